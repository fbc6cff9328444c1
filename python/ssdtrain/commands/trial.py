"""The trial of `ssdtrain doctor`: writes and reads bytes, compares them and measures the rates."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from statistics import median

from ssdtrain._core import Probe
from ssdtrain.config import StoreConfig
from ssdtrain.machine.tuning import DEFAULT, Engine
from ssdtrain.open_store import open_store

__all__ = ["Rates", "write_and_read"]

PATTERN_BYTES = 64 << 20
REQUEST_COUNT_MAX = 8
SECONDS_EACH_WAY = 0.7
"""With the comparison about two seconds in all."""
COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of the drive in the trial; bytes per second."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def write_and_read(directory: str, *, engine: Engine) -> tuple[Rates, bool]:
    """Return the rates of a directory's drive, and whether all bytes came back unchanged."""
    facts = os.statvfs(directory)
    free_bytes = facts.f_bavail * facts.f_frsize
    is_equal = _comes_back(directory, min(PATTERN_BYTES, free_bytes // 4))
    count = min(REQUEST_COUNT_MAX, free_bytes // 4 // Probe.REQUEST_BYTES)
    return _rates(Probe(directory, max(1, count)), max(1, count), engine), is_equal


def _rates(probe: Probe, count: int, engine: Engine) -> Rates:
    found = {}
    for way in ("write", "read"):
        begin = time.monotonic()
        passes: list[float] = []
        # The first pass writes to new blocks, which is slower than in training.
        while len(passes) < 2 or time.monotonic() - begin < SECONDS_EACH_WAY:
            passes.append(
                probe.seconds(
                    way,
                    0,
                    count,
                    backend=engine,
                    queue_depth=DEFAULT.queue_depth,
                    piece_bytes=DEFAULT.piece_bytes,
                )
            )
        found[way] = count * Probe.REQUEST_BYTES / median(passes[1:])
    return Rates(write_bytes_per_s=found["write"], read_bytes_per_s=found["read"])


def _comes_back(directory: str, nbytes: int) -> bool:
    """Write a pattern through a store, as training would, and compare the bytes that it reads."""
    source = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _fill(source)
    # Only this object tells the address of the mapping, and keeps it alive.
    first = ctypes.c_char.from_buffer(source)
    store = open_store(StoreConfig(dirs=(directory,)))
    try:
        stored = store.write(ctypes.addressof(first), nbytes, first)
        stored.wait()
        with memoryview(store.read(stored).wait()) as found:
            return all(
                bytes(found[at : at + COMPARED_BYTES]) == source[at : at + COMPARED_BYTES]
                for at in range(0, nbytes, COMPARED_BYTES)
            )
    finally:
        store.close()


def _fill(target: mmap.mmap) -> None:
    """Write noise, with a number in each page: no two are equal."""
    noise = os.urandom(mmap.PAGESIZE - 8)
    for number in range(len(target) // mmap.PAGESIZE):
        target.write(number.to_bytes(8, "little") + noise)
