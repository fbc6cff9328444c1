"""CPU memory, without a copy: written in place, read into memory that becomes the tensor."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Slot, Store
from ssdtrain.geometry import Geometry
from ssdtrain.planning.policy import Rates
from ssdtrain.transfer.base import Handle, Loading

__all__ = ["HostTransfer", "storage_on"]

RATES_GUESS = Rates(1e9, 1e9)
"""Before anything was measured."""
RATES_BYTES_MIN = 64 << 20
RATES_BUSY_S_MIN = 0.5
"""Less traffic than this, in less time, says nothing about a rate: bursts deceive."""


class HostTransfer:
    """The way of CPU memory; see ``transfer.base.Transfer``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.owns = store.owns
        self.resident_bytes = store.resident_bytes
        self.wait_for_abandoned = store.wait_for_abandoned
        self._measured = store.stats()
        self._rates = RATES_GUESS
        self._said = frozenset(store.notes())
        """Notes of the opening, which were logged there."""

    def save(self, source: Tensor, start: int, nbytes: int) -> Handle:
        """Queue the write of a range of the storage of ``source``."""
        address = source.untyped_storage().data_ptr() + start
        return Handle(self.store.write(address, nbytes, source), address, start, nbytes)

    def load(self, handle: Handle) -> Loading:
        """Begin the read, or join one that another user of the handle began."""
        loading = handle.joinable()
        if loading is not None:
            return loading
        slot = handle.slot() if handle.slot is not None else None
        if slot is not None:
            # Some node still holds a tensor on these very bytes.
            return Loading(handle, None, slot)
        loading = Loading(handle, self.store.read(handle.stored), None)
        handle.loading = weakref.ref(loading)
        return loading

    def restore(self, loading: Loading, geometry: Geometry) -> Tensor:
        """Return a tensor on the slot, in the exact geometry of the original."""
        slot = loading.wait()
        handle = loading.handle
        handle.slot = weakref.ref(slot)
        return geometry.build(storage_on(slot), handle.start)

    def rates(self) -> Rates:
        """Return what the disk did of late, or the last known where too little moved to tell."""
        now = self.store.stats()

        def rate(direction: str, moved: str, last_known: float) -> float:
            busy = f"{direction}_busy_ns"
            nbytes: int = now[moved] - self._measured[moved]
            busy_s: float = (now[busy] - self._measured[busy]) / 1e9
            enough = nbytes >= RATES_BYTES_MIN or busy_s >= RATES_BUSY_S_MIN
            if nbytes == 0 or busy_s <= 0 or not enough:
                return last_known
            self._measured[moved], self._measured[busy] = now[moved], now[busy]
            return nbytes / busy_s

        write = rate("write", "bytes_written", self._rates.write)
        self._rates = Rates(write, rate("read", "bytes_read", self._rates.read))
        return self._rates

    def notes(self) -> list[str]:
        """Return the directories that are out of use."""
        return [note for note in self.store.notes() if note not in self._said]


def storage_on(slot: Slot) -> UntypedStorage:
    """Return a storage on the memory of a slot, which lives as long as the storage does."""
    return torch.frombuffer(slot, dtype=torch.uint8).untyped_storage()
