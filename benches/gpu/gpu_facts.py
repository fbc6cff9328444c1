"""Step of `benches/gpu_check.py`: what this machine is, and which ssdtrain is installed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import ssdtrain
from gpu_found import Found, run_step, step_parser
from ssdtrain.commands.gpu import gpu_checks, gpu_facts
from ssdtrain.demo.machine import machine_facts

SOURCES = Path(__file__).resolve().parents[2] / "python" / "ssdtrain"


def look(_options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Note the facts."""
    machine, gpu = machine_facts(folder) | {"directory": None}, gpu_facts()
    for name, fact in machine.items():
        if fact is not None:
            found.note(name, fact)
    found.figures["gpu"] = asdict(gpu)
    found.rows += [(check.name, check.finding) for check in gpu_checks(gpu)]
    found.note("ssdtrain", version("ssdtrain"))
    installed = Path(ssdtrain.__file__).parent
    changed = [
        path.relative_to(SOURCES).as_posix()
        for path in sorted(SOURCES.rglob("*.py"))
        if not (installed / path.relative_to(SOURCES)).is_file()
        or (installed / path.relative_to(SOURCES)).read_bytes() != path.read_bytes()
    ]
    found.note("is_of_this_checkout", not changed)
    if changed:
        found.fail(
            f"the installed ssdtrain is not that of this checkout ({len(changed)} files differ, "
            f"such as {changed[0]}); install its wheel"
        )


if __name__ == "__main__":
    sys.exit(run_step(look, step_parser(__doc__).parse_args()))
