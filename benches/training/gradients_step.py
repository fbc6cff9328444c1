"""What a step of several micro-batches costs whose gradients leave memory in between.

Fresh processes train the same GPT with SGD, which has no state, and take turns step by step, in
another order in each round: one plain, which never imports ssdtrain, one that has imported it and
offloads nothing, and one for each bound on the gradients in memory.
In each round the disk's own rates are measured too, through the same store.

No step can be shorter than the plain one, nor than the disk needs for its bytes, so it is held
against the longer of both. Memory is what the kernel tells of a process from outside of it. A run
in which nothing went to the disk, a bound was exceeded or a bit differs fails.

    python benches/training/gradients_step.py [--dir DIR] [--layers N] [--hidden N] [--sequence N]
        [--micro-batches N] [--overlap step|backward] [--shares 0.5,0.25] [--rounds N]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

import ssdtrain
from parameters_step import IMPORTED, MIB, PLAIN, Disk, compare, parse_bounds
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.text import ByteBatches, standard_library_text
from turns import answer, parser_of, ratio, started, write_record

ASKED = ("layers", "hidden", "sequence", "micro_batches", "overlap", "threads", "rounds")


class Trainee:
    """One way's process: a model, its optimizer, and what a step returns."""

    def __init__(self, share: float, given: argparse.Namespace) -> None:
        torch.set_num_threads(given.threads)
        options = TrainingOptions(
            layers=given.layers, hidden=given.hidden, sequence=given.sequence, batch=1
        )
        self.trainee = build_trainee(options)
        self.parameters = list(self.trainee.module.parameters())
        text = standard_library_text(bytes_max=1 << 20)
        self.batches = ByteBatches(text, batch=1, sequence=given.sequence, seed=0)
        self.micro_batches = given.micro_batches
        self.batch_count = 0
        self.is_plain = share in (PLAIN, IMPORTED)
        self.gradient_bytes = sum(parameter.nbytes for parameter in self.parameters)
        self.bound_bytes = int(share * self.gradient_bytes)
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=1e-3)
        if not self.is_plain:
            ssdtrain.offload_optimizer(
                self.optimizer,
                given.dir,
                overlap=given.overlap,
                max_gradient_bytes=self.bound_bytes,
            )

    def step(self) -> dict[str, Any]:
        """Train one step."""
        before, began_s = self._traffic(), perf_counter()
        for number in range(self.micro_batches):
            if not self.is_plain:
                self.optimizer.set_is_last_backward(number == self.micro_batches - 1)
            loss = self.trainee.loss(self.batches.at(self.batch_count)) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            self.batch_count += 1
        backwards_s = perf_counter() - began_s
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, after = perf_counter() - began_s, self._traffic()
        return {
            "seconds": seconds,
            "optimizer_s": seconds - backwards_s,
            "loss": float(loss.item()).hex(),
            **{name: after[name] - before[name] for name in after},
        }

    def last_words(self) -> dict[str, Any]:
        """Return the digest of all weights, and what was in memory at most."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().data)
        peak = self.gradient_bytes
        if not self.is_plain:
            peak = self.optimizer.offload_stats.gradient_peak_bytes
        return {
            "weights": digest.hexdigest(),
            "gradient_bytes": self.gradient_bytes,
            "bound_bytes": self.bound_bytes,
            "peak_bytes": peak,
        }

    def _traffic(self) -> dict[str, float]:
        if self.is_plain:
            return {"read_bytes": 0, "written_bytes": 0, "stall_s": 0.0}
        stats = self.optimizer.offload_stats
        return {
            "read_bytes": stats.gradient_read_bytes,
            "written_bytes": stats.gradient_written_bytes,
            "stall_s": stats.gradient_stall_s,
        }


def row_of(name: str, found: dict[str, Any]) -> dict[str, float]:
    """Return the medians of one way, and of its ratios within each round."""
    steps = [one["steps"][name] for one in found["rounds"]]
    plain_s = [one["steps"]["plain"]["seconds"] for one in found["rounds"]]
    rates = [one["disk"] for one in found["rounds"]]
    read_s = [step["read_bytes"] / rate["read"] for step, rate in zip(steps, rates, strict=True)]
    write_s = [
        step["written_bytes"] / rate["write"] for step, rate in zip(steps, rates, strict=True)
    ]
    took = [step["seconds"] for step in steps]
    told = ("optimizer_s", "read_bytes", "written_bytes", "stall_s", "rss_bytes_peak")
    return {
        "step_s": statistics.median(took),
        **{key: statistics.median(step[key] for step in steps) for key in told},
        "over_plain": ratio(took, plain_s),
        "over_imported": ratio(
            took, [one["steps"]["imported"]["seconds"] for one in found["rounds"]]
        ),
        "over_longer": ratio(took, list(map(max, zip(plain_s, read_s, write_s, strict=True)))),
        **found["ends"][name],
    }


def report(rows: dict[str, dict[str, Any]]) -> str:
    """Lay the rows out for a person; raise if gradients stayed or exceeded their bound."""
    lines = [
        (
            "| gradients in memory | step, s | over plain | over imported "
            "| over the longer of plain and disk "
            "| read, written, MiB | stall, s | gradients at most, MiB | RSS at most, MiB |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        is_away = row["read_bytes"] > 0 and row["peak_bytes"] <= row["bound_bytes"]
        if name not in ("plain", "imported") and not is_away:
            raise AssertionError(f"{name}: gradients stayed in memory, or exceeded their bound")
        lines.append(
            f"| {name} | {row['step_s']:.3f} | {row['over_plain']:.3f} | "
            f"{row['over_imported']:.3f} | {row['over_longer']:.3f} | "
            f"{row['read_bytes'] / MIB:.0f}, {row['written_bytes'] / MIB:.0f} | "
            f"{row['stall_s']:.3f} | {row['peak_bytes'] / MIB:.0f} | "
            f"{row['rss_bytes_peak'] / MIB:.0f} |"
        )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--overlap", choices=("step", "backward"), default="step")
    return parse_bounds(parser, arguments, "gradients", round_count=7)


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    given = parse(arguments)
    if given.child is not None:
        trainee = Trainee(given.child, given)
        answer(lambda line: trainee.step() if line == "step" else trainee.last_words())
        return 0
    ways = [("plain", str(PLAIN)), ("imported", str(IMPORTED))]
    ways += [(f"{share:g} of them", str(share)) for share in given.shares]
    begun = started(ways, __file__, arguments, given.dir, without_name="plain")
    with (
        begun as (children, directory),
        ExitStack() as stack,
    ):
        found = compare(children, Disk(directory, stack), given.rounds)
    rows = {child.name: row_of(child.name, found) for child in children}
    if not found["losses_equal"] or len({row["weights"] for row in rows.values()}) != 1:
        raise AssertionError("losses or weights differ from those of the plain run")
    print(report(rows))
    write_record(given, ASKED, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
