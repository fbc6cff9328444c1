"""An interrupt (Ctrl-C) at any call of the hooks ends the step, and nothing else.

Python delivers it at the first line of a function; where that is a finalizer, it is printed, lost,
and the finalizer with it. So every call that a step makes inside the package is interrupted once.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch

import ssdtrain
from support import Rig

PACKAGE = str(Path(ssdtrain.__file__).parent)


class Interrupt:
    """Raises ``KeyboardInterrupt`` at one of the calls into the package."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.came = False

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self._left -= 1
        if self._left < 0 and not self.came:
            self.came = True
            raise KeyboardInterrupt


def step(rig: Rig) -> torch.Tensor:
    """Train on large, small and shared saved tensors; return the gradient."""
    x = torch.linspace(-1, 1, 20_000, requires_grad=True)
    y = (x * 2).sin()
    small = y[:64] * y[64:128]
    loss = (y * y).exp().sum() + small.sin().sum()
    rig.begin_writes()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("bound_bytes", [None, 250_000])
def test_an_interrupt_at_any_call_leaves_the_counts_right(
    bound_bytes: int | None, tmp_path: Path
) -> None:
    expected = None
    for number in itertools.count():
        rig = Rig(tmp_path, min_bytes=4096, max_resident_bytes=bound_bytes)
        with rig.context():
            try:
                with Interrupt(number) as interrupt:
                    found = step(rig)
            except KeyboardInterrupt:
                found = None
            # Lost would be: it came, and the step went on to its end.
            assert interrupt.came == (found is None), f"the interrupt at call {number} was lost"
            again = step(rig)
        expected = again if expected is None else expected
        assert torch.equal(again, expected)
        rig.assert_empty()
        rig.session.close()
        if found is not None:
            break
    assert number > 100
    assert torch.equal(found, expected)
