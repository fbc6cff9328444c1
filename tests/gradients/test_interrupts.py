"""An interrupt (Ctrl-C) at any moment of the hooks ends the step, and nothing else.

Python delivers it at the first line of a function, after a call, and when a loop begins anew. In a
finalizer it is printed and lost, and the finalizer with it. So the calls and the loops of a step
inside the package are interrupted one by one.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

from moments import AtCall, AtLoop, interrupt
from support import Rig, sizes, wait_until

MOMENTS = [(AtCall, 100), (AtLoop, 10)]
"""With how many of them there are in a step at least."""


EVERY = sizes(small=23, whole=1)
"""Of how many moments one is tried."""


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


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("bound_bytes", [None, 250_000])
@pytest.mark.parametrize(("at", "least_count"), MOMENTS)
def test_an_interrupt_at_any_moment_leaves_the_counts_right(
    at: type[AtCall | AtLoop],
    least_count: int,
    bound_bytes: int | None,
    every: int,
    tmp_path: Path,
) -> None:
    expected = None
    for number in itertools.count(step=every):
        rig = Rig(tmp_path, min_bytes=4096, max_resident_bytes=bound_bytes)
        with rig.context():
            try:
                with at(number, interrupt) as moment:
                    found = step(rig)
            except KeyboardInterrupt:
                found = None
            # Lost would be: it came, and the step went on to its end.
            assert moment.came == (found is None), f"the interrupt at moment {number} was lost"
            for again in (step(rig), step(rig), step(rig)):
                expected = again if expected is None else expected
                assert torch.equal(again, expected)
        rig.assert_empty()
        rig.session.close()
        if found is not None:
            break
    assert number > least_count
    assert torch.equal(found, expected)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("bound_bytes", [None, 250_000])
@pytest.mark.parametrize(("at", "least_count"), MOMENTS)
def test_a_signal_handler_may_ask_for_the_counts(
    at: type[AtCall | AtLoop],
    least_count: int,
    bound_bytes: int | None,
    every: int,
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, min_bytes=4096, max_resident_bytes=bound_bytes)
    with rig.context():
        expected = step(rig)
    before = rig.stats
    saved_count = before.tensors_kept + before.tensors_forwarded + before.tensors_offloaded
    for number in itertools.count(step=every):
        with rig.context(), at(number, lambda: rig.stats) as moment:
            found = step(rig)
        assert torch.equal(found, expected)
        # A write that was given up on its way holds its source until it has ended.
        wait_until(lambda: rig.stats.resident_bytes == 0, "the end of the step's writes")
        after = rig.stats
        counted = after.tensors_kept + after.tensors_forwarded + after.tensors_offloaded
        assert counted == (number // every + 2) * saved_count, (
            f"miscounted after a signal at {number}"
        )
        if not moment.came:
            break
    assert number > least_count
    rig.assert_empty()


@pytest.mark.parametrize("do", [Rig.flush, step])
def test_a_signal_handler_that_ends_the_write_that_is_waited_for(
    do: Callable[[Rig], object], tmp_path: Path
) -> None:
    """The hook that waits finds all of it done, and must not take its bytes for lost."""

    def handle(_number: int, frame: FrameType | None) -> None:
        assert frame is not None
        # Before the program waits for the disk, which stands still, nothing is to be seen.
        if frame.f_code.co_name == "wait_for_transfer":
            signal.setitimer(signal.ITIMER_REAL, 0)
            rig.disk.resume()
            with torch.enable_grad():
                do(rig)
            came.append(frame)

    def train() -> torch.Tensor:
        x = torch.linspace(-1, 1, 20_000, requires_grad=True)
        y = x
        for _ in range(12):
            y = torch.sin(y * 1.01)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    plain, came = train(), list[FrameType]()
    faults = {"seed": 1, "paused": True}
    rig = Rig(
        tmp_path, backend="simulated", faults=faults, min_bytes=4096, max_resident_bytes=320_000
    )
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with rig.context():
            found = train()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        rig.disk.resume()
    assert len(came) == 1
    assert torch.equal(found, plain)
    rig.assert_empty()
