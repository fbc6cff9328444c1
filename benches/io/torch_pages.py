"""What torch's switch for huge pages does to addresses of tensors, and to writes of them.

``python benches/io/torch_pages.py DIRECTORY`` prints Markdown. Processes with and without the
switch take turns, because torch reads it once; each writes the same 256 MiB of tensors again and
again, so that the blocks of the file exist after the first pass, which is not timed. *Used*
processes have made and freed tensors of other sizes before, so that the allocator has memory
to give out again.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SWITCH = "THP_MEM_ALLOC_ENABLE"
ROUND_COUNT = 3
PASS_COUNT = 9
PASS_BYTES = 256 << 20
SIZES = (64 << 10, 1 << 20, (2 << 20) - 4096, 2 << 20, 4 << 20, 16 << 20)
# Bytes of a tensor, and whether the process is a used one.
CASES = ((1 << 20, False), (4 << 20, False), (16 << 20, False), (16 << 20, True))


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(
            "name a directory on the disk to measure: python benches/io/torch_pages.py DIRECTORY"
        )
    directory = sys.argv[1]
    if "--addresses" in sys.argv:
        print(json.dumps(measure_addresses()))
        return
    if "--case" in sys.argv:
        size, used = CASES[int(sys.argv[-1])]
        print(json.dumps(measure_writes(directory, size, used=used)))
        return
    addresses: dict[str, Any] = {value: child(value, directory, "--addresses") for value in "01"}
    runs: dict[str, list[list[dict[str, float]]]] = {"0": [], "1": []}
    for number in range(ROUND_COUNT):
        for value in ("01", "10")[number % 2]:
            cases = range(len(CASES))
            runs[value].append([child(value, directory, "--case", str(case)) for case in cases])
    written = 2 * ROUND_COUNT * len(CASES) * (PASS_COUNT + 1) * PASS_BYTES
    versions = f"torch {version('torch')}, Linux {os.uname().release}, {os.cpu_count()} cores"
    print("# What torch's huge pages change\n")
    print(f"`python benches/io/torch_pages.py DIRECTORY`, {ROUND_COUNT} processes for each line,")
    print(f"{versions}; {written / 1e9:.0f} GB written. Rates are medians of processes, each the")
    print("median of its passes.")
    report_addresses(addresses)
    report_writes(runs)


def child(value: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | {SWITCH: value},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def measure_addresses() -> dict[str, list[int]]:
    """For each size, where eight tensors of it begin."""
    import torch  # noqa: PLC0415 - the parent sets the switch first

    found = {}
    for size in SIZES:
        tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(8)]
        found[str(size)] = [tensor.data_ptr() for tensor in tensors]
    return found


def measure_writes(directory: str, size: int, *, used: bool) -> dict[str, float]:
    import torch  # noqa: PLC0415 - the parent sets the switch first

    import ssdtrain  # noqa: PLC0415

    def sources(size: int) -> list[torch.Tensor]:
        count = PASS_BYTES // size
        return [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(count)]

    if used:
        for other in (size, 1 << 20):
            del sources(other)[:]
    before_bytes = huge_bytes()
    tensors = sources(size)
    huge_share = (huge_bytes() - before_bytes) / PASS_BYTES
    rates, cpus = [], []
    with ssdtrain.TensorStore(directory) as store:
        for number in range(PASS_COUNT + 1):
            cpu_begin, begin = cpu_s(), time.perf_counter()
            stored = [store.write(tensor) for tensor in tensors]
            for one in stored:
                one.wait()
            seconds, cpu = time.perf_counter() - begin, cpu_s() - cpu_begin
            if number > 0:
                rates.append(PASS_BYTES / seconds)
                cpus.append(cpu / PASS_BYTES * (1 << 30))
            for one in stored:
                store.release(one)
    rate, cpu = statistics.median(rates), statistics.median(cpus)
    return {"rate": rate, "cpu": cpu, "huge_share": huge_share}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages"):
            return int(line.split()[1]) << 10
    return 0


def report_addresses(addresses: dict[str, dict[str, list[int]]]) -> None:
    print("\n## Where tensors lie\n")
    print(f"| tensor | {SWITCH} | address % 4096 | starts on a huge page |")
    print("|--:|--:|---|--:|")
    for size in SIZES:
        for value, found in addresses.items():
            starts = found[str(size)]
            places = sorted({start % 4096 for start in starts})
            text = ", ".join(map(str, places[:4])) + (" ..." if len(places) > 4 else "")
            aligned = sum(start % (2 << 20) == 0 for start in starts)
            print(f"| {shown(size)} | {value} | {text} | {aligned} of {len(starts)} |")


def report_writes(runs: dict[str, list[list[dict[str, float]]]]) -> None:
    print("\n## Writes by the store\n")
    print(f"| tensor | {SWITCH} | on huge pages | GB/s | rate, ratio | CPU s/GiB | CPU, ratio |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for number, (size, used) in enumerate(CASES):
        plain = [run[number] for run in runs["0"]]
        for value in "01":
            found = [run[number] for run in runs[value]]

            def middle(key: str, found: list[dict[str, float]] = found) -> float:
                return statistics.median(one[key] for one in found)

            def ratio(
                key: str,
                found: list[dict[str, float]] = found,
                plain: list[dict[str, float]] = plain,
            ) -> float:
                pairs = zip(found, plain, strict=True)
                return statistics.median(one[key] / base[key] for one, base in pairs)

            print(
                f"| {shown(size)}{', used' if used else ''} | {value} |"
                f" {middle('huge_share'):.0%} |"
                f" {middle('rate') / 1e9:.2f} | {ratio('rate'):.2f} |"
                f" {middle('cpu'):.4f} | {ratio('cpu'):.2f} |"
            )


def shown(size: int) -> str:
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size >> 10} KiB"


if __name__ == "__main__":
    main()
