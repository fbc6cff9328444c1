"""Who waits for a GPU that is behind, and what goes on meanwhile."""

from __future__ import annotations

import faulthandler
import threading
from unittest import mock

import pytest
import torch

import ssdtrain
from fake_device import FakeDevice
from offloading import chain, check, gpus_of, made, offloaded
from on_fake import on_fake_device

TO_HOST = "copies to the host"
SLOTS = 12
"""Of 64 KiB, in the part of the ring that is for what goes to the disk."""
FAR_MORE = 3 * SLOTS
LOOKS = 300
PATIENCE_S = 30
"""Longer than any of these takes; a thread that stands for ever ends the process."""


def on_cpu(count: int, elements: int = 1024) -> None:
    """Run hooks that wait for no GPU: so many tensors that may leave the CPU's memory."""
    x = torch.ones(elements, requires_grad=True)
    for _ in range(count):
        torch.sin(x * 1.01).sum().backward()


def until_waiting(session: ssdtrain.Session, thread: threading.Thread) -> None:
    """Wait until that thread waits for the GPU."""
    while not gpus_of(session).waiting_count:
        assert thread.is_alive()


@pytest.mark.defends("no lock while waiting for a GPU")
@on_fake_device()
def test_other_threads_run_their_hooks_while_one_waits_for_the_gpu(fake: FakeDevice) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    leaf = made(0)
    with offloaded(max_resident_bytes=64 << 20) as session:

        def save() -> None:
            with session.context():
                chain(leaf, FAR_MORE)
            torch.cuda.synchronize()

        fake.hold(TO_HOST)
        # Under a bound it waits for as long as the GPU needs.
        saving = threading.Thread(target=save)
        saving.start()
        until_waiting(session, saving)
        # The GPU goes on only when this thread has run its own hooks.
        on_cpu(LOOKS)
        assert saving.is_alive()
        fake.release()
        saving.join()
        stats = session.stats
        assert stats.full_gpu_wait_s > 0
        assert stats.full_stayed_count == 0
        assert f"{stats.full_gpu_wait_s:.3f} s of waits for the GPU" in str(stats)
    assert not fake.waits_with_gil()


@pytest.mark.parametrize("is_bounded", [False, True])
@on_fake_device()
def test_a_disk_that_is_behind_is_waited_for_only_under_a_bound(
    fake: FakeDevice, is_bounded: bool
) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    leaf = made(0)
    with offloaded(max_resident_bytes=64 << 20 if is_bounded else None) as session:

        def save() -> None:
            with session.context():
                _held = chain(leaf, SLOTS)
                session.flush(wait=False)
                # All copies end, and their slots wait for the disk.
                torch.cuda.synchronize()
                saved = chain(leaf, SLOTS)
                session.flush(wait=False)
                saved.sum().backward()

        fake.hold("disk")
        saving = threading.Thread(target=save)
        saving.start()
        if is_bounded:
            until_waiting(session, saving)
        else:
            saving.join()
            assert session.stats.full_stayed_count > 0
        fake.release()
        saving.join()
        stats = session.stats
        assert bool(stats.full_disk_wait_s) == is_bounded
        assert bool(stats.full_stayed_count) != is_bounded
        assert stats.exposed_s >= stats.full_disk_wait_s
    check(leaf, SLOTS)


@pytest.mark.defends("who needs room waits with who waits for a GPU")
@on_fake_device()
def test_a_thread_that_needs_room_waits_with_one_that_waits_for_the_gpu(fake: FakeDevice) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    leaf, has_room = made(0), threading.Event()
    bound = (SLOTS + 8) * leaf.nbytes
    with offloaded(max_resident_bytes=bound) as session:

        def save() -> None:
            with session.context():
                saved = chain(leaf, SLOTS + 1)
                # There is no slot for the last one.
                session.flush(wait=False)
                has_room.wait()
                saved.sum().backward()

        fake.hold(TO_HOST)
        saving = threading.Thread(target=save)
        saving.start()
        until_waiting(session, saving)
        writeback = session._hooks.writeback  # type: ignore[union-attr]
        wait_for_room = writeback.wait_for_room

        def wait() -> bool:
            has_waited = wait_for_room()
            if writeback.records.writing_count == 0:
                fake.release()
            return has_waited

        with mock.patch.object(writeback, "wait_for_room", wait):
            # Too much, unless the tensor for which the other thread waits leaves memory.
            on_cpu(1, (bound - leaf.nbytes // 2) // 4)
        has_room.set()
        saving.join()
        torch.cuda.synchronize()
    check(leaf, SLOTS + 1)
