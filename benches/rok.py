"""Recompute, offload, keep: what each costs and frees, over batch sizes (the ROK curve).

SSDTrain (arXiv 2408.10013) draws throughput against the peak of activations for the three ways to
deal with them; here the mixes come beside them. In one process per model and batch size all ways
but `plain` take turns, a step each, in an order that rotates, so that what else the machine does
meets all alike:

    plain       a process of its own that never imports ssdtrain, in the same turns
    keep        the same where ssdtrain is imported
    recompute   each block is computed again in backward (`torch.utils.checkpoint`)
    offload     `ssdtrain.offload`
    half        every second block is computed again, the others are offloaded
    both        each block is computed again, and what the checkpoints keep is offloaded

Losses of all ways but `plain` are compared bit by bit. Throughput is tokens over the median of the
steps' times; the peak is the largest sum of the bytes of saved tensors in memory, without weights.

    python benches/rok.py [--models gpt bert] [--batches 1 2 4 8] [--turns N] [--dir DIR]
        [--json FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

# Benchmarks that share what they do lie there.
sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))

import ssdtrain
from plain_steps import Program
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.counting import SavedStorageCounter
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.models import blocks_of, build_trainee, recompute_block
from ssdtrain.demo.options import MODEL_NAMES, TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.planning.policy import Policy
from turns import ratio

MIB = 1 << 20
ADAPTING_TURNS = 6
"""A session plans anew after each of its first steps."""
RECOMPUTED_SHARE = {"keep": 0, "recompute": 1, "offload": 0, "half": 2, "both": 1}
"""Each so many blocks one is computed again; 0: none."""
OFFLOADS = {"offload", "half", "both"}
COLOURS = {
    "keep": "#d55e00",
    "recompute": "#56b4e9",
    "offload": "#009e73",
    "half": "#cc79a7",
    "both": "#0072b2",
}
"""From the palette of Okabe and Ito: told apart also by readers who do not see all colours."""
MARKERS = {"keep": "o", "recompute": "s", "offload": "^", "half": "D", "both": "v"}


class Way:
    """One model that is trained in one way."""

    def __init__(self, name: str, options: TrainingOptions) -> None:
        self.trainee = build_trainee(options)
        parameters = list(self.trainee.module.parameters())
        self.counter = SavedStorageCounter(parameters)
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)
        every = RECOMPUTED_SHARE[name]
        for place, block in enumerate(blocks_of(self.trainee.module)):
            if every and place % every == 0:
                recompute_block(block, self.counter.checkpoint_contexts)
        self.session: ssdtrain.Session | None = None
        if name in OFFLOADS:
            assert options.directory is not None
            config = OffloadConfig(store=StoreConfig(dirs=(options.directory,)))
            self.session = ssdtrain.Session(config, Policy())
        self.seconds: list[float] = []
        self.losses: list[str] = []
        self.written_bytes = 0

    def take(self, text: torch.Tensor, seed: int) -> None:
        """Take a step, and note its time and its loss."""
        torch.manual_seed(seed)
        written_bytes = 0 if self.session is None else self.session.stats.bytes_written
        began_s = perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        with nullcontext() if self.session is None else self.session.context():
            loss = self.trainee.loss(text)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.seconds.append(perf_counter() - began_s)
        self.losses.append(float(loss.item()).hex())
        if self.session is not None:
            self.written_bytes = self.session.stats.bytes_written - written_bytes

    def peak_bytes(self, text: torch.Tensor) -> int:
        """Take one more step, and return the most saved bytes in memory."""
        if self.session is None:
            with self.counter.measure():
                self.take(text, 0)
            return self.counter.resident_bytes_peak
        hooks: Any = self.session._hooks  # noqa: SLF001 - the peak of one step
        account = hooks._residency.account  # noqa: SLF001
        account.forget_peak()
        self.take(text, 0)
        return int(account.peak_bytes)


def train(options: TrainingOptions, turns: int) -> dict[str, Any]:
    """Take the turns; return the figures of each way."""
    ways = {name: Way(name, options) for name in RECOMPUTED_SHARE}
    batches = ByteBatches(
        load_text(None), batch=options.batch, sequence=options.sequence, seed=options.seed
    )
    takers: list[Callable[[torch.Tensor, int], None]] = [way.take for way in ways.values()]
    program = Program(options)
    takers.append(program.take)
    for turn in range(ADAPTING_TURNS + turns):
        first = turn % len(takers)
        for taker in takers[first:] + takers[:first]:
            taker(batches.at(turn), turn)
    program.close()
    rows = {}
    for name, way in ways.items():
        seconds = statistics.median(way.seconds[-turns:])
        rows[name] = {
            "seconds": seconds,
            "over_plain": ratio(way.seconds[-turns:], program.seconds[-turns:]),
            "over_keep": ratio(way.seconds[-turns:], ways["keep"].seconds[-turns:]),
            "tokens_per_s": options.tokens_per_step / seconds,
            "written_bytes": way.written_bytes,
            "losses_equal": way.losses == ways["keep"].losses,
        }
    text = batches.at(ADAPTING_TURNS + turns)
    for name, way in ways.items():
        rows[name]["peak_bytes"] = way.peak_bytes(text)
    return {"plain_s": statistics.median(program.seconds[-turns:]), "ways": rows}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw throughput against the peak, one curve for each way, one picture for each model."""
    backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = figures.Figure(figsize=(6 * len(models), 5), layout="constrained")
    backend.FigureCanvasAgg(figure)
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1)
        for name in RECOMPUTED_SHARE:
            points = [
                (row["ways"][name]["peak_bytes"] / MIB, row["ways"][name]["tokens_per_s"])
                for row in rows
                if row["model"] == model
            ]
            peaks, rates = zip(*points, strict=True)
            axes.plot(
                peaks, rates, marker=MARKERS[name], color=COLOURS[name], label=name, linewidth=2
            )
        batches = ", ".join(str(row["batch"]) for row in rows if row["model"] == model)
        axes.set_title(f"{model}, batches {batches}", loc="left", fontsize=13)
        axes.set_xscale("log")
        axes.set_xlabel("activation peak, MiB", fontsize=12)
        axes.set_ylabel("tokens per second", fontsize=12)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=11)
    figure.savefig(path, dpi=120)


