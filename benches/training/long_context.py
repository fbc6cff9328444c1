"""The long context: checkpointed blocks whose hidden states are offloaded, against kept ones.

With every block in `torch.utils.checkpoint` only the hidden states between the blocks stay until
backward, and with a long sequence they are most of what a step needs. Three fresh processes train
the same model and take turns step by step, so that all see the same machine: `checkpoint` never
imports ssdtrain, `imported` has imported it and does the same, `checkpoint + offload` runs under
`ssdtrain.offload`. Times are compared within each turn. The peak of saved bytes must fall by the
hidden states' bytes, at no more than 1.02 times the time of `checkpoint`, with every loss and
gradient bit-equal.

    python benches/training/long_context.py [--dir DIR] [--sequence N] [--layers N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.demo.counting import SavedStorageCounter
from ssdtrain.demo.machine import busy_cpu_s
from ssdtrain.demo.process import gradients_digest
from ssdtrain.machine.process_memory import reset_high_water_mark, status_bytes
from turns import Child, answer, parser_of, started, write_record

MIB = 1 << 20
HEAD_WIDTH = 64
TIME_RATIO_MAX = 1.02
WARM_UP_COUNT = 3
"""Steps before the timed ones: the first is measured for memory, all teach the order and rates."""
ASKED = ("sequence", "hidden", "layers", "window", "threads")
MODES = ("checkpoint", "imported", "checkpoint + offload")


class Block(nn.Module):
    """Attention within windows, then a gated product: its cost grows with the sequence only."""

    def __init__(self, hidden: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.LayerNorm(hidden)
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.gate = nn.Linear(hidden, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        """Add to the residual stream, (1, sequence, hidden)."""
        _, sequence, hidden = stream.shape
        heads = self.queries_keys_values(self.norm(stream))
        shape = (sequence // self.window, self.window, 3, hidden // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = heads.view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(stream.shape)
        out: Tensor = stream + self.attention_out(mixed) * torch.sigmoid(self.gate(mixed))
        return out


class Trainee:
    """One mode's process: a model, its session if it has one, and what a step returns."""

    def __init__(self, mode: str, options: argparse.Namespace, stack: ExitStack) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        self.blocks = nn.ModuleList(
            Block(options.hidden, options.window) for _ in range(options.layers)
        )
        self.parameters = list(self.blocks.parameters())
        self.text = torch.randn(1, options.sequence, options.hidden)
        self.counter = SavedStorageCounter(self.parameters)
        self.session: Any = None
        if mode == MODES[2]:
            self.session = stack.enter_context(ssdtrain.offload(options.dir))

    def step(self) -> dict[str, Any]:
        """Train one step; forward and backward are timed."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        busy_s, own_s, began_s = busy_cpu_s(), process_time(), perf_counter()
        stream = self.text * 1.0
        stream.requires_grad_()
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False)
        loss = stream.square().mean()
        del stream
        loss.backward()  # type: ignore[no-untyped-call]
        seconds, cpu_s, now_s = perf_counter() - began_s, process_time() - own_s, busy_cpu_s()
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "foreign_cpu_s": None if busy_s is None or now_s is None else now_s - busy_s - cpu_s,
            "loss": float(loss.item()).hex(),
            "gradients": gradients_digest(self.parameters),
        }

    def measured_step(self) -> dict[str, Any]:
        """Train a step that is watched: what the blocks save, and what the process needs on top."""
        before = reset_high_water_mark()
        found = self.step()
        found["rss_bytes"] = status_bytes("VmHWM") - before
        if self.session is not None:
            # The peak of all steps so far, the first included, which knew no order and no rates.
            found["saved_bytes_peak"] = self.session.stats.resident_bytes_peak
            found["session"] = str(self.session)
            found["bytes_written"] = self.session.stats.bytes_written
        else:
            with self.counter.measure():
                self.step()
            found["saved_bytes_peak"] = self.counter.resident_bytes_peak
        return found


def run_child(mode: str, options: argparse.Namespace) -> None:
    """Train what standard input asks for, a line for each step; answer each with a line."""
    with ExitStack() as stack:
        trainee = Trainee(mode, options, stack)
        answer(lambda line: trainee.measured_step() if line == "measure" else trainee.step())


def compare(children: list[Child], pair_count: int) -> dict[str, Any]:
    """Train in turns; return the medians, the peaks, and whether all steps agree in every bit."""
    for _ in range(WARM_UP_COUNT):
        first = [child.ask("step") for child in children]
    pairs: list[list[dict[str, Any]]] = []
    steps = [*first]
    for number in range(pair_count):
        first_place = number % len(children)
        order = children[first_place:] + children[:first_place]
        found = {child.name: child.ask("step") for child in order}
        steps += found.values()
        pairs.append([found[mode] for mode in MODES])
        told = [f"{one['seconds']:.2f} s ({one['cpu_s']:.2f} s CPU)" for one in pairs[-1]]
        print(f"pair {number + 1}: {', '.join(told)}", flush=True)
    memory = {child.name: child.ask("measure") for child in children}
    steps += memory.values()
    return {
        "pairs": pairs,
        "time_ratio": ratio_of(pairs, "seconds"),
        "cpu_ratio": ratio_of(pairs, "cpu_s"),
        "time_over_imported": ratio_of(pairs, "seconds", base=1),
        "cpu_over_imported": ratio_of(pairs, "cpu_s", base=1),
        "saved_bytes_peak": {mode: memory[mode]["saved_bytes_peak"] for mode in MODES},
        "rss_bytes": {mode: memory[mode]["rss_bytes"] for mode in MODES},
        "bit_equal": len({(step["loss"], step["gradients"]) for step in steps}) == 1,
        "session": memory[MODES[2]]["session"],
        "bytes_written": memory[MODES[2]]["bytes_written"],
    }


def ratio_of(pairs: list[list[dict[str, Any]]], key: str, base: int = 0) -> float:
    """Return the median of the turns' ratios to a mode: only neighbours saw the same machine."""
    return statistics.median(one[2][key] / one[base][key] for one in pairs)


