"""Functions of the CUDA driver fail: a clear error, or the tensor is kept; never other bits."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ssdtrain
from checkout import ROOT
from fake_device import FakeDevice
from offloading import chain, made, offloaded, settle
from on_fake import on_fake_device
from support import shared_out

LAUNCH_FAILED = 719
COUNT = 8


def symbols() -> list[str]:
    """Return every function of the driver that the core calls once a session is open."""
    source = Path(ROOT, "rust/core/src/cuda/driver.rs").read_text()
    table = source[source.index("\nfunctions! {") :]
    names = re.findall(r"^    (cu\w+)\(", table, re.MULTILINE)
    return [name for name in names if not re.match("cuInit|cuGetError", name)]


def step(leaf: Tensor, session: ssdtrain.Session) -> None:
    """Save, wait until all is on the disk, load, and compute the gradient."""
    leaf.grad = None
    saved = chain(leaf, COUNT)
    session.flush()
    saved.sum().backward()
    torch.cuda.synchronize()


def plain_gradient() -> Tensor:
    leaf = made(0)
    chain(leaf, COUNT).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()


@pytest.mark.parametrize("symbol", shared_out(symbols(), quick=symbols()[::3]))
@on_fake_device()
def test_a_function_of_the_driver_fails(fake: FakeDevice, symbol: str) -> None:
    plain = plain_gradient()
    for nth in (1, 2, None):
        leaf = made(0)
        with offloaded() as session:
            fake.fail(symbol, LAUNCH_FAILED, nth=nth)
            try:
                step(leaf, session)
            except (ssdtrain.CudaError, torch.AcceleratorError) as error:
                # Torch calls some of these itself, and says so in its own words.
                told = str(error)
                assert symbol in told
            else:
                told = None
            fake.recover()
            torch.cuda.synchronize()
            if told is None:
                assert not fake.races()
                assert leaf.grad is not None
                assert torch.equal(leaf.grad.cpu(), plain)
            # The next step works, in the same session, and leaves no slot behind.
            step(leaf, session)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.cpu(), plain)
            settle(session)
        # What an error left in the middle may have been overtaken by what came next.
        races = fake.races()
        assert told is not None or not races


def until_workers_have_ended() -> None:
    """Wait until no thread follows copies any more: with it go streams, events and memory."""

    def name(thread: Path) -> str:
        # It may end between the two.
        try:
            return (thread / "comm").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    while any(name(one).startswith("ssdtrain-gpu") for one in Path("/proc/self/task").iterdir()):
        torch.cuda.synchronize()


@on_fake_device()
def test_a_function_of_the_driver_fails_while_a_session_ends(fake: FakeDevice) -> None:
    plain = plain_gradient()
    for symbol in symbols():
        leaf = made(0)
        with offloaded() as session:
            step(leaf, session)
            settle(session)
            fake.fail(symbol, LAUNCH_FAILED, nth=None)
        del session
        # Torch's own calls may fail here as well.
        with suppress(torch.AcceleratorError):
            torch.cuda.synchronize()
        fake.recover()
        until_workers_have_ended()
        assert not fake.races(), symbol
        with offloaded() as session:
            step(leaf, session)
        del session
        until_workers_have_ended()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.cpu(), plain), symbol
