"""Reads the memory of this process from the kernel; keeps free memory, and gives it back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

GIVE_BACK_BYTES_MIN = 8 << 20
"""Free memory goes back to the system after at least so many bytes: that walks over all of it."""
RESET_HIGH_WATER_MARK = "5"
"""Written into `clear_refs`, this resets `VmHWM` to `VmRSS`; see proc(5)."""


GROWTH_BYTES = 64 << 20
"""A process that has grown by more gives free memory back at once."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest that glibc takes."""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Twice the other, which is what glibc itself sets."""
NEVER_TRIM_BYTES = (1 << 31) - 1
"""The largest number that mallopt takes."""

_mallopt: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Only glibc has this function, and only glibc keeps so much."""
if _trim is not None:
    _trim.argtypes = [ctypes.c_size_t]


class MemoryUnknownError(Exception):
    """The system does not tell about a process's memory; the message says what is missing."""


def status_bytes(field: str) -> int:
    """Read a size, such as `VmRSS`, of this process."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError as error:
        raise MemoryUnknownError(f"{STATUS} cannot be read: {error}") from error
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            # The kernel writes "kB" and means 1024 bytes.
            return int(value.split()[0]) << 10
    raise MemoryUnknownError(f"{STATUS} has no line {field}: this kernel does not count it")


def known_bytes(field: str) -> int:
    """Read a size as ``status_bytes`` does; 0 where the system does not tell."""
    try:
        return status_bytes(field)
    except MemoryUnknownError:
        return 0  # Reports show it as "0 bytes"; nothing depends on it.


def reset_high_water_mark() -> int:
    """Give freed memory back, set `VmHWM` to `VmRSS`; return `VmRSS` in bytes."""
    release_free_memory()
    try:
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
    except OSError as error:
        raise MemoryUnknownError(
            f"VmHWM cannot be reset, because {CLEAR_REFS} cannot be written: {error}"
        ) from error
    return status_bytes("VmRSS")


def release_free_memory() -> None:
    """Have the C library return its free pages.

    glibc keeps freed blocks below a threshold that grows to 32 MiB, for blocks that fit there.
    Other threads of Python go on meanwhile.
    """
    if _trim is not None:
        _trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of less than 32 MiB, for the next ones of their size.

    glibc comes to this threshold by itself as such blocks are freed, but for the largest of them:
    each of those is a mapping of its own, which the kernel makes and zeroes anew every time. It
    also gives the end of its heap back whenever that is free, which is in every step. Both do
    nothing if the user has set any option of malloc.
    """
    if _may_set_options():
        _mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        _mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES)


def let_freed_memory_go() -> None:
    """Have glibc give the end of its heap back again, from the next time that it grows by a free.

    Another session that is still open only becomes slower.
    """
    if _may_set_options():
        _mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def _may_set_options() -> bool:
    has_options = any(name.startswith("MALLOC_") for name in os.environ)
    has_options |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return _trim is not None and not has_options


class GrownMemory:
    """Gives free memory back when the process has grown, and else ever more rarely.

    What is given back is zeroed by the kernel at its next use, so a step that uses the same memory
    as the last should give none back. Holes in the heap that no tensor fits into stay given back.
    """

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._wait_bytes = 0
        """Bytes that are freed before the next time."""
        self._known_bytes = 0
        """The largest size of the process that is no growth."""

    def note_freed(self, nbytes: int) -> None:
        """Note bytes that writes have freed; give memory back if it is time."""
        resident_bytes = known_bytes("VmRSS")
        has_grown = resident_bytes > self._known_bytes + GROWTH_BYTES
        self._freed_bytes += nbytes
        if not has_grown and self._freed_bytes < self._wait_bytes:
            return
        self._wait_bytes = nbytes if has_grown else 2 * self._freed_bytes
        self._known_bytes = max(resident_bytes, self._known_bytes)
        self._freed_bytes = 0
        release_free_memory()


class FreedMemory:
    """Gives memory of tensors that went to the disk back to the system, now and then.

    It counts the bytes that writes free, less those that reads bring. The rest was allocated anew,
    such as the state of a first step: the C library keeps such blocks, and small objects that lie
    in them keep the next tensors out, so the process would grow by all of them. Reads have memory
    of their own.
    """

    def __init__(self, give_back_bytes: int) -> None:
        self._give_back_bytes = max(give_back_bytes, GIVE_BACK_BYTES_MIN)
        self._nbytes = 0

    def note_read(self, nbytes: int) -> None:
        """Note the bytes that a read has brought."""
        self._nbytes = max(0, self._nbytes - nbytes)

    def note_freed(self, nbytes: int) -> None:
        """Note the bytes that a write has freed; give memory back if they are enough."""
        self._nbytes += nbytes
        if self._nbytes >= self._give_back_bytes:
            self._nbytes = 0
            release_free_memory()
