"""The checks of `ssdtrain doctor` for tensors of GPUs: driver, devices, links, libraries.

Nothing here fails a check: training on the CPU works without any of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import os
import re
import resource
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssdtrain.commands.system import Check
from ssdtrain.machine.cufile import find_library
from ssdtrain.sizes import shown_bytes

__all__ = ["Device", "GpuFacts", "PcieLink", "gpu_checks", "gpu_facts"]

NVIDIA = "0x10de"
"""NVIDIA's number as a vendor of PCI devices."""
DISPLAY_CLASS = "0x03"
"""The first digits of a GPU's class; other functions of the card are sound and USB."""
NO_DRIVER = "no NVIDIA driver: CUDA tensors are not possible here; CPU training works"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU that torch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """The link of a GPU by the kernel. An idle GPU may have slowed its link down."""

    address: str
    speed: str
    """Such as ``16.0 GT/s PCIe``; empty where the kernel does not tell."""
    width: str
    speed_max: str
    width_max: str

    def __str__(self) -> str:
        """Return the link as reports write it."""
        now = f"x{self.width or '?'} at {self.speed or '?'}"
        most = f"x{self.width_max or '?'} at {self.speed_max or '?'}"
        return f"{self.address}: {now}, at most {most}"


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The parts of the system for tensors of GPUs; ``None``: missing or unknown."""

    driver: str | None
    """Version of NVIDIA's kernel module."""
    driver_cuda: str | None
    """Newest CUDA that the driver's library serves; ``None``: there is no such library."""
    torch_cuda: str | None
    """The CUDA that torch was built for."""
    devices: tuple[Device, ...]
    why_no_device: str | None
    """The message of torch."""
    links: tuple[PcieLink, ...]
    lockable_bytes: int | None
    """Memory that a process may lock; ``None``: any amount."""
    nvidia_fs: str | None
    """Version of the kernel module of GPUDirect Storage."""
    p2pdma: bool | None
    """True if the kernel was built for transfers between PCI devices."""
    is_udev_readable: bool
    """True if cuFile can find the drive of a file by udev's database."""
    cufile: str | None
    """Path of the library of GPUDirect Storage."""


def gpu_facts(root: Path = Path("/")) -> GpuFacts:
    """Collect all facts; the kernel's files lie below ``root``."""
    torch_cuda, devices, why_no_device = _devices()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return GpuFacts(
        driver=_first_line(root / "sys/module/nvidia/version")
        or _version_in(root / "proc/driver/nvidia/version"),
        driver_cuda=_driver_cuda(),
        torch_cuda=torch_cuda,
        devices=devices,
        why_no_device=why_no_device,
        links=tuple(_links(root / "sys/bus/pci/devices")),
        lockable_bytes=None if locked == resource.RLIM_INFINITY else locked,
        nvidia_fs=_first_line(root / "sys/module/nvidia_fs/version")
        or _version_in(root / "proc/driver/nvidia-fs/version"),
        p2pdma=_has_p2pdma(root),
        is_udev_readable=os.access(root / "run/udev", os.R_OK | os.X_OK),
        cufile=find_library(),
    )


def gpu_checks(facts: GpuFacts) -> Iterator[Check]:
    """Return the checks; a part of a GPU that is there and does not work is a warning."""
    yield _driver_check(facts)
    yield _device_check(facts)
    links = "; ".join(map(str, facts.links)) or "the kernel lists no PCI device of NVIDIA"
    yield Check(name="gpu_link", state="OK", finding=links)
    locked = facts.lockable_bytes
    limit = "any amount" if locked is None else f"at most {shown_bytes(locked)}"
    memory = shown_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    finding = f"{limit} may be locked by io_uring; the machine has {memory} of memory to pin"
    yield Check(name="pinned_memory", state="OK", finding=finding)
    parts = (
        f"nvidia-fs {facts.nvidia_fs}" if facts.nvidia_fs else "no nvidia-fs",
        f"cuFile is {facts.cufile}" if facts.cufile else "no libcufile.so.0",
        f"/run/udev is {'readable' if facts.is_udev_readable else 'not readable'}",
        {True: "P2PDMA in the kernel", False: "no P2PDMA in the kernel", None: "P2PDMA not told"}[
            facts.p2pdma
        ],
    )
    yield Check(name="gpudirect", state="OK", finding="; ".join(parts))


