"""Under a bound: records whose bytes the program holds anyway are neither written nor counted.

Buffers, detached weights and tensors that a module keeps in an attribute stay in memory in any
case: to write them would free nothing, and wear the disk in every step. Such a record is *lent*: it
has its source, but does not count as resident. Each pack looks at some lent records: torch counts
the users of a storage, and ssdtrain subtracts its own records. Once the program has let go of the
storage, the record counts again and is written.
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
"""Lent records that a pack looks at, at a microsecond for each."""
RECORDS_MIN = 8
"""Dead records are forgotten for the first time once a storage has had so many."""


class OnStorage(weakref.ref[UntypedStorage]):
    """A weak reference to a storage, with the records that lie on it."""

    __slots__ = ("is_held", "records")

    def __init__(self, _: UntypedStorage) -> None:
        self.records: WeakTable[Record] = WeakTable(forget_at_min=RECORDS_MIN)
        """By their identity."""
        self.is_held = False
        """True if the storage outlived its offloading: the program held it."""


class Lender:
    """The lent records; called with the session's lock held, and only under a bound."""

    def __init__(self) -> None:
        self._storages: WeakTable[UntypedStorage] = WeakTable()
        """An ``OnStorage`` for each, by its identity."""
        self._lent: deque[weakref.ref[Record]] = deque()

    def enter(self, record: Record, storage: UntypedStorage) -> None:
        """Take note of a new record. Every record has to be entered."""
        known = self._known(storage)
        if known is None:
            known = OnStorage(storage)
            self._storages.remember(id(storage), known)
        known.records.remember(id(record), weakref.ref(record))

    def learn(self, storage: UntypedStorage) -> bool:
        """Remember that the program holds this storage; return ``False`` if it does not.

        A backward that has found the bytes in memory was given a tensor on the storage. That tensor
        must not be taken for one of the program.
        """
        known = self._known(storage)
        if known is None or not self._is_held_by_others(storage):
            return False
        # A list: an interrupt at the end of a generator would be lost.
        if any([record.was_found for record in known.records.alive()]):  # noqa: C419
            return False
        known.is_held = True
        return True

    def knows(self, storage: UntypedStorage) -> bool:
        """Return whether the program held this storage before."""
        known = self._known(storage)
        return known is not None and known.is_held

    def lend(self, record: Record) -> bool:
        """Stop counting a record if the program holds its bytes; return whether it does."""
        if not self.is_held(record):
            return False
        record.lend()
        self._lent.append(weakref.ref(record))
        return True

    def is_held(self, record: Record) -> bool:
        """Return whether tensors of the program lie on the storage of a record's source."""
        assert record.source is not None
        return self._is_held_by_others(record.source.untyped_storage())

    def take_back(self) -> list[Record]:
        """Count the records that the program has let go of; return them, to be written."""
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
        """Return whether more tensors lie on the storage than those of the records.

        An operation that is still filling the storage counts as one that holds it.
        """
        known = self._known(storage)
        records = [] if known is None else known.records.alive()
        # The Python object `storage` counts as a user.
        own_count = 1 + len([record for record in records if record.source is not None])
        return users_of(storage) > own_count
