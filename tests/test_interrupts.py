"""An interrupt (Ctrl-C) at any call of the hooks ends the step, and nothing else.

Python delivers it at the first line of a function; where that is a finalizer, it is printed, lost,
and the finalizer with it. So the calls that a step makes inside the package are interrupted one
by one.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch

import ssdtrain
from support import Rig

PACKAGE = str(Path(ssdtrain.__file__).parent)


@pytest.fixture(autouse=True)
def only_new_garbage() -> Iterator[None]:
    """Spare thousands of collections the objects of the tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Signal:
    """Runs a handler at one of the moments at which Python would, within the package.

    That is when a function begins, and after a call of a function in C.
    """

    def __init__(self, number: int, handler: Callable[[], object], events: tuple[str, ...]) -> None:
        self._left = number
        self._handler = handler
        self._events = events
        self.came = False

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event not in self._events or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self._left -= 1
        if self._left < 0 and not self.came:
            self.came = True
            self._handler()


def interrupt() -> None:
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
                with Signal(number, interrupt, ("call", "c_return")) as signal:
                    found = step(rig)
            except KeyboardInterrupt:
                found = None
            # Lost would be: it came, and the step went on to its end.
            assert signal.came == (found is None), f"the interrupt at call {number} was lost"
            again = step(rig)
        expected = again if expected is None else expected
        assert torch.equal(again, expected)
        rig.assert_empty()
        rig.session.close()
        if found is not None:
            break
    assert number > 100
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bound_bytes", [None, 250_000])
def test_a_signal_handler_may_ask_for_the_counts(bound_bytes: int | None, tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_bytes=4096, max_resident_bytes=bound_bytes)
    with rig.context():
        expected = step(rig)
    before = rig.stats
    saved_count = before.tensors_kept + before.tensors_forwarded + before.tensors_offloaded
    for number in itertools.count():
        with rig.context(), Signal(number, lambda: rig.stats, ("call", "c_return")) as signal:
            found = step(rig)
        assert torch.equal(found, expected)
        after = rig.stats
        assert after.resident_bytes == 0
        counted = after.tensors_kept + after.tensors_forwarded + after.tensors_offloaded
        assert counted == (number + 2) * saved_count, f"miscounted after a signal at {number}"
        if not signal.came:
            break
    assert number > 100
    rig.assert_empty()
