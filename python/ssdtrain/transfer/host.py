"""How the bytes of a record go to the store and come back: one way per kind of memory."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from ssdtrain import _core
from ssdtrain.activations.saved_tensor import Loading, Record, SavedTensor

__all__ = ["HostDirect", "Transfer"]


class Transfer(Protocol):
    """What the tracker needs from a kind of memory."""

    def save(self, record: Record) -> None:
        """Begin the write of a record whose source is held."""

    def load(self, record: Record) -> Loading:
        """Begin, or join, the read of a record that is on the disk."""

    def restore(self, saved: SavedTensor, loading: Loading) -> Tensor:
        """Return the saved tensor, waiting for its bytes."""

    def is_foreign(self, storage: UntypedStorage) -> bool:
        """Whether somebody else owns the memory of a storage."""

    def resident_bytes(self) -> int:
        """Return the bytes that transfers hold in memory, but for sources that records hold."""

    def wait_for_given_up(self) -> bool:
        """Wait for the end of a transfer that nobody wants any more; ``False`` if there is none."""

    def notes(self) -> list[str]:
        """Return what was given up since the store was opened, one sentence each."""


class HostDirect:
    """CPU memory, without a copy: written in place, read into memory that becomes the tensor."""

    def __init__(self, store: _core.Store) -> None:
        self.store = store
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
        loading = Loading(self.store.read(record.stored), None)
        record.loading = weakref.ref(loading)
        return loading

    def restore(self, saved: SavedTensor, loading: Loading) -> Tensor:
        """Return the tensor on the slot, in the exact geometry of the original."""
        slot = loading.wait()
        saved.record.slot = weakref.ref(slot)
        storage = torch.frombuffer(slot, dtype=torch.uint8).untyped_storage()
        return saved.build(storage, saved.record.start)

    def is_foreign(self, storage: UntypedStorage) -> bool:
        """Whether its memory is neither torch's nor ours: an array's, or that of a mapped file.

        Whoever owns it may change it when torch's storage is long gone, and keeps it anyway.
        """
        return not storage.resizable() and not self.store.owns(storage.data_ptr())

    def resident_bytes(self) -> int:
        """Return the bytes of slots in use, and of sources of given-up writes under way."""
        return self.store.resident_bytes()

    def wait_for_given_up(self) -> bool:
        """Wait until one transfer that died under way has ended, and holds no memory any more."""
        return self.store.wait_for_abandoned()

    def notes(self) -> list[str]:
        """Return the directories that are out of use."""
        return [note for note in self.store.notes() if note not in self._said]
