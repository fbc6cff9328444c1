"""`ssdtrain COMMAND`, or `python -m ssdtrain COMMAND`: imports the command's module and runs it."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

ALIKE_MIN = 0.8
"""An unknown option that is so like a known option (1: equal) is taken for a misspelling."""
EXIT_UNREAD = 128 + 13
"""The code of a program that SIGPIPE ends."""

COMMANDS = {
    "bench": (
        "ssdtrain.commands.bench",
        "find the setting that suits a drive best, and keep it for the store",
    ),
    "demo": (
        "ssdtrain.demo.command",
        "train a small model under keep, recompute and offload, and compare time, memory and bits",
    ),
    "doctor": (
        "ssdtrain.commands.doctor",
        "check whether offload works in directories, and name remedies",
    ),
    "lifespan": (
        "ssdtrain.commands.lifespan",
        "compute how long drives last under the writes of a training",
    ),
    "plan": (
        "ssdtrain.commands.plan",
        "say whether a model's training step fits a GPU, and what each way costs",
    ),
    "run": (
        "ssdtrain.commands.run",
        "run a program with its saved tensors offloaded, and report at its end",
    ),
}
"""The module of each command, with `add_arguments` and `run`, and its summary.

It is imported when the command is called: `doctor` must run where the others cannot be imported.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a single line, without the names of all options."""

    def error(self, message: str) -> NoReturn:
        """End with the exit code of wrong usage."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help tells the options)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named, or print the list of commands."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # A program under `run` gets its streams as Python made them.
    if words[:1] != ["run"]:
        _prepare_streams()
    parser = _Parser(
        prog="ssdtrain",
        description="Trains with the activations on NVMe SSDs instead of in memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ssdtrain {version('ssdtrain')}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        own = commands.add_parser(name, help=summary, description=summary)
        # The options of the main parser end it, so a command is the first word.
        if words[:1] == [name]:
            import_module(module).add_arguments(own)
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        asked = commands.choices.get(chosen.command, parser)
        hint = _hint(unknown[0].partition("=")[0], asked, chosen.command)
        asked.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if chosen.command is None:
        parser.print_help()
        return 0
    command: Any = import_module(COMMANDS[chosen.command][0])
    if chosen.command == "run":
        return int(command.run(chosen))
    try:
        code: int = command.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        # Python flushes the rest at its end, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return code


def _prepare_streams() -> None:
    """Have both streams take any text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The parent has closed it: output for stderr would go to the other file.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - to the end
        stream = getattr(sys, name)
        # A path may hold bytes that are no text: print them escaped instead of failing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _hint(option: str, asked: argparse.ArgumentParser, command: str) -> str:
    """Return what to do about an option that a command does not know."""
    # Python's options have underscores, those of a command line hyphens.
    ours = option.replace("_", "-")
    known = asked._option_string_actions  # noqa: SLF001 - no public name
    alike = [ours] if ours in known else get_close_matches(ours, known, n=1, cutoff=ALIKE_MIN)
    # Options cannot be abbreviated, as a script may have options that begin alike.
    alike = alike or [name for name in known if name.startswith(f"{ours}-")]
    if len(alike) == 1:
        return f"; it is written {alike[0]} here"
    if command != "run":
        return ""
    return (
        "; options of your script come after its name: ssdtrain run --dir DIR [options] SCRIPT "
        f"{option} ..."
    )


def _is_reader_gone() -> bool:
    """Return whether nobody reads the output any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are told in any case
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
