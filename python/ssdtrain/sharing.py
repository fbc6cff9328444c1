"""What else of training uses the store and the bound of a session: its tenants.

A session is there for activations. Whoever keeps something else on its disks, such as the state of
an optimizer, is a *tenant*: it has a share of the store with memory of its own, a budget that is a
part of the session's bound, and a row in the session's report.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ssdtrain._core import Reservation, Store
from ssdtrain.residency import UNLIMITED_BYTES, Residency
from ssdtrain.shortage import Held
from ssdtrain.sizes import shown_bytes

__all__ = ["Budget", "ClassStats", "Figures", "Room", "Share", "Tenant", "Tenants"]

LOOK_S = 0.1
"""So often who waits for room looks whether it was given back by a thread that could not tell."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a tenant has now and did so far. Sizes in bytes, times in seconds."""

    resident_bytes: int = 0
    """In memory now, of what may leave it."""
    on_disk_bytes: int = 0
    """On the disk now, and not in memory."""
    bytes_written: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0
    """Time in which somebody waited for these bytes."""

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
    """What one class of training's memory has of a session. Sizes in bytes, times in seconds."""

    name: str
    """``"activations"``, ``"optimizer state"``, ``"weights"``."""
    hidden_s: float = 0.0
    """I/O time that nobody waited for, if its share of the drives' time is that of its bytes."""

    def since(self, earlier: ClassStats) -> ClassStats:
        """Return what was done after ``earlier``; what is resident or on the disk is of now."""
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


class Tenant(Protocol):
    """What has a row in the report of a session."""

    @property
    def name(self) -> str:
        """What the row is called; those of one name are one row."""

    def figures(self) -> Figures:
        """Return the figures of now, without a wait, on whichever thread."""


class Tenants:
    """The tenants of one session; they do not live longer for it."""

    def __init__(self) -> None:
        self._tenants: list[weakref.ref[Tenant]] = []

    def add(self, tenant: Tenant) -> None:
        """Ask a tenant for its figures from now on."""
        self._tenants.append(weakref.ref(tenant))

    def figures(self) -> dict[str, Figures]:
        """Return the figures by name, in the order in which they came."""
        found: dict[str, Figures] = {}
        for reference in self._tenants:
            tenant = reference()
            if tenant is not None:
                found[tenant.name] = found.get(tenant.name, Figures()) + tenant.figures()
        return found


class Room:
    """Memory that a tenant may fill until ``end``; without a bound it is as much as it likes."""

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
        """Who fills it, and must not wait for it."""

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound at all."""
        return self._reservation is not None

    @property
    def is_open(self) -> bool:
        """Whether it is reserved still."""
        return self._reservation is not None and self._reservation.nbytes > 0

    @property
    def is_standing(self) -> bool:
        """Whether it is given back when its holder dies, for which nobody waits."""
        return self._standing is not None

    def fill_here(self) -> None:
        """Fill it from now on in this thread."""
        self.thread = threading.get_ident()

    def note(self, nbytes: int) -> None:
        """Note what lies in it; of more than was reserved, the account tells as much."""
        if nbytes > self.nbytes and self._reservation is not None and self._budget is not None:
            self.nbytes = nbytes
            self._reservation.resize(nbytes)
            self._budget.note_peak()

    def end(self) -> None:
        """Give it back; what was in it has left memory. Idempotent."""
        if self._reservation is not None and self._budget is not None:
            if self._standing is not None:
                self._standing.resize(0)
            self._reservation.resize(0)
            self._budget.note_end()


class Budget:
    """A tenant's part in the bound of a session, which is reserved before memory is filled.

    Who has reserved room waits for the disk alone, never for who else wants some. So whoever is
    short of room may wait for its end, also with the session's lock, which it does not take.
    """

    def __init__(self, residency: Residency, lock: threading.RLock, name: str) -> None:
        self._residency = residency
        self._changed = threading.Condition(lock)
        self._process = os.getpid()
        self._name = name
        self._advice = ""
        self._rooms: weakref.WeakSet[Room] = weakref.WeakSet()
        """Weak, so that room which nobody can give back any more ends with who had it."""
        self.failure: str | None = None
        """Always ``None``; see ``residency.User``."""
        residency.add_user(self)

    @property
    def limit_bytes(self) -> int | None:
        """The bound of the session, if it has one."""
        return self._residency.limit_bytes

    @property
    def left_bytes(self) -> int | None:
        """What others have not set aside of it, of whom some may be dead."""
        return self._residency.left_bytes()

    def reserve(self, least_bytes: int, most_bytes: int, wanted: Callable[[], str]) -> Room:
        """Reserve what there is, at most ``most_bytes``; wait for ``least_bytes`` of it.

        ``wanted`` says who needs them.

        Raises:
            BudgetError: There will never be as much: nothing that is in memory can leave it.

        """
        if self._is_unbounded():
            return Room(UNLIMITED_BYTES)
        with self._changed:
            nbytes = min(most_bytes, max(least_bytes, self._residency.room_bytes()))
            self._residency.admit(nbytes, wanted)
            return self._reserved(nbytes)

    def try_to_reserve(self, nbytes: int) -> Room | None:
        """Reserve so much if there is room now."""
        if self._is_unbounded():
            return Room(UNLIMITED_BYTES)
        with self._changed:
            if self._residency.room_bytes() < nbytes:
                return None
            return self._reserved(nbytes)

    def set_aside(self, nbytes: int, wanted: Callable[[], str], advice: str) -> Room:
        """Reserve so much for as long as the room lives; ``advice`` says what makes it smaller.

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
        # In a forked process the lock may be held for ever, by a thread that is not there.
        return self.limit_bytes is None or self._process != os.getpid()

    def _reserved(self, nbytes: int, standing: Reservation | None = None) -> Room:
        room = Room(nbytes, self._residency.account.reserve(nbytes), self, standing)
        self._rooms.add(room)
        self._residency.note_peak()
        return room

    def note_peak(self) -> None:
        """Compare what is in memory with the peak."""
        self._residency.note_peak()

    def note_end(self) -> None:
        """Wake who waits for room; whom this cannot tell looks by itself."""
        # Not waiting for the lock: who has it may be waiting for what this thread does next.
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    # What the residency asks, with the session's lock held.

    def wait_for_room(self) -> bool:
        """Wait until room is given back, without the lock; ``False`` if none will be."""
        taken = [
            weakref.ref(room) for room in list(self._rooms) if room.is_open and not room.is_standing
        ]
        if not taken or self._is_of_this_thread():
            return False
        while all(map(_is_open, taken)):
            self._changed.wait(LOOK_S)
        return True

    def give_way(self) -> None:
        """Let go of what was set aside for the dead; what else is reserved is needed."""
        if any(room.is_open and room.is_standing for room in list(self._rooms)):
            # Who was dropped may be in a cycle, and wait for Python's collector.
            gc.collect()

    def held(self) -> list[Held]:
        """Return what cannot leave memory before this thread goes on."""
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
    """What a tenant has of a session."""

    store: Store
    """On the session's disks, with memory of its own for what it reads."""
    budget: Budget
    register: Callable[[Tenant], None]
    """Has the tenant's figures in the session's report."""
