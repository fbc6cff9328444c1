"""What every kind of memory offers: save a range of a storage, load it, restore a tensor on it.

A *handle* is the range in the store, and a *loading* is its way back. Neither knows who uses them:
activations are one user, and what else training keeps in memory can be another.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ssdtrain.geometry import Geometry
from ssdtrain.planning.policy import Rates

__all__ = ["Handle", "Loading", "Transfer"]


class Handle(Protocol):
    """A range of a storage on its way to the store, or there; its death gives the space back."""

    @property
    def address(self) -> int:
        """Where it was written from: torch can move the memory of a live storage."""

    @property
    def slot_bytes(self) -> int:
        """The memory that a read of it takes."""

    def is_here(self) -> bool:
        """Whether a read would take no more memory: one is under way, or its bytes are in use."""

    def done(self) -> bool:
        """Whether the write has ended, well or not."""

    def wait(self) -> None:
        """Wait for the write; raises what went wrong."""

    def cancel(self) -> bool:
        """Give the write up; ``True`` if it had not begun."""


class Loading(Protocol):
    """A read that was begun; whoever holds this holds its memory."""

    def done(self) -> bool:
        """Whether the bytes are there, or will never be."""


class Transfer(Protocol):
    """One kind of memory, and its way to the store and back."""

    def save(self, source: Tensor, start: int, nbytes: int) -> Handle:
        """Begin to write a range of the storage of ``source``, which is held until the write ends.

        Raises ``NoSpaceError``, ``BusyError`` and others of the store; nothing is lost then.
        """

    def load(self, handle: Handle) -> Loading:
        """Begin, or join, the read of what was written."""

    def restore(self, loading: Loading, geometry: Geometry) -> Tensor:
        """Return a tensor of that geometry on the bytes, waiting for them."""

    def owns(self, address: int) -> bool:
        """Whether the memory at an address was given out by this transfer."""

    def resident_bytes(self) -> int:
        """Return the bytes that transfers hold in memory, but for the sources of live handles."""

    def wait_for_abandoned(self) -> bool:
        """Wait for a transfer whose handle died under way; ``False`` if there is none."""

    def rates(self) -> Rates:
        """Return what the store's disks did of late."""

    def notes(self) -> list[str]:
        """Return which directories went out of use since the store was opened, and why."""
