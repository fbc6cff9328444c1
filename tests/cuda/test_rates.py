"""The policy learns what the copies of a GPU do, and which tensors are there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fake_device import FakeDevice
from offloading import Everything, chain, made, offloaded, settle
from on_fake import on_fake_device
from ssdtrain.planning.policy import Copies, Item, Rates, plan

COUNT = 60
COPY_US_MAX = 40_000
"""Together the copies take more than the half second after which a rate of few bytes is told."""
FAST = 1e9


@on_fake_device()
def test_slow_copies_are_measured_and_keep_tensors_on_the_gpu(fake: FakeDevice) -> None:
    leaf = made(0)
    fake.lag(COPY_US_MAX, "copies to the host", "copies to the device")
    with (
        mock.patch.object(Everything, "learn") as learn,
        offloaded(pinned_bytes=64 << 20) as session,
    ):
        saved = chain(leaf, COUNT)
        settle(session)
        saved.sum().backward()
        del saved
        settle(session)
        stats = session.stats
        fake.lag(0)
        chain(leaf, 1)  # begins a round, so the one before is learned from
    (_, items, rates, *_), _ = learn.call_args
    assert [(item.gpu, item.nbytes) for item in items] == [(0, leaf.nbytes)] * COUNT
    assert set(rates.copies) == {0}
    assert rates.copies[0].down == pytest.approx(stats.from_gpu_bytes / stats.from_gpu_s)
    assert rates.copies[0].up == pytest.approx(stats.to_gpu_bytes / stats.to_gpu_s)
    # A step whose forward and backward hide what the disk needs, ten times over.
    layer_s = 10 * leaf.nbytes / FAST
    step = [
        Item(key, item.nbytes, key * layer_s, 10.0 + (COUNT - key) * layer_s, item.gpu)
        for key, item in enumerate(items)
    ]
    end_s = step[-1].packed_s
    step = [item._replace(needed_s=item.needed_s - 10.0 + end_s + 0.02) for item in step]
    by_the_disk = plan(step, Rates(FAST, FAST))
    assert by_the_disk.written_bytes == COUNT * leaf.nbytes
    for direction in ("down", "up"):
        copies = Copies(**{direction: getattr(rates.copies[0], direction)})
        bounded = plan(step, Rates(FAST, FAST, {0: copies}))
        assert bounded.written_bytes < by_the_disk.written_bytes / 4, direction
    assert torch.cuda.memory_allocated() >= leaf.nbytes
