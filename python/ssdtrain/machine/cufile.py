"""Finds NVIDIA's cuFile, the library of GPUDirect Storage, and tries it in a child process.

The child is killed after a while: without ``/proc/modules``, ``cuFileDriverOpen`` of some versions
never returns, and a CUDA call that fails in it ends the process. The child switches compatibility
mode off, in which cuFile would copy through the CPU.
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
"""Time for the child; the library alone needs about a second."""
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
works, message = core.try_cufile(library or None, directory, int(gpu), allows_compat == "True")
print(message)
sys.exit(0 if works else 3)
"""
DOES_NOT_WORK = 3


@dataclass(frozen=True)
class Trial:
    """The result of an attempt to write and read a file by cuFile."""

    works: bool
    message: str
    """The version of cuFile, or why it does not work."""


def find_library() -> str | None:
    """Return the path of cuFile in the folders of the toolkit, the system or pip."""
    patterns = ["/usr/local/cuda/lib64", "/usr/lib/*-linux-gnu"]
    patterns += [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    patterns += [f"{glob.escape(folder)}/nvidia/*/lib" for folder in sys.path if folder]
    # `glob` skips folders that may not be read; pathlib raises.
    return next((path for folder in patterns for path in glob.glob(f"{folder}/{NAME}")), None)


def keep_log_away() -> None:
    """Keep cuFile from writing its log to the working directory, which is its default."""
    os.environ.setdefault(LOG_VARIABLE, os.devnull)


@functools.cache
def try_out(directory: str, gpu: int, *, allows_compat: bool = False) -> Trial:
    """Write and read 1 MiB in ``directory`` by cuFile, in a child process; results are cached.

    With ``allows_compat`` the bytes may go through the CPU's memory, without GPUDirect Storage.
    """
    library = find_library()
    if not sys.executable:
        return Trial(works=False, message="there is no Python interpreter that could try it")
    directory = os.path.abspath(directory)
    words = [sys.executable, "-I", "-S", "-c", CHILD, core_file, str(2 * TIMEOUT_S)]
    words += [library or "", directory, str(gpu), str(allows_compat)]
    mode = {"CUFILE_ALLOW_COMPAT_MODE": "true" if allows_compat else "false"}
    keep_log_away()
    child = subprocess.Popen(  # noqa: S603 - a fixed command
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Versions up to 1.15 read this; later ones are set by a call.
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
            message = f"cuFile did not answer within {TIMEOUT_S} s"
            if not Path("/proc/modules").exists():
                message += ", as where /proc/modules is missing"
            return Trial(works=False, message=message)
    if child.returncode in (0, DOES_NOT_WORK):
        return Trial(works=child.returncode == 0, message=out.strip())
    _remove_files_of(child.pid, directory)
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    message = f"the process that tried cuFile ended with {child.returncode}: {last}"
    return Trial(works=False, message=message)


def _remove_files_of(process: int, directory: str) -> None:
    """Remove files of a process that was killed: cuFile needs a name to register a file."""
    for path in glob.glob(f"{glob.escape(directory)}/.ssdtrain-{process}-*"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def direct_bytes() -> tuple[int, int] | None:
    """Return the bytes that nvidia-fs has written and read directly, for all processes.

    It counts whole MiB. Return ``None`` where it is not loaded, or does not count.
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
