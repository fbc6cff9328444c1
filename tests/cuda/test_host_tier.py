"""Tensors of a GPU that stay in pinned memory by plan, and never go to the disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import ssdtrain
from fake_device import FakeDevice
from offloading import All, Everything, chain, check, gpus_of, made, offloaded, settle
from on_devices import Device, on_each_device
from on_fake import on_fake_device
from ssdtrain.planning.policy import Copies, Item, Policy, Rates
from ssdtrain.transfer.host import HostTransfer

COUNT = 20
RING = 16 << 20
NO_DISK = Rates(1.0, 1.0, {0: Copies(1e12, 1e12)})
"""Of a disk that is no use."""


class Slow(Policy):
    """A policy of steps that take so long that every link could hide all of them."""

    def learn(self, signature: int, items: Sequence[Item], *others: Any) -> None:
        """Stretch the times of a step, so that the plan depends on none that was measured."""
        end_s = 2.0 * len(items)
        stretched = [
            item._replace(packed_s=1.0 * place, needed_s=end_s - place)
            for place, item in enumerate(items)
        ]
        super().learn(signature, stretched, *others)


def all_pinned() -> Everything:
    policy = Everything()
    policy.pinned = All()
    return policy


def open_way(session: ssdtrain.Session) -> None:
    """Let a first tensor open the way of the GPU."""
    _held = chain(made(1), 1)
    settle(session)


@pytest.mark.parametrize("room", [COUNT // 2, 2 * COUNT])
@on_each_device()
def test_pinned_tensors_are_not_written_and_others_are(device: Device, room: int) -> None:
    leaf = made(0)
    room_bytes = room * leaf.nbytes
    with offloaded(all_pinned(), pinned_bytes=RING, max_host_bytes=room_bytes) as session:
        open_way(session)
        gpus_of(session).pin_for_tier(room_bytes)
        before = session.stats
        assert before.pinned_bytes == RING + room_bytes
        saved = chain(leaf, COUNT)
        staying_bytes = min(room, COUNT) * leaf.nbytes
        settle(session, staying_bytes)
        assert session.stats.since(before).staying_bytes == staying_bytes
        saved.sum().backward()
        torch.cuda.synchronize()
        del saved
        # Until the thread of the GPU has let go of its last node. What stayed gives its place to
        # the next.
        settle(session)
        stats = session.stats.since(before)
        assert stats.bytes_written == COUNT * leaf.nbytes - staying_bytes
        assert stats.bytes_offloaded == COUNT * leaf.nbytes
        _held = chain(leaf, room)
        settle(session, room_bytes)
        assert session.stats.since(before).staying_bytes == staying_bytes + room_bytes
        assert "stayed in pinned memory by plan" in str(session.stats)
    check(leaf, COUNT)


@on_fake_device(devices=2)
def test_all_gpus_have_the_memory_in_turns(fake: FakeDevice) -> None:
    leaves = [made(0), made(0).detach().to("cuda:1").requires_grad_()]
    room_bytes = COUNT * leaves[0].nbytes
    with offloaded(all_pinned(), pinned_bytes=RING, max_host_bytes=room_bytes) as session:
        open_way(session)
        gpus_of(session).pin_for_tier(2 * room_bytes)
        before = session.stats
        assert before.pinned_bytes == RING + room_bytes
        fake.lag(2000, seed=1)
        for turn, leaf in enumerate([*leaves, *leaves]):
            leaf.grad = None
            with torch.cuda.device(leaf.device):
                saved = chain(leaf, COUNT)
                settle(session, room_bytes)
                saved.sum().backward()
                del saved
                settle(session)
            assert session.stats.since(before).staying_bytes == (turn + 1) * room_bytes
        fake.lag(0)
        assert session.stats.since(before).bytes_written == 0
    check(leaves[0], COUNT)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert torch.equal(leaves[0].grad.cpu(), leaves[1].grad.cpu())
    assert fake.races() == []


@on_fake_device()
def test_a_flush_frees_what_it_waited_for(fake: FakeDevice) -> None:
    leaf = made(0)
    room_bytes = COUNT * leaf.nbytes
    with offloaded(all_pinned(), pinned_bytes=RING, max_host_bytes=room_bytes) as session:
        open_way(session)
        gpus_of(session).pin_for_tier(room_bytes)
        for _ in range(50):
            saved = chain(leaf, COUNT)
            # The worker has often not seen yet that the last copies have ended.
            torch.cuda.synchronize()
            session.flush()
            assert session.stats.resident_bytes == 0
            del saved


@on_fake_device()
def test_a_late_copy_is_waited_for_in_pinned_memory_too(fake: FakeDevice) -> None:
    for seed in range(5):
        leaf = made(0)
        room_bytes = COUNT * leaf.nbytes
        with offloaded(all_pinned(), pinned_bytes=RING, max_host_bytes=room_bytes) as session:
            open_way(session)
            gpus_of(session).pin_for_tier(room_bytes)
            fake.lag(2000, seed=seed)
            for _ in range(3):
                leaf.grad = None
                chain(leaf, COUNT).sum().backward()
            fake.lag(0)
        check(leaf, COUNT)


@on_each_device()
def test_the_plan_decides_what_stays(device: Device) -> None:
    leaf = made(0)
    room_bytes = COUNT // 2 * leaf.nbytes
    policy = Slow(host_bytes=room_bytes)
    with (
        mock.patch.object(HostTransfer, "rates", return_value=NO_DISK),
        offloaded(policy, pinned_bytes=RING, max_host_bytes=room_bytes) as session,
    ):
        for step in range(4):
            before = session.stats
            leaf.grad = None
            saved = chain(leaf, COUNT)
            session.flush()
            saved.sum().backward()
            torch.cuda.synchronize()
            stats = session.stats.since(before)
            assert stats.staying_bytes == (room_bytes if step else 0)
            assert bool(stats.bytes_written) == (step == 0), "the plan spares the disk"
        assert session.stats.pinned_bytes == RING + room_bytes
        del saved
        settle(session)
    check(leaf, COUNT)


@on_fake_device()
def test_memory_that_cannot_be_pinned_is_told_and_done_without(fake: FakeDevice) -> None:
    leaf = made(0)
    policy = Slow(host_bytes=RING)
    told: list[str] = []
    handler = mock.Mock(level=logging.INFO, handle=lambda record: told.append(record.getMessage()))
    logging.getLogger("ssdtrain").addHandler(handler)
    with (
        mock.patch.object(HostTransfer, "rates", return_value=NO_DISK),
        offloaded(policy, pinned_bytes=RING, max_host_bytes=RING) as session,
    ):
        chain(leaf, COUNT).sum().backward()
        fake.fail("cuMemHostRegister_v2")
        for _ in range(3):
            leaf.grad = None
            chain(leaf, COUNT).sum().backward()
        torch.cuda.synchronize()
        assert session.stats.pinned_bytes == RING
        assert session.stats.staying_bytes == 0
    assert not policy.pinned
    (words,) = [text for text in told if "no tensor stays in pinned memory" in text]
    assert "cuMemHostRegister_v2" in words
    assert "max_host_bytes" in words
    check(leaf, COUNT)
