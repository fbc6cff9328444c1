"""Step of `benches/gpu_check.py`: what the drive writes and reads in a second, by each engine."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from gpu_found import Found, run_step, step_parser
from ssdtrain._core import Probe
from ssdtrain.errors import SsdtrainError

REQUEST_COUNT, PASSES = 32, 4
TINY_COUNT = 1


def look(options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Measure; that the kernel forbids io_uring is no failure."""
    count = TINY_COUNT if options.tiny else REQUEST_COUNT
    probe = Probe(str(folder), count)
    found.note("alignment_bytes", probe.alignment)
    for engine in ("io_uring", "psync"):
        for way in ("write", "read"):
            try:
                measured = rate(probe, engine, way, count)
            except SsdtrainError as error:
                if engine == "psync":
                    raise
                found.note(f"{engine}_{way}", None, f"not usable: {error}")
                continue
            name = f"{engine}_{way}_bytes_per_s"
            found.note(name, measured, f"{measured / 1e9:.2f} GB/s")


def rate(probe: Probe, engine: str, way: str, count: int) -> float:
    """Return bytes per second; the first pass writes to blocks that were never written."""
    seconds = [
        probe.seconds(
            way,
            0,
            count,
            backend=engine,
            queue_depth=Probe.QUEUE_DEPTH_DEFAULT,
            piece_bytes=Probe.PIECE_BYTES_DEFAULT,
        )
        for _ in range(PASSES)
    ]
    return count * Probe.REQUEST_BYTES / statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(run_step(look, step_parser(__doc__).parse_args()))
