"""What ``verify=True`` costs: CPU seconds, the caller's time, and the rate, with and without.

    python benches/io/verify_cost.py --dir DIRECTORY [--gib 2]

Tensors of 64 MiB on huge pages. First one after the other: CPU seconds of the process, which other
processes hardly change. Then all at once: how long the calling thread was held by ``write``, and
how fast all of them were written, and read. The two kinds of store take turns; medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import torch

import ssdtrain

TENSOR_BYTES = 64 << 20
ROUNDS = 5
COLUMNS = ("write CPU s/GiB", "read CPU s/GiB", "caller ms/GiB", "write GB/s", "read GB/s")


def cpu_seconds(
    store: ssdtrain.TensorStore, source: torch.Tensor, count: int
) -> tuple[float, float]:
    began = process_time()
    stored = []
    for _ in range(count):
        one = store.write(source)
        one.wait()
        stored.append(one)
    written = process_time()
    for one in stored:
        store.read(one).result()
    return written - began, process_time() - written


def seconds(
    store: ssdtrain.TensorStore, source: torch.Tensor, count: int
) -> tuple[float, float, float]:
    """Return the time of the calls of ``write``, and that of all writes and of all reads."""
    began = perf_counter()
    stored = [store.write(source) for _ in range(count)]
    called = perf_counter()
    for one in stored:
        one.wait()
    written = perf_counter()
    pending = [store.read(one) for one in stored]
    while pending:
        # The oldest goes at once, as in a backward.
        pending.pop(0).result()
    return called - began, written - began, perf_counter() - written


def measure(folder: str, source: torch.Tensor, count: int, *, verify: bool) -> tuple[float, ...]:
    gib, gigabytes = count * TENSOR_BYTES / (1 << 30), count * TENSOR_BYTES / 1e9
    with ssdtrain.TensorStore(folder, verify=verify) as store:
        # The first time pays for blocks on the disk and for pages in memory.
        seconds(store, source, count)
        write_cpu_s, read_cpu_s = cpu_seconds(store, source, count)
        called_s, write_s, read_s = seconds(store, source, count)
    return (
        write_cpu_s / gib,
        read_cpu_s / gib,
        called_s * 1e3 / gib,
        gigabytes / write_s,
        gigabytes / read_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What checksums cost.")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.randn(TENSOR_BYTES // 4)
    count = max(1, round(options.gib * (1 << 30) / TENSOR_BYTES))
    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for _ in range(ROUNDS):
            for verify in (False, True):
                found[verify].append(measure(folder, source, count, verify=verify))
    print(f"{'':<14}" + "".join(f"{name:>17}" for name in COLUMNS))
    for verify in (False, True):
        medians = map(statistics.median, zip(*found[verify], strict=True))
        print(f"verify={verify!s:<7}" + "".join(f"{one:>17.3f}" for one in medians))


if __name__ == "__main__":
    main()
