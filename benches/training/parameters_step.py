"""What a training step costs of a model whose weights lie on the disk.

Fresh processes train the same GPT and take turns step by step, in another order in each round: one
plain, which never imports ssdtrain, one that has imported it and offloads nothing, and one for each
bound on the weights in memory. In each round the disk's own rates are measured too, through the
same store: tensors of the sizes of the weights, written and read.

No step can be shorter than the plain one computes, nor than the disk needs for its bytes, so it is
held against the longer of both. The goal is 1.15 times that. Memory is what the kernel tells of a
process from outside of it. A run in which nothing went to the disk, a bound was exceeded or a bit
differs fails.

    python benches/training/parameters_step.py [--dir DIR] [--optimizer sgd|adamw] [--overlap HOW]
        [--layers N] [--hidden N] [--sequence N] [--batch N] [--shares 0.5,0.25] [--rounds N]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import ssdtrain
from ssdtrain.demo.machine import busy_cpu_s
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.text import ByteBatches, standard_library_text
from ssdtrain.machine.process_memory import RESET_HIGH_WATER_MARK
from turns import Child, answer, parser_of, ratio, started, write_record

MIB = 1 << 20
GOAL = 1.15
PLAIN = 1.0
"""The share of the weights in memory in the process that never imports ssdtrain."""
IMPORTED = 2.0
"""No share: stands for the process that has imported ssdtrain and offloads nothing."""
WARM_UP_COUNT = 3
"""Steps before the timed ones: they make the state, teach the order, and settle the memory."""
ASKED = ("optimizer", "overlap", "layers", "hidden", "sequence", "batch", "threads", "rounds")
OPTIMIZERS = ("sgd", "adamw")
OVERLAPS = ("step", "backward")
RAW_BYTES = 256 << 20
"""How much is written and read in each round to know the disk's rates."""
RAW_PIECE_BYTES = 16 << 20


class Trainee:
    """One way's process: a model, its optimizer, and what a step returns."""

    def __init__(self, share: float, given: argparse.Namespace) -> None:
        torch.set_num_threads(given.threads)
        options = TrainingOptions(
            layers=given.layers, hidden=given.hidden, sequence=given.sequence, batch=given.batch
        )
        self.trainee = build_trainee(options)
        self.model = self.trainee.module
        self.parameters = list(self.model.parameters())
        text = standard_library_text(bytes_max=1 << 20)
        self.batches = ByteBatches(text, batch=given.batch, sequence=given.sequence, seed=0)
        self.step_count = 0
        self.is_plain = share in (PLAIN, IMPORTED)
        self.weight_bytes = sum(parameter.nbytes for parameter in self.parameters)
        self.bound_bytes = int(share * self.weight_bytes)
        if not self.is_plain:
            bound = self.bound_bytes
            ssdtrain.offload_parameters(self.model, given.dir, max_resident_bytes=bound)
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=1e-3)
        if given.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=given.fused)
        overlap = given.overlap or ("step" if given.optimizer == "adamw" else None)
        if overlap is not None and not self.is_plain:
            buffer = given.buffer_bytes
            ssdtrain.offload_optimizer(
                self.optimizer, given.dir, buffer_bytes=buffer, overlap=overlap
            )

    def step(self) -> dict[str, Any]:
        """Train one step; forward, backward and optimizer are timed."""
        text = self.batches.at(self.step_count)
        self.step_count += 1
        before, busy_s, own_s, began_s = (
            self._traffic(),
            busy_cpu_s(),
            process_time(),
            perf_counter(),
        )
        loss = self.trainee.loss(text)
        forward_s = perf_counter() - began_s
        loss.backward()  # type: ignore[no-untyped-call]
        both_s = perf_counter() - began_s
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, cpu_s, now_s = perf_counter() - began_s, process_time() - own_s, busy_cpu_s()
        after = self._traffic()
        return {
            "seconds": seconds,
            "forward_s": forward_s,
            "backward_s": both_s - forward_s,
            "optimizer_s": seconds - both_s,
            "cpu_s": cpu_s,
            "foreign_cpu_s": 0.0 if busy_s is None or now_s is None else now_s - busy_s - cpu_s,
            "loss": float(loss.item()).hex(),
            **{name: after[name] - before[name] for name in after},
        }

    def last_words(self) -> dict[str, Any]:
        """Return the digest of all weights, and the figures of the whole run."""
        found: dict[str, Any] = {"weight_bytes": self.weight_bytes}
        if not self.is_plain:
            stats = ssdtrain.parameter_stats(self.model)
            found["bound_bytes"] = self.bound_bytes
            found["peak_resident_bytes"] = stats.peak_resident_bytes
            found["staying_bytes"] = stats.staying_bytes
            found["write_failed_count"] = stats.write_failed_count
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().data)
        return {**found, "weights": digest.hexdigest()}

    def _traffic(self) -> dict[str, float]:
        """Return what went to the disk and came from it so far, for weights and for state."""
        if self.is_plain:
            return {}
        weights = ssdtrain.parameter_stats(self.model)
        found = {
            "weights_read_bytes": weights.read_bytes,
            "weights_written_bytes": weights.written_bytes,
            "weights_stall_s": weights.stall_s,
        }
        state = getattr(self.optimizer, "offload_stats", None)
        if state is not None:
            found["state_read_bytes"] = state.read_bytes
            found["state_written_bytes"] = state.written_bytes
            found["state_stall_s"] = state.stall_s
        return found


