"""Step of `benches/gpu_check.py`: what the link of the GPU copies in a second, each way and both.

Through pinned memory, in copies of 64 MiB, timed by the host around a wait for the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from gpu_found import Found, run_step, step_parser

COPY_BYTES, COPY_COUNT, REPEATS = 64 << 20, 16, 5
TINY_BYTES, TINY_COUNT = 64 << 10, 2
Job = tuple[torch.cuda.Stream, Tensor, Tensor]
"""Stream, target, source."""


def rate(jobs: list[Job], count: int) -> float:
    """Return the bytes per second of all jobs together, of the median repeat."""
    rates = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began_s = perf_counter()
        for _ in range(count):
            for stream, target, source in jobs:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        nbytes = count * sum(source.nbytes for _, _, source in jobs)
        rates.append(nbytes / (perf_counter() - began_s))
    return statistics.median(rates)


def look(options: argparse.Namespace, _folder: Path, found: Found) -> None:
    """Measure, and compare what came back."""
    nbytes, count = (TINY_BYTES, TINY_COUNT) if options.tiny else (COPY_BYTES, COPY_COUNT)
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    pinned = torch.randint(256, (nbytes,), dtype=torch.uint8).pin_memory()
    source = pinned.cuda()
    landed = torch.empty_like(pinned).pin_memory()
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    jobs = {"down": [(down, landed, source)], "up": [(up, target, pinned)]}
    jobs["both"] = jobs["down"] + jobs["up"]
    for name, one in jobs.items():
        measured = rate(one, count)
        found.note(f"{name}_bytes_per_s", measured, f"{measured / 1e9:.1f} GB/s")
    pageable = torch.empty(nbytes, dtype=torch.uint8)
    measured = rate([(down, pageable, source)], count)
    found.note("down_unpinned_bytes_per_s", measured, f"{measured / 1e9:.1f} GB/s")
    if not (torch.equal(landed, pinned) and torch.equal(target.cpu(), pinned)):
        found.fail("bytes that were copied to the GPU and back are not those that were sent")


if __name__ == "__main__":
    sys.exit(run_step(look, step_parser(__doc__).parse_args()))
