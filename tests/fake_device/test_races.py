"""Races are reported, in words, every time; the same program in order is not.

The tests of the defences in ``tests/cuda/test_order.py`` are programs with other races.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from fake_device import FakeDevice
from on_fake import on_fake_device

BYTES = 1 << 16
OPTIONS = {"dtype": torch.uint8, "device": "cuda"}


def rounds(fake: FakeDevice) -> Iterator[bool]:
    """Whether the program is in order this time; in turns, so that no report is left over."""
    for is_in_order in (True, False) * 3:
        yield is_in_order
        fake.release()
        torch.cuda.synchronize()
        assert not fake.races()


def expect(fake: FakeDevice, is_in_order: bool, words: str) -> None:
    """There is one race, and it is reported once; or there is none."""
    wanted = [] if is_in_order else [f"{words}, and nothing orders them"]
    races = fake.races()
    assert [race.partition(" (")[0] for race in races] == wanted, races


def pinned(value: int = 1) -> Tensor:
    return torch.full((BYTES,), value, dtype=torch.uint8).pin_memory()


# Between operations of the device


@on_fake_device()
def test_use_of_a_copy_without_waiting(fake: FakeDevice) -> None:
    copies = torch.cuda.Stream()
    source = pinned()
    for is_in_order in rounds(fake):
        target = torch.zeros(BYTES, **OPTIONS)
        copies.wait_stream(torch.cuda.current_stream())
        fake.hold("copies to the device")
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        if is_in_order:
            torch.cuda.current_stream().wait_stream(copies)
        used = target + 1
        expect(fake, is_in_order, "aten::add reads bytes that a copy to the device writes")
        fake.release()
        assert not is_in_order or used.cpu().eq(2).all()


@on_fake_device()
def test_write_before_later_reads(fake: FakeDevice) -> None:
    """Reads that came since, of all the bytes or of some, do not stand in for it."""
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake):
        tensor = torch.zeros(BYTES, **OPTIONS)
        used = [tensor + 1, tensor[: BYTES // 2] + 1]
        if is_in_order:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            used.append(tensor[BYTES // 2 :] * 3)
        expect(fake, is_in_order, "aten::mul reads bytes that aten::zero_ writes")
        torch.cuda.synchronize()
        del used


@on_fake_device(devices=2)
def test_other_device_that_does_not_wait(fake: FakeDevice) -> None:
    for is_in_order in rounds(fake):
        near = torch.zeros(BYTES, dtype=torch.uint8, device="cuda:0")
        fake.hold("kernels")
        near.add_(1)
        stream = torch.cuda.current_stream("cuda:0") if is_in_order else torch.cuda.Stream("cuda:0")
        with torch.cuda.stream(stream):
            far = near.to("cuda:1")
        expect(fake, is_in_order, "aten::copy_ reads bytes that aten::add_ writes")
        fake.release()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert not is_in_order or far.cpu().eq(1).all()


@on_fake_device()
def test_rows_of_one_tensor(fake: FakeDevice) -> None:
    """Views that lie between each other's rows share no byte; ranges of bytes are told exactly."""
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake):
        left, right = torch.zeros(32, 128, **OPTIONS).split(64, dim=1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            left.add_(1)
        (right if is_in_order else left).mul_(2)
        races = fake.races()
        assert bool(races) is not is_in_order
        if races:
            assert races[0].startswith("aten::mul_ writes bytes that aten::add_ writes, and ")
            assert races[0].endswith("; the default stream of device 0, stream 1 of device 0)")
            assert re.search(r" \(64 bytes from byte \d+ of 2097152 on device 0; ", races[0])
        torch.cuda.synchronize()


# Between the device and the host


@on_fake_device()
def test_host_reads_what_was_copied_unseen(fake: FakeDevice) -> None:
    """Whether or not the copy had ended: nobody has looked."""
    source = torch.full((BYTES,), 3, **OPTIONS)
    target = pinned(0)
    for is_in_order in rounds(fake):
        event = torch.cuda.Event()
        target.copy_(source, non_blocking=True)
        event.record()
        while is_in_order and not event.query():
            os.sched_yield()
        target[-1].item()
        expect(fake, is_in_order, "the host reads bytes that a copy to the host writes")


@on_fake_device()
def test_host_writes_what_a_copy_reads(fake: FakeDevice) -> None:
    source = pinned(1)
    for is_in_order in rounds(fake):
        fake.hold("copies to the device")
        target = torch.empty(BYTES, **OPTIONS)
        target.copy_(source, non_blocking=True)
        assert source[-1] == 1  # to read it is in order
        assert not fake.races()
        if is_in_order:
            fake.release()
            torch.cuda.current_stream().synchronize()
        source[-1] = 1
        expect(fake, is_in_order, "the host writes bytes that a copy to the device reads")


@on_fake_device()
def test_memory_that_was_registered(fake: FakeDevice) -> None:
    """Memory that the host brought is watched as well, and shares its pages with nobody."""
    source = torch.full((BYTES,), 3, **OPTIONS)
    whole = torch.zeros(BYTES + 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    target = whole[start : start + BYTES]
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(target.data_ptr(), BYTES, 0).value == 0
    for is_in_order in rounds(fake):
        fake.hold("copies to the host")
        target.copy_(source, non_blocking=True)
        if is_in_order:
            fake.release()
            torch.cuda.current_stream().synchronize()
            assert target.eq(3).all()
        target.zero_()
        expect(fake, is_in_order, "the host writes bytes that a copy to the host writes")
    assert runtime.cudaHostUnregister(target.data_ptr()).value == 0


@on_fake_device()
def test_two_buffers_on_one_page(fake: FakeDevice) -> None:
    """What only shares a page with a copy is no race, and what comes after on it is seen again."""
    source = torch.full((64,), 3, **OPTIONS)
    buffer = torch.zeros(128, dtype=torch.uint8).pin_memory()
    for is_in_order in rounds(fake):
        fake.hold("copies to the host")
        buffer[:64].copy_(source, non_blocking=True)
        buffer[64:].add_(1)
        if not is_in_order:
            buffer[:32].copy_(source[:32], non_blocking=True)
            buffer[40].item()
        expect(fake, is_in_order, "the host reads bytes that a copy to the host writes")
