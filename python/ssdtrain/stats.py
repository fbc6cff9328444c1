"""What a session did: counted while it runs, shown as a frozen snapshot."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Holding", "Ledger", "Stats"]

T = TypeVar("T")

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of a session. Sizes in bytes, times in seconds, since the session began.

    Each saved storage ends in one of three ways, and is counted then:
    *offloaded* (written, its memory freed), *forwarded* (on its way to the disk, or there, but
    served from memory because it was still held), or *kept*: by plan, for its size, or because its
    write was cancelled or failed.
    """

    bytes_offloaded: int
    bytes_forwarded: int
    bytes_kept: int
    tensors_offloaded: int
    tensors_forwarded: int
    tensors_kept: int
    bytes_written: int
    """Bytes that reached the drive, with the widening to its block size."""
    bytes_read: int
    write_busy_s: float
    """Time in which at least one write was in flight."""
    read_busy_s: float
    stall_s: float
    """Time in which a computing thread waited for I/O: the exposed part."""
    stall_count: int
    write_failed_count: int
    """Writes that failed, or were refused for want of space; their tensors were kept."""
    resident_bytes: int
    """Saved bytes in memory now: kept, being written, read ahead or handed to a node."""
    resident_bytes_peak: int
    disk_used_bytes: int
    """Bytes of tensors on the disk now."""
    disk_reserved_bytes: int
    engines: tuple[tuple[str, str], ...]
    """Directory and engine of each spill file."""

    @property
    def hidden_s(self) -> float:
        """I/O time that no computing thread waited for."""
        return max(0.0, self.write_busy_s + self.read_busy_s - self.stall_s)

    def __str__(self) -> str:
        """Lay the figures out for a person."""
        engines = ", ".join(f"{name} in {place}" for place, name in self.engines)
        fates = (
            ("offloaded", self.bytes_offloaded, self.tensors_offloaded),
            ("forwarded", self.bytes_forwarded, self.tensors_forwarded),
            ("kept", self.bytes_kept, self.tensors_kept),
        )
        saved = ", ".join(f"{_mib(nbytes)} {fate} in {count}" for fate, nbytes, count in fates)
        moves = (
            ("written", self.bytes_written, self.write_busy_s),
            ("read", self.bytes_read, self.read_busy_s),
        )
        moved = ", ".join(f"{_mib(size)} {way} ({_rate(size, busy)})" for way, size, busy in moves)
        times = f"{self.hidden_s:.3f} s hidden, {self.stall_s:.3f} s exposed"
        used = f"{_mib(self.disk_used_bytes)} of {_mib(self.disk_reserved_bytes)}"
        peak, now = _mib(self.resident_bytes_peak), _mib(self.resident_bytes)
        rows = [
            f"ssdtrain: {engines}",
            f"  saved      {saved} tensors",
            f"  resident   {peak} at the peak, {now} now",
            f"  drive      {moved}, {used} in use",
            f"  I/O time   {times}, {self.stall_count} stalls",
        ]
        if self.write_failed_count:
            rows.append(f"  failures   {self.write_failed_count} writes; their tensors were kept")
        return "\n".join(rows)


class Holding(weakref.ref[T], Generic[T]):
    """A weak reference to what holds saved bytes, with what has to be known when it dies.

    Its callback is a function in C, which takes no lock and which no interrupt can enter: one at
    the first line of a finalizer in Python would be lost, and what it counts with it.
    """

    __slots__ = ("fate", "held_bytes", "identity", "nbytes", "registry")

    identity: int
    """Of the storage, while it lives."""
    nbytes: int
    held_bytes: int
    """Bytes in memory as they were packed: all, or none."""
    fate: str
    """How it would end now: "kept", "forwarded" or "offloaded"."""
    registry: dict[int, Holding[T]]
    """Where it is found by the identity."""


