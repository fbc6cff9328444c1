"""The yardstick: fio with direct I/O, at the best of a stated set of settings.

fio overwrites a file that was written before, because blocks that were never written cost the file
system a change of its books. Beside a row of ours that file is the very spill file that the store
has open: where a file lies on a disk alone may change its rate by a third. Its buffers lie on huge
pages (glibc's own switch), because on small ones the same fio is up to twice as slow, and beating
that would mean little.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_cases import Direction, Sample

HUGE_PAGES_SWITCH = "glibc.malloc.hugetlb=1"
INSTALL = (
    "fio was not found; it is the yardstick of every row. Install it: sudo apt-get install fio "
    "(Debian, Ubuntu) or sudo dnf install fio (Fedora)"
)
LIMIT_S = 600
CALIBRATION_REPEAT_COUNT = 2


class FioError(Exception):
    """fio is missing or could not do what it was told; the message says what next."""


@dataclass(frozen=True)
class FioSetting:
    """Request size and requests in flight."""

    block: str
    depth: int

    def __str__(self) -> str:
        """Name the setting the way fio's options do."""
        return f"bs={self.block} iodepth={self.depth}"


SETTINGS = (FioSetting("1M", 32), FioSetting("2M", 32), FioSetting("4M", 16), FioSetting("16M", 4))


class Fio:
    """fio on one file of its own, in the directory that is measured."""

    def __init__(self, directory: Path, pass_bytes: int) -> None:
        program = shutil.which("fio")
        if program is None:
            raise FioError(INSTALL)
        self._program = program
        self._file = directory / "fio.data"
        self._pass_bytes = pass_bytes
        self.written_bytes = 0
        self.best: dict[Direction, FioSetting] = {}
        self.calibration: list[dict[str, Any]] = []
        self._latest: dict[tuple[Direction, int], Sample] = {}

    def version(self) -> str:
        """Return what fio calls itself."""
        told = subprocess.run([self._program, "--version"], capture_output=True, check=True)
        return told.stdout.decode().strip()

    def command(
        self, setting: FioSetting, direction: Direction, files: Sequence[Path]
    ) -> list[str]:
        """Return the command line of one pass over the files, each with an equal part of it."""
        return [
            self._program,
            "--name=compare",
            "--thread",  # No process of its own, which would outlive a killed fio.
            f"--filename={':'.join(map(str, files))}",
            "--ioengine=io_uring",
            "--direct=1",
            f"--rw={direction}",
            f"--bs={setting.block}",
            f"--iodepth={setting.depth}",
            f"--filesize={self._pass_bytes // len(files)}",
            f"--size={self._pass_bytes}",
            "--overwrite=1",
            "--fallocate=none",
            "--output-format=json",
        ]

    def run(self, setting: FioSetting, direction: Direction, files: Sequence[Path] = ()) -> Sample:
        """Run one pass, over fio's own file unless others are given."""
        nbytes = self._pass_bytes
        command = self.command(setting, direction, files or [self._file])
        environment = os.environ | {"GLIBC_TUNABLES": HUGE_PAGES_SWITCH}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise FioError(
                f"fio failed ({done.returncode}) in `{' '.join(command)}`: "
                f"{(done.stderr or done.stdout).strip()[:500]}. Direct I/O needs a local file "
                "system such as ext4 or XFS with room for the file, and a kernel that allows "
                "io_uring: choose another --dir, or see `sysctl kernel.io_uring_disabled`"
            )
        # Warnings may stand before the first brace.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        side = job[direction]
        if side["io_bytes"] != nbytes:
            raise FioError(
                f"fio moved {side['io_bytes']} of {nbytes} bytes in `{' '.join(command)}`; run "
                "that command alone to see why"
            )
        if direction == "write":
            self.written_bytes += nbytes
        # Its shares of a processor are percentages of its own run time, in milliseconds.
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Sample(total_bytes=nbytes, seconds=nbytes / side["bw_bytes"], cpu_s=cpu_s)

    def prepare(self) -> None:
        """Write the file once, so that all timed passes find written blocks."""
        self.run(SETTINGS[0], "write")

    def calibrate(self) -> None:
        """Find the best setting of each direction; settings take turns, the best pass counts."""
        rates: dict[tuple[FioSetting, Direction], list[float]] = {}
        directions: tuple[Direction, ...] = ("write", "read")
        for _ in range(CALIBRATION_REPEAT_COUNT):
            for setting in SETTINGS:
                for direction in directions:
                    sample = self.run(setting, direction)
                    rates.setdefault((setting, direction), []).append(sample.bytes_per_s)
        for direction in directions:
            self.best[direction] = max(SETTINGS, key=lambda one: max(rates[one, direction]))
        self.calibration = [
            {
                "block": setting.block,
                "depth": setting.depth,
                "direction": direction,
                "bytes_per_s": max(found),
                "chosen": self.best[direction] == setting,
            }
            for (setting, direction), found in rates.items()
        ]

    def neighbour(
        self, direction: Direction, files: Sequence[Path] = (), *, may_reuse: bool
    ) -> Sample:
        """Run the best setting now; a quick run may take the latest pass again."""
        latest = (direction, len(files))
        if not may_reuse or latest not in self._latest:
            self._latest[latest] = self.run(self.best[direction], direction, files)
        return self._latest[latest]

    def close(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)
