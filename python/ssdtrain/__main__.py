"""`python -m ssdtrain COMMAND`: finds the command and hands over to it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Protocol

from ssdtrain.demo import command as demo

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(Protocol):
    """What a module offers to be a command."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit code."""
        ...


COMMANDS: dict[str, Command] = {"demo": demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named, or show what there is."""
    parser = argparse.ArgumentParser(
        prog="python -m ssdtrain",
        description="Trains with the activations on NVMe SSDs instead of in memory.",
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(own)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return COMMANDS[chosen.command].run(chosen)


if __name__ == "__main__":
    sys.exit(main())