class Ledger:
    """The running counts behind ``Stats``; changed only under the session's lock.

    What dies at any moment on any thread is appended to a queue, which the next hook settles.

    [Note: no calls] Python looks for signals after a call and when a loop begins anew. A handler
    may raise (Ctrl-C), or ask for these very counts. So what belongs together is done by statements
    that call nothing: by subscripts and slots, and not by `pop`, `get` or `min`; and a loop asks
    inside whether it goes on, because the condition of a `while` is asked before its jump.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes of saved storages that are in memory as they were packed."""
        self.resident_bytes_peak = 0
        self.stall_s = 0.0
        self.stall_count = 0
        self.write_failed_count = 0
        self.bytes: dict[str, int] = {"offloaded": 0, "forwarded": 0, "kept": 0}
        self.tensors: dict[str, int] = {"offloaded": 0, "forwarded": 0, "kept": 0}
        self._holdings: dict[object, None] = {}
        """Everything alive: a weak reference that died before its object would tell nothing."""
        self._ended: deque[Any] = deque()
        self._ended_kept: deque[Any] = deque()
        self._kept: dict[int, list[int]] = {}
        """Identity of a storage that kept tensors hold: its bytes, and how many hold it."""

    def settle(self) -> None:
        """Take note of what died since the last call."""
        ended, holdings = self._ended, self._holdings
        while True:
            if not ended:
                break
            holding = ended[0]
            del ended[0]
            del holdings[holding]
            self.held_bytes -= holding.held_bytes
            self.bytes[holding.fate] += holding.nbytes
            self.tensors[holding.fate] += 1
            registry, identity = holding.registry, holding.identity
            if identity in registry and registry[identity] is holding:
                del registry[identity]
        ended, kept = self._ended_kept, self._kept
        while True:
            if not ended:
                break
            holding = ended[0]
            del ended[0]
            del holdings[holding]
            identity = holding.identity
            entry = kept[identity]
            entry[1] -= 1
            if entry[1] == 0:
                del kept[identity]
                self.held_bytes -= entry[0]
                self.bytes["kept"] += entry[0]
                self.tensors["kept"] += 1

    def hold(
        self, holder: T, nbytes: int, identity: int, registry: dict[int, Holding[T]]
    ) -> Holding[T]:
        """Count ``nbytes`` that ``holder`` holds until it dies; ``registry`` finds it meanwhile."""
        holding = Holding(holder, self._ended.append)
        holding.identity = identity
        holding.registry = registry
        holding.nbytes = holding.held_bytes = nbytes
        holding.fate = "kept"
        registry[identity] = holding
        self._holdings[holding] = None
        self.held_bytes += nbytes
        return holding

    def free(self, holding: Holding[T]) -> None:
        """Note that its bytes are on the disk, and in memory no more."""
        self.held_bytes -= holding.held_bytes
        holding.held_bytes = 0
        holding.fate = "offloaded"

    def hold_kept(self, holder: object, identity: int, nbytes: int, storage_bytes: int) -> None:
        """Count a kept tensor: all on one storage together at most as much as the storage."""
        holding = Holding(holder, self._ended_kept.append)
        kept = self._kept
        if identity in kept:
            entry = kept[identity]
        else:
            entry = kept[identity] = [0, 0]
        # Not by `min` and `max`: see above.
        more = storage_bytes - entry[0]
        if more > nbytes:
            more = nbytes
        elif more < 0:
            more = 0
        holding.identity = identity
        entry[0] += more
        entry[1] += 1
        self._holdings[holding] = None
        self.held_bytes += more

    def note_peak(self, arena_bytes: int) -> None:
        """Compare what is resident now with the peak; called after whatever may raise it.

        ``arena_bytes`` was asked for first: what died since would be counted there once more.
        """
        self.settle()
        self.resident_bytes_peak = max(self.resident_bytes_peak, self.held_bytes + arena_bytes)

    def note_stall(self, seconds: float) -> None:
        """Count a wait of a computing thread."""
        self.stall_s += seconds
        self.stall_count += 1

    def snapshot(self, store: dict[str, object], read_bytes: int) -> Stats:
        """Join these counts with those of the store (``_core.Store.stats``).

        ``read_bytes`` is what reads hold in memory.
        """

        def number(key: str) -> int:
            value = store.get(key, 0)
            assert isinstance(value, int)
            return value

        engines = store.get("engines", ())
        assert isinstance(engines, list | tuple)
        return Stats(
            bytes_offloaded=self.bytes["offloaded"],
            bytes_forwarded=self.bytes["forwarded"],
            bytes_kept=self.bytes["kept"],
            tensors_offloaded=self.tensors["offloaded"],
            tensors_forwarded=self.tensors["forwarded"],
            tensors_kept=self.tensors["kept"],
            bytes_written=number("bytes_written"),
            bytes_read=number("bytes_read"),
            write_busy_s=number("write_busy_ns") / 1e9,
            read_busy_s=number("read_busy_ns") / 1e9,
            stall_s=self.stall_s,
            stall_count=self.stall_count,
            write_failed_count=self.write_failed_count,
            resident_bytes=self.held_bytes + read_bytes,
            resident_bytes_peak=self.resident_bytes_peak,
            disk_used_bytes=number("disk_used_bytes"),
            disk_reserved_bytes=number("disk_reserved_bytes"),
            engines=tuple((str(place), str(name)) for place, name in engines),
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "no rate yet"
