"""Finds the mount of a directory, and the drive below."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Drive", "Mount", "drive_of", "mount_of"]

SYSFS = Path("/sys")
SECTOR_BYTES = 512
"""The unit of sizes in sysfs for drives with any size of sectors."""
VIRTUAL_DRIVERS = frozenset({"virtio_blk", "vbd", "xen-blkfront"})
"""Drivers of KVM and Xen (the driver of Xen has the name of its bus in sysfs)."""
VIRTUAL_VENDORS = frozenset({"QEMU", "VMWARE", "VMWARE,", "MSFT", "VBOX", "GOOGLE"})
"""Vendors of virtual SCSI drives."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system."""

    kind: str
    """Such as ``ext4``."""
    source: str
    """Mostly the path of a block device."""
    point: str
    """The folder on which it is mounted."""

    def __str__(self) -> str:
        """Return the mount as reports write it."""
        return f"{self.kind} on {self.source} at {self.point}"


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A whole block device, also where the file system is on one of its partitions."""

    number: str
    """Major and minor, as ``lsblk`` writes them."""
    name: str
    model: str
    """Empty where the system does not tell, as with many virtual disks."""
    serial: str
    size_bytes: int
    rotational: bool
    """True if the drive says that it rotates, unless it is virtual."""

    def __str__(self) -> str:
        """Return the drive as reports write it, without its serial number."""
        model = f"{self.model}, " if self.model else ""
        return f"{self.name} ({model}{self.size_bytes / 1e9:.3g} GB)"


def mount_of(directory: str | os.PathLike[str]) -> Mount | None:
    """Find the mount that a directory is on."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None  # Not Linux, or no /proc: reports say "unknown".
    place = Path(directory).resolve()
    best: tuple[int, Mount] | None = None
    for line in lines:
        # man 5 proc_pid_mountinfo: id, parent, device, root, mount point, options, any number of
        # optional fields, "-", type, source, options.
        before, _, after = line.partition(" - ")
        point = _unescape(before.split()[4])
        kind, source = after.split()[:2]
        depth = len(Path(point).parts)
        # A later mount on the same point hides the earlier one.
        if place.is_relative_to(point) and (best is None or depth >= best[0]):
            best = depth, Mount(kind=kind, source=_unescape(source), point=point)
    return None if best is None else best[1]


def drive_of(directory: str | os.PathLike[str], sysfs: Path = SYSFS) -> Drive | None:
    """Find the block device below a directory; ``None`` where there is none, or several."""
    for number in _device_numbers(directory):
        try:
            place = (sysfs / "dev" / "block" / number).resolve(strict=True)
        except OSError:
            continue
        if (place / "partition").exists():
            place = place.parent
        size = _word(place / "size")
        return Drive(
            number=_word(place / "dev") or number,
            name=_word(place / "dm" / "name") or place.name,
            model=_word(place / "device" / "model"),
            serial=_word(place / "device" / "serial", place / "serial", place / "dm" / "uuid"),
            size_bytes=int(size) * SECTOR_BYTES if size.isdecimal() else 0,
            rotational=_word(place / "queue" / "rotational") == "1" and not _is_virtual(place),
        )
    return None


def _is_virtual(place: Path) -> bool:
    """Return whether a hypervisor made this drive, so that ``rotational`` means nothing.

    The kernel's default is a rotating drive, and most hypervisors tell it nothing.
    """
    driver = (place / "device" / "driver").resolve().name
    vendor = _word(place / "device" / "vendor").upper()
    return driver in VIRTUAL_DRIVERS or vendor in VIRTUAL_VENDORS


def _device_numbers(directory: str | os.PathLike[str]) -> list[str]:
    """Return the numbers under which sysfs may know the device of a directory."""
    numbers = []
    try:
        numbers.append(os.stat(directory).st_dev)
        # Btrfs gives each file system a number of no device; the mount names the device.
        mount = mount_of(directory)
        if mount is not None and mount.source.startswith("/"):
            facts = os.stat(mount.source)
            if stat.S_ISBLK(facts.st_mode):
                numbers.append(facts.st_rdev)
    except OSError:
        pass  # The directory or its device cannot be read: there are no further numbers.
    return [f"{os.major(number)}:{os.minor(number)}" for number in numbers]


def _word(*paths: Path) -> str:
    """Return the content of the first file that can be read and is not empty."""
    for path in paths:
        try:
            word = path.read_text(errors="replace").strip()
        except OSError:
            continue  # Most drives lack some of these files, and some are for root only.
        if word:
            return word
    return ""


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo; the backslash last, as its escape may precede digits."""
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, plain)
    return field
