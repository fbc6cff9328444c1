"""`python -m ssdtrain demo`: reads the options, runs the modes, tells the result."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ssdtrain.commands.arguments import size
from ssdtrain.demo import picture, report, summary, whole, whole_report
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.options import DTYPE_NAMES, MODEL_NAMES, MODES, Mode, TrainingOptions
from ssdtrain.demo.runner import Progress, run_all
from ssdtrain.errors import SsdtrainError
from ssdtrain.sizes import shown_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_DIRECTORY = Path("ssdtrain-demo")

WHOLE_LAYERS = 16
WHOLE_BATCH = 1
WHOLE_MEMORY = 640 << 20
"""What `--whole` trains by default needs six times as much."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""What shells expect of a command that ended with Ctrl-C: 128 and the number of SIGINT."""


class UsageError(Exception):
    """What was asked for cannot be done; the message says what, where, why and what next."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    defaults = TrainingOptions()
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory on the SSD to offload to (default: ./ssdtrain-demo, made and removed)",
    )

    def number(name: str, kind: type[int | float], default: object, text: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, help=f"{text} (default: {default})", metavar="N"
        )

    number("--steps", int, defaults.steps, "timed steps of each run")
    number("--repeats", int, 3, "fresh processes for each mode")
    parser.add_argument(
        "--model",
        choices=MODEL_NAMES,
        default=defaults.model,
        help="gpt (default) is plain PyTorch; the others are from transformers, untrained",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help=f"transformer blocks of each stack (default: {defaults.layers}, "
        f"{WHOLE_LAYERS} with --whole)",
    )
    number("--hidden", int, defaults.hidden, "width, a multiple of 64")
    number("--sequence", int, defaults.sequence, "bytes of text in one sequence")
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help=f"sequences in one step (default: {defaults.batch}, {WHOLE_BATCH} with --whole)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        default=defaults.dtype,
        help=f"bfloat16 computes under autocast (default: {defaults.dtype})",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        metavar="P",
        help="probability (default: 0 for gpt, 0.1 for the others)",
    )
    number("--seed", int, defaults.seed, "of weights, dropout and choice of text")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text to train on (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--max-resident-bytes",
        type=size("max_resident_bytes"),
        metavar="SIZE",
        help="upper bound on the saved bytes that offload leaves in memory, such as 2GiB "
        "(default: none)",
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        default=MODES,
        help="comma-separated, of plain, keep, recompute and offload (default: all four)",
    )
    _add_whole(parser)
    _add_files(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    for name, default, what in (
        ("--json", "demo.json", "file for all figures"),
        ("--picture", "demo.png", "file for the picture of memory over time"),
    ):
        parser.add_argument(
            name,
            type=Path,
            metavar="PATH",
            help=f"{what} ({default}, demo-whole.{default[5:]} with --whole)",
        )


def _add_whole(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--whole",
        action="store_true",
        help="train gpt with AdamW in little memory: weights, state and activations on the disk",
    )
    parser.add_argument(
        "--memory",
        type=size("memory"),
        default=WHOLE_MEMORY,
        metavar="SIZE",
        help="with --whole, memory for training above what the libraries take "
        f"(default: {shown_bytes(WHOLE_MEMORY)})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code."""
    _complete(arguments)
    try:
        options = _options(arguments)
        _check(arguments)
    except (UsageError, ValueError) as error:
        print(f"ssdtrain demo: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with _directory(arguments) as directory:
            if arguments.whole:
                assert directory is not None, "offload is among the modes"
                return _run_whole(replace(options, directory=str(directory)), arguments)
            return _run_and_tell(options, directory, arguments)
    except KeyboardInterrupt:
        print("ssdtrain demo: interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UsageError as error:
        print(f"ssdtrain demo: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run_and_tell(
    options: TrainingOptions, directory: Path | None, arguments: argparse.Namespace
) -> int:
    modes: Sequence[Mode] = arguments.modes
    options = replace(options, directory=None if directory is None else str(directory))
    progress = Progress(sys.stderr, repeats=arguments.repeats, timed_count=options.steps)
    runs = run_all(options, modes, repeats=arguments.repeats, progress=progress)
    result = report.Report(
        options=options,
        repeats=arguments.repeats,
        machine=machine_facts(directory),
        runs=runs,
        summaries=[summary.summarise(runs, mode, options.tokens_per_step) for mode in modes],
        comparison=summary.compare(runs),
    )
    # The table first: it must not be lost to a full disk or a broken matplotlib.
    print(f"\n{report.render(result)}\n", flush=True)
    report.write_json(result, arguments.json)
    print(f"figures: {arguments.json}")
    title = f"Saved tensors over one training step: {options.model}, {options.dtype}"
    try:
        picture.draw(runs, title, arguments.picture)
        print(f"picture: {arguments.picture}")
    except picture.PictureUnavailableError as error:
        print(error)
    return 0 if result.succeeded else EXIT_FAILED


def _run_whole(options: TrainingOptions, arguments: argparse.Namespace) -> int:
    try:
        result = whole.run_whole(whole.options_of(options, arguments.memory), sys.stderr)
    except whole.TooLittleMemoryError as error:
        raise UsageError(str(error)) from error
    print(f"\n{whole_report.render(result)}\n", flush=True)
    whole_report.write_json(result, arguments.json)
    print(f"figures: {arguments.json}")
    try:
        whole_report.draw(result, arguments.picture)
        print(f"picture: {arguments.picture}")
    except picture.PictureUnavailableError as error:
        print(error)
    return 0 if result.succeeded else EXIT_FAILED


def _complete(arguments: argparse.Namespace) -> None:
    """Put in the defaults that depend on --whole."""
    defaults = TrainingOptions()
    name = "demo-whole" if arguments.whole else "demo"
    for option, value in (
        ("layers", WHOLE_LAYERS if arguments.whole else defaults.layers),
        ("batch", WHOLE_BATCH if arguments.whole else defaults.batch),
        ("json", Path(f"{name}.json")),
        ("picture", Path(f"{name}.png")),
    ):
        if getattr(arguments, option) is None:
            setattr(arguments, option, value)


def _options(arguments: argparse.Namespace) -> TrainingOptions:
    return TrainingOptions(
        model=arguments.model,
        layers=arguments.layers,
        hidden=arguments.hidden,
        sequence=arguments.sequence,
        batch=arguments.batch,
        dtype=arguments.dtype,
        dropout=arguments.dropout,
        steps=arguments.steps,
        seed=arguments.seed,
        data=None if arguments.data is None else str(arguments.data),
        max_resident_bytes=arguments.max_resident_bytes,
    )


def _modes(text: str) -> tuple[Mode, ...]:
    """Parse `--modes`; plain and keep come first, so that all others can be held against them."""
    asked = {name.strip() for name in text.split(",")}
    unknown = sorted(asked.difference(MODES))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(MODES)}"
        )
    return tuple(mode for mode in MODES if mode in asked)


