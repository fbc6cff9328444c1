"""A memory control group: a process in it is killed if it takes more than it is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

MOUNTS = Path("/proc/self/mounts")


class NoGroupError(Exception):
    """No group could be made; the message says why."""


class MemoryGroup:
    """A group of this process's making, by either version of cgroups; removed at the end.

    What a process has before it joins is not counted in it.
    """

    def __init__(self, limit_bytes: int) -> None:
        if os.geteuid() != 0:
            raise NoGroupError("only root can make one")
        found = next(_controllers(), None)
        if found is None:
            raise NoGroupError("no control group here limits memory")
        root, self._version = found
        self._path = root / f"ssdtrain-demo-{os.getpid()}"
        try:
            self._path.mkdir()
        except OSError as error:
            raise NoGroupError(f"{self._path} cannot be made: {error.strerror}") from error
        try:
            self._limit(limit_bytes)
        except OSError as error:
            self._path.rmdir()
            raise NoGroupError(f"{self._path} takes no limit: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.rmdir()

    def take(self, process: int) -> None:
        """Have a process, and what it starts, be counted and limited from now on."""
        (self._path / "cgroup.procs").write_text(str(process))

    def peak_bytes(self) -> int | None:
        """Return the most that was in use at once; None where the kernel does not tell."""
        name = "memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"
        try:
            return int((self._path / name).read_text())
        except FileNotFoundError:
            return None  # Linux before 5.19 with the second version: the report shows "-".

    def _limit(self, limit_bytes: int) -> None:
        is_second = self._version == 2
        name = "memory.max" if is_second else "memory.limit_in_bytes"
        (self._path / name).write_text(str(limit_bytes))
        # Swap is no help: none by the second version, and both together by the first.
        name, value = (
            ("memory.swap.max", 0) if is_second else ("memory.memsw.limit_in_bytes", limit_bytes)
        )
        if (self._path / name).exists():
            (self._path / name).write_text(str(value))


def _controllers() -> Iterator[tuple[Path, int]]:
    """Give the places where groups that limit memory can be made, with their version."""
    for line in MOUNTS.read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        root = Path(place)
        if kind == "cgroup" and "memory" in options.split(","):
            yield root, 1
        elif kind == "cgroup2" and "memory" in (root / "cgroup.subtree_control").read_text():
            yield root, 2
