"""The checks of `ssdtrain doctor` for a directory, from the system up to its drive."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from ssdtrain._core import Probe, Store
from ssdtrain.commands.gpu import GpuFacts, gpu_checks, gpu_facts
from ssdtrain.commands.system import (
    Check,
    huge_pages,
    io_uring_remedy,
    kernel,
    limits,
    torch_huge_pages,
    torch_version,
)
from ssdtrain.commands.trial import Rates, write_and_read
from ssdtrain.errors import ConfigError, NoSpaceError, SsdtrainError, UnsupportedError
from ssdtrain.machine import tuning
from ssdtrain.machine.drive import drive_of, mount_of
from ssdtrain.sizes import shown_bytes

__all__ = ["Examination"]

MIB, GIB = 1 << 20, 1 << 30
FREE_BYTES_MIN = 64 * MIB
"""A store refuses a directory with less."""
FREE_BYTES_GOOD = 4 * GIB
"""The activations of a step may need so much."""
LIMIT_REMEDIES: dict[int | None, str] = {
    errno.EMFILE: "ulimit -n 1024",
    errno.EFBIG: "ulimit -f unlimited",
    errno.ENOMEM: "ulimit -v unlimited; free -h",
}
"""Commands that raise the limit of the process for which the kernel gave an error."""


class Examination:
    """The checks of one directory, in their order."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.rates: Rates | None = None
        self.gpu: GpuFacts | None = None
        self._quoted = shlex.quote(directory)
        self._engine: tuning.Engine = "psync"
        """io_uring once its check has passed."""
        self._broken: str | None = None
        """The name of a failed check without which the later ones make no sense."""

    def checks(self) -> Iterator[Check]:
        """Run all checks."""
        yield kernel()
        yield torch_version()
        yield torch_huge_pages()
        yield huge_pages()
        yield from limits()
        for check in (
            self._directory,
            self._file_system,
            self._drive,
            self._free_space,
            self._direct_io,
            self._io_uring,
            self._write_and_read,
            self._tuning,
        ):
            name = check.__name__.removeprefix("_")
            if self._broken is None:
                result = check()
            else:
                finding = f"not checked, because {self._broken} failed"
                remedy = f"ssdtrain doctor {self._quoted}"
                result = Check(name=name, state="SKIP", finding=finding, remedy=remedy)
            if result.state == "FAIL":
                self._broken = name
            yield result
        self.gpu = gpu_facts()
        yield from gpu_checks(self.gpu)

    def _directory(self) -> Check:
        name, place, quoted = "directory", Path(self.directory), self._quoted
        absolute = str(place.absolute())
        try:
            is_directory = place.is_dir()
            os.stat(place)
        except FileNotFoundError:
            return Check(
                name=name,
                state="FAIL",
                finding=f"{absolute} does not exist",
                remedy=f"mkdir -p {quoted}",
            )
        except OSError as error:
            return Check(
                name=name,
                state="FAIL",
                finding=f"cannot look at {absolute}: {error.strerror}",
                remedy=f"namei -l {shlex.quote(absolute)}",
            )
        if not is_directory:
            parent = shlex.quote(str(place.parent))
            return Check(
                name=name,
                state="FAIL",
                finding=f"{absolute} is not a directory",
                remedy=f"ssdtrain doctor {parent}",
            )
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            mount = mount_of(place)
            point = shlex.quote(mount.point) if mount is not None else quoted
            return Check(
                name=name,
                state="FAIL",
                finding=f"{absolute} is on a file system that is mounted read-only",
                remedy=f"sudo mount -o remount,rw {point}",
            )
        if not os.access(place, os.W_OK | os.X_OK):
            return Check(
                name=name,
                state="FAIL",
                finding=f"user {os.geteuid()} cannot create files in {absolute}",
                remedy=f"sudo install -d -o {os.geteuid()} {quoted}/ssdtrain; "
                f"ssdtrain doctor {quoted}/ssdtrain",
            )
        return Check(name=name, state="OK", finding=f"permissions of {absolute} allow to write")

    def _file_system(self) -> Check:
        name, mount = "file_system", mount_of(self.directory)
        shown = "unknown" if mount is None else str(mount)
        error = self._opening_error(backend="psync", direct_io="disabled")
        if error is not None and not isinstance(error, NoSpaceError):
            refusal, _, remedy = str(error).partition("; ")
            if isinstance(error, ConfigError) and "local" in remedy:
                remedy = (
                    "findmnt -t ext4,xfs,btrfs lists the local file systems; name a directory on "
                    "one of them"
                )
            return Check(
                name=name,
                state="FAIL",
                finding=f"{shown}: {refusal}",
                remedy=LIMIT_REMEDIES.get(error.errno, remedy or "sudo dmesg | tail"),
            )
        if mount is not None and mount.kind == "overlay":
            return Check(
                name=name,
                state="WARN",
                finding=f"{shown}: a container's own layer, which copies and may be slow",
                remedy="docker run --volume /path/on/nvme:/nvme ..., then ssdtrain doctor /nvme",
            )
        return Check(name=name, state="OK", finding=shown)

    def _drive(self) -> Check:
        name, drive = "drive", drive_of(self.directory)
        if drive is None:
            return Check(name=name, state="OK", finding="no single block device is known below it")
        if drive.rotational:
            return Check(
                name=name,
                state="WARN",
                finding=f"{drive} says that it is a rotating disk",
                remedy="lsblk -o NAME,MODEL,ROTA,SIZE,MOUNTPOINTS lists the drives; rely on the "
                "rates below",
            )
        return Check(name=name, state="OK", finding=f"{drive}, not rotating")

    def _free_space(self) -> Check:
        name, facts = "free_space", os.statvfs(self.directory)
        free = facts.f_bavail * facts.f_frsize
        finding = f"{shown_bytes(free)} free of {shown_bytes(facts.f_blocks * facts.f_frsize)}"
        remedy = f"sudo du -xh --max-depth=1 {self._quoted} | sort -h shows what to delete"
        if free < FREE_BYTES_MIN:
            finding += f"; {shown_bytes(FREE_BYTES_MIN)} are the least"
            return Check(name=name, state="FAIL", finding=finding, remedy=remedy)
        if free < FREE_BYTES_GOOD:
            finding += "; a step of training may need more, then tensors are kept in memory"
            return Check(name=name, state="WARN", finding=finding, remedy=remedy)
        return Check(name=name, state="OK", finding=finding)

    def _direct_io(self) -> Check:
        name = "direct_io"
        try:
            alignment = Probe(self.directory, 1).alignment
        except SsdtrainError as error:
            return Check(
                name=name,
                state="FAIL",
                finding=str(error).partition("; ")[0],
                remedy="findmnt -t ext4,xfs lists file systems that take O_DIRECT; or accept the "
                "page cache: ssdtrain.offload(dir, direct_io='optional')",
            )
        return Check(name=name, state="OK", finding=f"O_DIRECT works, aligned to {alignment} bytes")

    def _io_uring(self) -> Check:
        name = "io_uring"
        error = self._opening_error(backend="io_uring", direct_io="optional")
        if error is None:
            self._engine = "io_uring"
            return Check(name=name, state="OK", finding="usable")
        if not isinstance(error, UnsupportedError):
            remedy = f"ssdtrain doctor {self._quoted}"
            return Check(name=name, state="FAIL", finding=str(error), remedy=remedy)
        reason = str(error).partition("; ")[0]
        return Check(
            name=name,
            state="WARN",
            finding=f"{reason}; threads with pread and pwrite do its work",
            remedy=io_uring_remedy(),
        )

    def _write_and_read(self) -> Check:
        name = "write_and_read"
        try:
            self.rates, is_equal = write_and_read(self.directory, engine=self._engine)
        except (SsdtrainError, OSError) as error:
            remedy = f"sudo dmesg | tail; df -h {self._quoted}"
            remedy = LIMIT_REMEDIES.get(error.errno, remedy)
            return Check(name=name, state="FAIL", finding=str(error), remedy=remedy)
        if not is_equal:
            return Check(
                name=name,
                state="FAIL",
                finding="bytes came back changed: the drive, its cable or the memory is defective",
                remedy="sudo dmesg | tail -n 50; sudo smartctl -a on the drive",
            )
        rates = self.rates
        return Check(
            name=name,
            state="OK",
            finding=f"every byte came back; {rates.write_bytes_per_s / 1e9:.2f} GB/s written, "
            f"{rates.read_bytes_per_s / 1e9:.2f} GB/s read",
        )

    def _tuning(self) -> Check:
        kept = tuning.load(self.directory)
        if kept is None:
            finding = f"the defaults; `ssdtrain bench {self._quoted}` looks for better ones"
        else:
            finding = f"{kept.tuning}; measured on {kept.measured}"
        return Check(name="tuning", state="OK", finding=finding)

    def _opening_error(self, *, backend: str, direct_io: str) -> SsdtrainError | None:
        """Open a store and close it; return the error that it raised."""
        try:
            Store(
                [(self.directory, None)],
                backend=backend,
                direct_io=direct_io,
                max_disk_bytes=None,
                verify=False,
            ).close()
        except SsdtrainError as error:
            return error
        return None
