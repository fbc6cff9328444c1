"""What goes wrong on the device ends in an error that says so, and in nothing else."""

from __future__ import annotations

import ctypes
import re
import signal
import threading

import pytest
import torch

from fake_device import FakeDevice, can_fail
from on_fake import child, on_fake_device

LAUNCH_FAILED, NOT_SUPPORTED = 719, 801


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


# Failures that a test asks for


@on_fake_device()
def test_every_function_can_fail(fake: FakeDevice) -> None:
    library = driver()
    assert len(can_fail()) > 120
    for symbol in can_fail():
        fake.fail(symbol, LAUNCH_FAILED)
        assert getattr(library, symbol)(*[None] * 7) == LAUNCH_FAILED, symbol
        text = library.cudaGetErrorString(LAUNCH_FAILED).decode()
        assert text == f"CUDA_ERROR_LAUNCH_FAILED (fake device: the test made {symbol} fail)"


# The host where it must not be


def reads(fake: FakeDevice, is_freed: bool) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    address = tensor.data_ptr()
    if is_freed:
        del tensor
        torch.cuda.empty_cache()
    ctypes.string_at(address + 16, 4)


@pytest.mark.parametrize(
    ("is_freed", "words"),
    [
        (False, r"memory of a device, byte 16 of \d+ on device 0"),
        (True, "memory of a device that was"),
    ],
)
def test_host_that_touches_memory_of_the_device(is_freed: bool, words: str) -> None:
    done = child(reads, is_freed=is_freed)
    assert done.returncode == -signal.SIGSEGV, done
    assert re.search(f"fake device: the host reads {words}", done.stderr), done.stderr
    assert "in reads" in done.stderr  # where in Python


# Waits


def waits_for_what_is_held(fake: FakeDevice) -> None:
    tensor = torch.ones(4, device="cuda")
    fake.hold("kernels", torch.cuda.Stream())
    tensor.add_(1)
    torch.cuda.synchronize()


def test_wait_that_does_not_end() -> None:
    done = child(waits_for_what_is_held, {"patience_s": 1})
    assert done.returncode == -signal.SIGABRT, done
    assert "cuCtxSynchronize waited for 1 s, and the device did not get there" in done.stderr
    assert "(held by the test: kernels, stream " in done.stderr


@on_fake_device()
def test_waits_with_the_interpreters_lock(fake: FakeDevice) -> None:
    tensor = torch.ones(4, device="cuda")
    fake.hold("kernels")
    tensor.add_(1)
    release = threading.Timer(0.05, fake.release)
    release.start()
    torch.cuda.synchronize()  # lets go of the lock, else nobody could release it
    assert not fake.waits_with_gil()
    fake.lag(300_000)
    for _ in range(3):
        tensor.add_(1)
    assert ctypes.PyDLL(None).cuCtxSynchronize() == 0  # keeps it
    assert fake.waits_with_gil() == {"cuCtxSynchronize": 1}


# Other functions


def calls_what_is_missing(fake: FakeDevice) -> None:
    library = driver()
    for _ in range(2):
        assert library.cudaMallocAsync(None, 8, None) == NOT_SUPPORTED
        assert library.cuMemCreate(None, 8, None, 0) == NOT_SUPPORTED
    assert fake.refused() == {"cudaMallocAsync": 2, "cuMemCreate": 2}


def test_function_that_the_fake_lacks() -> None:
    done = child(calls_what_is_missing)
    assert done.returncode == 1, done
    assert done.stderr.count("fake device: cudaMallocAsync was called, which the fake does") == 1
    assert "not device.refused()" in done.stderr
