"""What a step of AdamW costs whose state lies on the disk.

Four ways take turns, in another order in each round: the plain optimizer, the offloaded one, the
same with a way back from failed steps (undo), and its traffic alone: the same reads and writes
around an update that does nothing, which is the time that the disk and the store need. No offloaded
step can take less than the longer of that and the plain one.

    python benches/training/optimizer_step.py [--dir DIR] [--parameters N] [--rounds N] [--json F]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import ssdtrain
from ssdtrain.demo.machine import machine_facts

WIDTH = 2048
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
}


class Idle(torch.optim.AdamW):
    """Makes the state of AdamW in the first step, and updates nothing in the others."""

    def step(self, closure: Any = None) -> Any:
        """Make the state, or do nothing."""
        if any(len(self.state[param]) == 0 for param in self.param_groups[0]["params"]):
            return super().step(closure)
        return None


def parameters(count: int) -> list[Parameter]:
    """Return square weights with gradients, at least ``count`` numbers."""
    generator = torch.Generator().manual_seed(0)

    def made() -> Tensor:
        return torch.randn(WIDTH, WIDTH, generator=generator)

    weights = [Parameter(made()) for _ in range(-(-count // WIDTH**2))]
    for weight in weights:
        weight.grad = made()
    return weights


def measure(
    options: dict[str, Any], directory: Path, count: int, rounds: int, buffer_bytes: str
) -> dict[str, float]:
    """Return medians of seconds per step, and the ratios within each round."""
    plain = torch.optim.AdamW(parameters(count), **options)
    offloaded: Any = ssdtrain.offload_optimizer(
        torch.optim.AdamW(parameters(count), **options), directory, buffer_bytes=buffer_bytes
    )
    undoing = ssdtrain.offload_optimizer(
        torch.optim.AdamW(parameters(count), **options),
        directory,
        buffer_bytes=buffer_bytes,
        undo=True,
    )
    traffic = ssdtrain.offload_optimizer(
        Idle(parameters(count), **options), directory, buffer_bytes=buffer_bytes
    )
    steps: dict[str, Callable[[], Any]] = {
        "plain": plain.step,
        "offloaded": offloaded.step,
        "undoing": undoing.step,
        "traffic": traffic.step,
    }
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = perf_counter()
            steps[name]()
            # The first step makes the state.
            if number:
                times[name].append(perf_counter() - began)
    longer = [max(pair) for pair in zip(times["plain"], times["traffic"], strict=True)]
    stats = offloaded.offload_stats
    return {
        "state_bytes": float(stats.on_disk_bytes + stats.resident_bytes),
        "resident_bytes_after_step": float(stats.resident_bytes),
        **{f"{name}_s": statistics.median(took) for name, took in times.items()},
        "over_plain": _ratio(times["offloaded"], times["plain"]),
        "over_traffic": _ratio(times["offloaded"], times["traffic"]),
        "over_longer": _ratio(times["offloaded"], longer),
        "undoing_over_offloaded": _ratio(times["undoing"], times["offloaded"]),
        "written_bytes_per_step": stats.written_bytes / stats.step_count,
        "read_bytes_per_step": stats.read_bytes / stats.step_count,
        "stall_share": stats.stall_s / stats.step_s,
    }


def _ratio(those: list[float], others: list[float]) -> float:
    return statistics.median(map(float.__truediv__, those, others))


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a directory on a local file system")
    parser.add_argument("--parameters", type=int, default=64 << 20, help="numbers in the model")
    parser.add_argument("--buffer-bytes", default="256MiB", help="of ssdtrain.offload_optimizer")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each way")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.parameters < 1:
        parser.error("--rounds and --parameters must be at least 1")
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        rows = {
            name: measure(
                given, Path(directory), options.parameters, options.rounds, options.buffer_bytes
            )
            for name, given in KINDS.items()
        }
    print(
        "| optimizer | state, MiB | plain, s | traffic alone, s | offloaded, s | over plain | "
        "over the longer of both | with undo over without |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for name, row in rows.items():
        print(
            f"| {name} | {row['state_bytes'] / 2**20:.0f} | {row['plain_s']:.3f} | "
            f"{row['traffic_s']:.3f} | {row['offloaded_s']:.3f} | {row['over_plain']:.2f} | "
            f"{row['over_longer']:.2f} | {row['undoing_over_offloaded']:.2f} |"
        )
    if options.json is not None:
        machine = asdict(machine_facts(options.dir)) | {"directory": None}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = {"date": date, "machine": machine, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
