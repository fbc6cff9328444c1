"""Under a bound: what somebody else holds anyway is neither written nor counted.

Buffers, detached weights and tensors that a module keeps in an attribute stay in memory whatever we
do: to write them would free nothing, and wear the disk in every step. Such a record is *lent*: it
has its source, but its bytes are not in memory because of us. Whether others still hold them is
looked at again and again, by the users that torch counts for each storage. Once they have let go,
the bytes are ours: they count, and are written.
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import UntypedStorage

from ssdtrain.activations.saved_tensor import Record
from ssdtrain.machine.torch_internals import storage_users

__all__ = ["Lender", "is_held_by_others"]

OWN_USERS = 2
"""Of a storage that only one record holds: its source, and the Python object that is asked."""
LOOKS_MAX = 16
"""Lent records that one pack looks at: bounds its work, at less than a microsecond for each."""
FORGET_AT_MIN = 1024
"""At so many known storages, those that are gone are forgotten for the first time."""


class Lender:
    """Knows what others hold; called with the session's lock held."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[UntypedStorage]] = {}
        """By identity, storages that outlived their offloading: somebody else held them."""
        self._forget_at = FORGET_AT_MIN
        self._borrowers: dict[int, weakref.ref[Record]] = {}
        """The record that was lent last on each storage, by the identity of the storage."""
        self._lent: deque[weakref.ref[Record]] = deque()

    def learn(self, storage: UntypedStorage) -> None:
        """Remember that offloading this storage freed nothing."""
        if len(self._held) >= self._forget_at:
            self._held = {key: one for key, one in self._held.items() if one() is not None}
            self._borrowers = {
                key: one for key, one in self._borrowers.items() if one() is not None
            }
            self._forget_at = max(FORGET_AT_MIN, 2 * len(self._held))
        self._held[id(storage)] = weakref.ref(storage)

    def knows(self, storage: UntypedStorage) -> bool:
        """Whether others held this very storage before."""
        known = self._held.get(id(storage))
        return known is not None and known() is storage and not self._is_lent(storage)

    def lend(self, record: Record) -> bool:
        """Stop counting a record whose bytes others hold; ``False`` if they do not."""
        assert record.source is not None
        storage = record.source.untyped_storage()
        # Of two records on one storage each would take the other for somebody else.
        if self._is_lent(storage) or not is_held_by_others(record):
            return False
        record.is_lent = True
        record.holding.lend()
        reference = weakref.ref(record)
        self._borrowers[id(storage)] = reference
        self._lent.append(reference)
        return True

    def take_back(self) -> list[Record]:
        """Count what others have let go; return it, to be written."""
        taken = []
        for _ in range(min(LOOKS_MAX, len(self._lent))):
            reference = self._lent.popleft()
            record = reference()
            if record is None or record.source is None:
                continue
            if is_held_by_others(record):
                self._lent.append(reference)
                continue
            record.is_lent = False
            record.holding.take_back()
            taken.append(record)
        return taken

    def _is_lent(self, storage: UntypedStorage) -> bool:
        reference = self._borrowers.get(id(storage))
        record = None if reference is None else reference()
        return record is not None and record.is_lent and record.storage() is storage


def is_held_by_others(record: Record) -> bool:
    """Whether more tensors lie on the storage than the record's own.

    What a node is still filling is held by the operation, so it counts as held here.
    """
    assert record.source is not None
    return storage_users(record.source) > OWN_USERS
