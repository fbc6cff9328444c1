"""Draws the places of each saved tensor over time, as a Chrome trace, which Perfetto opens.

The clock is that of PyTorch's profiler (nanoseconds since 1970), whose file can be joined: then the
operations and the tensors are in the same picture.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.sizes import shown_bytes

__all__ = ["events_of", "save_timeline"]

PROCESS = "ssdtrain: saved tensors"
PROCESS_NUMBER = 1 << 30
"""No process has so large a number, so the rows are apart from those of a profile."""
COLOURS = {
    "in memory": "thread_state_running",
    "on its way to the disk": "thread_state_iowait",
    "on the disk": "thread_state_sleeping",
    "back": "thread_state_runnable",
}
"""Names from the palette of Chrome's viewer; others choose their own."""
Life = tuple[int, int, Sequence[int]]
"""Key, bytes and moments; see ``_core.Timeline.lives``."""


def events_of(lives: Sequence[Life], base_ns: int) -> list[dict[str, Any]]:
    """Return the bars of tensors, each in a row without another bar at that time.

    ``base_ns`` is the moment that the file calls 0; times in a file are in microseconds.
    """
    named = {"ph": "M", "pid": PROCESS_NUMBER, "name": "process_name", "args": {"name": PROCESS}}
    events: list[dict[str, Any]] = [named]
    free: list[tuple[int, int]] = []
    """The time at which each row is free again, and its number."""
    row_count = 0
    for key, nbytes, moments in sorted(lives, key=lambda life: life[2][0]):
        packed_ns, dropped_ns = moments[0], moments[5]
        if free and free[0][0] <= packed_ns:
            _, row = heapq.heappop(free)
        else:
            row, row_count = row_count, row_count + 1
        heapq.heappush(free, (dropped_ns, row))
        for name, from_ns, until_ns in _bars(moments):
            events.append(
                {
                    "ph": "X",
                    "pid": PROCESS_NUMBER,
                    "tid": row,
                    "name": name,
                    "cname": COLOURS[name],
                    "ts": (from_ns - base_ns) / 1000,
                    "dur": (until_ns - from_ns) / 1000,
                    "args": {"tensor": f"{key & (1 << 64) - 1:016x}", "size": shown_bytes(nbytes)},
                }
            )
    return events


def _bars(moments: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return name, begin and end of the stretches of a life that take any time."""
    packed, writing, freed, reading, _, dropped = moments
    # A tensor whose write was cancelled, or that others held, was in memory all the time.
    steps = [("in memory", packed), ("on its way to the disk", writing), ("on the disk", freed)]
    steps.append(("back", reading if freed else 0))
    begun = [(name, begin) for name, begin in steps if begin]
    ends = [begin for _, begin in begun[1:]] + [dropped]
    return [
        (name, begin, end) for (name, begin), end in zip(begun, ends, strict=True) if end > begin
    ]


def save_timeline(
    path: str | os.PathLike[str],
    lives: Sequence[Life],
    beside: str | os.PathLike[str] | None = None,
) -> None:
    """Write a Chrome trace, with the events of the trace ``beside`` if that is given.

    Raises ``ConfigError`` if ``beside`` is no Chrome trace, ``OSError`` if a file cannot be read or
    written.
    """
    document: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    if beside is not None:
        document = _read(beside)
    else:
        document["baseTimeNanoseconds"] = min((life[2][0] for life in lives), default=0)
    events = events_of(lives, document.get("baseTimeNanoseconds", 0))
    document["traceEvents"] = [*document["traceEvents"], *events]
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ConfigError(
            f"{os.fspath(path)} is no Chrome trace, as torch.profiler's export_chrome_trace "
            "writes: it has no list traceEvents"
        )
    base_ns = document.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int):
        raise ConfigError(
            f"{os.fspath(path)} is no Chrome trace, as torch.profiler's export_chrome_trace "
            f"writes: its baseTimeNanoseconds is {base_ns!r}, not a whole number"
        )
    return document
