"""NVIDIA's cuFile, the library of GPUDirect Storage: where it is, and whether it works here.

Whether it works is asked in a child process that is ended after a while. Where ``/proc/modules`` is
missing, ``cuFileDriverOpen`` never returns from some versions, and a CUDA call that fails them ends
the process. The child has compatibility mode off, in which cuFile would copy through the CPU.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ssdtrain._core import __file__ as core_file

__all__ = ["Trial", "direct_bytes", "find_library", "keep_log_away", "try_out"]

NAME = "libcufile.so.0"
TIMEOUT_S = 20
"""So long the child may take; the library alone needs about a second."""
STATISTICS = Path("/proc/driver/nvidia-fs/stats")
LOG_VARIABLE = "CUFILE_LOGFILE_PATH"

CHILD = """
import signal, sys
signal.alarm(int(sys.argv[2]))  # Also if its parent is gone by then.
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
loader = ExtensionFileLoader("_core", sys.argv[1])
core = module_from_spec(spec_from_loader(loader.name, loader))
loader.exec_module(core)
library, directory, gpu, allows_compat = sys.argv[3:]
works, told = core.try_cufile(library or None, directory, int(gpu), allows_compat == "True")
print(told)
sys.exit(0 if works else 3)
"""
DOES_NOT_WORK = 3


@dataclass(frozen=True)
class Trial:
    """What came of an attempt to write and read a file by cuFile."""

    works: bool
    told: str
    """The version of cuFile, or why it does not work."""


def find_library() -> str | None:
    """Look for cuFile where the toolkit, the system or pip put it."""
    patterns = ["/usr/local/cuda/lib64", "/usr/lib/*-linux-gnu"]
    patterns += [one for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    patterns += [f"{glob.escape(one)}/nvidia/*/lib" for one in sys.path if one]
    # The module says nothing about folders that may not be looked at; pathlib raises.
    return next((path for one in patterns for path in glob.glob(f"{one}/{NAME}")), None)


def keep_log_away() -> None:
    """Keep cuFile from writing its log to the working directory, which is what it does untold."""
    os.environ.setdefault(LOG_VARIABLE, os.devnull)


@functools.cache
def try_out(directory: str, gpu: int, *, allows_compat: bool = False) -> Trial:
    """Write and read 1 MiB in ``directory`` by cuFile, in a child process; asked once each.

    With ``allows_compat`` it may go through the CPU's memory, which is no GPUDirect Storage.
    """
    library = find_library()
    if not sys.executable:
        return Trial(works=False, told="there is no interpreter for a child process that tries it")
    directory = os.path.abspath(directory)
    words = [sys.executable, "-I", "-S", "-c", CHILD, core_file, str(2 * TIMEOUT_S)]
    words += [library or "", directory, str(gpu), str(allows_compat)]
    mode = {"CUFILE_ALLOW_COMPAT_MODE": "true" if allows_compat else "false"}
    keep_log_away()
    child = subprocess.Popen(  # noqa: S603 - the words are ours
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Up to version 1.15 this decides; later ones are told by a call.
        env=os.environ | mode,
    )
    with child:
        try:
            out, err = child.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            child.kill()
            child.communicate()
            _remove_files_of(child.pid, directory)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            told = f"cuFile did not answer within {TIMEOUT_S} s"
            if not Path("/proc/modules").exists():
                told += ", as where /proc/modules is missing"
            return Trial(works=False, told=told)
    if child.returncode in (0, DOES_NOT_WORK):
        return Trial(works=child.returncode == 0, told=out.strip())
    _remove_files_of(child.pid, directory)
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    told = f"the process that tried cuFile ended with {child.returncode}: {last}"
    return Trial(works=False, told=told)


def _remove_files_of(process: int, directory: str) -> None:
    """Remove what a process that was ended left: cuFile needs a name to register a file."""
    for path in glob.glob(f"{glob.escape(directory)}/.ssdtrain-{process}-*"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def direct_bytes() -> tuple[int, int] | None:
    """Return the bytes that nvidia-fs has written and read directly, for all processes.

    ``None`` where nvidia-fs is not loaded, or does not count. Counted in whole MiB.
    """
    try:
        text = STATISTICS.read_text()
    except OSError:
        return None
    counts = [re.search(rf"\b{way}MiB=(\d+)", text) for way in ("write", "read")]
    if "IO stats: Disabled" in text or None in counts:
        return None
    written, read = (int(count[1]) << 20 for count in counts if count is not None)
    return written, read