def _check(arguments: argparse.Namespace) -> None:
    """Find out now what would otherwise fail after minutes of training."""
    if arguments.whole and (
        arguments.model != "gpt"
        or arguments.dtype != "float32"
        or arguments.dropout
        or arguments.modes != MODES
        or arguments.max_resident_bytes is not None
    ):
        raise UsageError(
            "--whole trains gpt in float32 without dropout, with all on the disk: leave out "
            "--model, --dtype, --dropout, --modes and --max-resident-bytes"
        )
    if arguments.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, it is {arguments.repeats}")
    for option, path in (("--json", arguments.json), ("--picture", arguments.picture)):
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory; name a file in it")
        folder = path.absolute().parent
        if not os.access(folder, os.W_OK):
            raise UsageError(
                f"{option} {path}: {folder} is not a directory that can be written to; "
                "name a file in one that is"
            )
    pictures = (".png", ".svg", ".pdf")
    if arguments.picture.suffix not in pictures:
        raise UsageError(f"--picture {arguments.picture}: end its name in one of {pictures}")
    readable = arguments.data is None or (
        os.path.isfile(arguments.data) and os.access(arguments.data, os.R_OK)
    )
    if not readable:
        raise UsageError(f"--data {arguments.data}: there is no file that can be read; name one")
    if arguments.model != "gpt" and importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"--model {arguments.model} needs Hugging Face transformers: install it with "
            "`pip install 'ssdtrain[transformers]'`, or leave --model out"
        )


@contextmanager
def _directory(arguments: argparse.Namespace) -> Iterator[Path | None]:
    """Provide the place to offload to, and leave nothing behind that was not there before."""
    if "offload" not in arguments.modes:
        yield None
        return
    own = arguments.dir is None
    directory: Path = DEFAULT_DIRECTORY if own else arguments.dir
    if own:
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make {directory.absolute()}: {error.strerror}; name a directory on the "
                "SSD to offload to with --dir"
            ) from error
    try:
        _check_directory(directory)
        yield directory
    finally:
        left = sorted(path.name for path in directory.iterdir()) if own else []
        if left:
            print(
                f"{directory.absolute()} is not empty and stays: {', '.join(left[:5])}",
                file=sys.stderr,
            )
        elif own:
            directory.rmdir()


def _check_directory(directory: Path) -> None:
    """Let the library itself refuse a bad place at once: offload is the last mode to start."""
    import ssdtrain  # noqa: PLC0415 (only offload needs it)

    try:
        with ssdtrain.offload(directory):
            pass
    except (OSError, SsdtrainError) as error:
        raise UsageError(str(error)) from error
