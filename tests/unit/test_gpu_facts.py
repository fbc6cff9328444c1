"""What `ssdtrain doctor` says of GPUs, on machines that are made of files and figures."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.commands.gpu import NO_DRIVER, Device, GpuFacts, PcieLink, gpu_checks, gpu_facts
from ssdtrain.commands.system import Check

NOTHING = GpuFacts(
    driver=None,
    driver_cuda=None,
    torch_cuda="13.0",
    devices=(),
    why_no_device="it says nothing more",
    links=(),
    lockable_bytes=None,
    nvidia_fs=None,
    p2pdma=None,
    is_udev_readable=False,
    cufile=None,
)
LINK = PcieLink(
    address="0000:17:00.0",
    speed="2.5 GT/s PCIe",
    width="8",
    speed_max="32.0 GT/s PCIe",
    width_max="16",
)
WHOLE = replace(
    NOTHING,
    driver="580.95.05",
    driver_cuda="13.0",
    devices=(Device(name="NVIDIA H100", memory_bytes=80 << 30),),
    why_no_device=None,
    links=(LINK,),
    lockable_bytes=8 << 20,
    nvidia_fs="2.26.6",
    p2pdma=True,
    is_udev_readable=True,
    cufile="/usr/lib/libcufile.so.0",
)


def checks(facts: GpuFacts) -> dict[str, Check]:
    return {one.name: one for one in gpu_checks(facts)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_a_driver_is_told_and_fails_nothing() -> None:
    found = checks(NOTHING)
    assert found["gpu_driver"].finding == NO_DRIVER
    assert {one.state for one in found.values()} == {"OK"}
    assert "no CUDA device; torch is built for CUDA 13.0" in found["gpu"].finding
    assert "no nvidia-fs; no libcufile.so.0; /run/udev is not readable" in (
        found["gpudirect"].finding
    )


def test_a_machine_with_all_of_it() -> None:
    found = checks(WHOLE)
    assert {one.state for one in found.values()} == {"OK"}
    assert found["gpu_driver"].finding == "NVIDIA driver version 580.95.05, up to CUDA 13.0"
    assert found["gpu"].finding == "NVIDIA H100 (80 GiB); torch is built for CUDA 13.0"
    assert found["gpu_link"].finding == (
        "0000:17:00.0: x8 at 2.5 GT/s PCIe, at most x16 at 32.0 GT/s PCIe"
    )
    assert found["pinned_memory"].finding.startswith("at most 8 MiB may be locked")
    assert found["gpudirect"].finding == (
        "nvidia-fs 2.26.6; cuFile is /usr/lib/libcufile.so.0; /run/udev is readable; "
        "P2PDMA in the kernel"
    )


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"driver_cuda": None, "devices": ()}, "gpu_driver", "no library libcuda.so.1"),
        ({"driver_cuda": None, "driver": None}, "gpu_driver", "a GPU of NVIDIA, but no library"),
        ({"devices": (), "why_no_device": "too old"}, "gpu", "sees no CUDA device (too old)"),
        ({"devices": (), "torch_cuda": None}, "gpu", "torch has no CUDA"),
    ],
)
def test_a_broken_driver_is_warned_of(changes: dict[str, object], name: str, words: str) -> None:
    check = checks(replace(WHOLE, **changes))[name]
    assert check.state == "WARN"
    assert words in check.finding
    assert check.remedy is not None


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    write(tmp_path / "proc/driver/nvidia/version", version)
    write(tmp_path / "sys/module/nvidia_fs/version", "2.26.6\n")
    (tmp_path / "run/udev").mkdir(parents=True)
    (tmp_path / "proc/config.gz").write_bytes(gzip.compress(b"A=y\nCONFIG_PCI_P2PDMA=y\n"))
    for address, vendor, kind in (
        ("0000:17:00.0", "0x10de", "0x030200"),
        ("0000:17:00.1", "0x10de", "0x040300"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        place = tmp_path / "sys/bus/pci/devices" / address
        for name, text in (
            ("vendor", vendor),
            ("class", kind),
            ("current_link_speed", LINK.speed),
            ("current_link_width", LINK.width),
            ("max_link_speed", LINK.speed_max),
            ("max_link_width", LINK.width_max),
        ):
            write(place / name, f"{text}\n")
    facts = gpu_facts(tmp_path)
    assert (facts.driver, facts.nvidia_fs, facts.p2pdma) == ("580.95.05", "2.26.6", True)
    assert facts.links == (LINK,)
    assert facts.is_udev_readable
    (tmp_path / "proc/config.gz").write_bytes(gzip.compress(b"# CONFIG_PCI_P2PDMA is not set\n"))
    assert gpu_facts(tmp_path).p2pdma is False
    nothing = gpu_facts(tmp_path / "empty")
    assert (nothing.driver, nothing.nvidia_fs, nothing.p2pdma, nothing.links) == (
        None,
        None,
        None,
        (),
    )
    assert not nothing.is_udev_readable
