"""What the demo says at its end: one table for people, the same as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ssdtrain.demo.options import WITHOUT_SSDTRAIN

if TYPE_CHECKING:
    from pathlib import Path

    from ssdtrain.demo.machine import Machine
    from ssdtrain.demo.options import ModeRun, TrainingOptions
    from ssdtrain.demo.summary import Comparison, ModeSummary
from ssdtrain.sizes import shown_bytes

UNKNOWN = "-"
MIB = 1 << 20
LABEL_WIDTH = 34
COLUMN_WIDTH = 16
LINE_WIDTH = 99

TIME_NOTE = """\
A time is the median of a repeat's timed steps, then the median over the repeats; a ratio is the
median over the repeats of the ratio to plain within each repeat. A step is forward, backward and
optimizer. Every run is a fresh process; the modes take turns."""

MODES_NOTE = """\
plain and recompute never import ssdtrain. keep is plain in a process that has imported it, which
switches on torch's huge pages (THP_MEM_ALLOC_ENABLE=1), but offloads nothing: a ratio over keep is
what offloading alone does."""

ACTIVATION_NOTE = """\
Activation peak: the largest sum of the bytes of saved tensors in memory, parameters excluded. For
offload over all steps, by its own account; for the others counted in one more step, not timed."""

RSS_NOTE = """\
RSS peak above resident: VmHWM over the timed steps, less VmRSS (weights, gradients, libraries)
before them."""

FOREIGN_CORES_MAX = 0.3
"""More cores busy with other processes than this, and times of step say nothing about modes."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a demo found out."""

    options: TrainingOptions
    repeats: int
    machine: Machine
    runs: Sequence[ModeRun]
    summaries: Sequence[ModeSummary]
    comparison: Comparison

    @property
    def succeeded(self) -> bool:
        """Whether every mode finished and no bit differed."""
        finished = all(summary.failure is None for summary in self.summaries)
        return finished and self.comparison.bit_identical is not False


