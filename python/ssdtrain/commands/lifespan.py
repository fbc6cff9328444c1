"""`ssdtrain lifespan`: computes how long drives live under offloading."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from ssdtrain.commands.arguments import check_count, option, positive, size
from ssdtrain.errors import ConfigError
from ssdtrain.planning.lifespan import PAPER, Transformer, Wear
from ssdtrain.planning.profiles import DRIVES, named

__all__ = ["add_arguments", "run", "shown_days"]

EXIT_MISUSED = 2
SIZES = ("batch", "sequence", "hidden", "layers")
OF_A_TRANSFORMER = (*SIZES, "tensor_parallel", "teraflops")
DESCRIBED = ("drive", "tbw", "drives", "write_rate", "bytes_per_step", "step_time")
"""Options that `--paper` replaces, besides those of a transformer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `lifespan`."""
    parser.epilog = (
        "What is written: --write-rate, or --bytes-per-step with --step-time, or the sizes of a "
        "transformer with --step-time or --teraflops. Example: ssdtrain lifespan --drive "
        "990-pro-2tb --bytes-per-step 40GB --step-time 6"
    )
    parser.add_argument("--paper", action="store_true", help="the case of arXiv 2408.10013")
    drives = parser.add_argument_group("the drives")
    drives.add_argument("--drive", metavar="NAME", help=f"one of {', '.join(DRIVES)}")
    drives.add_argument("--tbw", type=positive, metavar="TB", help="rated TBW of a drive instead")
    drives.add_argument("--drives", type=int, metavar="N", help="how many (1)")
    written = parser.add_argument_group("what is written")
    written.add_argument("--write-rate", type=size("--write-rate"), help="bytes per second: 2GB")
    written.add_argument("--bytes-per-step", type=size("--bytes-per-step"), help="such as 40GB")
    written.add_argument("--step-time", type=positive, metavar="S", help="seconds of a step")
    for name, words in (
        ("batch", "sequences in a step"),
        ("sequence", "tokens of a sequence"),
        ("hidden", "the model's hidden size"),
        ("layers", "the model's layers"),
    ):
        written.add_argument(f"--{name}", type=int, metavar="N", help=words)
    written.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="GPUs that share a layer (1)"
    )
    written.add_argument(
        "--teraflops", type=positive, help="10^12 operations per second that the GPU attains"
    )
    assumed = parser.add_argument_group("what is assumed")
    assumed.add_argument(
        "--rated-amplification",
        type=positive,
        default=PAPER.rated_amplification,
        help="write amplification behind the rating (%(default)s, the paper's)",
    )
    assumed.add_argument(
        "--own-amplification",
        type=positive,
        default=PAPER.own_amplification,
        help="write amplification of offloading (%(default)s)",
    )
    assumed.add_argument(
        "--retention-gain",
        type=positive,
        default=PAPER.retention_gain,
        help="gain of retention relaxed to a day (%(default)s, the paper's)",
    )
    parser.add_argument(
        "--years", type=positive, default=5.0, help="life for the daily budget (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        _check(arguments)
        wear = _wear(arguments)
        document = _document(wear, arguments.years)
    except ConfigError as error:
        print(f"ssdtrain lifespan: {error}", file=sys.stderr)
        return EXIT_MISUSED
    print(json.dumps(document, indent=1) if arguments.json else _text(wear, arguments.years))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that exclude each other, and for huge numbers."""
    values = vars(arguments)
    given = {name for name, value in values.items() if value is not None and value is not False}
    for name in (*SIZES, "drives", "tensor_parallel"):
        check_count(name, getattr(arguments, name))
    rules = (
        ("paper", (*DESCRIBED, *OF_A_TRANSFORMER)),
        ("write_rate", ("bytes_per_step", "step_time", *OF_A_TRANSFORMER)),
        ("bytes_per_step", OF_A_TRANSFORMER),
        ("step_time", ("teraflops",)),
    )
    for name, others in rules:
        ignored = [option(other) for other in others if other in given and name in given]
        if ignored:
            raise ConfigError(
                f"{option(name)} already gives the figure for which {', '.join(ignored)} would "
                "be used; give one of the two"
            )


def _wear(arguments: argparse.Namespace) -> Wear:
    rated_bytes, written_bytes_per_s = PAPER.rated_bytes, PAPER.written_bytes_per_s
    if not arguments.paper:
        rated_bytes, written_bytes_per_s = _rated_bytes(arguments), _written_bytes_per_s(arguments)
    return Wear(
        rated_bytes=rated_bytes,
        written_bytes_per_s=written_bytes_per_s,
        rated_amplification=arguments.rated_amplification,
        own_amplification=arguments.own_amplification,
        retention_gain=arguments.retention_gain,
    )


