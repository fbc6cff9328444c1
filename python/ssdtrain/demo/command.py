"""`ssdtrain demo`: reads the options, runs the modes, and writes table, figures and picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ssdtrain
from ssdtrain.commands.arguments import size
from ssdtrain.demo import report
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.options import (
    DTYPE_NAMES,
    MODEL_NAMES,
    MODES,
    OTHER_BYTES,
    WHOLE_MODES,
    TrainingOptions,
)
from ssdtrain.demo.runner import run_all
from ssdtrain.errors import ConfigError, SsdtrainError
from ssdtrain.sizes import shown_bytes

SIZES = {
    "steps": (3, 3, "timed steps of each process"),
    "repeats": (3, 1, "fresh processes for each mode"),
    "layers": (8, 16, "transformer blocks of each stack"),
    "hidden": (1024, 1024, "width, a multiple of 64"),
    "sequence": (512, 512, "bytes of text in a sequence"),
    "batch": (2, 1, "sequences in a step"),
}
"""By option: the default, the default with ``--whole``, and the help."""
WHOLE_MEMORY = 640 << 20
"""All tensors that `--whole` trains with by default are six times as large."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells expect after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""

    def add(name: str, words: str, **more: Any) -> None:
        parser.add_argument(name, help=words, **more)

    add("--dir", "directory on the SSD (default: .)", type=Path, default=Path())
    words = "gpt (default) is plain PyTorch; the others are from transformers, untrained"
    add("--model", words, choices=MODEL_NAMES, default="gpt")
    for name, (default, default_whole, words) in SIZES.items():
        more = "" if default == default_whole else f", {default_whole} with --whole"
        add(f"--{name}", f"{words} (default: {default}{more})", type=int, metavar="N")
    words = "bfloat16 computes under autocast (default: float32)"
    add("--dtype", words, choices=DTYPE_NAMES, default="float32")
    words = "text to train on (default: the sources of Python's standard library)"
    add("--data", words, metavar="FILE")
    words = "train gpt with AdamW in little memory: weights, state and activations on the disk"
    add("--whole", words, action="store_true")
    words = "with --whole, memory for training, above that of the libraries"
    words += f" (default: {shown_bytes(WHOLE_MEMORY)})"
    add("--memory", words, type=size("memory"), default=WHOLE_MEMORY, metavar="SIZE")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, write its files into the current directory, and return the exit code."""
    stem = "demo-whole" if arguments.whole else "demo"
    try:
        for name, defaults in SIZES.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, defaults[arguments.whole])
        _check(arguments)
        with TemporaryDirectory(prefix="ssdtrain-demo-", dir=arguments.dir) as directory:
            # The library itself refuses a bad place at once: offload is the last mode to start.
            with ssdtrain.offload(directory):
                pass
            options = _options(arguments, directory)
            modes, repeats = WHOLE_MODES if arguments.whole else MODES, arguments.repeats
            runs = run_all(options, modes, repeats)
            found = report.document(options, modes, repeats, machine_facts(arguments.dir), runs)
    except KeyboardInterrupt:
        print("ssdtrain demo: interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OSError, SsdtrainError) as error:
        print(f"ssdtrain demo: {error}", file=sys.stderr)
        return EXIT_USAGE
    # The table first: it must not be lost to a full disk or a broken matplotlib.
    print(f"\n{report.render(found)}\n", flush=True)
    Path(f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {stem}.json")
    try:
        report.draw(found, Path(f"{stem}.png"))
        print(f"picture: {stem}.png")
    except ImportError as error:
        print(f"no picture: {error}; matplotlib comes with: pip install 'ssdtrain[demo]'")
    return 0 if report.succeeded(found) else EXIT_FAILED


def _check(arguments: argparse.Namespace) -> None:
    """Raise now for options that would fail after minutes of training."""
    if arguments.whole and (arguments.model != "gpt" or arguments.dtype != "float32"):
        raise ConfigError("--whole trains gpt in float32: leave out --model and --dtype")
    if arguments.whole and arguments.memory <= OTHER_BYTES:
        raise ConfigError(
            f"--memory {shown_bytes(arguments.memory)}: {shown_bytes(OTHER_BYTES)} of it are for "
            "code and threads, and the rest for tensors; give more"
        )
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, it is {arguments.repeats}")
    if not os.access(".", os.W_OK):
        raise ConfigError("the current directory cannot be written to; figures are written there")
    if arguments.data is not None and not os.access(arguments.data, os.R_OK):
        raise ConfigError(f"--data {arguments.data}: there is no file that can be read; name one")
    if arguments.model != "gpt" and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"--model {arguments.model} needs Hugging Face transformers: install it with "
            "`pip install 'ssdtrain[transformers]'`, or leave --model out"
        )


def _options(arguments: argparse.Namespace, directory: str) -> TrainingOptions:
    names = ("model", "layers", "hidden", "sequence", "batch", "dtype", "steps", "data")
    return TrainingOptions(
        **{name: getattr(arguments, name) for name in names},
        directory=directory,
        given_bytes=arguments.memory if arguments.whole else None,
    )