def write_json(report: Report, path: Path) -> None:
    """Write the figures, and everything they were computed from."""
    document: dict[str, Any] = {
        "modes": {summary.mode: asdict(summary) for summary in report.summaries},
        "bit_identical": report.comparison.bit_identical,
        "comparison_notes": report.comparison.notes,
        "machine": asdict(report.machine),
        "arguments": {
            **asdict(report.options),
            "dropout": report.options.dropout_probability,
            "repeats": report.repeats,
            "modes": [summary.mode for summary in report.summaries],
        },
        "without_ssdtrain": sorted(WITHOUT_SSDTRAIN),
        "runs": [run.to_dict() for run in report.runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def render(report: Report) -> str:
    """Lay out the table, the losses, the verdict and the footnotes."""
    blocks = [_heading(report), _figures(report), _losses(report), _verdict(report)]
    sessions = [run for run in report.runs if run.summary and run.repeat == 1]
    blocks += [f"The offload session of repeat 1 about itself:\n{run.summary}" for run in sessions]
    blocks.append(_footnotes(report))
    return "\n\n".join(blocks)


def _heading(report: Report) -> str:
    options, machine = report.options, report.machine
    parameters_count = max((run.parameters_count for run in report.runs), default=0)
    text = options.data or "the sources of Python's standard library"
    return (
        f"{options.model}, {parameters_count / 1e6:.1f}M parameters: {options.layers} layers, "
        f"hidden {options.hidden}, sequence {options.sequence}, batch {options.batch}, "
        f"{options.dtype}, dropout {options.dropout_probability:g}\n"
        f"trained on {text}; timed steps: {options.steps}, repeats: {report.repeats}\n"
        f"{machine.cpu}, {machine.core_count} cores, {shown_bytes(machine.memory_bytes)}, "
        f"{machine.kernel}, torch {machine.torch}, Python {machine.python}"
        + (
            f"\n{machine.directory}: {machine.file_system or 'unknown'}"
            if machine.directory
            else ""
        )
    )


def _figures(report: Report) -> str:
    def row(label: str, cell: Callable[[ModeSummary], str]) -> str:
        return _row(label, [cell(summary) for summary in report.summaries])

    lines = [
        _row("", [summary.mode for summary in report.summaries]),
        _rule(report),
        row("step time, s", lambda s: _with_ratio(s.step_s_median, s.ratio_to_plain.step_s, ".2f")),
        row("  over keep", lambda s: _with_ratio(None, s.ratio_to_keep.step_s, "")),
        row(
            "activation peak, MiB",
            lambda s: _with_ratio(
                _mib(s.activation_bytes_peak), s.ratio_to_plain.activation_bytes_peak, ",.0f"
            ),
        ),
        row(
            "RSS peak above resident, MiB",
            lambda s: _with_ratio(_mib(s.rss_bytes_peak), s.ratio_to_plain.rss_bytes_peak, ",.0f"),
        ),
        row("  over keep", lambda s: _with_ratio(None, s.ratio_to_keep.rss_bytes_peak, "")),
        row("RSS peak of the process, MiB", lambda s: _number(_mib(s.rss_bytes_high), ",.0f")),
        row("written per step, MiB", lambda s: _number(_mib(s.bytes_written_per_step), ",.0f")),
        row("read per step, MiB", lambda s: _number(_mib(s.bytes_read_per_step), ",.0f")),
        row("exposed stall per step, s", lambda s: _number(s.stall_s, ".3f")),
        row("tokens per second", lambda s: _number(s.tokens_per_s, ",.0f")),
        row("cores busy with other processes", lambda s: _number(s.foreign_cores, ".2f")),
    ]
    disturbed = [
        f"{_number(summary.foreign_cores, '.1f')} during {summary.mode}"
        for summary in report.summaries
    ]
    if any((summary.foreign_cores or 0) > FOREIGN_CORES_MAX for summary in report.summaries):
        lines.append(
            f"TIMES ARE NOT COMPARABLE: other processes kept cores busy ({', '.join(disturbed)}); "
            "run it alone"
        )
    return "\n".join(lines)


def _losses(report: Report) -> str:
    lines = [_row("loss", [summary.mode for summary in report.summaries]), _rule(report)]
    count = max((len(summary.losses) for summary in report.summaries), default=0)
    for index in range(count):
        cells = [
            f"{summary.losses[index]:.7f}" if index < len(summary.losses) else UNKNOWN
            for summary in report.summaries
        ]
        kinds = {
            run.steps[index].kind
            for run in report.runs
            if run.repeat == 1 and index < len(run.steps)
        }
        lines.append(_row(f"step {index + 1} ({', '.join(sorted(kinds))})", cells))
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    comparison = report.comparison
    answer = {True: "yes", False: "NO", None: "not compared"}[comparison.bit_identical]
    lines = [f"losses and all gradients bit-identical to {comparison.reference}: {answer}"]
    lines += [f"  {note}" for note in comparison.notes]
    lines += [
        textwrap.fill(f"{summary.mode} FAILED: {summary.failure}", LINE_WIDTH)
        for summary in report.summaries
        if summary.failure is not None
    ]
    return "\n".join(lines)


def _footnotes(report: Report) -> str:
    notes = [TIME_NOTE, MODES_NOTE, ACTIVATION_NOTE, RSS_NOTE]
    notes += sorted(
        {
            f"RSS is unknown: {run.memory.rss_note}"
            for run in report.runs
            if run.memory is not None and run.memory.rss_note is not None
        }
    )
    return "\n".join(notes)


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _rule(report: Report) -> str:
    return "-" * (LABEL_WIDTH + COLUMN_WIDTH * len(report.summaries))


def _with_ratio(value: float | None, ratio: float | None, form: str) -> str:
    # Both parts have a fixed width, so that the numbers stand below each other.
    number = "" if value is None and ratio is not None else _number(value, form)
    return f"{number} {'' if ratio is None else f'{ratio:.3f}x':>7}"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _mib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB
