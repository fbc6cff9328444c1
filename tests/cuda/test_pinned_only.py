"""A session without a directory on a GPU: tensors go to pinned memory or stay; no disk is used."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import ssdtrain
from fake_device import FakeDevice
from offloading import at_any_price, chain, check, gpus_of, made, settle
from on_devices import Device, on_each_device
from on_fake import on_fake_device
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.planning.policy import Policy
from test_host_tier import Slow

COUNT = 20
NOWHERE = StoreConfig(dirs=())


def session_with(policy: Policy, room_bytes: int | None) -> ssdtrain.Session:
    config = OffloadConfig(
        store=NOWHERE, min_bytes=512, max_host_bytes=room_bytes, rematerialize="never"
    )
    return ssdtrain.Session(config, policy)


def unnamed_files() -> list[str]:
    """Return the open files that have no name; the driver opens others at its first copy."""
    paths = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
    return sorted(path for path in paths if path.endswith("(deleted)"))


@on_each_device()
def test_tensors_go_to_pinned_memory_and_come_back(device: Device) -> None:
    leaf = made(0)
    room_bytes = COUNT // 2 * leaf.nbytes
    files = unnamed_files()
    session = session_with(Slow(host_bytes=room_bytes), room_bytes)
    with at_any_price(), session.context():
        for step in range(4):
            before = session.stats
            leaf.grad = None
            saved = chain(leaf, COUNT)
            session.flush()
            saved.sum().backward()
            torch.cuda.synchronize()
            stats = session.stats.since(before)
            assert stats.staying_bytes == (room_bytes if step else 0), "by the plan of a first step"
            assert stats.bytes_offloaded == stats.staying_bytes
        del saved
        settle(session)
    assert unnamed_files() == files
    session.close()
    stats = session.stats
    assert stats.pinned_bytes == room_bytes, "without memory through which tensors go to a disk"
    assert stats.to_gpu_bytes == stats.staying_bytes == stats.from_gpu_bytes == 3 * room_bytes
    assert stats.bytes_written == stats.write_failed_count == stats.full_stayed_count == 0
    assert stats.reason is None
    assert "disk's" not in stats.limit
    assert "none, so nothing is written" in str(session)
    check(leaf, COUNT)


@on_fake_device()
def test_without_pinned_memory_no_way_is_opened(fake: FakeDevice) -> None:
    leaf = made(0)
    session = session_with(Slow(), None)
    with session.context():
        for _ in range(3):
            leaf.grad = None
            saved = chain(leaf, COUNT)
            saved.sum().backward()
        assert gpus_of(session).copy_rates() == []
        threads = [Path(task.path, "comm").read_text() for task in os.scandir("/proc/self/task")]
        assert not [name for name in threads if name.startswith("ssdtrain")]
    session.close()
    assert session.stats.from_gpu_bytes == session.stats.pinned_bytes == 0
    check(leaf, COUNT)
