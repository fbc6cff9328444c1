"""Times whole steps with and without torch's huge pages and glibc's thresholds.

    python benches/training/pages_step.py --dir DIR [--layers N] [--hidden N] [--batch N]
        [--sequence N] [--dtype bfloat16] [--repeats N] [--threads N] [--json FILE]

Each case is a fresh process that trains the demo's GPT with dropout; they take turns. Printed are
medians over the processes: of a step wall time, CPU time and the system's part of it, page faults;
the most memory of the process, and what it has after forward.

- plain: a program that never imports ssdtrain.
- imported, offloaded: with the huge pages that `import ssdtrain` switches on.
- small pages: the same with THP_MEM_ALLOC_ENABLE=0.
- reused: the same with GLIBC_TUNABLES under which freed memory is used again, and not mapped anew.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import ssdtrain
from ssdtrain.demo import without
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import DTYPE_NAMES, TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.machine.process_memory import status_bytes

SMALL_PAGES = {"THP_MEM_ALLOC_ENABLE": "0"}
REUSED = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
}
CASES: dict[str, dict[str, str]] = {
    "plain": {},
    "imported": {},
    "imported, small pages": SMALL_PAGES,
    "imported, reused": REUSED,
    "offloaded": {},
    "offloaded, small pages": SMALL_PAGES,
    "offloaded, reused": REUSED,
    "offloaded, small pages, reused": SMALL_PAGES | REUSED,
}
STEP_COUNT = 6
WARM_UP_COUNT = 2
MIB = 1 << 20
COLUMNS = ("wall_s", "cpu_s", "system_s", "faults", "peak_mib", "after_forward_mib")


def train(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; return its medians."""
    torch.set_num_threads(given.threads)
    options = options_of(given)
    trainee = build_trainee(options)
    optimizer = torch.optim.AdamW(trainee.module.parameters(), lr=1e-4)
    batches = ByteBatches(load_text(None), batch=given.batch, sequence=given.sequence, seed=0)
    rows: list[dict[str, float]] = []
    is_offloaded = case.startswith("offloaded")
    with ssdtrain.offload(given.dir) if is_offloaded else nullcontext():
        for number in range(STEP_COUNT):
            text = batches.at(number)
            before, began_s = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=given.dtype == "bfloat16"):
                loss = trainee.loss(text)
            after_forward = status_bytes("VmRSS") / MIB
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            wall_s, after = perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
            system_s = after.ru_stime - before.ru_stime
            rows.append(
                {
                    "wall_s": wall_s,
                    "cpu_s": after.ru_utime - before.ru_utime + system_s,
                    "system_s": system_s,
                    "faults": after.ru_minflt - before.ru_minflt,
                    "after_forward_mib": after_forward,
                }
            )
    counted = rows[WARM_UP_COUNT:]
    return {
        **{key: median(row[key] for row in counted) for key in counted[0]},
        "peak_mib": status_bytes("VmHWM") / MIB,
        "loss": float(loss.item()).hex(),
    }


def options_of(given: argparse.Namespace) -> TrainingOptions:
    """Return the options of the demo's model."""
    return TrainingOptions(
        layers=given.layers,
        hidden=given.hidden,
        sequence=given.sequence,
        batch=given.batch,
        dtype=given.dtype,
        dropout=0.2,
    )


def child(case: str, arguments: list[str]) -> dict[str, Any]:
    """Run a case in a fresh process; return what it tells."""
    words = [__file__, *arguments, "--case", case]
    environ = without.environment() | CASES[case]
    output = without.output_of(*words, is_without=case == "plain", environ=environ)
    found: dict[str, Any] = json.loads(output)
    return found


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code: 1 if a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, help="directory on the drive to offload to")
    for name, value in (("layers", 6), ("hidden", 384), ("sequence", 256), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case is not None:
        print(json.dumps(train(given.case, given)))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for number in range(given.repeats):
        # Forwards and backwards, so that a drift of the machine meets all of them.
        for case in CASES if number % 2 == 0 else list(CASES)[::-1]:
            runs[case].append(child(case, arguments))
    rows = {
        case: {key: median(run[key] for run in found) for key in COLUMNS}
        for case, found in runs.items()
    }
    print("| | wall, s | CPU, s | system, s | faults | peak, MiB | after forward, MiB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for case, row in rows.items():
        times = " | ".join(f"{row[key]:.2f}" for key in COLUMNS[:3])
        print(f"| {case} | {times} | {' | '.join(f'{row[key]:,.0f}' for key in COLUMNS[3:])} |")
    is_equal = len({run["loss"] for found in runs.values() for run in found}) == 1
    print(f"last losses: {'all equal' if is_equal else 'NOT EQUAL'}")
    if given.json is not None:
        document = {"command": " ".join(arguments), "rows": rows, "runs": runs}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
