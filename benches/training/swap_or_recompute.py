"""Swap or recompute: what `ssdtrain.checkpoint` makes of a bound, on the disk and on slower ones.

For each share of the disk's rate two processes train a GPT by turns. One is the plain program: it
never imports ssdtrain. In the other the blocks are marked, and it trains in six ways: `keep` is
PyTorch as it is; in `offloaded` all blocks are offloaded under a bound, in `recomputed` all are
computed again, and in `ours` ssdtrain chooses. In `made again` no block is computed again, but
saved tensors are made again from others where the plan says so; in `both` ssdtrain chooses blocks
and tensors. A turn is two steps of each, and of the plain
program, in an order that rotates; the second one counts. Time is the median over the turns of a
step over that of the plain program in that turn, with the middle half, and over that of `keep`. The
peak is the memory of the process above that before the step, over the same of `keep`: it includes
tensors that are computed again. All ways of the second process must agree in every bit of loss and
gradients.

A slower disk is a control group (blkio) that bounds reads and writes; only root may make one, and
without it the disk is measured as it is.

    python benches/training/swap_or_recompute.py --dir DIR [--shares 1 0.1 0.03] [--turns N]
        [--bound 0.25] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import ssdtrain
from never_worse import BLKIO, GIB, counting, disk_rate, keep_figures, throttled
from plain_steps import Program
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.counting import SavedStorageCounter
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.process import gradients_digest
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.machine.process_memory import reset_high_water_mark, status_bytes
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recompute import Choices

MIB = 1 << 20
ADAPTING_TURNS = 6
WAYS = ("keep", "offloaded", "recomputed", "ours", "made again", "both")


class _Everything(set[int]):
    def __contains__(self, key: object) -> bool:
        return True


class Given(Choices):
    """Chooses the same for all blocks, and for good."""

    def __init__(self, chosen: set[int]) -> None:
        super().__init__()
        self.chosen = chosen

    def learn(self, *_: object) -> float:
        """Learn nothing."""
        return 0.0


CHOICES = {
    "offloaded": lambda: Given(set()),
    "recomputed": lambda: Given(_Everything()),
    "ours": Choices,
    "made again": lambda: Given(set()),
    "both": Choices,
}


class Trainee:
    """The model, its batches, and the seed of a turn."""

    def __init__(self, options: TrainingOptions) -> None:
        self._trainee = build_trainee(options)
        module: Any = self._trainee.module
        for block in module.blocks:
            ssdtrain.checkpoint(block)
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-3)
        self._batches = ByteBatches(
            load_text(None), batch=options.batch, sequence=options.sequence, seed=options.seed
        )
        self.turn = 0

    def step(self) -> str:
        """Run forward and backward; return the bits of the loss."""
        torch.manual_seed(self.turn)
        self.optimizer.zero_grad(set_to_none=False)
        loss = self._trainee.loss(self._batches.at(self.turn))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item()).hex()

    def saved_bytes(self) -> int:
        """Return what a plain step saves at its peak."""
        counter = SavedStorageCounter(self.parameters)
        with counter.measure():
            self.step()
        return counter.resident_bytes_peak


class Way:
    """One way of taking a step."""

    def __init__(self, name: str, directory: str, bound_bytes: int) -> None:
        self.session: ssdtrain.Session | None = None
        if name in CHOICES:
            store = StoreConfig(dirs=(directory,))
            config = OffloadConfig(
                store=store,
                max_resident_bytes=bound_bytes,
                rematerialize="auto" if name in ("made again", "both") else "never",
            )
            self.session = ssdtrain.Session(config, Policy(), CHOICES[name]())
        self.rows: list[dict[str, float]] = []

    def take(self, trainee: Trainee) -> tuple[str, str]:
        """Take a step, and note what it took."""
        session = self.session
        before = None if session is None else session.stats
        resident_bytes, began_s = reset_high_water_mark(), perf_counter()
        with nullcontext() if session is None else session.context():
            loss = trainee.step()
        row: dict[str, float] = {
            "seconds": perf_counter() - began_s,
            "peak_bytes": status_bytes("VmHWM") - resident_bytes,
        }
        bits = loss, gradients_digest(trainee.parameters)
        if session is not None and before is not None:
            did = session.stats.since(before)
            row |= {
                "written_bytes": did.bytes_written,
                "stall_s": did.stall_s,
                "blocks_recomputed": did.blocks_recomputed,
                "rematerialized_bytes": did.bytes_rematerialized,
                "rematerialize_s": did.rematerialize_s,
                "expected_s": did.recompute_expected_s,
                "measured_s": did.recompute_measured_s,
            }
        self.rows.append(row)
        return bits


def train(options: TrainingOptions, turns: int, bound_share: float) -> dict[str, Any]:
    """Take the turns; return the figures of each way."""
    assert options.directory is not None
    trainee = Trainee(options)
    saved_bytes = trainee.saved_bytes()
    bound_bytes = int(bound_share * saved_bytes)
    ways = {name: Way(name, options.directory, bound_bytes) for name in WAYS}
    program, is_equal = Program(options, updates=False), True
    takers = [program.take, *(partial(way.take, trainee) for way in ways.values())]
    for turn in range(ADAPTING_TURNS + turns):
        trainee.turn = turn
        first = turn % len(takers)
        found = {take() for take in takers[first:] + takers[:first] for _ in range(2)}
        # The plain program, in the other process, tells only its time.
        is_equal &= len(found - {None}) == 1
        trainee.optimizer.step()
    program.close()
    keep, plain_s = counting(ways["keep"].rows, turns), counting(program.seconds, turns)
    told = {name: _figures(counting(way.rows, turns), keep, plain_s) for name, way in ways.items()}
    return {
        "saved_bytes": saved_bytes,
        "bound_bytes": bound_bytes,
        "bit_equal": is_equal,
        "plain_s": statistics.median(plain_s),
        "keep_s": statistics.median(row["seconds"] for row in keep),
        "ways": told,
        "report": str(ways["ours"].session),
    }


def _figures(
    rows: list[dict[str, float]], keep: list[dict[str, float]], plain_s: list[float]
) -> dict[str, float]:
    ratios = sorted(one["seconds"] / plain for one, plain in zip(rows, plain_s, strict=True))
    over_keep = [one["seconds"] / kept["seconds"] for one, kept in zip(rows, keep, strict=True)]
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    plain_peak_bytes = statistics.median(row["peak_bytes"] for row in keep)
    return {
        **medians,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "over_keep": statistics.median(over_keep),
        "peak": medians["peak_bytes"] / plain_peak_bytes,
    }


def run_child(words: list[str]) -> int:
    """Train in a process of its own, so that memory and threads begin anew."""
    given = json.loads(words[0])
    options = TrainingOptions.from_json(given["options"])
    assert options.directory is not None
    with throttled(options.directory, given["rate"]):
        told = train(options, given["turns"], given["bound"])
    print(json.dumps(told))
    return 0


def measure(options: TrainingOptions, rate: float | None, arguments: Any) -> dict[str, Any]:
    """Start the process of one share and return what it tells."""
    given = {
        "options": options.to_json(),
        "rate": rate,
        "turns": arguments.turns,
        "bound": arguments.bound,
    }
    command = [sys.executable, "-P", __file__, "--child", json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def show(share: float, told: dict[str, Any]) -> None:
    """Print the rows of one share."""
    bound = f"{told['bound_bytes'] / MIB:.0f} of {told['saved_bytes'] / MIB:.0f} MiB"
    print(f"disk {share:g}, bound {bound}, bits equal: {'yes' if told['bit_equal'] else 'NO'}")
    for name, one in told["ways"].items():
        time = f"{one['ratio']:.3f} ({one['ratio_low']:.3f}-{one['ratio_high']:.3f})"
        time += f", {one['over_keep']:.3f} of keep"
        text = f"  {name:<11}{one['seconds']:8.3f} s {time:<38} peak {one['peak']:.2f}"
        if "stall_s" in one:
            text += (
                f"  {one['written_bytes'] / MIB:5.0f} MiB written  {one['stall_s']:.3f} s stalled"
            )
            text += f"  {one['blocks_recomputed']:.0f} blocks"
            text += f", {one['rematerialized_bytes'] / MIB:.0f} MiB again"
        if name == "ours":
            text += f"  {one['expected_s']:.3f} s expected, {one['measured_s']:.3f} s measured"
        print(text, flush=True)


def main(words: list[str]) -> int:
    """Measure, print, and return the exit code: 1 if a bit differs."""
    if words[:1] == ["--child"]:
        return run_child(words[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.1, 0.03])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--bound", type=float, default=0.25, help="share of what keep saves")
    for name, value in (("layers", 8), ("hidden", 512), ("sequence", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.home()) as directory:
        rate = disk_rate(directory)
        can_throttle = os.geteuid() == 0 and BLKIO.is_dir()
        print(f"disk: {rate / GIB:.2f} GiB/s" + ("" if can_throttle else "; cannot be throttled"))
        options = TrainingOptions(
            model="gpt", directory=directory, dropout=0.1,
            layers=arguments.layers, hidden=arguments.hidden,
            sequence=arguments.sequence, batch=arguments.batch,
        )  # fmt: skip
        for share in arguments.shares if can_throttle else [1.0]:
            told = measure(options, None if share == 1 else share * rate, arguments)
            rows.append({"share": share, **told})
            show(share, told)
            if arguments.json is not None:
                name = Path(__file__).name
                keep_figures(arguments.json, name, words, directory, rate, rows)
    return 0 if all(row["bit_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
