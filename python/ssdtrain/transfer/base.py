"""What every kind of memory offers: save a range of a storage, load it, restore a tensor on it.

A *handle* is the range in the store, and a *loading* is its way back. Neither knows who uses them:
activations are one user, and what else training keeps in memory can be another.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from ssdtrain._core import Pending, Slot, Stored
from ssdtrain.errors import SsdtrainError
from ssdtrain.geometry import Geometry
from ssdtrain.planning.policy import Rates

__all__ = ["Handle", "Loading", "Transfer"]

SLOT_OVERHEAD_BYTES = 2 * 4096
"""What a read takes beyond its bytes at most: a block more on each side, rounded to whole pages."""


class Handle:
    """A range of a storage on its way to the store, or there; its death gives the space back."""

    __slots__ = ("_stored", "address", "loading", "nbytes", "slot", "start")

    def __init__(self, stored: Stored, address: int, start: int, nbytes: int) -> None:
        self._stored = stored
        self.address = address
        """Where it was written from: torch can move the memory of a live storage."""
        self.start = start
        """First byte of the range in its storage."""
        self.nbytes = nbytes
        self.loading: weakref.ref[Loading] | None = None
        """The last read that was begun."""
        self.slot: weakref.ref[Slot] | None = None
        """The memory that the last read filled; alive as long as some tensor lies on it."""

    @property
    def stored(self) -> Stored:
        """What the store gave for it."""
        return self._stored

    @property
    def slot_bytes(self) -> int:
        """The most memory that a read of it takes."""
        return self.nbytes + SLOT_OVERHEAD_BYTES

    def done(self) -> bool:
        """Whether the write has ended, well or not."""
        return self._stored.done()

    def wait(self) -> None:
        """Wait for the write; raises what went wrong."""
        self._stored.wait()

    def cancel(self) -> bool:
        """Give the write up; ``True`` if it had not begun."""
        return self._stored.cancel()

    def joinable(self) -> Loading | None:
        """Return a read that is under way, which another user can join."""
        loading = self.loading() if self.loading is not None else None
        return None if loading is None or loading.has_failed else loading


class Loading:
    """A read that was begun; whoever holds this holds its memory."""

    __slots__ = ("__weakref__", "_pending", "_slot", "handle", "has_failed")

    def __init__(self, handle: Handle, pending: Pending | None, slot: Slot | None) -> None:
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
        """Return what the store gave up since it was opened, one sentence each."""
