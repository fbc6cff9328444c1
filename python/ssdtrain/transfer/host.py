"""CPU memory, without a copy: written in place, read into memory that becomes the tensor.

What moves the bytes is in the compiled part (`_core.Handle`, `_core.Loading`); this is what the
hooks ask about it.
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
        """The GPUs whose tensors go to the disk, if torch has some."""
        self._direct = direct
        self.stats = store.stats
        self.wait_for_abandoned = store.wait_for_abandoned
        self._said = frozenset(store.notes())
        """Notes of the opening, which were logged there."""

    def resident_bytes(self) -> int:
        """Return the bytes that transfers hold in memory, but for the sources of live handles."""
        host_bytes = self.store.resident_bytes()
        return host_bytes if self.gpus is None else host_bytes + self.gpus.loaded_bytes()

    def on_gpus(self) -> OnGpus:
        """Return what was done with GPUs."""
        return on_gpus(self.gpus, self._direct)

    def rates(self) -> Rates:
        """Return what the disks did of late, or a guess, and what the copies of GPUs did."""
        write, read = self.store.rates()
        copies = copy_rates(self.gpus)
        return Rates(write or RATE_GUESS, read or RATE_GUESS, copies)

    def pin_for_tier(self, gpu: int, nbytes: int) -> None:
        """Pin memory of the CPU, in which so much of a GPU's tensors stays by plan."""
        if self.gpus is not None:
            self.gpus.pin_for_tier(gpu, nbytes)

    def refusals(self) -> list[tuple[SsdtrainError, int]]:
        """Return why tensors of GPUs are not on the disk that left the GPU, since the last call.

        At most one error of each kind, and for how many tensors it stands.
        """
        return [] if self.gpus is None else self.gpus.take_refusals()

    def notes(self) -> list[str]:
        """Return the directories that went out of use since the store was opened, and why."""
        return [note for note in self.store.notes() if note not in self._said]
