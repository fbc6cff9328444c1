"""`ssdtrain run [options] script.py ARGS`: runs a program inside `with ssdtrain.offload(...)`.

The block is left, and the report printed, when the interpreter ends: after the traceback of an
error, after threads that the program left behind, and after its own functions for the exit.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, get_args

from ssdtrain.commands.arguments import directory, size
from ssdtrain.commands.program import Program, ProgramError, find_module, find_script, run_program
from ssdtrain.commands.reach import reach_from
from ssdtrain.config import Backend, DirectIo, Gds, Rematerialize
from ssdtrain.errors import SsdtrainError
from ssdtrain.offload import offload
from ssdtrain.planning.policy import Policy
from ssdtrain.session import Session
from ssdtrain.stats import Stats

__all__ = ["add_arguments", "run"]

EXIT_USAGE = 2
FORMAT = 1
LAUNCHERS = frozenset(
    {
        "accelerate",
        "deepspeed",
        "torchrun",
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
        "torch.distributed.launch",
        "torch.distributed.run",
    }
)
"""Programs that train nothing themselves and start others that do."""

SIZES = {
    "min_bytes": "smaller saved tensors stay in memory (default: 256KiB)",
    "max_resident_bytes": "upper bound on the saved bytes in memory, such as 8GiB",
    "max_disk_bytes": "upper bound on the bytes on disk, such as 500GiB",
    "pinned_bytes": "memory through which a GPU's tensors go, for each GPU (default: 2GiB)",
    "max_host_bytes": "more such memory, in which GPUs' tensors may stay by plan (default: none)",
}
"""Options that are sizes, with their help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `run`; the words after the program's name are the program's."""
    parser.usage = (
        "ssdtrain run [--dir DIR] [options] SCRIPT [ARGS ...]\n"
        "       ssdtrain run [--dir DIR] [options] -m MODULE [ARGS ...]"
    )
    parser.formatter_class = Formatter
    # The program may have an option that begins like an option of this command.
    parser.allow_abbrev = False
    parser.add_argument(
        "--dir",
        action="append",
        type=directory,
        metavar="DIR",
        help="directory on the SSD to offload to; several times for several drives. Without one "
        "nothing is written: tensors are made again from others, or stay in memory of the CPU",
    )
    for name, words in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=size(name), metavar="SIZE", help=words)
    parser.add_argument(
        "--max-device-bytes",
        type=lambda given: given if given == "auto" else size("max_device_bytes")(given),
        metavar="SIZE",
        help="bound for all that torch has allocated on the GPU, such as 20GiB; or auto",
    )
    parser.add_argument("--backend", choices=get_args(Backend), help="(default: auto)")
    parser.add_argument("--direct-io", choices=get_args(DirectIo), help="(default: required)")
    parser.add_argument(
        "--gds",
        choices=get_args(Gds),
        help="GPUDirect Storage, past the CPU's memory (default: optional)",
    )
    parser.add_argument(
        "--rematerialize",
        choices=get_args(Rematerialize),
        help="make saved tensors again from others where that is cheap (default: auto)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        default=None,
        help="checksum every tensor before its write, and compare when it is read",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.json",
        help="write the figures of the report there too; with RANK in the environment "
        "FILE.rankN.json, of a child process FILE.processN.json",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE [ARGS ...]",
        help="run a module instead of a script, as `python -m` does",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the program and its arguments"
    )


class Formatter(argparse.HelpFormatter):
    """Shows the metavar of the rest of the line, where argparse shows dots."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action.metavar, str) and action.nargs == argparse.REMAINDER:
            return action.metavar
        return super()._format_args(action, default_metavar)