def medians_of(pairs: list[list[dict[str, Any]]], key: str) -> dict[str, float]:
    """Return the median of each mode."""
    return {
        mode: statistics.median(pair[at][key] for pair in pairs) for at, mode in enumerate(MODES)
    }


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Lay the comparison out for a person."""
    pairs = found["pairs"]
    hidden_bytes = options.layers * options.sequence * options.hidden * 4
    size = f"{options.layers} blocks, hidden {options.hidden}, sequence {options.sequence}"
    lines = [
        f"{size}: hidden states of {hidden_bytes / MIB:.0f} MiB; torch {torch.__version__}",
        f"{'':<24}{MODES[0]:>12}{MODES[1]:>12}{MODES[2]:>24}{'ratio':>10}{'over imported':>16}",
    ]
    rows = (("step time, s", "seconds", "time"), ("CPU time, s", "cpu_s", "cpu"))
    for name, key, kind in rows:
        plain, imported, ours = medians_of(pairs, key).values()
        ratios = found[f"{kind}_ratio"], found[f"{kind}_over_imported"]
        lines.append(
            f"{name:<24}{plain:>12.2f}{imported:>12.2f}{ours:>24.2f}{ratios[0]:>9.3f}x"
            f"{ratios[1]:>15.3f}x"
        )
    lines.append(f"{'':<72}{'fell by':>10}{'of imported':>16}")
    for name, key in (
        ("saved bytes peak, MiB", "saved_bytes_peak"),
        ("RSS on top, MiB", "rss_bytes"),
    ):
        plain, imported, ours = (found[key][mode] / MIB for mode in MODES)
        lines.append(
            f"{name:<24}{plain:>12.0f}{imported:>12.0f}{ours:>24.0f}{plain - ours:>10.0f}"
            f"{imported - ours:>16.0f}"
        )
    lines += [
        f"losses and gradients bit-equal: {'yes' if found['bit_equal'] else 'NO'}",
        f"time goal of {TIME_RATIO_MAX}x (median of the turns' ratios): "
        + ("met" if found["time_ratio"] <= TIME_RATIO_MAX else "MISSED"),
        found["session"],
    ]
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options, and refuse what no model can be built from."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequence", type=int, default=16384, help="a multiple of --window")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9, help="timed steps of each")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.sequence % options.window or options.hidden % HEAD_WIDTH or options.pairs < 1:
        parser.error("--sequence must be a multiple of --window, --hidden of 64, --pairs above 0")
    return options


def main(arguments: list[str]) -> int:
    """Compare, print, and return the exit code: 1 if a bit differs."""
    options = parse(arguments)
    if options.child is not None:
        run_child(options.child, options)
        return 0
    ways = [(mode, mode) for mode in MODES]
    begun = started(ways, __file__, arguments, options.dir, without_name=MODES[0])
    with begun as (children, _):
        found = compare(children, options.pairs)
    print(report(found, options))
    pairs = found.pop("pairs")
    medians = {key: medians_of(pairs, key) for key in ("seconds", "cpu_s")}
    write_record(options, ASKED, {"pair_count": len(pairs), **medians, **found})
    return 0 if found["bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
