"""A CUDA device without a GPU: PyTorch's own ``torch.cuda`` over a fake driver. See README.md.

A process begins with the driver preloaded (`fake_build.environment` says how) and calls `start`
before it uses CUDA; the handle that it gets chooses how late things happen and what fails, and
tells what was seen.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import re
import warnings
from collections import Counter

import torch

import fake_build

KINDS = (
    "kernels",
    "copies to the device",
    "copies to the host",
    "copies on the device",
    "disk",
)
"""What can be held and made late; "disk" is a system call that reads or writes pinned memory."""

ILLEGAL_ADDRESS = 700
"""The code of a failure if a test names none."""

MEMORY_BYTES = 1 << 30


def start(
    devices: int = 1,
    memory_bytes: int = MEMORY_BYTES,
    *,
    watch_host: bool = True,
    patience_s: int = 60,
) -> FakeDevice:
    """Initialise CUDA on fake devices, with operators of the CPU in the place of its kernels.

    With `watch_host` the host's own accesses to pinned memory are seen, which costs a system call
    for each copy. After `patience_s` a wait for the device counts as a hang and ends the process.
    """
    driver = ctypes.CDLL(None)  # whatever this process began with
    if not hasattr(driver, "fake_set_option"):
        raise RuntimeError("start this process with the variables of fake_build.environment()")
    # A crash, as of a host that touches the device's memory, shows where in Python it was.
    faulthandler.enable()
    fake = FakeDevice(driver)
    for name, value in (
        ("device_count", devices),
        ("memory_bytes", memory_bytes),
        ("is_host_watched", watch_host),
        ("patience_s", patience_s),
    ):
        driver.fake_set_option(name.encode(), ctypes.c_long(value))
    load_kernels()
    torch.cuda.init()
    return fake


@functools.cache
def load_kernels() -> None:
    """Put the fake's kernels in the place of CUDA's, once. A process may do so before it forks."""
    with warnings.catch_warnings():
        # That kernels are replaced is what this is for.
        warnings.simplefilter("ignore")
        torch.ops.load_library(str(fake_build.build() / fake_build.KERNELS))
    # Attention and convolution by their formulas: the CPU has nothing for the fused kernels.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    # Shapes come from operators that PyTorch has in Python, the first of which import a lot.
    square = torch.ones(2, 2, device="meta")
    torch.add(square @ square, 1)


def can_fail() -> list[str]:
    """The functions of CUDA that a test can make fail: all but those that tell of errors."""
    tell = re.compile(r"cu(?:da)?(?:GetError|GetLastError|PeekAtLastError)")
    return [name for name in fake_build.symbols() if not tell.match(name)]


class FakeDevice:
    """Chooses how the fake devices of this process behave, and tells what was seen of them."""

    is_exact = True
    """What is held stands still until it is released, and every race is seen."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        for name in ("take_races", "calls", "refused", "waits_with_gil"):
            getattr(driver, f"fake_{name}").restype = ctypes.c_void_p
        driver.fake_ns_in_calls.restype = ctypes.c_long
        # Called with the interpreter's lock: else each look would count itself.
        prototype = ctypes.PYFUNCTYPE(ctypes.c_long)
        self._ns_without_lock = prototype(("fake_ns_without_lock", driver))

    # What was seen

    def races(self) -> list[str]:
        """Each pair of accesses that nothing ordered, in words; since the last call."""
        return self._text("take_races").splitlines()

    def calls(self) -> Counter[str]:
        """How often each function of CUDA was called."""
        return self._counts("calls")

    def refused(self) -> Counter[str]:
        """What was called that the fake does not do."""
        return self._counts("refused")

    def waits_with_gil(self) -> Counter[str]:
        """Functions that had to wait for a device, and in which the caller held Python's lock."""
        return self._counts("waits_with_gil")

    # What calls take

    def time_calls(self, *, is_on: bool) -> None:
        """Measure from now on what the next two tell, or no longer."""
        self._driver.fake_time_calls(int(is_on))

    def ns_in_calls(self) -> int:
        """How long this thread was in functions of CUDA while that was measured, in nanoseconds.

        It is the fake's own time, and no part of a real driver's: its locks, its clocks and lists
        for the races, the threads that it wakes. What they do on streams is not in it.
        """
        return int(self._driver.fake_ns_in_calls())

    def ns_without_lock(self) -> int:
        """How long this thread had given up Python's lock while that was measured, in nanoseconds.

        Always 0 where Python is no library of its own (``ldd`` of it names no ``libpython``).
        """
        return int(self._ns_without_lock())

    # How late things happen

    def hold(self, *what: str | torch.cuda.Stream) -> None:
        """Let nothing of these kinds (see `KINDS`), or nothing on these streams, go on."""
        for one in what:
            if isinstance(one, str):
                self._driver.fake_hold(_kind(one))
            else:
                self._driver.fake_hold_stream(_handle(one))

    def release(self, *what: str | torch.cuda.Stream) -> None:
        """Let go of these, or of all that is held."""
        if not what:
            self._driver.fake_release_all()
        for one in what:
            if isinstance(one, str):
                self._driver.fake_release(_kind(one))
            else:
                self._driver.fake_release_stream(_handle(one))

    def lag(self, most_us: int, *kinds: str, seed: int = 1) -> None:
        """Make each of these kinds, or everything, late by a random time of at most so much."""
        self._driver.fake_set_lag_seed(ctypes.c_long(seed))
        for one in kinds or KINDS:
            self._driver.fake_set_lag(_kind(one), ctypes.c_long(most_us))

    # What fails

    def fail(self, symbol: str, code: int = ILLEGAL_ADDRESS, *, nth: int | None = 1) -> None:
        """Make the `nth` call of a function from now on fail, or every one."""
        if symbol not in can_fail():
            raise ValueError(f"the fake device has no {symbol} that can fail; see can_fail()")
        after = 0 if nth is None else nth - 1
        self._driver.fake_fail(symbol.encode(), code, ctypes.c_long(after), int(nth is None))

    def recover(self) -> None:
        """Forget all failures, also that of a kernel, which lasts."""
        self._driver.fake_recover()

    def _text(self, name: str) -> str:
        address = getattr(self._driver, f"fake_{name}")()
        try:
            return ctypes.string_at(address).decode()
        finally:
            self._driver.fake_free(ctypes.c_void_p(address))

    def _counts(self, name: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in self._text(name).splitlines():
            words, _, count = line.rpartition(" ")
            counts[words] = int(count)
        return counts


def _kind(name: str) -> bytes:
    if name not in KINDS:
        raise ValueError(f"{name!r} is none of {KINDS}")
    return name.encode()


def _handle(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
