"""CPU memory, without a copy: written in place, read into memory that becomes the tensor.

The compiled part moves the bytes (`_core.Handle`, `_core.Loading`). This file tells the hooks how
much memory that takes and how fast it is.
"""

from __future__ import annotations

from ssdtrain._core import Gpus, Store
from ssdtrain.errors import SsdtrainError
from ssdtrain.planning.policy import RATE_GUESS, Rates
from ssdtrain.transfer.direct import DirectWay
from ssdtrain.transfer.staged import OnGpus, copy_rates, on_gpus

__all__ = ["HostTransfer"]


class HostTransfer:
    """The way of CPU memory to a store and back."""

    def __init__(self, store: Store, gpus: Gpus | None, direct: DirectWay) -> None:
        self.store = store
        self.gpus = gpus
        """The GPUs whose tensors go to the disk; ``None`` if torch was built without CUDA."""
        self._direct = direct
        self.stats = store.stats
        self.wait_for_abandoned = store.wait_for_abandoned
        self._said = frozenset(store.notes())
        """Notes that were logged when the store was opened."""

    def resident_bytes(self) -> int:
        """Return the bytes that transfers hold in memory, without sources of live handles."""
        host_bytes = self.store.resident_bytes()
        return host_bytes if self.gpus is None else host_bytes + self.gpus.loaded_bytes()

    def on_gpus(self) -> OnGpus:
        """Return the figures of all GPUs."""
        return on_gpus(self.gpus, self._direct)

    def rates(self) -> Rates:
        """Return the recent rates of the disks, or a guess, and those of copies of GPUs.

        Without a directory the rates of the disks are 0.
        """
        write, read = self.store.rates()
        copies = copy_rates(self.gpus)
        return Rates(
            RATE_GUESS if write is None else write, RATE_GUESS if read is None else read, copies
        )

    def pin_for_tier(self, nbytes: int) -> None:
        """Pin ``nbytes`` of the CPU's memory for tensors of GPUs that stay there by plan."""
        if self.gpus is not None:
            self.gpus.pin_for_tier(nbytes)

    def refusals(self) -> list[tuple[SsdtrainError, int]]:
        """Return errors of writes whose bytes have left the GPU, since the last call.

        There is at most one error of each kind, with the count of its tensors.
        """
        return [] if self.gpus is None else self.gpus.take_refusals()

    def notes(self) -> list[str]:
        """Return a note for each directory that went out of use since the store was opened."""
        return [note for note in self.store.notes() if note not in self._said]
