"""How the fake device is built, and where it cannot be."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.machinery
import importlib.util
import platform
import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fake_build
from checkout import ROOT
from fake_build import UnavailableError
from fake_device import FakeDevice
from on_fake import on_fake_device

CUDA_13 = "__version__ = '2.15.0'; cuda = '13.2'"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is taken for PyTorch's, with headers of CUDA beside it."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(CUDA_13)
    headers = tmp_path / "nvidia" / "cu13" / "include"
    headers.mkdir(parents=True)
    (headers / "cuda_runtime_api.h").touch()
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    monkeypatch.setattr(fake_build, "find_torch", fake_build.find_torch.__wrapped__)
    monkeypatch.setattr(fake_build, "build", fake_build.build.__wrapped__)
    monkeypatch.setattr(fake_build, "build_driver", fake_build.build_driver.__wrapped__)
    monkeypatch.setattr(fake_build, "BUILDS", tmp_path / "builds")
    return folder


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("__version__ = '2.15.0+cpu'; cuda = None", "2.15.0+cpu is a build without CUDA"),
        ("__version__ = '2.11.0'; cuda = '12.8'", "built for CUDA 12.8; this needs 13"),
    ],
)
def test_pytorch_that_does_not_do(package: Path, version: str, words: str) -> None:
    (package / "version.py").write_text(version)
    with pytest.raises(UnavailableError, match=re.escape(words)):
        fake_build.build()


NUMBER = re.compile(r"^\s*(CU\w+)\s*=\s*(0x[0-9a-fA-F]+|[0-9]+)\b", re.MULTILINE)


def numbers(header: Path) -> dict[str, int]:
    return {name: int(value, 0) for name, value in NUMBER.findall(header.read_text())}


@pytest.mark.long
def test_the_driver_alone_needs_no_header_of_cuda(package: Path) -> None:
    shutil.rmtree(package.parent / "nvidia")
    with pytest.raises(UnavailableError, match="without headers"):
        fake_build.build()
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


def test_nothing_to_build_with(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(UnavailableError, match="no C\\+\\+ compiler"):
        fake_build.build()
    shutil.rmtree(package.parent / "nvidia")
    with pytest.raises(UnavailableError, match="without headers"):
        fake_build.build()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnavailableError, match="this is aarch64"):
        fake_build.build()


def test_tests_say_why_they_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> dict[str, str]:
        raise UnavailableError("it rains")

    monkeypatch.setattr(fake_build, "environment", unavailable)
    with pytest.raises(pytest.skip.Exception, match="no fake device: it rains"):
        test_every_function_of_cuda_is_there()


def test_two_ask_and_one_builds(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is at it: it waits at the lock, and finds it done."""
    built: list[Path] = []
    second_came, real_lock = threading.Event(), fcntl.flock

    def at_the_lock(file: Any, how: int) -> None:
        if built:
            second_came.set()
        real_lock(file, how)

    def compiled(_compiler: str, _torch: object, out: Path) -> None:
        built.append(out)
        if len(built) == 1:
            seconds.append(pool.submit(fake_build.build))
        else:
            second_came.set()
        assert second_came.wait(60)
        assert len(built) == 1
        (out / fake_build.DRIVER).touch()

    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/echo")
    monkeypatch.setattr(fcntl, "flock", at_the_lock)
    monkeypatch.setattr(fake_build, "_compile", compiled)
    seconds: list[Future[Path]] = []
    with ThreadPoolExecutor(1) as pool:
        folder = fake_build.build()
        assert seconds[0].result() == folder
    assert len(built) == 1
    assert (folder / fake_build.DRIVER).exists()
    assert {path.name for path in fake_build.BUILDS.iterdir()} == {folder.name, "lock"}


def test_other_pytorch_is_another_build(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/echo")
    monkeypatch.setattr(fake_build, "_compile", lambda *_: None)
    folder = fake_build.build()
    assert fake_build.build() == folder
    (package / "version.py").write_text(CUDA_13.replace("2.15.0", "2.15.1"))
    assert fake_build.build() != folder


def test_build_that_fails_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(_compiler: str, _torch: object, out: Path) -> None:
        (out / fake_build.DRIVER).touch()
        fake_build._run(["sh", "-c", "echo 'no such thing' >&2; exit 1"])

    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/echo")
    monkeypatch.setattr(fake_build, "_compile", compiled)
    with pytest.raises(RuntimeError, match="failed:\nno such thing"):
        fake_build.build()
    assert [path.name for path in fake_build.BUILDS.iterdir()] == ["lock"]


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
