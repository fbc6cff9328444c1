"""Fresh processes of one benchmark that take turns, so that all of them see the same machine.

The parent writes a line to a process for what it wants, and gets a line of JSON for it. A process
is the benchmark itself, called with `--child WAY` and a directory that all of them share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ssdtrain.demo import without
from ssdtrain.demo.machine import machine_facts


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks of this kind have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, help="a directory on a local file system (default: a new one here)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser


class Child:
    """A way's process, seen from the parent."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        is_without: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; with `is_without` it never imports ssdtrain."""
        self.name = name
        self._process = without.start(
            *arguments, is_without=is_without, environ=environ, stdin=subprocess.PIPE
        )
        self.pid = self._process.pid

    def tell(self, what: str) -> None:
        """Give it a line, whose answer `hear` waits for."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(what + "\n")
        stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for its answer."""
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name!r} ended; its last words are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str) -> dict[str, Any]:
        """Have it answer a line."""
        self.tell(what)
        return self.hear()

    def end(self) -> None:
        """Close its input, at which it ends."""
        self._process.communicate()


@contextmanager
def started(
    ways: Iterable[tuple[str, str]],
    script: str,
    arguments: list[str],
    place: Path | None,
    *,
    without_name: str | None = None,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[tuple[list[Child], Path]]:
    """Start a process for each way, given by its name and by what follows `--child`.

    The process of the way `without_name` never imports ssdtrain, like a program that does not use
    it. `environments` are those of processes, by name. Yields the processes, and the directory that
    they write to: a new one in `place`, or here.
    """
    with (
        tempfile.TemporaryDirectory(dir=place or Path.cwd()) as directory,
        ExitStack() as stack,
    ):
        children = []
        for name, way in ways:
            words = [script, *arguments, "--dir", directory, "--child", way]
            environ = None if environments is None else environments.get(name)
            child = Child(name, words, is_without=name == without_name, environ=environ)
            stack.callback(child.end)
            children.append(child)
        yield children, Path(directory)


def answer(answer_to: Callable[[str], dict[str, Any]]) -> None:
    """Answer each line of standard input, on the side of a child, until there are no more."""
    for line in sys.stdin:
        print(json.dumps(answer_to(line.strip())), flush=True)


def ratio(those: list[float], others: list[float]) -> float:
    """Return the median of the ratios, pair by pair."""
    return statistics.median(map(float.__truediv__, those, others))


def write_record(options: argparse.Namespace, asked: Iterable[str], found: dict[str, Any]) -> None:
    """Write what was found to the file of `--json`, with the date, the machine and the options."""
    if options.json is None:
        return
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine_facts(options.dir) | {"directory": None},
        **{name: getattr(options, name) for name in asked},
        **found,
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")
