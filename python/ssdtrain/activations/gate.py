"""What each thread saved and has not been given to the disk; see ``writeback`` for the rule."""

from __future__ import annotations

import threading
import weakref

from ssdtrain.activations.saved_tensor import Record

__all__ = ["Gate", "Local"]

ALL_PASSED = 1 << 63
"""More than any sequence number: a thread that has ended is in no node."""
FORGET_AT_MIN = 1024
"""At so many in a reserve, those that are dead are forgotten for the first time."""


class Gate:
    """What one thread saved, in the order of packing."""

    __slots__ = (
        "first_sequence",
        "look_at",
        "nbytes",
        "owner",
        "passed_sequence",
        "records",
        "reserve",
    )

    def __init__(self, owner: weakref.ref[Token]) -> None:
        self.owner = owner
        """Dead once the thread has ended: then it has passed all its nodes."""
        self.records: list[weakref.ref[Record]] = []
        """What is written once its node has been passed."""
        self.nbytes = 0
        self.first_sequence = 0
        """Of its first record; those of the others are not lower."""
        self.reserve: list[weakref.ref[Record]] = []
        """What is written only if room is short; some are dead."""
        self.passed_sequence = 0
        """The thread has passed all nodes before this one; kept only for a reserve."""
        self.look_at = FORGET_AT_MIN
        """At so many in the reserve, those that are dead are forgotten."""

    def add(self, record: Record) -> None:
        """Take what is to be written."""
        if not self.records:
            self.first_sequence = record.sequence
        self.records.append(weakref.ref(record))
        self.nbytes += record.nbytes

    def add_to_reserve(self, record: Record) -> None:
        """Take what is to be written only if room is short."""
        if len(self.reserve) >= self.look_at:
            self.reserve = [one for one in self.reserve if one() is not None]
            self.look_at = max(FORGET_AT_MIN, 2 * len(self.reserve))
        self.reserve.append(weakref.ref(record))

    def is_needed(self) -> bool:
        """Whether its thread lives, or left something that can still be written."""
        return (
            self.owner() is not None
            or bool(self.records)
            or any(one() is not None for one in self.reserve)
        )

    def passed(self) -> int:
        """Return the node before which the thread has passed all; known only for a reserve."""
        return ALL_PASSED if self.owner() is None else self.passed_sequence


class Token:
    """Dies with its thread. A thread's number would not do: another thread gets it later."""

    __slots__ = ("__weakref__",)


class Local(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.token = Token()
        self.gate: Gate | None = None