def _driver_check(facts: GpuFacts) -> Check:
    name = "gpu_driver"
    module = f"version {facts.driver}" if facts.driver else "of unknown version"
    if facts.driver_cuda is not None:
        finding = f"NVIDIA driver {module}, up to CUDA {facts.driver_cuda}"
        return Check(name=name, state="OK", finding=finding)
    if facts.driver is None and not facts.links:
        return Check(name=name, state="OK", finding=NO_DRIVER)
    there = f"a kernel module {module}" if facts.driver else "a GPU of NVIDIA"
    return Check(
        name=name,
        state="WARN",
        finding=f"{there}, but no library libcuda.so.1: CUDA tensors are not possible here",
        remedy="nvidia-smi; install the driver; in a container: docker run --gpus all ...",
    )


def _device_check(facts: GpuFacts) -> Check:
    name = "gpu"
    built = (
        f"torch is built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "torch has no CUDA"
    )
    if facts.devices:
        devices = ", ".join(
            f"{device.name} ({shown_bytes(device.memory_bytes)})" for device in facts.devices
        )
        return Check(name=name, state="OK", finding=f"{devices}; {built}")
    if facts.driver_cuda is None:
        return Check(name=name, state="OK", finding=f"no CUDA device; {built}")
    return Check(
        name=name,
        state="WARN",
        finding=f"torch sees no CUDA device ({facts.why_no_device}); {built}",
        remedy="nvidia-smi; echo $CUDA_VISIBLE_DEVICES; pip install torch brings a build for CUDA",
    )


def _devices() -> tuple[str | None, tuple[Device, ...], str | None]:
    """Return the CUDA of torch, its devices, and the reason if there are none."""
    try:
        import torch  # noqa: PLC0415 - the command must run without it
    except (ImportError, OSError) as error:
        return None, (), f"torch cannot be imported: {error}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = [
                torch.cuda.get_device_properties(number)
                for number in range(torch.cuda.device_count())
            ]
        except (RuntimeError, AssertionError) as error:
            return torch.version.cuda, (), str(error).partition("\n")[0]
    devices = tuple(Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in found)
    words = str(said[-1].message).partition("\n")[0] if said else "it says nothing more"
    return torch.version.cuda, devices, None if devices else words


def _driver_cuda() -> str | None:
    """Ask the driver's library for the newest CUDA that it serves; nothing is initialised."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        answer = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    # 13020 is CUDA 13.2.
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if answer == 0 else "unknown"


def _links(devices: Path) -> Iterator[PcieLink]:
    try:
        places = sorted(devices.iterdir())
    except OSError:
        return  # No PCI bus, or a container that hides it.
    for place in places:
        kind = _first_line(place / "class") or ""
        if _first_line(place / "vendor") != NVIDIA or not kind.startswith(DISPLAY_CLASS):
            continue
        yield PcieLink(
            address=place.name,
            speed=_first_line(place / "current_link_speed") or "",
            width=_first_line(place / "current_link_width") or "",
            speed_max=_first_line(place / "max_link_speed") or "",
            width_max=_first_line(place / "max_link_width") or "",
        )


def _has_p2pdma(root: Path) -> bool | None:
    """Read from the kernel's configuration whether it has P2PDMA."""
    packed, plain = root / "proc/config.gz", root / f"boot/config-{os.uname().release}"
    with contextlib.suppress(OSError, EOFError):
        return b"\nCONFIG_PCI_P2PDMA=y" in gzip.decompress(packed.read_bytes())
    with contextlib.suppress(OSError):
        return "\nCONFIG_PCI_P2PDMA=y" in plain.read_text(errors="replace")
    return None


def _version_in(path: Path) -> str | None:
    """Find the first number with points in a file."""
    found = re.search(r"\d+(?:\.\d+)+", _first_line(path) or "")
    return None if found is None else found[0]


def _first_line(path: Path) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None  # The callers ask whether the file is there.
    return lines[0].strip() if lines else None
