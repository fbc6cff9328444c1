"""Messages that ssdtrain logs once, and the message of a ``BudgetError``."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.sizes import shown_bytes

__all__ = ["PROCESS", "Held", "Notices", "Shortage", "log", "say_begin"]

log = logging.getLogger("ssdtrain")

FIGURE = re.compile(r"[\d.]+( [KMGT]i?B)?")
"""A reason with other figures is the same reason."""
NAMED_SHARE_MIN = 0.25
"""Advice is given about a user of memory that holds at least this share: less would not help."""
KNOWN_BY = "DefaultCPUAllocator: can't allocate memory"
"""The words of PyTorch's CPU allocator. Lightning's search for a batch size knows a lack of memory
by them, Accelerate's (and so that of Transformers' Trainer) by `` out of memory.``."""
PARTIAL = "Gradients are partial now: zero them before you try again. "
"""A backward that ends early has added to some gradients and not to others."""


class Notices:
    """Logs one message for each topic: a warning that comes back with every step is not read."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def say(
        self, topic: str, message: str, *arguments: object, level: int = logging.WARNING
    ) -> None:
        """Log ``message % arguments``, unless a message of this topic was logged before."""
        if topic in self._topics:
            return
        self._topics.add(topic)
        text = message % arguments
        # Where logging is not set up, Python prints the bare text, without the logger's name.
        if not log.hasHandlers():
            text = f"ssdtrain: {text}"
        # A log record may be kept, and an error in it would keep its frames and their tensors.
        log.log(level, "%s", text)

    def say_end(self, reason: str | None, *, is_surprising: bool) -> None:
        """Log why a session offloaded little; a warning if the user could expect more."""
        if reason is not None:
            level = logging.WARNING if is_surprising else logging.INFO
            text = "ssdtrain offloaded little or nothing: %s"
            self.say(FIGURE.sub("", reason), text, reason, level=level)


PROCESS = Notices()
"""Messages about the whole process, such as how a directory is used."""


def say_begin(min_bytes: int, bound: int | None, engines: Sequence[tuple[str, str]]) -> None:
    """Log which saved tensors a session offloads, and to which directories."""
    if not engines:
        log.info("ssdtrain has no directory here, so it writes nothing")
        return
    log.info(
        "ssdtrain offloads saved tensors of at least %s to %s; %s",
        shown_bytes(min_bytes),
        ", ".join(f"{place} ({name})" for place, name in engines),
        f"at most {shown_bytes(bound)} of all stay in memory"
        if bound
        else "as much as the disk hides",
    )


@dataclass(frozen=True)
class Held:
    """A part of the memory that cannot be freed."""

    nbytes: int
    where: str
    """Where the bytes are and why they stay; follows "x MiB"."""
    advice: str
    """An imperative: how to free them. Empty if there is no advice."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """An operation that lacks memory under ``max_resident_bytes``."""

    limit_bytes: int
    needed_bytes: int
    wanted: str
    """The operation that needs ``needed_bytes`` more."""
    resident_bytes: int
    """Bytes that are in memory and cannot leave it."""
    held: Sequence[Held]
    failure: str | None
    """The error of the last write, if writes fail."""

    def of_point(self, rest_bytes: int | None = None) -> str:
        """Return the message of a ``BudgetError`` that is raised at this operation.

        A backward gives ``rest_bytes``, which its node needs besides.
        """
        least_bytes = self.resident_bytes + self.needed_bytes + (rest_bytes or 0)
        found = f"This operation needs {_bound(least_bytes)}"
        return self._message(found, least_bytes, "" if rest_bytes is None else PARTIAL)

    def of_pass(self, least_bytes: int) -> str:
        """Return the message for a forward that lacked memory, which its backward raises.

        All tensors that the forward saved take ``least_bytes``.
        """
        found = (
            "The forward went on without keeping what it saved, to count it: all of it needs "
            f"{_bound(least_bytes)}"
        )
        return self._message(found, least_bytes, PARTIAL)

    def _message(self, found: str, least_bytes: int, then: str) -> str:
        limit = f"max_resident_bytes={self.limit_bytes} ({shown_bytes(self.limit_bytes)})"
        return (
            f"ssdtrain is out of memory. {limit} cannot be kept: {self.wanted} {self._needs()}. "
            f"{found}. Raise the bound{self._advice(least_bytes)}. {then}"
            f"(Programs that search for a batch size know this error by {KNOWN_BY!r}.)"
        )

    def _needs(self) -> str:
        needed = shown_bytes(self.needed_bytes)
        if self.resident_bytes <= 0:
            return f"needs {needed} at once"
        parts = [part for part in self.held if part.nbytes > 0]
        told = [f"{shown_bytes(part.nbytes)} {part.where}" for part in parts]
        in_use_bytes = self.resident_bytes - sum(part.nbytes for part in parts)
        if in_use_bytes > 0:
            told.append(f"{shown_bytes(in_use_bytes)} was read back and is in use")
        because = f" because writes fail: {self.failure}" if self.failure is not None else ""
        holds = f" ({'; '.join(told)})" if told else ""
        resident = shown_bytes(self.resident_bytes)
        return f"needs {needed} more, and {resident} in memory cannot leave it{because}{holds}"

    def _advice(self, least_bytes: int) -> str:
        if self.failure is not None:
            return ", use a smaller batch, or see why the writes fail"
        largest = max(self.held, key=lambda part: part.nbytes, default=None)
        if largest is None or largest.nbytes < NAMED_SHARE_MIN * least_bytes or not largest.advice:
            return " or use a smaller batch"
        return f", use a smaller batch, or {largest.advice}"


def _bound(nbytes: int) -> str:
    return f"at least max_resident_bytes={nbytes} ({shown_bytes(nbytes)})"
