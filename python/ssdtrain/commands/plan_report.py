"""The output of `ssdtrain plan`: the table of ways, its JSON, the lines of its picture. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ssdtrain._core import StepPlan
from ssdtrain.commands.lifespan import shown_days
from ssdtrain.planning.lifespan import Wear
from ssdtrain.planning.picture import Line
from ssdtrain.planning.solve import Device, Step
from ssdtrain.sizes import shown_bytes

__all__ = ["Row", "document", "lines", "text"]

PLANNED_ONLY = ("all tensors", "best of all")
"""Ways that are only possible: nothing runs such a plan on a GPU."""
COLUMNS = (
    "step: how long it takes; of that, stall waits for drives or copies, and again computes again.",
    "written: to the drives, in one step. drive life: until as much is written as the drives are",
    "rated for, with one step after the other. above bound: how much longer the step is than the",
    "shortest that any plan could reach with this memory which computes nothing again.",
)
"""The meaning of the columns."""


@dataclass(frozen=True)
class Row:
    """A way of running the step."""

    name: str
    meaning: str
    peak_bytes: int | None
    fits: bool
    plan: StepPlan | None
    problem: str = ""

    @property
    def is_run(self) -> bool:
        """True if ssdtrain or PyTorch runs a step on a GPU in this way today."""
        return self.name not in PLANNED_ONLY


def lines(step: Step, rows: list[Row]) -> list[Line]:
    """Return the memory over the time of the step, plain and in the ways that change it most."""
    ends = list(accumulate(kernel.seconds for kernel in step.trace.kernels))
    starts = [0.0, *ends[:-1]]
    drawn = [Line("keep", list(zip(starts, step.live_bytes(), strict=True)), ends[-1])]
    for row in rows:
        if row.plan is not None and row.name in {"recompute", "offload", "all tensors"}:
            idle = step.peak_bytes(row.plan) - row.plan.peak_bytes
            points = [(seconds, nbytes + idle) for seconds, nbytes in row.plan.resident]
            drawn.append(Line(row.name, points, row.plan.step_s))
    return drawn


def _life_days(plan: StepPlan, rated_bytes: float) -> float | None:
    if not plan.moved_bytes[0]:
        return None
    rate = plan.moved_bytes[0] / plan.step_s
    return Wear(rated_bytes=rated_bytes, written_bytes_per_s=rate).rated_days()


def document(step: Step, device: Device, rows: list[Row], rated_bytes: float) -> dict[str, Any]:
    """Return the report for JSON."""
    trace = step.trace

    def figures(row: Row) -> dict[str, Any]:
        plan = row.plan
        problem = {"problem": row.problem} if row.problem else {}
        if plan is None:
            return {"fits": False, **problem}
        return {
            "fits": row.fits,
            **problem,
            "peak_bytes": row.peak_bytes,
            "class_peak_bytes": step.class_peak_bytes(plan),
            "host_peak_bytes": plan.host_peak_bytes,
            "step_seconds": plan.step_s,
            "stall_seconds": plan.stall_s,
            "recompute_seconds": plan.recompute_s,
            "bound_seconds": plan.bound_s,
            "written_bytes": plan.moved_bytes[0],
            "to_host_bytes": plan.moved_bytes[1],
            "drive_life_days": _life_days(plan, rated_bytes),
        }

    return {
        "format": 1,
        "step": trace.name,
        "origin": trace.origin,
        "kernels": len(trace.kernels),
        "memory_bytes": device.memory_bytes,
        "ways": {row.name: figures(row) for row in rows},
    }


def text(
    step: Step,
    device: Device,
    rows: list[Row],
    rated_bytes: float,
    origin: Sequence[str],
) -> str:
    """Return the report; it ends with ``origin``, the sources of the figures."""
    trace = step.trace
    kinds = ", ".join(
        f"{kind.replace('_', ' ')} {shown_bytes(nbytes)}"
        for kind, nbytes in step.bytes_at_peak().items()
        if nbytes
    )
    write, read = device.write_bytes_per_s / 1e9, device.read_bytes_per_s / 1e9
    memory, host = shown_bytes(device.memory_bytes), shown_bytes(device.host_bytes)
    heads = ("fits", "peak", "step", "stall", "again", "written", "drive life", "above bound")
    widths = (4, 10, 9, 9, 9, 10, 11, 12)
    titles = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    shown = [
        trace.name,
        f"{len(trace.kernels):,} kernels; at the peak of keep there are {kinds}",
        f"memory {memory}, drives write {write:.3g} and read {read:.3g} GB/s, host lends {host}",
    ]
    if all(tensor.kind in {"activation", "workspace"} for tensor in trace.tensors):
        shown.append(
            "Weights, gradients and optimizer state are not in this step: add theirs to each peak."
        )
    shown += ["", f"{'':12} {titles}"]
    shown += [_line(row, rated_bytes) for row in rows]
    shown.append("")
    problems = [f"  {row.name}: {row.problem}" for row in rows if row.problem]
    if problems:
        shown += ["What does not fit:", *problems, ""]
    shown += [f"{row.name}: {row.meaning}" for row in rows]
    shown.append(
        "On a GPU ssdtrain moves no weights and no optimizer state: of 'all tensors' and 'best of "
        "all' it does the part of activations."
    )
    advice = _advice(device, rows)
    shown += [advice] if advice else []
    shown += ["", *COLUMNS]
    return "\n".join([*shown, *origin])


def _advice(device: Device, rows: list[Row]) -> str:
    """Return advice if the step fits in no way, or in no way that can be run."""
    changes = (
        "a smaller --batch or --sequence, another --optimizer, or more memory (--gpu, --memory) "
        "changes that."
    )
    if any(row.fits and row.is_run for row in rows):
        return ""
    if any(row.fits for row in rows):
        return f"So this step fits in no way that can be run today: {changes}"
    # A row that fits the memory and does not fit exceeds a budget.
    if any(row.peak_bytes is not None and row.peak_bytes <= device.memory_bytes for row in rows):
        return "So this step fits the memory, and no way keeps each --budget: raise them."
    return f"So this step does not fit: {changes}"


def _line(row: Row, rated_bytes: float) -> str:
    plan = row.plan
    if plan is None or row.peak_bytes is None:
        return f"{row.name:12} {'no':>4}"
    days = _life_days(plan, rated_bytes)
    life = "-" if days is None else shown_days(days)
    is_comparable = row.fits and not plan.recompute_s
    above = f"{max(0.0, plan.step_s / plan.bound_s - 1):.1%}" if is_comparable else "-"
    return (
        f"{row.name:12} {'yes' if row.fits else 'no':>4} {shown_bytes(row.peak_bytes):>10} "
        f"{_shown_s(plan.step_s):>9} {_shown_s(plan.stall_s):>9} {_shown_s(plan.recompute_s):>9} "
        f"{shown_bytes(plan.moved_bytes[0]) if plan.moved_bytes[0] else '-':>10} {life:>11} "
        f"{above:>12}"
    )


def _shown_s(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