def show(row: dict[str, Any]) -> None:
    """Print one batch size."""
    keep = row["ways"]["keep"]
    for name, way in row["ways"].items():
        equal = "" if way["losses_equal"] else "  LOSSES DIFFER"
        print(
            f"{row['model']:<6} {row['batch']:>5}  {name:<9} {way['tokens_per_s']:9.0f}"
            f" {1 / way['over_plain']:8.3f}x {1 / way['over_keep']:8.3f}x"
            f" {way['peak_bytes'] / MIB:9.1f}"
            f" {way['peak_bytes'] / keep['peak_bytes']:7.3f}x {way['written_bytes'] / MIB:9.1f}"
            f"{equal}",
            flush=True,
        )


def main(words: list[str]) -> int:
    if words[:1] == ["--child"]:
        print(json.dumps(train(TrainingOptions.from_json(words[1]), int(words[2]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt", "bert"], choices=MODEL_NAMES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=10)
    for name, value in (("layers", 6), ("hidden", 512), ("sequence", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args(words)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.home()) as directory:
        print(f"{'model':<6} {'batch':>5}  {'way':<9} {'tokens/s':>9} {'of plain':>9}"
              f" {'of keep':>9} {'peak MiB':>9} {'of keep':>8} {'MiB out':>9}")  # fmt: skip
        for model in arguments.models:
            for batch in arguments.batches:
                options = TrainingOptions(
                    model=model, batch=batch, directory=directory,
                    layers=arguments.layers, hidden=arguments.hidden, sequence=arguments.sequence,
                )  # fmt: skip
                command = [sys.executable, "-P", __file__, "--child", options.to_json()]
                done = subprocess.run(
                    [*command, str(arguments.turns)], stdout=subprocess.PIPE, text=True, check=True
                )
                told = json.loads(done.stdout.splitlines()[-1])
                tokens_per_s = options.tokens_per_step / told["plain_s"]
                print(f"{model:<6} {batch:>5}  {'plain':<9} {tokens_per_s:9.0f}")
                rows.append({"model": model, "batch": batch, **told})
                show(rows[-1])
        if arguments.picture is not None:
            draw(rows, arguments.picture)
        if arguments.json is not None:
            document = {
                "command": "python benches/rok.py " + " ".join(words),
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": machine_facts(Path(directory)) | {"directory": None},
                "rows": rows,
            }
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
