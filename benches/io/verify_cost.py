"""What ``verify=True`` costs: CPU seconds per GiB written and read, with and without checksums.

    python benches/io/verify_cost.py --dir DIRECTORY [--gib 2]

Tensors of 64 MiB on huge pages, written and read one after the other; the two kinds of store take
turns, and the median of the rounds counts. Other processes cost time, but hardly CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import process_time

import torch

import ssdtrain

TENSOR_BYTES = 64 << 20
ROUNDS = 5


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


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds per GiB with and without checksums.")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.randn(TENSOR_BYTES // 4)
    count = max(1, round(options.gib * (1 << 30) / TENSOR_BYTES))
    gib = count * TENSOR_BYTES / (1 << 30)
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for _ in range(ROUNDS):
            for verify in (False, True):
                with ssdtrain.TensorStore(folder, verify=verify) as store:
                    cpu_seconds(store, source, 1)
                    spent[verify].append(cpu_seconds(store, source, count))
    print(f"{'CPU seconds per GiB':<24}{'write':>10}{'read':>10}")
    for verify in (False, True):
        write, read = (statistics.median(way) / gib for way in zip(*spent[verify], strict=True))
        print(f"verify={verify!s:<17}{write:>10.3f}{read:>10.3f}")


if __name__ == "__main__":
    main()
