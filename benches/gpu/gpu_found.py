"""What a step of `benches/gpu_check.py` found: figures for a program, rows for a person, failures.

Each step is a program of its own: it prints its rows, and with `--json FILE` writes all there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LABEL_COLUMNS = 34


@dataclass
class Found:
    """Filled by a step while it looks."""

    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def note(self, name: str, figure: Any, shown: str | None = None) -> None:
        """Add a figure, and a row that shows it."""
        self.figures[name] = figure
        self.rows.append((name.replace("_", " "), str(figure) if shown is None else shown))

    def fail(self, what: str) -> None:
        """Add a failure, in a sentence that says what and where."""
        self.failures.append(what)

    def text(self) -> str:
        """Lay the rows and failures out for a person."""
        lines = [f"  {label:<{LABEL_COLUMNS}} {shown}" for label, shown in self.rows]
        return "\n".join([*lines, *(f"  FAILED: {one}" for one in self.failures)])


def step_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all steps have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, help="a directory on a local file system (default: a new one here)"
    )
    parser.add_argument("--json", type=Path, help="write what was found here too")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test, not of a GPU")
    return parser


def run_step(look: Callable[[argparse.Namespace, Path, Found], None], options: Any) -> int:
    """Look, print, and return the exit code: 1 if anything failed.

    The step gets a new folder in `--dir`, which goes with it.
    """
    found = Found()
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd(), prefix="gpu-") as folder:
        try:
            look(options, Path(folder), found)
        except Exception as error:  # noqa: BLE001 - a step that ends early tells what it has
            traceback.print_exc()
            found.fail(f"{type(error).__name__}: {error}")
    print(found.text(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 1 if found.failures else 0
