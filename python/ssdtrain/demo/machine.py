"""Describes the machine on which the demo ran."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ssdtrain.machine.drive import mount_of


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, and the directory that offload writes to."""

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
    """Describe this machine and the directory that offload writes to."""
    mount = None if directory is None else mount_of(directory)
    return Machine(
        cpu=_cpu_name(),
        core_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=metadata.version("torch"),
        directory=None if directory is None else str(directory),
        file_system=None if mount is None else str(mount),
    )


def busy_cpu_s() -> float | None:
    """Return the CPU seconds that all processes of the machine have used since it started.

    None where the system does not tell.
    """
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None  # Not Linux, or no /proc: the report shows "-".
    # man 5 proc_stat: user, nice, system, idle, iowait, irq, softirq, steal; the
    # further columns are contained in these.
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
