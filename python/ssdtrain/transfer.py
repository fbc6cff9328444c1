"""How the bytes of a record go to the store and come back: one way per kind of memory."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from ssdtrain import _core
from ssdtrain.errors import SsdtrainError
from ssdtrain.saved import Loading, Reading, Record, SavedTensor

__all__ = ["HostDirect", "Transfer"]


class Transfer(Protocol):
    """What the tracker needs from a kind of memory."""

    def save(self, record: Record) -> None:
        """Begin the write of a record whose source is held."""

    def load(self, record: Record) -> Loading:
        """Begin, or join, the read of a record that is on the disk."""

    def restore(self, saved: SavedTensor, loading: Loading) -> Tensor:
        """Return the saved tensor, waiting for its bytes."""

    def resident_bytes(self) -> int:
        """Return the bytes of reads that are under way or in use."""

    def end_given_up(self) -> bool:
        """Wait for a read that nobody wants any more; ``False`` if there is none."""

    def notes(self) -> list[str]:
        """Return what was given up since the store was opened, one sentence each."""


class HostDirect:
    """CPU memory, without a copy: written in place, read into memory that becomes the tensor."""

    def __init__(self, store: _core.Store, *, bounded: bool) -> None:
        self.store = store
        self._bounded = bounded
        self._reads: dict[Reading, None] = {}
        """Under a bound on resident bytes all that were begun: it may have to wait for those that
        nobody wants any more, which hold memory until they end."""
        self._dropped: deque[Reading] = deque()
        """Those whose user is gone."""
        self._given_up: deque[_core.Pending] = deque()
        """Those of them that could not be cancelled."""
        self._said = frozenset(store.notes())
        """Notes of the opening, which were logged there."""

    def save(self, record: Record) -> None:
        """Queue the write. Raises ``NoSpaceError``, ``BusyError`` and others; nothing is lost."""
        record.written_at = record.address()
        record.stored = self.store.write(record.written_at, record.nbytes, record.source)

    def load(self, record: Record) -> Loading:
        """Begin the read, or join one that another user of the record began."""
        loading = record.reading()
        if loading is not None:
            return loading
        slot = record.slot() if record.slot is not None else None
        if slot is not None:
            # Some node still holds a tensor on these very bytes.
            return Loading(None, slot)
        assert record.stored is not None
        pending = self.store.read(record.stored)
        loading = Loading(pending, None)
        record.loading = weakref.ref(loading)
        if self._bounded:
            watch = Reading(loading, self._dropped.append)
            watch.pending = pending
            loading.watch = watch
            self._reads[watch] = None
        return loading

    def restore(self, saved: SavedTensor, loading: Loading) -> Tensor:
        """Return the tensor on the slot, in the exact geometry of the original."""
        slot = loading.wait()
        saved.record.slot = weakref.ref(slot)
        storage = torch.frombuffer(slot, dtype=torch.uint8).untyped_storage()
        return saved.build(storage, saved.record.start)

    def resident_bytes(self) -> int:
        """Return the bytes of the slots in use."""
        if self._bounded:
            self._give_up()
        return self.store.arena_live_bytes()

    def notes(self) -> list[str]:
        """Return the directories that are out of use."""
        return [note for note in self.store.notes() if note not in self._said]

    def end_given_up(self) -> bool:
        """Wait for one given-up read to end, well or not, and let its memory go."""
        self._give_up()
        if not self._given_up:
            return False
        pending = self._given_up.popleft()
        with suppress(SsdtrainError):
            pending.wait()
        return True

    def _give_up(self) -> None:
        """Cancel the reads that nobody wants any more, and remember those that have begun.

        Between calls this is consistent, see ``stats`` [Note: no calls].
        """
        dropped, given_up = self._dropped, self._given_up
        while True:
            if not dropped:
                break
            read = dropped[0]
            del dropped[0]
            del self._reads[read]
            pending = read.pending
            if pending is not None:
                given_up.append(pending)
                pending.cancel()
        while True:
            first = given_up[0] if given_up else None
            if first is None or not first.done():
                break
            if given_up and given_up[0] is first:
                del given_up[0]
