"""`ssdtrain doctor DIR`: says whether offload works in a directory, and what mends what does not.

The output is made for a person and for a report of a bug; `--json` tells the same to a program.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib.metadata import version

from ssdtrain.commands.checks import Examination
from ssdtrain.commands.system import Check
from ssdtrain.config import directories
from ssdtrain.errors import ConfigError

__all__ = ["add_arguments", "run"]

EXIT_USABLE = 0
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("dir", type=_directory, metavar="DIR", help="directory to offload to")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    examination = Examination(arguments.dir)
    checks = []
    if not arguments.json:
        print(f"ssdtrain {version('ssdtrain')}, doctor of {arguments.dir}")
    for check in examination.checks():
        checks.append(check)
        if not arguments.json:
            print(_text(check), flush=True)
    failed = [check for check in checks if check.state == "FAIL"]
    if arguments.json:
        rates = None if examination.rates is None else asdict(examination.rates)
        document = {
            "format": 1,
            "ssdtrain": version("ssdtrain"),
            "directory": arguments.dir,
            "usable": not failed,
            "checks": [asdict(check) for check in checks],
            "rates": rates,
        }
        print(json.dumps(document, indent=1))
    else:
        print(_verdict(arguments.dir, checks))
    return EXIT_FAILED if failed else EXIT_USABLE


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


def _directory(text: str) -> str:
    try:
        return directories(text)[0]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
