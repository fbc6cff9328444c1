"""What a session did, as a frozen snapshot and as a report for a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ssdtrain.machine.huge_pages import SMALL_PAGES_REMEDY, has_small_pages
from ssdtrain.machine.process_memory import known_bytes
from ssdtrain.reasons import Reason
from ssdtrain.residency import Residency
from ssdtrain.sizes import shown_bytes
from ssdtrain.stalls import Stalls

__all__ = ["Stats", "snapshot"]

OF_THE_MOMENT = frozenset(
    {
        "resident_bytes",
        "resident_bytes_peak",
        "disk_used_bytes",
        "disk_reserved_bytes",
        "process_bytes",
        "process_bytes_peak",
        "has_small_pages",
        "is_surprising",
    }
)
"""Fields that tell a state or a peak: a difference of two of them means nothing."""


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
    """Writes that failed, or for which the disk had no space; their tensors were kept."""
    write_refused_count: int
    """Writes that ``max_disk_bytes`` did not allow; their tensors were kept."""
    resident_bytes: int
    """Saved bytes in memory now: kept, being written, read ahead or handed to a node."""
    resident_bytes_peak: int
    disk_used_bytes: int
    """Bytes of tensors on the disk now."""
    disk_reserved_bytes: int
    """Size of the files that they are in: space that others cannot use meanwhile."""
    engines: tuple[tuple[str, str], ...]
    """Directory and engine of each spill file."""
    process_bytes: int
    """Memory of the whole process now (``VmRSS``); 0 where the system does not tell."""
    process_bytes_peak: int
    """Its peak since the process began (``VmHWM``)."""
    has_small_pages: bool
    """Whether torch's tensors are not on huge pages, because ssdtrain was imported too late."""
    reason: str | None = None
    """Why little or nothing was offloaded, and what to change; ``None`` if much was."""
    is_surprising: bool = False
    """Whether that is so although something else could have been expected."""

    @property
    def hidden_s(self) -> float:
        """I/O time that no computing thread waited for."""
        return max(0.0, self.write_busy_s + self.read_busy_s - self.stall_s)

    def since(self, earlier: Stats) -> Stats:
        """Return what was done after ``earlier``, a snapshot of the same session.

        Counts, bytes and times are differences. What is resident or on the disk now, and the peak
        since the session began, are those of this snapshot.
        """
        changes = {}
        for field in fields(self):
            now = getattr(self, field.name)
            if isinstance(now, int | float) and field.name not in OF_THE_MOMENT:
                changes[field.name] = now - getattr(earlier, field.name)
        return replace(self, **changes)

    def as_dict(self) -> dict[str, int | float | str]:
        """Return all of it by name, in a flat form that JSON and every logger take.

        Names that contain ``bytes`` are sizes in bytes, those that end in ``_s`` times in seconds;
        what begins with ``is`` or ``has`` is 0 or 1, and ``reason`` is empty if there is none.
        """
        values: dict[str, int | float | str] = {
            field.name: getattr(self, field.name) for field in fields(self)
        }
        values["has_small_pages"] = int(self.has_small_pages)
        values["is_surprising"] = int(self.is_surprising)
        values["reason"] = self.reason or ""
        values["engines"] = self._engines()
        values["hidden_s"] = self.hidden_s
        return values

    def _engines(self) -> str:
        return ", ".join(f"{name} in {place}" for place, name in self.engines)

    def __str__(self) -> str:
        """Lay the figures out for a person."""
        fates = (
            ("offloaded", self.bytes_offloaded, self.tensors_offloaded),
            ("forwarded", self.bytes_forwarded, self.tensors_forwarded),
            ("kept", self.bytes_kept, self.tensors_kept),
        )
        saved = ", ".join(
            f"{shown_bytes(nbytes)} {fate} in {count}" for fate, nbytes, count in fates
        )
        moves = (
            ("written", self.bytes_written, self.write_busy_s),
            ("read", self.bytes_read, self.read_busy_s),
        )
        moved = ", ".join(
            f"{shown_bytes(size)} {way}{_rate(size, busy)}" for way, size, busy in moves
        )
        times = f"{self.hidden_s:.3f} s hidden, {self.stall_s:.3f} s exposed"
        used, reserved = shown_bytes(self.disk_used_bytes), shown_bytes(self.disk_reserved_bytes)
        peak, now = shown_bytes(self.resident_bytes_peak), shown_bytes(self.resident_bytes)
        memory = (
            f"{shown_bytes(self.process_bytes_peak)} of memory at the peak, "
            f"{shown_bytes(self.process_bytes)} now, all included"
        )
        rows = [
            f"ssdtrain: {self._engines()}",
            f"  saved      {saved} tensors",
            f"  resident   {peak} at the peak, {now} now",
            f"  process    {memory}",
            f"  drive      {moved}",
            f"  on disk    {used} now, in files of {reserved}",
            f"  I/O time   {times}, {self.stall_count} stalls",
        ]
        if self.write_failed_count:
            rows.append(f"  failures   {self.write_failed_count} writes; their tensors were kept")
        if self.write_refused_count:
            rows.append(
                f"  bound      {self.write_refused_count} writes beyond max_disk_bytes not made"
            )
        if self.has_small_pages:
            rows.append(
                f"  pages      small, because ssdtrain was imported too late; {SMALL_PAGES_REMEDY}"
            )
        if self.reason is not None:
            rows.append(f"  because    {self.reason}")
        return "\n".join(rows)


def snapshot(
    residency: Residency,
    stalls: Stalls,
    *,
    resident_bytes: int,
    write_failed_count: int,
    write_refused_count: int,
    store: Mapping[str, object],
    reason: Reason | None,
) -> Stats:
    """Join the counts of a session with those of its store (``_core.Store.stats``)."""

    def number(key: str) -> int:
        value = store.get(key, 0)
        assert isinstance(value, int)
        return value

    engines = store.get("engines", ())
    assert isinstance(engines, list | tuple)
    ended = residency.account.ended()
    return Stats(
        bytes_offloaded=ended["offloaded"][0],
        bytes_forwarded=ended["forwarded"][0],
        bytes_kept=ended["kept"][0],
        tensors_offloaded=ended["offloaded"][1],
        tensors_forwarded=ended["forwarded"][1],
        tensors_kept=ended["kept"][1],
        bytes_written=number("bytes_written"),
        bytes_read=number("bytes_read"),
        write_busy_s=number("write_busy_ns") / 1e9,
        read_busy_s=number("read_busy_ns") / 1e9,
        stall_s=stalls.total_s,
        stall_count=stalls.count,
        write_failed_count=write_failed_count,
        write_refused_count=write_refused_count,
        resident_bytes=resident_bytes,
        resident_bytes_peak=residency.account.peak_bytes,
        disk_used_bytes=number("disk_used_bytes"),
        disk_reserved_bytes=number("disk_reserved_bytes"),
        engines=tuple((str(place), str(name)) for place, name in engines),
        process_bytes=known_bytes("VmRSS"),
        process_bytes_peak=known_bytes("VmHWM"),
        has_small_pages=has_small_pages(),
        reason=None if reason is None else reason.text,
        is_surprising=reason is not None and reason.is_warning,
    )


def _rate(nbytes: int, seconds: float) -> str:
    return f" ({shown_bytes(nbytes / seconds)}/s)" if seconds > 0 else ""
