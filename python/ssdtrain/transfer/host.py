"""CPU memory, without a copy: written in place, read into memory that becomes the tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Pending, Slot, Store, Stored
from ssdtrain.errors import SsdtrainError
from ssdtrain.geometry import Geometry
from ssdtrain.planning.policy import Rates
from ssdtrain.transfer.base import Handle, Loading

__all__ = ["HostTransfer", "storage_on"]

RATE_GUESS = 1e9
"""Bytes per second of a disk that has not moved enough to tell: that of a slow NVMe drive, so that
the first plan is a careful one."""


class HostHandle:
    """A range in the store; see ``transfer.base.Handle``."""

    __slots__ = ("address", "done", "loading", "slot", "start", "stored")

    def __init__(self, stored: Stored, address: int, start: int) -> None:
        self.stored = stored
        self.address = address
        self.start = start
        """First byte of the range in its storage."""
        # The store's own function: hooks ask it often.
        self.done: Callable[[], bool] = stored.done
        self.loading: weakref.ref[HostLoading] | None = None
        """The last read that was begun."""
        self.slot: weakref.ref[Slot] | None = None
        """The memory that the last read filled; alive as long as some tensor lies on it."""

    def wait(self) -> None:
        """Wait for the write; raises what went wrong."""
        self.stored.wait()

    def cancel(self) -> bool:
        """Cancel the write; ``True`` if it had not begun."""
        return self.stored.cancel()

    @property
    def slot_bytes(self) -> int:
        """The memory that a read of it takes."""
        return self.stored.slot_bytes

    def is_here(self) -> bool:
        """Whether a read would take no more memory: one is under way, or its bytes are in use."""
        return self.joinable() is not None or (self.slot is not None and self.slot() is not None)

    def joinable(self) -> HostLoading | None:
        """Return the last read if it did not fail and somebody still holds it: others can join."""
        loading = self.loading() if self.loading is not None else None
        return None if loading is None or loading.has_failed else loading


class HostLoading:
    """A read that was begun, or bytes that are here; see ``transfer.base.Loading``."""

    __slots__ = ("__weakref__", "_pending", "_slot", "handle", "has_failed")

    def __init__(self, handle: HostHandle, pending: Pending | None, slot: Slot | None) -> None:
        assert (pending is None) != (slot is None)
        self.handle = handle
        self._pending = pending
        self._slot = slot
        self.has_failed = False
        """Nobody joins it any more: the next user reads anew."""

    def done(self) -> bool:
        """Whether the bytes are there, or will never be."""
        pending = self._pending
        return pending is None or pending.done()

    def wait(self) -> Slot:
        """Return the bytes, waiting if they are not there; raises what went wrong."""
        # Another thread may wait for the same read, and end it between these lines.
        pending = self._pending
        if pending is not None:
            try:
                self._slot = pending.wait()
            except SsdtrainError:
                self.has_failed = True
                raise
            self._pending = None
        slot = self._slot
        assert slot is not None
        return slot


class HostTransfer:
    """The way of CPU memory; see ``transfer.base.Transfer``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.owns = store.owns
        self.resident_bytes = store.resident_bytes
        self.stats = store.stats
        self.wait_for_abandoned = store.wait_for_abandoned
        self._said = frozenset(store.notes())
        """Notes of the opening, which were logged there."""

    def save(self, source: Tensor, start: int, nbytes: int) -> HostHandle:
        """Queue the write of a range of the storage of ``source``."""
        address = source.untyped_storage().data_ptr() + start
        return HostHandle(self.store.write(address, nbytes, source), address, start)

    def load(self, handle: Handle) -> HostLoading:
        """Begin the read, or join one that another user of the handle began."""
        assert isinstance(handle, HostHandle)
        loading = handle.joinable()
        if loading is not None:
            return loading
        slot = handle.slot() if handle.slot is not None else None
        if slot is not None:
            # Some node still holds a tensor on these very bytes.
            return HostLoading(handle, None, slot)
        loading = HostLoading(handle, self.store.read(handle.stored), None)
        handle.loading = weakref.ref(loading)
        return loading

    def restore(self, loading: Loading, geometry: Geometry) -> Tensor:
        """Return a tensor on the slot, in the exact geometry of the original."""
        assert isinstance(loading, HostLoading)
        slot = loading.wait()
        handle = loading.handle
        handle.slot = weakref.ref(slot)
        return geometry.build(storage_on(slot), handle.start)

    def rates(self) -> Rates:
        """Return what the disks did of late, or a guess."""
        write, read = self.store.rates()
        return Rates(write or RATE_GUESS, read or RATE_GUESS)

    def notes(self) -> list[str]:
        """Return the directories that are out of use."""
        return [note for note in self.store.notes() if note not in self._said]


def storage_on(slot: Slot) -> UntypedStorage:
    """Return a storage on the memory of a slot, which lives as long as the storage does."""
    return torch.frombuffer(slot, dtype=torch.uint8).untyped_storage()