def _rated_bytes(arguments: argparse.Namespace) -> float:
    if (arguments.drive is None) == (arguments.tbw is None):
        only = "" if arguments.drive is None else ", not both"
        raise ConfigError(f"name the drive with --drive NAME, or its rating with --tbw TB{only}")
    if arguments.drive is not None:
        rated_bytes = named(DRIVES, arguments.drive, "drive").rated_bytes
    else:
        rated_bytes = arguments.tbw * 1e12
    return float(rated_bytes * (arguments.drives or 1))


def _written_bytes_per_s(arguments: argparse.Namespace) -> float:
    if arguments.write_rate is not None:
        return float(arguments.write_rate)
    sizes = {name: getattr(arguments, name) for name in SIZES}
    missing = [f"--{name}" for name, value in sizes.items() if value is None]
    if arguments.bytes_per_step is not None:
        step_s = arguments.step_time
        step_bytes = float(arguments.bytes_per_step)
    elif not missing:
        model = Transformer(**sizes, tensor_parallel=arguments.tensor_parallel or 1)
        step_bytes, step_s = model.activation_bytes(), arguments.step_time
        if step_s is None and arguments.teraflops is not None:
            step_s = model.step_flops() / (arguments.teraflops * 1e12)
    elif len(missing) < len(SIZES):
        raise ConfigError(f"of the transformer's sizes {', '.join(missing)} is missing")
    else:
        raise ConfigError(
            "say what is written: --write-rate, --bytes-per-step, or --batch, --sequence, --hidden "
            "and --layers; or --paper for the paper's case"
        )
    if step_s is None:
        raise ConfigError("say how long a step takes: --step-time S, or --teraflops with sizes")
    return float(step_bytes / step_s)


def _document(wear: Wear, years: float) -> dict[str, Any]:
    if not math.isfinite(wear.relaxed_days()):
        raise ConfigError("with these figures drives would live for ever; give likelier ones")
    return {
        "format": 1,
        "rated_bytes": wear.rated_bytes,
        "written_bytes_per_s": wear.written_bytes_per_s,
        "rated_amplification": wear.rated_amplification,
        "own_amplification": wear.own_amplification,
        "retention_gain": wear.retention_gain,
        "rated_days": wear.rated_days(),
        "sequential_days": wear.sequential_days(),
        "relaxed_days": wear.relaxed_days(),
        "budget_years": years,
        "budget_bytes_per_day": wear.budget_bytes_per_day(years),
    }


def _text(wear: Wear, years: float) -> str:
    ratio = wear.rated_amplification / wear.own_amplification
    per_day = wear.written_bytes_per_s * 86_400
    relaxed = "flash that keeps data for a day only, which no drive on sale lets you choose"
    rows = (
        (wear.rated_days(), "by the rating, which is what a maker warrants"),
        (wear.sequential_days(), f"x {ratio:g}: the rating counts with more write amplification"),
        (wear.relaxed_days(), f"x {wear.retention_gain:g} more: {relaxed}"),
    )
    rated = f"drives rated for {wear.rated_bytes / 1e12:,.0f} TB"
    rate = f"written at {wear.written_bytes_per_s / 1e9:.3g} GB/s all day"
    budget = _shown_decimal(wear.budget_bytes_per_day(years))
    return "\n".join(
        [
            f"{rated}, {rate} ({per_day / 1e12:,.1f} TB a day)",
            *(f"{shown_days(days):>12}  {words}" for days, words in rows),
            f"{budget:>12}  a day may be written if the rating is to last for {years:g} years",
        ]
    )


def _shown_decimal(nbytes: float) -> str:
    """Return a size in the units in which makers rate drives, as the lines around it have them."""
    unit, name = (1e12, "TB") if nbytes >= 1e12 else (1e9, "GB")
    return f"{nbytes / unit:,.1f} {name}"


def shown_days(days: float) -> str:
    """Return a life as reports write it: ``"3.2 hours"``, ``"4.6 days"``, ``"2.70 years"``."""
    if days < 2:
        return f"{days * 24:.1f} hours"
    if days < 365:
        return f"{days:.1f} days"
    return f"{days / 365:,.2f} years"
