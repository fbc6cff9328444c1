"""Times whole steps on a CPU against a program that never imports ssdtrain, by kind of pages.

    python benches/training/pages_step.py [--dir DIR] [--model gpt|bert|gpt2|t5] [--layers N]
        [--hidden N] [--batch N] [--sequence N] [--dtype bfloat16] [--dropout P] [--steps N]
        [--threads N] [--cases plain offloaded ...] [--json FILE]

Each case is a fresh process that trains a model of the demo with AdamW; they take turns, step by
step, after warm-up steps. Printed are the median over the turns of the time over that of `plain`
with its standard error, and of a step medians of CPU time, the system's part of it and page faults;
the most memory of the process after the warm-up, and that over `plain`'s.

- plain: a program that never imports ssdtrain.
- imported, offloaded: with the huge pages that `import ssdtrain` switches on; `offloaded` is a
  session as it is by default.
- small pages: the same with THP_MEM_ALLOC_ENABLE=0.
- glibc's thresholds: a session that leaves those of malloc as they are.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

import ssdtrain
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import DTYPE_NAMES, TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.machine.process_memory import CLEAR_REFS, RESET_HIGH_WATER_MARK, status_bytes
from turns import answer, parser_of, started, write_record

SMALL_PAGES = {"THP_MEM_ALLOC_ENABLE": "0"}
USERS_OWN = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""Changes nothing in malloc; but a session leaves the thresholds alone if the user sets one."""
CASES: dict[str, dict[str, str]] = {
    "plain": {},
    "imported": {},
    "imported, small pages": SMALL_PAGES,
    "offloaded": {},
    "offloaded, small pages": SMALL_PAGES,
    "offloaded, glibc's thresholds": USERS_OWN,
}
WARM_UP_COUNT = 6
"""Recipes are proved in two steps, and plans settle after three."""
MIB = 1 << 20
ERROR_OF_MEDIAN = 1.25
"""The standard error of a median over that of a mean, for a normal distribution."""
ASKED = (
    "model",
    "layers",
    "hidden",
    "sequence",
    "batch",
    "dtype",
    "dropout",
    "steps",
    "threads",
    "cases",
)


def trainer(case: str, given: argparse.Namespace, stack: ExitStack) -> Callable[[str], Any]:
    """Return the function that trains a step in this process and tells its figures."""
    torch.set_num_threads(given.threads)
    trainee = build_trainee(options_of(given))
    optimizer = torch.optim.AdamW(trainee.module.parameters(), lr=1e-4)
    batches = ByteBatches(load_text(None), batch=given.batch, sequence=given.sequence, seed=0)
    if case.startswith("offloaded"):
        stack.enter_context(ssdtrain.offload(given.dir))

    def step(number: str) -> dict[str, Any]:
        if int(number) == WARM_UP_COUNT:
            CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
        text = batches.at(int(number))
        before, began_s = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=given.dtype == "bfloat16"):
            loss = trainee.loss(text)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        wall_s, after = perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
        system_s = after.ru_stime - before.ru_stime
        return {
            "wall_s": wall_s,
            "cpu_s": after.ru_utime - before.ru_utime + system_s,
            "system_s": system_s,
            "faults": after.ru_minflt - before.ru_minflt,
            "peak_mib": status_bytes("VmHWM") / MIB,
            "loss": float(loss.item()).hex(),
        }

    return step


def options_of(given: argparse.Namespace) -> TrainingOptions:
    """Return the options of the demo's model."""
    return TrainingOptions(
        model=given.model,
        layers=given.layers,
        hidden=given.hidden,
        sequence=given.sequence,
        batch=given.batch,
        dtype=given.dtype,
        dropout=given.dropout,
    )


def row_of(steps: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of a case."""
    ratios = [one["wall_s"] / other["wall_s"] for one, other in zip(steps, plain, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return {
        **{
            key: statistics.median(step[key] for step in steps)
            for key in ("wall_s", "cpu_s", "system_s", "faults")
        },
        "ratio": statistics.median(ratios),
        "ratio_error": ERROR_OF_MEDIAN * error,
        "peak_mib": steps[-1]["peak_mib"],
        "peak_ratio": steps[-1]["peak_mib"] / plain[-1]["peak_mib"],
    }


def measure(given: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Run the cases in turns."""
    cases = ["plain", *(case for case in given.cases if case != "plain")]
    steps: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    ways = [(case, case) for case in cases]
    environments = {case: os.environ | CASES[case] for case in cases if case != "plain"}
    with started(
        ways, __file__, arguments, given.dir, without_name="plain", environments=environments
    ) as (children, _):
        for number in range(WARM_UP_COUNT + given.steps):
            # Forwards and backwards, so that a drift of the machine meets all of them.
            for child in children if number % 2 == 0 else children[::-1]:
                steps[child.name].append(child.ask(str(number)))
    timed = {case: found[WARM_UP_COUNT:] for case, found in steps.items()}
    is_equal = all(
        len({steps[case][number]["loss"] for case in cases}) == 1
        for number in range(WARM_UP_COUNT + given.steps)
    )
    rows = {case: row_of(found, timed["plain"]) for case, found in timed.items()}
    return {"rows": rows, "is_equal": is_equal}


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code: 1 if a loss differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=("gpt", "bert", "gpt2", "t5"), default="gpt")
    for name, value in (("layers", 6), ("hidden", 384), ("sequence", 256), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        with ExitStack() as stack:
            answer(trainer(given.child, given, stack))
        return 0
    found = measure(given, arguments)
    print("| | step, s | over plain | CPU, s | of the system | faults | peak, MiB | over plain |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for case, row in found["rows"].items():
        times = f"{row['wall_s']:.2f} | {row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        system = f"{row['cpu_s']:.2f} | {row['system_s']:.2f} | {row['faults']:,.0f}"
        print(f"| {case} | {times} | {system} | {row['peak_mib']:,.0f} | {row['peak_ratio']:.2f} |")
    print(f"losses: {'all equal' if found['is_equal'] else 'NOT EQUAL'}")
    write_record(given, ASKED, found)
    return 0 if found["is_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
