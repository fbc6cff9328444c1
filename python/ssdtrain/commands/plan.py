"""`ssdtrain plan MODEL`: tells if a training step fits a GPU, and the costs of each way."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

from ssdtrain._core import StepPlan
from ssdtrain.commands import plan_report
from ssdtrain.commands.arguments import check_count, not_negative, option, share, size
from ssdtrain.commands.plan_report import Row
from ssdtrain.errors import ConfigError, SsdtrainError
from ssdtrain.machine import tuning
from ssdtrain.planning import trace as traces
from ssdtrain.planning.picture import page
from ssdtrain.planning.profiles import DRIVES, GPUS, PCIE_BYTES_PER_S, named
from ssdtrain.planning.solve import PLACES, Device, Place, Step, only, plan_document
from ssdtrain.planning.trace import Trace
from ssdtrain.sizes import in_bytes, shown_bytes

__all__ = ["add_arguments", "run"]

EXIT_DOES_NOT_FIT = 1
EXIT_MISUSED = 2
EXIT_INTERRUPTED = 130
SILENCE_S_MAX = 10.0
"""After so long the command says that it is still at work."""
OF_A_MODEL = {
    "batch": 1,
    "sequence": None,
    "accumulate": 1,
    "dtype": "bfloat16",
    "optimizer": "adamw",
    "compute_share": 0.6,
    "memory_share": 0.8,
}
"""Options that a recorded step does not take, with their defaults."""
OPTIMIZERS = {
    "adamw": (2, None, False),
    "adamw-master": (2, 4, True),
    "sgd": (0, None, False),
    "sgd-momentum": (1, None, False),
}
"""States for each parameter, bytes of their values (as the parameter's), and a float32 master."""

INCLUDED = {
    "all tensors": ("offload", "host"),
    "best of all": ("recompute", "offload", "host", "all tensors"),
}
"""By way, the ways that are special cases of it; the planner may find a longer step for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plan`."""
    parser.epilog = (
        "Example: ssdtrain plan llama-3-8b --gpu h100 --drive 990-pro-2tb --drives 4. "
        "Exit code: 0 if the step fits in a way that can be run today (keep, recompute, offload, "
        "host), 1 if it fits in none of these, 2 for a wrong option."
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
    step.add_argument("--batch", type=int, help="sequences in a micro-batch (1)")
    step.add_argument("--sequence", type=int, help="tokens of a sequence (2048; 512 for bert)")
    step.add_argument("--accumulate", type=int, help="micro-batches in a step (1)")
    step.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="(bfloat16)")
    step.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="(adamw)")
    _add_machine(parser.add_argument_group("the machine"))
    asked = parser.add_argument_group("what is asked for")
    asked.add_argument(
        "--slowdown-max",
        type=not_negative,
        default=0.02,
        metavar="SHARE",
        help="where all fits, how much longer the step may become to save memory: 0.02 is 2 %% "
        "(0.02)",
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
        type=share,
        metavar="SHARE",
        help="of the FLOPs a second on the GPU's data sheet, how much the model reaches (0.6)",
    )
    machine.add_argument(
        "--memory-share",
        type=share,
        metavar="SHARE",
        help="of the memory bandwidth on the GPU's data sheet, how much the model reaches (0.8)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        _complete(arguments)
        device, rated_bytes = _device(arguments)
        with _says_if_slow():
            # Code of the user may print, and the output may be JSON.
            with redirect_stdout(sys.stderr):
                trace = _trace(arguments)
            rows, steps, sought = _rows(trace, device, arguments)
        if arguments.save_trace:
            traces.save(trace, arguments.save_trace)
        report = plan_report.text(
            steps[0], device, rows, rated_bytes, [sought, *_origin(trace, arguments)]
        )
        if arguments.html:
            lines = plan_report.lines(steps[0], rows)
            Path(arguments.html).write_text(
                page(trace.name, lines, device.memory_bytes, report), encoding="utf-8"
            )
        best = rows[-1].plan
        if arguments.save_plan and best is not None:
            document = plan_document(steps[-1], device, best)
            Path(arguments.save_plan).write_text(json.dumps(document) + "\n")
    except KeyboardInterrupt:
        print("ssdtrain plan: interrupted; nothing was planned", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"ssdtrain plan: {where}{error.strerror}", file=sys.stderr)
        return EXIT_MISUSED
    except SsdtrainError as error:
        print(f"ssdtrain plan: {error}", file=sys.stderr)
        return EXIT_MISUSED
    if arguments.json:
        print(json.dumps(plan_report.document(steps[0], device, rows, rated_bytes), indent=1))
    else:
        print(report)
    return 0 if any(row.fits and row.is_run for row in rows) else EXIT_DOES_NOT_FIT


@contextmanager
def _says_if_slow() -> Iterator[None]:
    """Print a line if the command takes long."""
    words = (
        "ssdtrain plan: still at work. Every operation of the step is looked at and planned for; "
        "recurrent layers over long sequences have very many. Ctrl-C ends it."
    )
    timer = Timer(SILENCE_S_MAX, lambda: print(words, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _complete(arguments: argparse.Namespace) -> None:
    """Give a model's options that were left out their defaults.

    Raises ``ConfigError`` for options that make no sense, alone or together.
    """
    if arguments.model is None and arguments.trace is None:
        raise ConfigError("name a model, as in `ssdtrain plan llama-3-8b`, or give --trace FILE")
    if arguments.model is not None and arguments.trace is not None:
        raise ConfigError(
            f"{arguments.model} and --trace {arguments.trace} are two steps; give one of them"
        )
    for name in ("batch", "sequence", "accumulate", "drives"):
        check_count(name, getattr(arguments, name))
    for name, default in OF_A_MODEL.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.trace is not None:
            raise ConfigError(
                f"{option(name)} says how a model is run, and the step in {arguments.trace} was "
                f"run already: leave {option(name)} out, or name a model instead of --trace"
            )


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.trace is not None:
        return traces.load(arguments.trace)
    # torch's parts and transformers are not needed for a recorded trace.
    from ssdtrain.planning.derive import Optimizer, Roofline, derive  # noqa: PLC0415
    from ssdtrain.planning.models import DTYPES, builder  # noqa: PLC0415

    gpu = named(GPUS, arguments.gpu, "GPU")
    sequence = arguments.sequence or (512 if arguments.model.startswith("bert-") else 2048)
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
    """Return the device and the bytes that its drives are rated for."""
    gpu = named(GPUS, arguments.gpu, "GPU")
    drive = named(DRIVES, arguments.drive, "drive")
    write, read = drive.write_bytes_per_s, drive.read_bytes_per_s
    if arguments.dir is not None:
        if not Path(arguments.dir).is_dir():
            why = "there is no such directory; --dir takes one on the drive, that of ssdtrain bench"
            raise FileNotFoundError(errno.ENOENT, why, arguments.dir)
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
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {word!r} is not of the form NAME=VALUE")
        if name in found:
            raise ConfigError(f"{option} names {name!r} twice; give it once")
        found[name] = value
    return found


def _rows(
    trace: Trace, device: Device, arguments: argparse.Namespace
) -> tuple[list[Row], list[Step], str]:
    """Return the ways with the steps that they plan, and a sentence about the aim."""
    parts: Any = _rules(arguments.place, "--place")
    budgets = {
        name: in_bytes(f"--budget {name}", value)
        for name, value in _rules(arguments.budget, "--budget").items()
    }
    activations: dict[Any, Place] = only(("activation",), "ssd")
    ways: list[tuple[str, str, Any, bool]] = [
        ("offload", "activations to the drives", activations, False),
        ("host", "activations to the host's memory", only(("activation",), "host"), False),
        (
            "all tensors",
            "also weights, gradients and optimizer state; to the drives or the host",
            None,
            False,
        ),
        ("best of all", "drives, host, and recomputing what costs least for its bytes", None, True),
    ]
    plain = Step(trace, budgets=budgets)
    most = max(plain.live_bytes())
    unlimited = most + (1 << 30)
    # Where all fits anyway, the aim is less memory.
    saves_memory = most <= device.memory_bytes and not budgets
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
            if saves_memory and not again:
                return step.least_peak(device, arguments.slowdown_max)
            return step.least_step(device, may_recompute=again)

        rows.append(_row(step, name, meaning, device, solve))
    sought = "Each way that moves anything is planned for the shortest step that fits."
    if saves_memory:
        sought = (
            "All fits anyway, so offload, host and all tensors are planned for the least memory of "
            f"a step that is at most {100 * arguments.slowdown_max:g} % longer (--slowdown-max), "
            "and best of all for the shortest step."
        )
    else:
        rows = _no_longer(rows)
    return rows, steps, sought


def _no_longer(rows: list[Row]) -> list[Row]:
    """Return the rows with the shortest plan of each way and of its special cases."""
    known = {row.name: row for row in rows}
    for name, others in INCLUDED.items():
        plans = {
            row.plan.step_s: row
            for row in (known[way] for way in (*others, name))
            if row.fits and row.plan is not None
        }
        if plans:
            known[name] = replace(plans[min(plans)], name=name, meaning=known[name].meaning)
    return list(known.values())


def _recomputed(step: Step, device: Device, unlimited: int) -> StepPlan:
    if all(tensor.recompute_seconds is None for tensor in step.trace.tensors):
        raise ConfigError("the trace does not tell how long it takes to compute a tensor again")
    return step.judged(device, "recompute", unlimited)


def _row(step: Step, name: str, meaning: str, device: Device, solve: Any) -> Row:
    try:
        plan = solve()
    except ConfigError as error:
        return Row(name, meaning, None, fits=False, plan=None, problem=str(error))
    peak, exceeded = step.peak_bytes(plan), step.exceeded(device, plan)
    if peak > device.memory_bytes:
        memory = shown_bytes(device.memory_bytes)
        exceeded.append(f"it takes {shown_bytes(peak)} at its peak, and there are {memory}")
    return Row(name, meaning, peak, fits=not exceeded, plan=plan, problem="; ".join(exceeded))


def _origin(trace: Trace, arguments: argparse.Namespace) -> list[str]:
    """Return the sources of the figures, as sentences."""
    found = [f"The step is {trace.origin}."] if trace.origin else []
    gpu = named(GPUS, arguments.gpu, "GPU").title
    if arguments.trace is None:
        if arguments.dtype not in trace.origin:
            found.append(
                f"--dtype {arguments.dtype} did not change the weights: the function did not make "
                "them in the dtype that it was given."
            )
        found.append(
            f"Predicted: kernels take what {arguments.compute_share:g} of the GPU's peak and "
            f"{arguments.memory_share:g} of its bandwidth allow. No figure here was measured."
        )
    else:
        found.append(
            "Predicted: kernels take as long as the trace says; memory and drives are those named "
            f"above, and the link is that of {gpu} (--gpu), whatever ran the step."
        )
    if arguments.dir is None:
        drive = named(DRIVES, arguments.drive, "drive").title
        found.append(
            f"Drives: {arguments.drives} of {drive} (--drives, --drive), taken to have the rates "
            "of the data sheet, which many do not keep for long; --dir takes rates that ssdtrain "
            "bench measured."
        )
    return found
