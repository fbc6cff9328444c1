"""The checks of `ssdtrain doctor` on any machine: kernel, torch, huge pages, limits."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssdtrain.errors import SsdtrainError
from ssdtrain.sizes import shown_bytes

__all__ = [
    "Check",
    "State",
    "huge_pages",
    "io_uring_remedy",
    "kernel",
    "limits",
    "torch_huge_pages",
    "torch_version",
]

State = Literal["OK", "WARN", "FAIL", "SKIP"]
"""``SKIP``: not checked, because an earlier check failed."""

MIB = 1 << 20
FILE_SIZE_MIN = 64 * MIB
"""A store's file grows in steps of at least this."""
OPEN_FILES_GOOD = 256
KERNEL_GOOD = (6, 1)
"""This kernel tells the alignment of direct I/O, and has rings without interrupts."""
TORCH_REMEDY = "pip install --upgrade 'torch>=2.11'"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check."""

    name: str
    state: State
    finding: str
    remedy: str | None = None
    """A command that mends it, or shows the cause; set unless ``state`` is OK."""


def kernel() -> Check:
    """Look at the version of Linux."""
    release = os.uname().release
    finding = f"Linux {release}, {os.uname().machine}, Python {sys.version.split()[0]}"
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if numbers >= KERNEL_GOOD:
        return Check(name="kernel", state="OK", finding=finding)
    good = ".".join(map(str, KERNEL_GOOD))
    return Check(
        name="kernel",
        state="WARN",
        finding=f"{finding}; {good} or newer is faster and tells the alignment of direct I/O",
        remedy="sudo apt-get dist-upgrade, or what updates the kernel here; then reboot",
    )


def torch_version() -> Check:
    """Import torch, and the functions of it that ssdtrain needs."""
    name = "torch"
    try:
        import torch  # noqa: PLC0415 - the command must run without it

        from ssdtrain.machine import torch_internals as _needed  # noqa: F401, PLC0415
    except SsdtrainError as error:
        return Check(name=name, state="FAIL", finding=str(error), remedy=TORCH_REMEDY)
    except (ImportError, OSError) as error:
        finding = f"cannot be imported: {error}"
        return Check(name=name, state="FAIL", finding=finding, remedy=TORCH_REMEDY)
    return Check(name=name, state="OK", finding=f"torch {torch.__version__}")


def torch_huge_pages() -> Check:
    """Check that torch's tensors are on huge pages."""
    name, switch = "torch_huge_pages", "THP_MEM_ALLOC_ENABLE"
    shown = f"{switch}={os.environ.get(switch, '')}"
    try:
        import torch  # noqa: PLC0415 - the command must run without it
    except (ImportError, OSError):
        finding = "not checked, because torch failed"
        return Check(name=name, state="SKIP", finding=finding, remedy=TORCH_REMEDY)
    is_aligned = torch.empty(4 * MIB, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0
    if os.environ.get(switch) == "1" and is_aligned:
        return Check(name=name, state="OK", finding=f"{shown}, set by `import ssdtrain`")
    return Check(
        name=name,
        state="WARN",
        finding=f"{shown}: tensors are not on huge pages, which slows the drive",
        remedy=f"unset {switch}",
    )


def huge_pages() -> Check:
    """Look at the kernel's transparent huge pages."""
    name = "huge_pages"
    modes: dict[str, str] = {}
    for file in ("enabled", "defrag", "shmem_enabled"):
        with contextlib.suppress(OSError):  # A kernel without them has no such files.
            chosen = re.search(r"\[(.+?)\]", (HUGE_PAGES / file).read_text())
            modes[file] = chosen[1] if chosen else "unknown"
    finding = ", ".join(f"{file} {mode}" for file, mode in modes.items()) or "this kernel has none"
    if not modes:
        remedy = "zgrep TRANSPARENT_HUGEPAGE /proc/config.gz; a kernel that was built with it"
        return Check(name=name, state="WARN", finding=finding, remedy=remedy)
    for file in ("enabled", "defrag"):
        if modes.get(file) == "never":
            return Check(
                name=name,
                state="WARN",
                finding=f"{finding}; on small pages the drive is slower",
                remedy=f"echo madvise | sudo tee {HUGE_PAGES / file}",
            )
    return Check(name=name, state="OK", finding=finding)


def limits() -> Iterator[Check]:
    """Check the limits of the process."""
    unlimited = resource.RLIM_INFINITY
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check(
        name="open_files",
        state="OK" if files >= OPEN_FILES_GOOD or files == unlimited else "WARN",
        finding=f"at most {_count(files)}",
        remedy=None if files >= OPEN_FILES_GOOD or files == unlimited else "ulimit -n 1024",
    )
    for name, kind, least, effect, option in (
        ("file_size", resource.RLIMIT_FSIZE, FILE_SIZE_MIN, "writes beyond it fail", "f"),
        ("address_space", resource.RLIMIT_AS, 0, "reads need addresses for their memory", "v"),
    ):
        limit, _ = resource.getrlimit(kind)
        state: State = "OK" if limit == unlimited else "FAIL" if limit < least else "WARN"
        yield Check(
            name=name,
            state=state,
            finding=_bytes(limit) + ("" if state == "OK" else f"; {effect}"),
            remedy=None if state == "OK" else f"ulimit -{option} unlimited",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # Since Linux 5.12 the memory of rings counts elsewhere.
    old = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 12)
    small = old and locked != unlimited and locked < MIB
    yield Check(
        name="locked_memory",
        state="WARN" if small else "OK",
        finding=_bytes(locked) + ("; io_uring of this kernel needs more" if small else ""),
        remedy="ulimit -l unlimited" if small else None,
    )


def io_uring_remedy() -> str:
    """Return the command that allows io_uring here."""
    with contextlib.suppress(OSError, ValueError):  # Kernels before 6.6 have no such switch.
        if int(Path("/proc/sys/kernel/io_uring_disabled").read_text()) > 0:
            return "sudo sysctl kernel.io_uring_disabled=0"
    with contextlib.suppress(OSError):
        if re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return (
                "a seccomp filter forbids it, as containers do; allow io_uring_setup, "
                "io_uring_enter and io_uring_register: docker run --security-opt "
                "seccomp=profile.json ..."
            )
    return "ulimit -l unlimited; or a kernel with CONFIG_IO_URING"


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"at most {shown_bytes(limit)}"
