"""A real GPU in the place of the fake one: as much of its handle as hardware can do.

What a test holds is late here, behind work that takes a while, and not held for sure; races are
not seen, only what they do. So a test may not rely on either (`is_exact`).

The variable SSDTRAIN_GPU_STAND_IN=1 lets the fake device stand in for the real one: so this file,
and what uses it, are tried where there is no GPU.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import torch

import fake_build
import fake_device
from fake_device import KINDS

STAND_IN = "SSDTRAIN_GPU_STAND_IN"
LATE_BYTES, LATE_COUNT = 256 << 20, 20
"""What keeps a stream or a link busy: some 5 ms of memory traffic, 100 ms of copies over PCIe."""
STAND_IN_BYTES, STAND_IN_COUNT = 64 << 10, 2
PROBE_S_MAX = 120
PROBE = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
TO_DEVICE, TO_HOST, KERNELS = "copies to the device", "copies to the host", "kernels"


def is_stand_in() -> bool:
    """Whether the fake device stands in for a GPU."""
    return os.environ.get(STAND_IN) == "1"


@functools.cache
def missing() -> str | None:
    """Return why there is no GPU to run on, or ``None``; asks in a process of its own.

    A process that has initialised CUDA could not fork those that run the tests.
    """
    if is_stand_in():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"CUDA did not start within {PROBE_S_MAX} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["CUDA does not start"])[-1]
    return None if int(done.stdout) else "PyTorch sees no GPU"


def environment() -> dict[str, str]:
    """What the environment of a process must hold before it starts."""
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return deterministic | fake_build.environment() if is_stand_in() else deterministic


def start(**options: Any) -> Hardware:
    """Initialise CUDA, with operators that give the same bits each time.

    The `options` are those of the fake device, for which nobody asks a real one.
    """
    if is_stand_in():
        fake_device.start(**options)
    torch.cuda.init()
    # Only warned, the backwards of attention would add in any order.
    torch.use_deterministic_algorithms(True)
    # Filling what is empty would hide what is not written, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    # The backward of this kernel adds in any order.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return Hardware()


class Hardware:
    """The GPUs of this process, in the words of `FakeDevice`."""

    is_exact = False

    def __init__(self) -> None:
        self._nbytes, self._count = LATE_BYTES, LATE_COUNT
        if is_stand_in():
            self._nbytes, self._count = STAND_IN_BYTES, STAND_IN_COUNT
        self._busy: dict[object, tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor | None]] = {}

    def hold(self, *what: str | torch.cuda.Stream) -> None:
        """Make what comes next of these late; of the disk nothing can be said here."""
        for one in what:
            if isinstance(one, torch.cuda.Stream):
                self._occupy(one, one, None)
            elif one == KERNELS:
                current = torch.cuda.current_stream()
                self._occupy(current, current, None)
            elif one in (TO_DEVICE, TO_HOST):
                stream = self._busy[one][0] if one in self._busy else torch.cuda.Stream()
                self._occupy(one, stream, one)

    def release(self, *what: str | torch.cuda.Stream) -> None:
        """What is late comes by itself."""

    def lag(self, most_us: int, *kinds: str, seed: int = 1) -> None:
        """Make these, or everything, late once; hardware is late in its own ways besides."""
        if most_us:
            self.hold(*(kinds or KINDS))

    def races(self) -> list[str]:
        """Nobody sees them."""
        return []

    def refused(self) -> dict[str, int]:
        """A real driver has all functions."""
        return {}

    def waits_with_gil(self) -> dict[str, int]:
        """Nobody sees them."""
        return {}

    def _occupy(self, key: object, stream: torch.cuda.Stream, way: str | None) -> None:
        """Put work on a stream that takes a while, in memory of its own."""
        with torch.cuda.stream(stream):
            if key not in self._busy:
                memory = torch.zeros(self._nbytes, dtype=torch.uint8, device="cuda")
                host = None if way is None else torch.zeros(self._nbytes, dtype=torch.uint8)
                self._busy[key] = stream, memory, None if host is None else host.pin_memory()
            _, memory, host = self._busy[key]
            for _ in range(self._count):
                if host is None:
                    memory.add_(1)
                elif way == TO_HOST:
                    host.copy_(memory, non_blocking=True)
                else:
                    memory.copy_(host, non_blocking=True)
