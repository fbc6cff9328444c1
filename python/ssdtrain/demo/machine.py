"""Describes the machine on which the demo or a benchmark ran."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ssdtrain.machine.drive import mount_of


def machine_facts(directory: Path | None) -> dict[str, Any]:
    """Describe this machine and the directory that offload writes to, for a file of figures."""
    mount = None if directory is None else mount_of(directory)
    return {
        "cpu": _cpu_name(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "directory": None if directory is None else str(directory),
        # Type, device and mount point.
        "file_system": None if mount is None else str(mount),
    }


def busy_cpu_s() -> float | None:
    """Return the CPU seconds of all processes since the machine started; None if unknown."""
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
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
