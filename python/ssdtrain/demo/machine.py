"""The facts about the machine without which a table of times means nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts without which the times mean nothing."""

    cpu: str
    core_count: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    directory: str | None
    file_system: str | None
    """Type, device and mount point of the directory that offload writes to."""


def machine_facts(directory: Path | None) -> Machine:
    """Describe this machine and the place where offload writes."""
    return Machine(
        cpu=_cpu_name(),
        core_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=metadata.version("torch"),
        directory=None if directory is None else str(directory),
        file_system=None if directory is None else file_system(directory),
    )


def file_system(directory: Path) -> str | None:
    """Find the mount that a directory is on: `type on device at mount point`."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None  # Not Linux, or no /proc: the report says "unknown".
    place = directory.resolve()
    best: tuple[int, str] | None = None
    for line in lines:
        # man 5 proc_pid_mountinfo: id, parent, device, root, mount point, options, any number of
        # optional fields, "-", type, source, options.
        before, _, after = line.partition(" - ")
        mount_point = _unescape(before.split()[4])
        kind, source = after.split()[:2]
        depth = len(Path(mount_point).parts)
        # A later mount on the same point hides the earlier one.
        if place.is_relative_to(mount_point) and (best is None or depth >= best[0]):
            best = depth, f"{kind} on {_unescape(source)} at {mount_point}"
    return None if best is None else best[1]


def busy_cpu_s() -> float | None:
    """Return the CPU seconds that all processes of the machine have used since it started.

    None where the system does not tell.
    """
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None  # Not Linux, or no /proc: the report shows "-".
    # man 5 proc_stat: user, nice, system, idle, iowait, irq, softirq, steal; what follows is
    # contained in these.
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo; the backslash last, as its escape may precede digits."""
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, plain)
    return field


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
