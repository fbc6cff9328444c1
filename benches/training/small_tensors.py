"""What small operations cost with hooks on: their saved tensors are too small to be written.

Four ways take turns, in another order in each round: without hooks, with identity hooks (pack and
unpack return what they get: the least that hooks can cost), with ours, and with ours under a bound
that is wide enough. Printed are medians of the time of a forward, its backward, and the end of its
graph, and ratios to identity hooks of the same round.

    python benches/training/small_tensors.py [--dir DIR] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.machine import machine_facts
from ssdtrain.planning.policy import Policy

OPERATION_COUNT = 3_000
SEQUENCE_COUNT = 200
BOUND_BYTES = 1 << 30


def chain() -> Tensor:
    """Multiply and take a sine, 3,000 times, on 64 numbers: three saved tensors each time."""
    weight = torch.ones(64, requires_grad=True)
    x = torch.ones(64)
    for _ in range(OPERATION_COUNT):
        x = torch.sin(x * weight)
    return x.sum()


def recurrent() -> Callable[[], Tensor]:
    """Run a cell over a sequence."""
    torch.manual_seed(0)
    cell = nn.GRUCell(64, 64)
    rows = torch.randn(SEQUENCE_COUNT, 8, 64)

    def run() -> Tensor:
        hidden = torch.zeros(8, 64)
        for row in rows:
            hidden = cell(row, hidden)
        return hidden.sum()

    return run


def seconds(work: Callable[[], Tensor], hooks: AbstractContextManager[object]) -> float:
    """Time a forward, its backward, and the end of its graph."""
    began = perf_counter()
    with hooks:
        loss = work()
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    return perf_counter() - began


def measure(work: Callable[[], Tensor], directory: Path, rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, and the ratios of the rounds to identity hooks."""
    store = StoreConfig(dirs=(str(directory),), direct_io="optional")
    bounds = {"ssdtrain": None, "ssdtrain, bound": BOUND_BYTES}
    sessions = {
        name: ssdtrain.Session(OffloadConfig(store=store, max_resident_bytes=bound), Policy())
        for name, bound in bounds.items()
    }
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "without hooks": nullcontext,
        "identity hooks": lambda: saved_tensors_hooks(same, same),
        **{name: session.context for name, session in sessions.items()},
    }
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took_s = seconds(work, ways[name]())
            # The first round fills caches.
            if number:
                times[name].append(took_s)
    for session in sessions.values():
        session.close()
    medians = {name: statistics.median(took) * 1e3 for name, took in times.items()}
    ratios = {
        name: statistics.median(map(float.__truediv__, took, times["identity hooks"]))
        for name, took in times.items()
    }
    return {"milliseconds": medians, "over_identity": ratios}


def same(tensor: Tensor) -> Tensor:
    """Return what was given."""
    return tensor


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a directory on a local file system")
    parser.add_argument("--rounds", type=int, default=21, help="forward and backward passes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    works = {"3,000 times sin(x * w)": chain, "GRUCell, 200 times": recurrent()}
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        rows = {
            name: measure(work, Path(directory), options.rounds) for name, work in works.items()
        }
    print("| work | hooks | ms | over identity hooks |\n|---|---|--:|--:|")
    for work, row in rows.items():
        for name, milliseconds in row["milliseconds"].items():
            print(f"| {work} | {name} | {milliseconds:.1f} | {row['over_identity'][name]:.3f} |")
    if options.json is not None:
        machine = machine_facts(options.dir) | {"directory": None}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = {"date": date, "machine": machine, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
