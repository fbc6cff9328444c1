"""Lets the state of optimizers, weights and gradients use the store and the bound of a session.

A session is made for activations. An object that keeps other tensors on its disks is a *tenant*: it
has a share of the store with memory of its own, a budget that is a part of the session's bound, and
a row in the session's report.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from ssdtrain._core import Reservation, Store
from ssdtrain.notices import Held
from ssdtrain.residency import UNLIMITED_BYTES, Residency
from ssdtrain.sizes import shown_bytes

__all__ = [
    "Budget",
    "ClassStats",
    "Figures",
    "Room",
    "Share",
    "Tenant",
    "Tenants",
]

LOOK_S = 0.1
"""A wait for room looks so often, as a thread without the lock wakes nobody when it ends a room."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a tenant. Sizes in bytes, times in seconds."""

    resident_bytes: int = 0
    """Bytes in memory now that may leave it."""
    on_disk_bytes: int = 0
    """Bytes on the disk now that are not in memory."""
    bytes_written: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0
    """Time in which a computing thread waited for these bytes."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            on_disk_bytes=self.on_disk_bytes + other.on_disk_bytes,
            bytes_written=self.bytes_written + other.bytes_written,
            bytes_read=self.bytes_read + other.bytes_read,
            stall_s=self.stall_s + other.stall_s,
        )


@dataclass(frozen=True, kw_only=True)
class ClassStats(Figures):
    """The figures of a class of tensors in a session. Sizes in bytes, times in seconds."""

    name: str
    """``"activations"``, ``"optimizer state"``, ``"weights"``."""
    hidden_s: float = 0.0
    """I/O time without a wait; a class is taken to use the drives in proportion to its bytes."""

    def since(self, earlier: ClassStats) -> ClassStats:
        """Return the traffic after ``earlier``, with the bytes in memory and on the disk now."""
        return replace(
            self,
            bytes_written=self.bytes_written - earlier.bytes_written,
            bytes_read=self.bytes_read - earlier.bytes_read,
            stall_s=self.stall_s - earlier.stall_s,
            hidden_s=self.hidden_s - earlier.hidden_s,
        )

    def __str__(self) -> str:
        """Tell the figures to a person."""
        return (
            f"{self.name}: {shown_bytes(self.resident_bytes)} in memory and "
            f"{shown_bytes(self.on_disk_bytes)} on disk now, {shown_bytes(self.bytes_written)} "
            f"written, {shown_bytes(self.bytes_read)} read, {self.hidden_s:.3f} s hidden, "
            f"{self.stall_s:.3f} s stalled"
        )


class Tenant(ABC):
    """An object with a row in the report of a session, where its traffic stays when it is gone."""

    name: ClassVar[str]
    """The name of the row; tenants of the same name share a row."""
    _report: Tenants | None = None

    @abstractmethod
    def figures(self) -> Figures:
        """Return the figures of now, without a wait, on any thread."""

    def reports_to(self, report: Tenants) -> None:
        """Give the last figures to this report."""
        self._report = report

    def __del__(self) -> None:
        """Post the last figures."""
        if self._report is not None:
            self._report.note_gone(self.name, self.figures())


class Tenants:
    """The tenants of a session, by weak references, and the traffic of those that are gone."""

    def __init__(self) -> None:
        self._tenants: list[weakref.ref[Tenant]] = []
        self._gone: list[tuple[str, Figures]] = []

    def add(self, tenant: Tenant) -> None:
        """Add a tenant to the report."""
        self._tenants.append(weakref.ref(tenant))
        tenant.reports_to(self)

    def note_gone(self, name: str, last: Figures) -> None:
        """Keep the traffic of a tenant that is going, on any thread and without a wait."""
        self._gone.append((name, replace(last, resident_bytes=0, on_disk_bytes=0)))

    def figures(self) -> dict[str, Figures]:
        """Return the figures by name, those of tenants that are gone first."""
        alive = [tenant for reference in self._tenants if (tenant := reference()) is not None]
        found: dict[str, Figures] = {}
        for name, figures in [*self._gone, *((tenant.name, tenant.figures()) for tenant in alive)]:
            found[name] = found.get(name, Figures()) + figures
        return found


class Room:
    """Memory that a tenant may fill until ``end``; without a bound of any size."""

    def __init__(
        self,
        nbytes: int,
        reservation: Reservation | None = None,
        budget: Budget | None = None,
        standing: Reservation | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._reservation = reservation
        self._budget = budget
        self._standing = standing
        self.thread: int | None = None
        """The thread that fills it, which must not wait for its end."""

    @property
    def is_bounded(self) -> bool:
        """True if the session has a bound."""
        return self._reservation is not None

    @property
    def is_open(self) -> bool:
        """True if it is still reserved."""
        return self._reservation is not None and self._reservation.nbytes > 0

    @property
    def is_standing(self) -> bool:
        """True if it ends when its holder dies; no wait for room counts on that."""
        return self._standing is not None

    def fill_here(self) -> None:
        """Note that this thread fills it from now on."""
        self.thread = threading.get_ident()

    def note(self, nbytes: int) -> None:
        """Note the bytes in it; the reservation grows if they are more."""
        if nbytes > self.nbytes and self._reservation is not None and self._budget is not None:
            self.nbytes = nbytes
            self._reservation.resize(nbytes)
            self._budget.note_peak()

    def end(self) -> None:
        """Give it back when its bytes have left memory; a second call does nothing."""
        if self._reservation is not None and self._budget is not None:
            if self._standing is not None:
                self._standing.resize(0)
            self._reservation.resize(0)
            self._budget.note_end()


class Budget:
    """A tenant's part in the bound of a session, which is reserved before memory is filled.

    A thread with reserved room waits for the disk only, never for other rooms. So a thread that is
    short of room may wait for the end of a room, also while it holds the session's lock, because
    no end takes that lock.
    """

    def __init__(self, residency: Residency, lock: threading.RLock, name: str) -> None:
        self._residency = residency
        self._changed = threading.Condition(lock)
        self._process = os.getpid()
        self._name = name
        self._advice = ""
        self._rooms: weakref.WeakSet[Room] = weakref.WeakSet()
        """Weak, so that a room ends with its holder, which may be gone without ``end``."""
        self.failure: str | None = None
        """Always ``None``; see ``residency.MemoryUser``."""
        residency.add_user(self)

    @property
    def limit_bytes(self) -> int | None:
        """The bound of the session, if it has one."""
        return self._residency.limit_bytes

    @property
    def left_bytes(self) -> int | None:
        """The bytes of the bound that no tenant has set aside; some tenants may be gone by now."""
        return self._residency.left_bytes()

    def reserve(self, least_bytes: int, most_bytes: int, wanted: Callable[[], str]) -> Room:
        """Reserve the room there is, at most ``most_bytes``; wait for ``least_bytes`` of it.

        ``wanted`` returns the name of the tenant for an error.

        Raises:
            BudgetError: So much room can never be free: no tensor in memory can leave it.

        """
        if self._is_unbounded():
            return Room(UNLIMITED_BYTES)
        with self._changed:
            nbytes = min(most_bytes, max(least_bytes, self._residency.room_bytes()))
            self._residency.admit(nbytes, wanted)
            return self._reserved(nbytes)

    def try_to_reserve(self, nbytes: int) -> Room | None:
        """Reserve room if there is enough now, or return ``None``."""
        if self._is_unbounded():
            return Room(UNLIMITED_BYTES)
        with self._changed:
            if self._residency.room_bytes() < nbytes:
                return None
            return self._reserved(nbytes)

    def set_aside(self, nbytes: int, wanted: Callable[[], str], advice: str) -> Room:
        """Reserve room for as long as its holder lives; an error shows ``advice``.

        Raises:
            BudgetError: As ``reserve``.

        """
        if self._is_unbounded():
            return Room(UNLIMITED_BYTES)
        with self._changed:
            self._residency.admit(nbytes, wanted)
            self._advice = advice
            return self._reserved(nbytes, self._residency.standing.reserve(nbytes))

    def _is_unbounded(self) -> bool:
        # In a forked process a thread that is not there may hold the lock for ever.
        return self.limit_bytes is None or self._process != os.getpid()

    def _reserved(self, nbytes: int, standing: Reservation | None = None) -> Room:
        room = Room(nbytes, self._residency.account.reserve(nbytes), self, standing)
        self._rooms.add(room)
        self._residency.note_peak()
        return room

    def note_peak(self) -> None:
        """Compare the bytes in memory with the peak."""
        self._residency.note_peak()

    def note_end(self) -> None:
        """Wake waits for room; after LOOK_S a wait looks by itself."""
        # No wait for the lock: its holder may wait for the next line of this thread.
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    # The methods of a MemoryUser, called with the session's lock held.

    def wait_for_room(self) -> bool:
        """Wait without the lock until a room ends; ``False`` if none will end."""
        taken = [
            weakref.ref(room) for room in list(self._rooms) if room.is_open and not room.is_standing
        ]
        if not taken or self._is_of_this_thread():
            return False
        while all(map(_is_open, taken)):
            self._changed.wait(LOOK_S)
        return True

    def give_way(self) -> None:
        """Give back rooms whose holders are gone; all other rooms are needed."""
        if any(room.is_open and room.is_standing for room in list(self._rooms)):
            # A dropped holder may be in a cycle, and wait for Python's collector.
            gc.collect()

    def held(self) -> list[Held]:
        """Return the bytes that cannot leave memory before this thread goes on."""
        nbytes = sum(room.nbytes for room in list(self._rooms) if room.is_open)
        return [Held(nbytes, f"is reserved for {self._name}", self._advice)]

    def _is_of_this_thread(self) -> bool:
        here = threading.get_ident()
        return any(room.is_open and room.thread == here for room in list(self._rooms))


def _is_open(reference: weakref.ref[Room]) -> bool:
    room = reference()
    return room is not None and room.is_open


@dataclass(frozen=True)
class Share:
    """The parts of a session that a tenant gets."""

    store: Store
    """A store on the session's disks, with memory of its own for reads."""
    budget: Budget
    register: Callable[[Tenant], None]
    """Adds the tenant to the session's report."""
