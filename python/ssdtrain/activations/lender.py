"""Under a bound: what somebody else holds anyway is neither written nor counted.

Buffers, detached weights and tensors that a module keeps in an attribute stay in memory whatever we
do: to write them would free nothing, and wear the disk in every step. Such a record is *lent*: it
has its source, but its bytes are not in memory because of us. Whether others still hold them is
looked at again and again, by the users that torch counts for each storage, less the records that
lie on it. Once others have let go, the bytes are ours: they count, and are written.
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import UntypedStorage

from ssdtrain._core import Record
from ssdtrain.activations.weak_table import WeakTable
from ssdtrain.machine.torch_internals import users_of

__all__ = ["Lender"]

LOOKS_MAX = 16
"""Lent records that one pack looks at: bounds its work, at a microsecond for each."""
RECORDS_MIN = 8
"""At so many records on one storage, those that are gone are forgotten for the first time."""


class OnStorage(weakref.ref[UntypedStorage]):
    """A storage, weakly, and what is known of it."""

    __slots__ = ("is_held", "records")

    def __init__(self, _: UntypedStorage) -> None:
        self.records: WeakTable[Record] = WeakTable(forget_at_min=RECORDS_MIN)
        """All that lie on it, by their identity."""
        self.is_held = False
        """Whether it outlived its offloading: somebody else held it."""


class Lender:
    """Knows what others hold; called with the session's lock held, and only under a bound."""

    def __init__(self) -> None:
        self._storages: WeakTable[UntypedStorage] = WeakTable()
        """An ``OnStorage`` for each, by its identity."""
        self._lent: deque[weakref.ref[Record]] = deque()

    def enter(self, record: Record, storage: UntypedStorage) -> None:
        """Take note of a new record; every one has to be known."""
        known = self._known(storage)
        if known is None:
            known = OnStorage(storage)
            self._storages.remember(id(storage), known)
        known.records.remember(id(record), weakref.ref(record))

    def learn(self, storage: UntypedStorage) -> bool:
        """Remember that to offload this storage frees nothing; ``False`` if nobody else holds it.

        A backward that has found the bytes in memory was given a tensor on the storage, which must
        not be taken for somebody else's.
        """
        known = self._known(storage)
        if known is None or not self._is_held_by_others(storage):
            return False
        # Not a generator: an interrupt in the end of one would be lost.
        if any([one.was_found for one in known.records.alive()]):  # noqa: C419
            return False
        known.is_held = True
        return True

    def knows(self, storage: UntypedStorage) -> bool:
        """Whether others held this very storage before."""
        known = self._known(storage)
        return known is not None and known.is_held

    def lend(self, record: Record) -> bool:
        """Stop counting a record whose bytes others hold; ``False`` if they do not."""
        if not self.is_held(record):
            return False
        record.lend()
        self._lent.append(weakref.ref(record))
        return True

    def is_held(self, record: Record) -> bool:
        """Return whether tensors that are not ours lie on the storage of a record's source."""
        assert record.source is not None
        return self._is_held_by_others(record.source.untyped_storage())

    def take_back(self) -> list[Record]:
        """Count what others have let go; return it, to be written."""
        taken = []
        for _ in range(min(LOOKS_MAX, len(self._lent))):
            reference = self._lent.popleft()
            record = reference()
            if record is None or record.source is None:
                continue
            if self.is_held(record):
                self._lent.append(reference)
                continue
            record.take_back()
            taken.append(record)
        return taken

    def _known(self, storage: UntypedStorage) -> OnStorage | None:
        known = self._storages.get(id(storage))
        # `id` is an identity only while the storage lives.
        return known if isinstance(known, OnStorage) and known() is storage else None

    def _is_held_by_others(self, storage: UntypedStorage) -> bool:
        """Whether more tensors lie on the storage than those of our records.

        What a node is still filling is held by the operation, so it counts as held here.
        """
        known = self._known(storage)
        records = [] if known is None else known.records.alive()
        # The Python object that is asked counts as one of them.
        own_count = 1 + len([one for one in records if one.source is not None])
        return users_of(storage) > own_count
