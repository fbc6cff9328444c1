"""`ssdtrain doctor DIR...`: checks whether offload works in directories, and suggests remedies.

The output is for a person and for a report of a bug; `--json` prints the same for a program.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from ssdtrain.commands.arguments import directory
from ssdtrain.commands.checks import Examination
from ssdtrain.commands.system import Check

__all__ = ["add_arguments", "run"]

EXIT_USABLE = 0
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument(
        "dir", nargs="+", type=directory, metavar="DIR", help="directory to offload to"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    documents = []
    for number, path in enumerate(arguments.dir):
        if number and not arguments.json:
            print()
        documents.append(_examine(path, prints=not arguments.json))
    if arguments.json:
        # A single directory is an object, several are a list of such objects.
        several = {"format": 1, "directories": documents}
        print(json.dumps(documents[0] if len(documents) == 1 else several, indent=1))
    return EXIT_USABLE if all(document["usable"] for document in documents) else EXIT_FAILED


def _examine(directory: str, *, prints: bool) -> dict[str, Any]:
    """Check a directory, and print each result as it comes; return all for JSON."""
    examination = Examination(directory)
    checks = []
    if prints:
        print(f"ssdtrain {version('ssdtrain')}, doctor of {directory}")
    for check in examination.checks():
        checks.append(check)
        if prints:
            print(_text(check), flush=True)
    if prints:
        print(_verdict(directory, checks), flush=True)
    return {
        "format": 1,
        "ssdtrain": version("ssdtrain"),
        "directory": directory,
        "usable": all(check.state != "FAIL" for check in checks),
        "checks": [asdict(check) for check in checks],
        "rates": None if examination.rates is None else asdict(examination.rates),
        "gpu": None if examination.gpu is None else asdict(examination.gpu),
    }


def _text(check: Check) -> str:
    line = f"{check.state:<4}  {check.name:<16}  {check.finding}"
    if check.state in {"WARN", "FAIL"} and check.remedy is not None:
        line += f"\n{'':24}try: {check.remedy}"
    return line


def _verdict(directory: str, checks: list[Check]) -> str:
    failed = [check.name for check in checks if check.state == "FAIL"]
    warned = [check.name for check in checks if check.state == "WARN"]
    if failed:
        return f"Offload does not work in {directory}: mend {', '.join(failed)}."
    if warned:
        return f"Offload works in {directory}; it could be better, see: {', '.join(warned)}."
    return f"Offload works in {directory}."
