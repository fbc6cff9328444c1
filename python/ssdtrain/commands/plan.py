"""`ssdtrain plan MODEL`: whether a training step fits a GPU, and what each way of fitting costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ssdtrain._core import StepPlan
from ssdtrain.commands.arguments import not_negative, positive, size
from ssdtrain.commands.lifespan import shown_days
from ssdtrain.errors import ConfigError, SsdtrainError
from ssdtrain.machine import tuning
from ssdtrain.planning import trace as traces
from ssdtrain.planning.lifespan import Wear
from ssdtrain.planning.picture import Line, page
from ssdtrain.planning.profiles import DRIVES, GPUS, PCIE_BYTES_PER_S, named
from ssdtrain.planning.solve import PLACES, Device, Place, Step, only, plan_document
from ssdtrain.planning.trace import CLASSES, Trace
from ssdtrain.sizes import in_bytes, shown_bytes

__all__ = ["add_arguments", "run"]

EXIT_DOES_NOT_FIT = 1
EXIT_MISUSED = 2
COUNT_MAX = 1_000_000_000
"""Of sequences, tokens, micro-batches and drives: products of more are beyond 64 bits."""
OPTIMIZERS = {
    "adamw": (2, None, False),
    "adamw-master": (2, 4, True),
    "sgd": (0, None, False),
    "sgd-momentum": (1, None, False),
}
"""States for each parameter, bytes of their values (as the parameter's), and a float32 master."""


@dataclass(frozen=True)
class Row:
    """One way of running the step."""

    name: str
    meaning: str
    peak_bytes: int | None
    fits: bool
    plan: StepPlan | None
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plan`."""
    parser.epilog = (
        "Example: ssdtrain plan llama-3-8b --gpu h100 --drive 990-pro-2tb --drives 4. "
        "Exit code: 0 if the step fits in some way, 1 if it fits in none, 2 for a wrong option."
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="llama-3-8b, llama-3-70b, granite-8b, gpt2, gpt2-xl, bert-base, bert-large, or "
        "FILE.py:FUNCTION, which is given batch, sequence and dtype and returns a model and what "
        "computes its loss",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="a training step that ssdtrain recorded (session.traces), instead of a model",
    )
    step = parser.add_argument_group("the step")
    step.add_argument("--batch", type=int, default=1, help="sequences in a micro-batch (1)")
    step.add_argument("--sequence", type=int, help="tokens of a sequence (2048; 512 for bert)")
    step.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step (1)")
    step.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    step.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    _add_machine(parser.add_argument_group("the machine"))
    asked = parser.add_argument_group("what is asked for")
    asked.add_argument(
        "--slowdown-max",
        type=not_negative,
        default=0.02,
        metavar="SHARE",
        help="how much longer the step may become to save memory: 0.02 is 2 %% (0.02)",
    )
    asked.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="PATTERN=PLACE",
        help=f"a part of the model and one of {', '.join(PLACES)}: 'model.layers.*=ssd'",
    )
    asked.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="NAME=BYTES",
        help="a class or a pattern of parts, and what of it may be in memory: activation=8GiB",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument("--html", metavar="FILE", help="write a picture of memory over the step")
    output.add_argument("--save-trace", metavar="FILE", help="write the step as a trace")
    output.add_argument("--save-plan", metavar="FILE", help="write the plan over all places")


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)} (h100)")
    machine.add_argument(
        "--memory",
        type=size("--memory"),
        metavar="SIZE",
        help="memory that the step may use, such as 24GiB (what the data sheet of the GPU says)",
    )
    machine.add_argument(
        "--drive", default="990-pro-2tb", help=f"one of {', '.join(DRIVES)} (990-pro-2tb)"
    )
    machine.add_argument("--drives", type=int, default=1, help="how many such drives (1)")
    machine.add_argument(
        "--dir",
        help="take the rates that `ssdtrain bench DIR` measured instead of a data sheet's",
    )
    machine.add_argument(
        "--host-memory",
        type=size("--host-memory"),
        default=128 << 30,
        metavar="SIZE",
        help="memory of the CPU that tensors of the GPU may be put into (128GiB)",
    )
    machine.add_argument(
        "--compute-share",
        type=positive,
        default=0.6,
        metavar="SHARE",
        help="of the FLOPs a second on the GPU's data sheet, how much the model reaches (0.6)",
    )
    machine.add_argument(
        "--memory-share",
        type=positive,
        default=0.8,
        metavar="SHARE",
        help="of the memory bandwidth on the GPU's data sheet, how much the model reaches (0.8)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        trace = _trace(arguments)
        device, rated_bytes = _device(arguments)
        rows, steps = _rows(trace, device, arguments)
        if arguments.save_trace:
            traces.save(trace, arguments.save_trace)
        report = _text(trace, device, rows, rated_bytes, arguments)
        if arguments.html:
            lines = _lines(steps[0], rows)
            Path(arguments.html).write_text(page(trace.name, lines, device.memory_bytes, report))
        best = rows[-1].plan
        if arguments.save_plan and best is not None:
            document = plan_document(steps[-1], device, best)
            Path(arguments.save_plan).write_text(json.dumps(document) + "\n")
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"ssdtrain plan: {where}{error.strerror}", file=sys.stderr)
        return EXIT_MISUSED
    except SsdtrainError as error:
        print(f"ssdtrain plan: {error}", file=sys.stderr)
        return EXIT_MISUSED
    if arguments.json:
        print(json.dumps(_document(steps[0], device, rows, rated_bytes), indent=1))
    else:
        print(report)
    return 0 if any(row.fits for row in rows) else EXIT_DOES_NOT_FIT


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.model is None and arguments.trace is None:
        raise ConfigError("name a model, as in `ssdtrain plan llama-3-8b`, or give --trace FILE")
    if arguments.model is not None and arguments.trace is not None:
        raise ConfigError(
            f"{arguments.model} and --trace {arguments.trace} are two steps; give one of them"
        )
    for name in ("batch", "sequence", "accumulate", "drives"):
        given = getattr(arguments, name)
        if given is not None and not 1 <= given <= COUNT_MAX:
            raise ConfigError(f"--{name} must be 1 or more, and at most {COUNT_MAX:,}, not {given}")
    if arguments.trace is not None:
        return traces.load(arguments.trace)
    # torch's parts and transformers are not needed for a recorded trace.
    from ssdtrain.planning.derive import Optimizer, Roofline, derive  # noqa: PLC0415
    from ssdtrain.planning.models import DTYPES, builder  # noqa: PLC0415

    gpu = named(GPUS, arguments.gpu, "GPU")
    sequence = arguments.sequence or (512 if "bert" in arguments.model else 2048)
    states, state_bytes, has_master = OPTIMIZERS[arguments.optimizer]
    shapes = f"batch {arguments.batch}, sequence {sequence}, {arguments.dtype}"
    accumulated = f", {arguments.accumulate} micro-batches" if arguments.accumulate > 1 else ""
    return derive(
        f"{arguments.model}, {shapes}{accumulated}, {arguments.optimizer}, on {gpu.title}",
        builder(arguments.model, arguments.batch, sequence, DTYPES[arguments.dtype]),
        Roofline(
            tensor_flops=gpu.tensor_flops * arguments.compute_share,
            single_flops=gpu.single_flops * arguments.compute_share,
            memory_bytes_per_s=gpu.memory_bytes_per_s * arguments.memory_share,
        ),
        Optimizer(states=states, state_bytes=state_bytes, has_master=has_master),
        arguments.accumulate,
    )


def _device(arguments: argparse.Namespace) -> tuple[Device, float]:
    """Return the device and what its drives are rated to have written."""
    gpu = named(GPUS, arguments.gpu, "GPU")
    drive = named(DRIVES, arguments.drive, "drive")
    write, read = drive.write_bytes_per_s, drive.read_bytes_per_s
    if arguments.dir is not None:
        kept = tuning.load(arguments.dir)
        if kept is None:
            raise ConfigError(
                f"nothing is known of the drive of {arguments.dir}; measure it with "
                f"`ssdtrain bench {arguments.dir}`"
            )
        write, read = kept.write_bytes_per_s, kept.read_bytes_per_s
    device = Device(
        memory_bytes=arguments.memory or gpu.memory_bytes,
        host_bytes=arguments.host_memory,
        write_bytes_per_s=write * arguments.drives,
        read_bytes_per_s=read * arguments.drives,
        bus_bytes_per_s=PCIE_BYTES_PER_S[gpu.pcie_generation],
    )
    return device, drive.rated_bytes * arguments.drives


def _rules(words: Sequence[str], option: str) -> dict[str, str]:
    found = {}
    for one in words:
        name, equals, value = one.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {one!r} is not of the form NAME=VALUE")
        found[name] = value
    return found


COLUMNS = (
    "step: how long it takes; of that, stall waits for drives or copies, and again computes again.",
    "written: to the drives, in one step. drive life: until as much is written as the drives are",
    "rated for, with one step after the other. above bound: how much longer the step is than the",
    "shortest that any plan could reach with this memory.",
)
"""What the columns mean."""


def _rows(
    trace: Trace, device: Device, arguments: argparse.Namespace
) -> tuple[list[Row], list[Step]]:
    parts: Any = _rules(arguments.place, "--place")
    budgets = {
        name: in_bytes(f"--budget {name}", value)
        for name, value in _rules(arguments.budget, "--budget").items()
    }
    activations: dict[Any, Place] = only(("activation",), "ssd")
    ways: list[tuple[str, str, Any, bool]] = [
        (
            "offload",
            "activations to the drives: what ssdtrain does on a GPU, under a bound",
            activations,
            False,
        ),
        ("host", "activations to the host's memory", only(("activation",), "host"), False),
        ("all tensors", "also weights, gradients and optimizer state, or to the host", None, False),
        ("best of all", "drives, host, and recomputing what costs least for its bytes", None, True),
    ]
    plain = Step(trace, budgets=budgets)
    most = max(plain.live_bytes())
    unlimited = most + (1 << 30)
    rows = [
        _row(
            plain,
            "keep",
            "nothing is moved",
            device,
            lambda: plain.judged(device, "keep", unlimited),
        ),
        _row(
            plain,
            "recompute",
            "all saved tensors are computed again",
            device,
            lambda: _recomputed(plain, device, unlimited),
        ),
    ]
    steps = [plain]
    for name, meaning, classes, may_recompute in ways:
        step = Step(trace, classes=classes, parts=parts, budgets=budgets)
        steps.append(step)

        def solve(step: Step = step, again: bool = may_recompute) -> StepPlan:
            if most <= device.memory_bytes and not budgets and not again:
                return step.least_peak(device, arguments.slowdown_max)
            return step.least_step(device, may_recompute=again)

        rows.append(_row(step, name, meaning, device, solve))
    return rows, steps


def _recomputed(step: Step, device: Device, unlimited: int) -> StepPlan:
    if all(one.recompute_seconds is None for one in step.trace.tensors):
        raise ConfigError("the trace does not tell how long it takes to compute a tensor again")
    return step.judged(device, "recompute", unlimited)


def _row(step: Step, name: str, meaning: str, device: Device, solve: Any) -> Row:
    try:
        plan = solve()
    except ConfigError as error:
        return Row(name, meaning, None, fits=False, plan=None, problem=str(error))
    peak, exceeded = step.peak_bytes(plan), step.exceeded(plan)
    fits = peak <= device.memory_bytes and not exceeded
    return Row(name, meaning, peak, fits=fits, plan=plan, problem="; ".join(exceeded))


def _lines(step: Step, rows: list[Row]) -> list[Line]:
    ends = list(accumulate(one.seconds for one in step.trace.kernels))
    starts = [0.0, *ends[:-1]]
    lines = [Line("keep", list(zip(starts, step.live_bytes(), strict=True)), ends[-1])]
    for row in rows:
        if row.plan is not None and row.name in {"recompute", "offload", "all tensors"}:
            idle = step.peak_bytes(row.plan) - row.plan.peak_bytes
            points = [(seconds, nbytes + idle) for seconds, nbytes in row.plan.resident]
            lines.append(Line(row.name, points, row.plan.step_s))
    return lines


def _life_days(plan: StepPlan, rated_bytes: float) -> float | None:
    if not plan.moved_bytes[0]:
        return None
    rate = plan.moved_bytes[0] / plan.step_s
    return Wear(rated_bytes=rated_bytes, written_bytes_per_s=rate).rated_days()


def _document(step: Step, device: Device, rows: list[Row], rated_bytes: float) -> dict[str, Any]:
    trace = step.trace

    def told(row: Row) -> dict[str, Any]:
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
        "kernels": len(trace.kernels),
        "memory_bytes": device.memory_bytes,
        "ways": {row.name: told(row) for row in rows},
    }


def _text(
    trace: Trace,
    device: Device,
    rows: list[Row],
    rated_bytes: float,
    arguments: argparse.Namespace,
) -> str:
    totals = {
        kind: sum(one.nbytes for one in trace.tensors if one.kind == kind) for kind in CLASSES
    }
    kinds = ", ".join(
        f"{kind.replace('_', ' ')} {shown_bytes(total)}"
        for kind, total in totals.items()
        if total and kind != "workspace"
    )
    write, read = device.write_bytes_per_s / 1e9, device.read_bytes_per_s / 1e9
    memory, host = shown_bytes(device.memory_bytes), shown_bytes(device.host_bytes)
    heads = ("fits", "peak", "step", "stall", "again", "written", "drive life", "above bound")
    widths = (4, 10, 9, 9, 9, 10, 11, 12)
    titles = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    lines = [
        trace.name,
        f"in one step: {kinds}; {len(trace.kernels):,} kernels",
        f"memory {memory}, drives write {write:.3g} and read {read:.3g} GB/s, host lends {host}",
        "",
        f"{'':12} {titles}",
    ]
    lines += [_line(row, rated_bytes) for row in rows]
    lines.append("")
    lines += [f"{row.name}: {row.problem}" for row in rows if row.problem]
    lines += [f"{row.name}: {row.meaning}" for row in rows]
    lines += ["", *COLUMNS]
    lines.append(
        f"Predicted: kernels take what {arguments.compute_share:g} of the GPU's peak and "
        f"{arguments.memory_share:g} of its bandwidth allow. No figure here was measured."
        if arguments.trace is None
        else "Predicted: kernels take as long as when the trace was recorded; the memory, the link "
        "and the drives are those named above, not of the machine that recorded it."
    )
    return "\n".join(lines)


def _line(row: Row, rated_bytes: float) -> str:
    plan = row.plan
    if plan is None or row.peak_bytes is None:
        return f"{row.name:12} {'no':>4}"
    days = _life_days(plan, rated_bytes)
    life = "-" if days is None else shown_days(days)
    above = f"{max(0.0, plan.step_s / plan.bound_s - 1):.1%}" if not plan.recompute_s else "-"
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
