"""How often the driver is called for a tensor that leaves a GPU and comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ssdtrain
import support
from fake_device import FakeDevice
from offloading import Everything, check, gpus_of, made, offloaded, settle
from on_fake import on_fake_device

COUNT = 64
AHEAD_COUNT = 6
"""Tensors of 4 MiB that are read ahead at least: 32 MiB, refilled by a quarter."""
NOT_OF_HOOKS = (
    # The thread that follows the copies calls these as long as something is under way.
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuThreadExchangeStreamCaptureMode",
    # An event serves again. How many there are at once depends on time.
    "cuEventCreate",
    # torch's, and each wait for the device has a look at its context.
    "cuDevicePrimaryCtxGetState",
    "cuCtxSynchronize",
    # Launches of a GPU leave its context current in each thread; those of the fake do not.
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)


def calls(fake: FakeDevice) -> int:
    """Return the number of calls so far, but for those that depend on time."""
    counts = fake.calls()
    counts["cuCtxGetCurrent"] -= counts["cuCtxSynchronize"]
    is_of_driver = (name for name in counts if name.startswith("cu") and name[:4] != "cuda")
    return sum(counts[name] for name in is_of_driver if name not in NOT_OF_HOOKS)


def chain_behind_loads(x: Tensor, session: ssdtrain.Session) -> Tensor:
    """Compute what `chain` does. A node runs in backward once its tensor has come from the disk.

    A need that waits for the disk has more calls, and how many do depends on the machine's load.
    The first need begins the reads ahead.
    """
    copied = gpus_of(session).copied_bytes
    before_bytes = copied()[1]

    def until_loaded(number: int) -> Callable[[Tensor], None]:
        wanted_count = min(COUNT - number + AHEAD_COUNT, COUNT)
        wanted_bytes = before_bytes + wanted_count * x.nbytes
        return lambda _: support.wait_until(lambda: copied()[1] >= wanted_bytes, "loads")

    for number in range(COUNT):
        x = torch.sin(x * 1.01)
        if number < COUNT - 1:
            x.register_hook(until_loaded(number))
    return x


@pytest.mark.parametrize(("elements", "calls_max"), [(16 << 10, 8), (1 << 20, 12)])
@on_fake_device()
def test_a_tensor_that_leaves_and_comes_back(
    fake: FakeDevice, elements: int, calls_max: int
) -> None:
    """Its two copies, the events of their ends, and little that it does not share with others.

    Tensors of 64 KiB leave and come back in groups; of 4 MiB, four leave together, and two are read
    together. Each need may be a wait for a load.
    """
    leaf = made(0, elements)
    options = {"min_bytes": leaf.nbytes, "pinned_bytes": 4 * COUNT * leaf.nbytes}
    with offloaded(Everything(), **options) as session:
        for _ in range(3):
            leaf.grad = None
            torch.cuda.synchronize()
            before, left_bytes = calls(fake), session.stats.bytes_offloaded
            loss = chain_behind_loads(leaf, session).sum()
            settle(session)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            torch.cuda.synchronize()
            made_since = calls(fake) - before
            assert session.stats.bytes_offloaded - left_bytes == COUNT * leaf.nbytes
    assert made_since <= calls_max * COUNT, f"{made_since / COUNT} calls for each tensor"
    check(leaf, COUNT)
    assert fake.races() == []