class Disk:
    """The disk's own rates, through the store that holds the weights."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._store = stack.enter_context(ssdtrain.TensorStore(directory))
        count = RAW_BYTES // RAW_PIECE_BYTES
        self._tensors = [torch.randn(RAW_PIECE_BYTES // 4) for _ in range(count)]

    def rates(self) -> dict[str, float]:
        """Write and read as fast as it goes; return bytes per second of each."""
        began_s = perf_counter()
        stored = [self._store.write(tensor) for tensor in self._tensors]
        for one in stored:
            one.wait()
        written_s = perf_counter() - began_s
        began_s = perf_counter()
        # As a model does: some are on their way, and each is dropped after its use.
        reads = [self._store.read(one) for one in stored[:4]]
        for number in range(len(stored)):
            if number + 4 < len(stored):
                reads.append(self._store.read(stored[number + 4]))
            reads.pop(0).result()
        read_s = perf_counter() - began_s
        for one in stored:
            self._store.release(one)
        return {"write": RAW_BYTES / written_s, "read": RAW_BYTES / read_s}


def run_child(share: float, given: argparse.Namespace) -> None:
    """Train what standard input asks for, a line for each step; answer each with a line."""
    trainee = Trainee(share, given)
    answer(lambda line: trainee.step() if line == "step" else trainee.last_words())


def step_of(child: Child) -> dict[str, Any]:
    """Have a process train a step; add the memory that it had before it and at most in it."""
    proc = Path("/proc") / str(child.pid)
    before = status_bytes_of(proc, "VmRSS")
    (proc / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
    found = child.ask("step")
    return {**found, "rss_bytes": before, "rss_bytes_peak": status_bytes_of(proc, "VmHWM")}


def status_bytes_of(proc: Path, field: str) -> int:
    """Return what the kernel tells of the memory of a process."""
    for line in (proc / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{proc / 'status'} has no line {field}")


def name_of(share: float) -> str:
    """Return what the tables call a way."""
    return {PLAIN: "plain", IMPORTED: "imported"}.get(share, f"{share:g} of the weights")


def compare(children: list[Child], disk: Disk, round_count: int) -> dict[str, Any]:
    """Train in turns; return the rounds and what each process says at its end."""
    losses: list[set[str]] = [
        {step_of(child)["loss"] for child in children} for _ in range(WARM_UP_COUNT)
    ]
    rounds: list[dict[str, Any]] = []
    for number in range(round_count):
        first = number % len(children)
        steps = {child.name: step_of(child) for child in children[first:] + children[:first]}
        rounds.append({"disk": disk.rates(), "steps": steps})
        losses.append({step["loss"] for step in steps.values()})
        told = (f"{child.name} {steps[child.name]['seconds']:.2f} s" for child in children)
        print(f"round {number + 1}: {', '.join(told)}", flush=True)
    return {
        "rounds": rounds,
        "ends": {child.name: child.ask("end") for child in children},
        "losses_equal": all(len(one) == 1 for one in losses),
    }


def row_of(name: str, found: dict[str, Any]) -> dict[str, float]:
    """Return the medians of one way, and of its ratios within each round."""
    rounds = found["rounds"]
    steps = [one["steps"][name] for one in rounds]
    plain = [one["steps"]["plain"] for one in rounds]
    ways = {"read": "read_bytes", "written": "written_bytes", "stall": "stall_s"}
    totals = {
        way: [sum(step.get(f"{of}_{key}", 0) for of in ("weights", "state")) for step in steps]
        for way, key in ways.items()
    }
    rates = [one["disk"] for one in rounds]
    read_s = [size / rate["read"] for size, rate in zip(totals["read"], rates, strict=True)]
    write_s = [size / rate["write"] for size, rate in zip(totals["written"], rates, strict=True)]
    took = [step["seconds"] for step in steps]
    plain_s = [step["seconds"] for step in plain]
    longer = [max(of) for of in zip(plain_s, read_s, write_s, strict=True)]
    both = [max(a, b + c) for a, b, c in zip(plain_s, read_s, write_s, strict=True)]
    parts = ("forward_s", "backward_s", "optimizer_s", "cpu_s", "foreign_cpu_s")
    return {
        "step_s": statistics.median(took),
        **{part: statistics.median(step[part] for step in steps) for part in parts},
        "read_bytes_per_step": statistics.median(totals["read"]),
        "written_bytes_per_step": statistics.median(totals["written"]),
        "stall_s": statistics.median(totals["stall"]),
        "disk_read_s": statistics.median(read_s),
        "disk_write_s": statistics.median(write_s),
        "over_plain": ratio(took, plain_s),
        "over_imported": ratio(took, [one["steps"]["imported"]["seconds"] for one in rounds]),
        "cpu_over_plain": ratio(
            [step["cpu_s"] for step in steps], [step["cpu_s"] for step in plain]
        ),
        "over_longer": ratio(took, longer),
        "over_longer_shared": ratio(took, both),
        "rss_bytes": statistics.median(step["rss_bytes"] for step in steps),
        "rss_bytes_peak": statistics.median(step["rss_bytes_peak"] for step in steps),
        **found["ends"][name],
    }


def refuse_nothing(rows: dict[str, dict[str, Any]], found: dict[str, Any]) -> None:
    """Raise unless weights were on the disk, under their bound, and all bits are equal."""
    if not found["losses_equal"] or len({row["weights"] for row in rows.values()}) != 1:
        raise AssertionError("losses or weights differ from those of the plain run")
    for name, row in rows.items():
        if name in ("plain", "imported"):
            continue
        away = row["weight_bytes"] - row["bound_bytes"] - row["staying_bytes"]
        if away <= 0 or min(row["read_bytes_per_step"], row["written_bytes_per_step"]) < away:
            raise AssertionError(f"{name}: a step moved less than the {away} bytes that are away")
        if row["peak_resident_bytes"] > row["bound_bytes"]:
            raise AssertionError(f"{name}: more weights were in memory than the bound allows")
        if row["write_failed_count"]:
            raise AssertionError(f"{name}: the disk refused weights, which stayed in memory")


def report(rows: dict[str, dict[str, Any]], disk: dict[str, float]) -> str:
    """Lay the rows out for a person."""
    lines = [
        f"the disk alone: reads {disk['read'] / MIB:.0f} MiB/s, writes {disk['write'] / MIB:.0f}",
        (
            "| in memory | step, s | over plain | over imported | its CPU time | "
            "over the longer of plain and disk | disk each way in turn | read, written, MiB | "
            "their time alone, s | stall, s | "
            "weights at most, MiB | RSS before, at most, MiB | other processes' CPU, s |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['step_s']:.3f} | {row['over_plain']:.3f} | "
            f"{row['over_imported']:.3f} | "
            f"{row['cpu_over_plain']:.3f} | {row['over_longer']:.3f} "
            f"| {row['over_longer_shared']:.3f} | {row['read_bytes_per_step'] / MIB:.0f}, "
            f"{row['written_bytes_per_step'] / MIB:.0f} | {row['disk_read_s']:.3f}, "
            f"{row['disk_write_s']:.3f} | {row['stall_s']:.3f} | "
            f"{row.get('peak_resident_bytes', row['weight_bytes']) / MIB:.0f} | "
            f"{row['rss_bytes'] / MIB:.0f}, {row['rss_bytes_peak'] / MIB:.0f} | "
            f"{row['foreign_cpu_s']:.2f} |"
        )
    worst = max(row["over_longer"] for row in rows.values())
    lines.append(f"goal of {GOAL} times the longer: {'met' if worst <= GOAL else 'MISSED'}")
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = parser_of(__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument(
        "--overlap",
        choices=OVERLAPS,
        help="of ssdtrain.offload_optimizer, also for sgd, which has no state (default: step for "
        "adamw; sgd is left as it is)",
    )
    parser.add_argument("--fused", action="store_true", help="AdamW's fused code")
    parser.add_argument("--buffer-bytes", default="64MiB", help="of ssdtrain.offload_optimizer")
    parser.add_argument("--batch", type=int, default=1)
    return parse_bounds(parser, arguments, "weights", round_count=9)


def parse_bounds(
    parser: argparse.ArgumentParser, arguments: list[str], what: str, *, round_count: int
) -> argparse.Namespace:
    """Add the options of a model of which a part may be in memory, and read all."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--shares", default="0.5,0.25", help=f"of the {what}, as bounds")
    parser.add_argument("--rounds", type=int, default=round_count, help="timed steps of each way")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.shares = [float(share) for share in given.shares.split(",")]
    if given.rounds < 1 or not all(0 < share < 1 for share in given.shares):
        parser.error("--rounds must be at least 1, and each of --shares between 0 and 1")
    return given


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    given = parse(arguments)
    if given.child is not None:
        run_child(given.child, given)
        return 0
    ways = [(name_of(share), str(share)) for share in (PLAIN, IMPORTED, *given.shares)]
    begun = started(ways, __file__, arguments, given.dir, without_name="plain")
    with (
        begun as (children, directory),
        ExitStack() as stack,
    ):
        found = compare(children, Disk(directory, stack), given.rounds)
    rows = {child.name: row_of(child.name, found) for child in children}
    refuse_nothing(rows, found)
    disk = {
        way: statistics.median(one["disk"][way] for one in found["rounds"])
        for way in ("read", "write")
    }
    print(report(rows, disk))
    write_record(given, ASKED, {"disk_bytes_per_s": disk, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
