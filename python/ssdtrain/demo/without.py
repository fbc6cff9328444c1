"""Runs a module or a script of this project as a program that never imports ssdtrain.

The plain program, with which others are compared, must not switch on torch's huge pages, as the
import does. So it is started as this file, by its path, which replaces `ssdtrain` by an empty
package: `ssdtrain.demo.models` can be imported, `ssdtrain/__init__.py` does not run.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

__all__ = ["command", "environment", "output_of", "start"]


def start(
    program: str,
    *words: str,
    is_without: bool,
    environ: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> subprocess.Popen[str]:
    """Start a module, or a script by its path, in a fresh process whose output is read.

    With `is_without` the process never imports ssdtrain.
    """
    with_ssdtrain = [sys.executable, *([] if program.endswith(".py") else ["-m"]), program, *words]
    return subprocess.Popen(
        command(program, *words) if is_without else with_ssdtrain,
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment() if environ is None and is_without else environ,
    )


def output_of(program: str, *words: str, is_without: bool, environ: Mapping[str, str]) -> str:
    """Run a program as `start` does, wait for its end, and return its output.

    Raises:
        CalledProcessError: Its exit code is not 0.

    """
    with start(program, *words, is_without=is_without, environ=environ) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return output


def command(program: str, *words: str) -> list[str]:
    """Return the command that runs a module, or a script by its path, without ssdtrain."""
    return [sys.executable, "-P", __file__, program, *words]


def environment() -> dict[str, str]:
    """Return this process's environment without the variable that `import ssdtrain` sets."""
    from ssdtrain.machine.huge_pages import SWITCH  # noqa: PLC0415 - not where `main` runs

    return {name: value for name, value in os.environ.items() if name != SWITCH}


def main(words: list[str]) -> None:
    """Run a module, or a script if it is a path."""
    package = ModuleType("ssdtrain")
    package.__path__ = [str(Path(__file__).parents[1])]
    # With None there, an import raises ModuleNotFoundError.
    sys.modules |= {"ssdtrain": package, "ssdtrain._core": None}  # type: ignore[dict-item]
    program, *_ = sys.argv = words
    if program.endswith(".py"):
        # As for any script: modules beside it can be imported.
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
