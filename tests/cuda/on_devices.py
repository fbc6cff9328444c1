"""Tests that run on the fake device, and the same on a real GPU: one table, two devices.

pytest tests/cuda           # on the fake
pytest -m gpu tests/cuda    # on hardware; skipped where there is none
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import children
import hardware
from fake_device import FakeDevice
from hardware import Hardware
from on_fake import FAKE, Kind, child, judge

Device = FakeDevice | Hardware

ON_HARDWARE = Kind(
    children.SERVER,
    "import hardware, on_fake; on_fake.run(hardware.start)",
    lambda _options: hardware.environment(),
)
KINDS = {"fake": FAKE, "hardware": ON_HARDWARE}
BACKENDS = ["fake", pytest.param("hardware", marks=pytest.mark.gpu)]


def on_each_device(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process with fake devices, and marked `gpu` in one with real ones.

    It is given the device's handle as its first argument. The `options` are those of
    `fake_device.start`. Other arguments have to fit into JSON.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_child(*, backend: str, **arguments: Any) -> None:
            reason = hardware.missing() if backend == "hardware" else None
            if reason is not None:
                pytest.skip(f"no GPU: {reason}")
            judge(child(test, options, KINDS[backend], **arguments))

        parameters = list(inspect.signature(test).parameters.values())[1:]
        backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
        in_child.__signature__ = inspect.Signature([*parameters, backend])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("backend", BACKENDS)(in_child)

    return decorate
