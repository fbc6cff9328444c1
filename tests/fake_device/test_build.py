"""How the fake device is built, and where it cannot be."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

import fake_build
from checkout import ROOT
from fake_build import UnavailableError
from fake_device import FakeDevice
from on_fake import on_fake_device

NUMBER = re.compile(r"^\s*(CU\w+)\s*=\s*(0x[0-9a-fA-F]+|[0-9]+)\b", re.MULTILINE)


def numbers(header: Path) -> dict[str, int]:
    return {name: int(value, 0) for name, value in NUMBER.findall(header.read_text())}


@pytest.mark.long
def test_the_driver_alone_has_what_the_core_calls() -> None:
    driver = ctypes.CDLL(str(fake_build.build_driver() / fake_build.DRIVER))
    table = Path(ROOT, "rust/core/src/cuda/driver.rs").read_text()
    names = re.findall(r"^    (cu\w+)\(", table, re.MULTILINE)
    assert names
    assert [name for name in names if not hasattr(driver, name)] == []


def test_our_own_numbers_are_those_of_cuda() -> None:
    try:
        cuda = fake_build.find_torch().cuda / "cuda.h"
    except UnavailableError as reason:
        pytest.skip(f"no headers to compare with: {reason}")
    own = numbers(fake_build.SOURCES / "include" / "own" / "cuda.h")
    assert len(own) > 40
    assert own.items() <= numbers(cuda).items()


@on_fake_device()
def test_every_function_of_cuda_is_there(fake: FakeDevice) -> None:
    """Libraries that look for all of them, as cuFile does, find them."""
    library: Any = ctypes.CDLL(None)
    text = (fake_build.find_torch().cuda / "cuda.h").read_text()
    names = re.findall(r"^CUresult CUDAAPI (cu[A-Z]\w+)\(", text, re.MULTILINE)
    assert len(names) > 400
    for name in names:
        assert hasattr(library, name), name
    found, status = ctypes.c_void_p(), ctypes.c_int()
    for name, version in (("cuMemAlloc", "_v2"), ("cuStreamGetCaptureInfo", "_v3")):
        answer = library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(found), 13000, 0, ctypes.byref(status)
        )
        function = ctypes.cast(getattr(library, name + version), ctypes.c_void_p)
        assert (answer, status.value, found.value) == (0, 0, function.value)