def run(arguments: argparse.Namespace) -> int:
    """Run the program; it ends as it would under Python alone."""
    names = [*SIZES, "max_device_bytes", "backend", "direct_io", "gds", "rematerialize", "verify"]
    given = {name: getattr(arguments, name) for name in names}
    options = {name: value for name, value in given.items() if value is not None}
    report = None if arguments.report is None else arguments.report.absolute()
    try:
        _check_report(report)
        tool = offload(arguments.dir, **options)
        program = _find(arguments)
        job = Job(program=program.name, dirs=arguments.dir, options=options, report=report)
        _say_if_launcher(program.name)
        _enter(tool, job)
    except (ProgramError, SsdtrainError) as error:
        _say(f"ssdtrain run: {error}")
        return EXIT_USAGE
    run_program(program)
    return 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of the command; plain data, which child processes get too."""

    program: str
    dirs: list[str] | None
    """Absolute: the program may change its directory before it starts a child process."""
    options: dict[str, Any]
    report: Path | None


class Ending:
    """Makes the report of a process once, when the process ends."""

    def __init__(self, job: Job, session: Session, *, is_child: bool) -> None:
        self._job = job
        self._session = session
        self._process = os.getpid()
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", ""))
        # Launchers other than torch's may use these names for something else.
        self._rank = int(rank) if rank.isdecimal() else None
        self._is_child = is_child
        self.is_over = False

    def tell(self) -> None:
        """Print the report and write it to its file; do nothing in a forked process."""
        if self.is_over or os.getpid() != self._process:
            return
        self.is_over = True
        stats = self._session.stats
        name = self._job.program
        name += "" if self._rank is None else f", rank {self._rank}"
        name += f", process {self._process}" if self._is_child else ""
        _say(f"ssdtrain run: {name}\n{self._session}")
        path = self._path()
        if path is None:
            return
        try:
            path.write_text(json.dumps(self._document(stats), indent=1) + "\n")
        except OSError as error:
            _say(f"ssdtrain run: the report could not be written: {error}")

    def _path(self) -> Path | None:
        path = self._job.report
        if path is None:
            return None
        suffix = "" if self._rank is None else f".rank{self._rank}"
        suffix += f".process{self._process}" if self._is_child else ""
        return path.with_name(f"{path.stem}{suffix}{path.suffix}")

    def _document(self, stats: Stats) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "program": self._job.program,
            "process": self._process,
            "rank": self._rank,
            "dirs": self._job.dirs,
            **stats.as_dict(),
        }


def _enter(tool: offload, job: Job) -> None:
    """Enter the block until the interpreter ends, also in new threads and child processes."""
    session = tool.__enter__()
    ending = Ending(job, session, is_child=False)

    def end() -> None:
        # A forked process inherits this function, and not the block.
        if os.getpid() == process:
            try:
                tool.__exit__(None, None, None)
            finally:
                ending.tell()

    def context() -> AbstractContextManager[object]:
        return nullcontext() if ending.is_over else session.context()

    process = os.getpid()
    atexit.register(end)
    reach_from(context, partial(_open_in_child, job))


def _open_in_child(job: Job) -> tuple[Session, Callable[[], None]]:
    """Open a session in a child process; return it with the function that makes its report."""
    config = offload(job.dirs, **job.options)._config  # noqa: SLF001 - of the parent
    session = Session(config, Policy(config.max_host_bytes or 0))
    ending = Ending(job, session, is_child=True)

    def end() -> None:
        if not ending.is_over:
            session.close()
            ending.tell()

    return session, end


def _find(arguments: argparse.Namespace) -> Program:
    if arguments.module is not None:
        # Where `--` follows the module, the parser counts the rest as the script's words.
        words = [*arguments.module, *arguments.program]
        if not words:
            raise ProgramError("-m needs the name of a module")
        return find_module(words[0], words[1:])
    if not arguments.program:
        raise ProgramError("name the script to run: ssdtrain run --dir DIR script.py ARGS")
    return find_script(arguments.program[0], arguments.program[1:])


def _check_report(path: Path | None) -> None:
    """Raise now if the report could not be written after hours of training."""
    if path is None:
        return
    if path.is_dir():
        raise ProgramError(f"--report {path} is a directory; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise ProgramError(
            f"--report {path}: {path.parent} is not a directory that can be written to; name a "
            "file in one that is"
        )


def _say_if_launcher(name: str) -> None:
    if name in LAUNCHERS or os.path.basename(name) in LAUNCHERS:
        _say(
            f"ssdtrain run: {name} starts other programs, which train without ssdtrain then; put "
            "it the other way round: torchrun OPTIONS --no-python ssdtrain run --dir DIR "
            "script.py, or accelerate launch OPTIONS --no_python ssdtrain run --dir DIR script.py"
        )


def _say(words: str) -> None:
    """Print to stderr, or nowhere if that is closed: stdout is the program's."""
    stream: TextIO | None = sys.stderr
    if stream is not None and not stream.closed:
        print(words, file=stream, flush=True)
