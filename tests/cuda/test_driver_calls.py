"""How often the driver is called for a tensor that leaves a GPU and comes back."""

from __future__ import annotations

import pytest
import torch

from fake_device import FakeDevice
from offloading import Everything, chain, check, made, offloaded, settle
from on_fake import on_fake_device

COUNT = 64
NOT_OF_HOOKS = (
    # The thread that follows the copies calls these as long as something is under way.
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuThreadExchangeStreamCaptureMode",
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


@pytest.mark.parametrize(("elements", "calls_max"), [(16 << 10, 8), (1 << 20, 20)])
@on_fake_device()
def test_a_tensor_that_leaves_and_comes_back(
    fake: FakeDevice, elements: int, calls_max: int
) -> None:
    """Its two copies, the events of their ends, and little that it does not share with others.

    Tensors of 64 KiB leave and come back in groups; of 4 MiB, four leave together.
    """
    leaf = made(0, elements)
    options = {"min_bytes": leaf.nbytes, "pinned_bytes": 4 * COUNT * leaf.nbytes}
    with offloaded(Everything(), **options) as session:
        for _ in range(3):
            leaf.grad = None
            torch.cuda.synchronize()
            before, left_bytes = calls(fake), session.stats.bytes_offloaded
            loss = chain(leaf, COUNT).sum()
            settle(session)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            torch.cuda.synchronize()
            made_since = calls(fake) - before
            assert session.stats.bytes_offloaded - left_bytes == COUNT * leaf.nbytes
    assert made_since <= calls_max * COUNT, f"{made_since / COUNT} calls for each tensor"
    check(leaf, COUNT)
    assert fake.races() == []
