"""What `demo --whole` says: before it starts, at its end, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from ssdtrain.commands.lifespan import shown_days
from ssdtrain.demo import picture
from ssdtrain.demo.report import FOREIGN_CORES_MAX
from ssdtrain.demo.whole_plan import DAY_S, RATED_BYTES
from ssdtrain.planning.lifespan import Wear
from ssdtrain.sizes import shown_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from ssdtrain.demo.machine import Machine
    from ssdtrain.demo.whole_options import DiskRates, WholeOptions, WholeRun
    from ssdtrain.demo.whole_plan import Expected

MIB = 1 << 20
LABEL_WIDTH = 44


@dataclass(frozen=True, kw_only=True)
class WholeReport:
    """Everything that the demo found out."""

    options: WholeOptions
    machine: Machine
    disk: DiskRates | None
    """None if the smaller model could not be trained."""
    expected: Expected | None
    """Likewise."""
    runs: Sequence[WholeRun]
    """`fits`, then `whole`, then what it is compared with, as far as they came."""
    is_limited: bool
    """Whether the whole run could not take more memory than it was given."""
    notes: Sequence[str]

    @property
    def whole(self) -> WholeRun | None:
        """The run of the whole model, if it has ended."""
        found = [run for run in self.runs if run.mode == "whole" and run.end is not None]
        return found[0] if found else None

    @property
    def pair(self) -> tuple[WholeRun, WholeRun] | None:
        """The two runs whose bits are compared: ours and the plain one, of the same model."""
        ours = [run for run in self.runs if run.mode == "whole" and run.end is not None]
        plain = [run for run in self.runs if run.mode != "whole" and run.end is not None]
        return next(((a, b) for a in ours for b in plain if a.layers == b.layers), None)

    @property
    def bit_identical(self) -> bool | None:
        """Whether all losses and the last weights have the bits of the plain run."""
        if self.pair is None:
            return None
        ours, plain = self.pair
        assert ours.end is not None
        assert plain.end is not None
        losses = [step.loss for step in ours.steps] == [step.loss for step in plain.steps]
        return losses and ours.end.weights_digest == plain.end.weights_digest

    @property
    def all_bytes(self) -> int:
        """What training the whole model takes: weights, gradients, state, activations."""
        whole = self.whole
        assert whole is not None
        assert whole.end is not None
        return sum(one.all_bytes for one in whole.end.memory)

    @property
    def succeeded(self) -> bool:
        """Whether every run ended, every bit agrees, and the memory sufficed."""
        if any(run.failure is not None for run in self.runs) or not self.bit_identical:
            return False
        whole = self.whole
        return whole is not None and (whole.peak_bytes or 0) <= self.options.given_bytes


def expectation(options: WholeOptions, plan: Expected, layers: int) -> str:
    """Say what a run is expected to take, before it starts."""
    return "\n".join(
        [
            (
                f"expected, from {layers} of {options.training.layers} layers trained in memory "
                "and the disk's rates:"
            ),
            (
                f"  {plan.parameters_count / 1e6:.0f}M parameters: weights, gradients, AdamW state "
                f"and activations are {shown_bytes(plan.all_bytes)}"
            ),
            f"  a step needs {shown_bytes(plan.needed_bytes)} of it at once; given are "
            f"{shown_bytes(options.given_bytes)}: "
            + ("it fits" if plan.needed_bytes <= options.given_bytes else "IT DOES NOT FIT"),
            (
                f"  a step reads {shown_bytes(plan.read_bytes)} and writes "
                f"{shown_bytes(plan.written_bytes)}: {plan.step_s:.2f} s, the longer of computing "
                f"({plan.plain_s:.2f} s) and the disk ({plan.disk_s:.2f} s)"
            ),
            (
                f"  day and night that writes {plan.written_bytes_per_day / 1e12:.1f} TB a day: a "
                f"drive rated for {RATED_BYTES / 1e12:,.0f} TB lasts {shown_days(plan.life_days)}"
            ),
        ]
    )


def render(report: WholeReport) -> str:
    """Lay everything out for a person."""
    blocks = [_heading(report)]
    whole = report.whole
    if whole is not None:
        blocks += [_memory(report, whole), _times(report, whole)]
    answer = {True: "yes", False: "NO", None: "not compared"}[report.bit_identical]
    verdict = [f"losses and last weights bit-identical to the plain run: {answer}"]
    verdict += [f"  {note}" for note in report.notes]
    verdict += [f"{run.mode} FAILED: {run.failure}" for run in report.runs if run.failure]
    return "\n\n".join([*blocks, "\n".join(verdict)])


def write_json(report: WholeReport, path: Path) -> None:
    """Write all figures."""
    found = asdict(report)
    found["bit_identical"] = report.bit_identical
    if report.whole is not None:
        found["figures"] = figures(report, report.whole)
    path.write_text(json.dumps(found, indent=1) + "\n")


def draw(report: WholeReport, path: Path) -> None:
    """Draw what the whole run and the plain one had in memory, above their libraries."""
    ours = report.whole
    plain = [run for run in report.runs if run.mode == "plain"]
    named = [("plain", run, picture.COLOURS["plain"], "--") for run in plain]
    named += [("whole", ours, picture.COLOURS["offload"], "-")] if ours is not None else []
    given = report.options.given_bytes
    picture.draw_curves(
        [
            picture.Curve(f"{name} (sampled peak {{:,.0f}} MiB)", colour, style, run.curve)
            for name, run, colour, style in named
            if run.curve
        ],
        path,
        title="Memory of training with AdamW, all tensors",
        across="seconds since the training began to be built",
        up="resident above the libraries, MiB",
        limit=(f"given: {given / MIB:,.0f} MiB", given),
    )


def figures(report: WholeReport, whole: WholeRun) -> dict[str, float | None]:
    """Return what the table shows of the times and the traffic, by name."""
    plan, disk = report.expected, report.disk
    assert plan is not None, "the whole run comes after it"
    assert disk is not None
    step_s = median(step.seconds for step in whole.timed)
    read = median(step.read_bytes for step in whole.timed)
    written = median(step.written_bytes for step in whole.timed)
    stall_s = median(step.stall_s for step in whole.timed)
    disk_s = read / disk.read_bytes_per_s + written / disk.write_bytes_per_s
    plain = [run for run in report.runs if run.mode == "plain" and run.end is not None]
    plain_s = median(step.seconds for step in plain[0].timed) if plain else None
    taken = whole.peak_bytes
    return {
        "all_bytes": report.all_bytes,
        "over_given": report.all_bytes / report.options.given_bytes,
        "over_taken": None if not taken else report.all_bytes / taken,
        "step_s": step_s,
        "expected_step_s": plan.step_s,
        "plain_s": plain_s,
        "over_plain": None if plain_s is None else step_s / plain_s,
        "scaled_plain_s": plan.plain_s,
        "over_scaled_plain": step_s / plan.plain_s,
        "read_bytes_per_step": read,
        "written_bytes_per_step": written,
        "disk_s": disk_s,
        "exposed_s": stall_s,
        "hidden_s": max(0.0, disk_s - stall_s),
        "written_bytes_per_day": written / step_s * DAY_S,
    }


def _heading(report: WholeReport) -> str:
    training, machine = report.options.training, report.machine
    count = max((run.parameters_count for run in report.runs), default=0)
    text = training.data or "the sources of Python's standard library"
    return (
        f"gpt, {count / 1e6:.1f}M parameters: {training.layers} layers, hidden {training.hidden}, "
        f"sequence {training.sequence}, batch {training.batch}, float32, AdamW\n"
        f"trained on {text}; timed steps: {training.steps}\n"
        f"{machine.cpu}, {machine.core_count} cores, {shown_bytes(machine.memory_bytes)}, "
        f"{machine.kernel}, torch {machine.torch}, Python {machine.python}\n"
        f"{machine.directory}: {machine.file_system or 'unknown'}"
    )


def _memory(report: WholeReport, whole: WholeRun) -> str:
    assert whole.end is not None
    given = report.options.given_bytes
    lines = [
        f"{'memory, MiB':<{LABEL_WIDTH}}{'in all':>12}{'in memory at most':>20}",
        "-" * (LABEL_WIDTH + 32),
    ]
    lines += [
        f"{one.name:<{LABEL_WIDTH}}{one.all_bytes / MIB:>12,.0f}{one.in_memory_bytes / MIB:>20,.0f}"
        for one in whole.end.memory
    ]
    taken = "-" if whole.peak_bytes is None else f"{whole.peak_bytes / MIB:,.0f}"
    kind = "limited by a control group" if report.is_limited else "measured, not limited"
    lines += [
        (
            f"{'together; what training took above libraries':<{LABEL_WIDTH}}"
            f"{report.all_bytes / MIB:>12,.0f}{taken:>20}"
        ),
        *(
            f"{'what the plain run took above libraries':<{LABEL_WIDTH}}{'':>12}"
            f"{(run.peak_bytes or 0) / MIB:>20,.0f}"
            for run in report.runs
            if run.mode == "plain" and run.end is not None
        ),
        (
            f"given: {given / MIB:,.0f} MiB ({kind}), of which training needs "
            f"{report.all_bytes / given:.1f} times as much"
        ),
    ]
    if (whole.peak_bytes or 0) > given:
        lines.append("IT TOOK MORE MEMORY THAN IT WAS GIVEN")
    return "\n".join(lines)


def _times(report: WholeReport, whole: WholeRun) -> str:
    found = figures(report, whole)

    def row(label: str, name: str, scale: float, form: str, ratio: str = "") -> str:
        value = found[name]
        shown = "-" if value is None else format(value / scale, form)
        times = found[ratio] if ratio else None
        return f"{label:<{LABEL_WIDTH}}{shown:>12}" + (f"{times:>19.3f}x" if times else "")

    life = Wear(
        rated_bytes=RATED_BYTES, written_bytes_per_s=(found["written_bytes_per_day"] or 1) / DAY_S
    )
    lines = [
        f"{'a step':<{LABEL_WIDTH}}{'':>12}{'whole over it':>20}",
        "-" * (LABEL_WIDTH + 32),
        row("whole, s", "step_s", 1, ",.2f"),
        row("plain, s", "plain_s", 1, ",.2f", "over_plain"),
        row(
            "plain, scaled from a model that fits, s",
            "scaled_plain_s",
            1,
            ",.2f",
            "over_scaled_plain",
        ),
        row("expected before it started, s", "expected_step_s", 1, ",.2f"),
        row("read, MiB", "read_bytes_per_step", MIB, ",.0f"),
        row("written, MiB", "written_bytes_per_step", MIB, ",.0f"),
        row("the disk alone would need for it, s", "disk_s", 1, ",.2f"),
        row("  of that exposed: computing waited, s", "exposed_s", 1, ",.2f"),
        row("  of that hidden, s", "hidden_s", 1, ",.2f"),
        row("written day and night, TB a day", "written_bytes_per_day", 1e12, ",.1f"),
        (
            f"{f'a drive rated for {RATED_BYTES / 1e12:,.0f} TB lasts':<{LABEL_WIDTH}}"
            f"{shown_days(life.rated_days()):>12}"
        ),
    ]
    busy = {run.mode: _foreign_cores(run) for run in report.runs}
    if max(busy.values(), default=0.0) > FOREIGN_CORES_MAX:
        told = ", ".join(f"{cores:.1f} during {mode}" for mode, cores in busy.items())
        lines.append(
            f"TIMES ARE NOT COMPARABLE: other processes kept cores busy ({told}); run it alone"
        )
    return "\n".join(lines)


def _foreign_cores(run: WholeRun) -> float:
    shares = [
        step.foreign_cpu_s / step.seconds for step in run.timed if step.foreign_cpu_s is not None
    ]
    return median(shares) if shares else 0.0
