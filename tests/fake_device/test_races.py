"""Each kind of race is reported, in words, every time; the same program in order is not."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from checkout import SCRATCH
from fake_device import FakeDevice
from on_fake import on_fake_device
from support import sizes

pytestmark = pytest.mark.parametrize("count", sizes(small=3, whole=100))

BYTES = 1 << 16
OPTIONS = {"dtype": torch.uint8, "device": "cuda"}


def rounds(fake: FakeDevice, count: int) -> Iterator[bool]:
    """Whether the program is in order this time; in turns, so that no report is left over."""
    for is_in_order in (True, False) * count:
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
def test_use_of_a_copy_without_waiting(fake: FakeDevice, count: int) -> None:
    copies = torch.cuda.Stream()
    source = pinned()
    for is_in_order in rounds(fake, count):
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
def test_copy_that_does_not_wait_for_compute(fake: FakeDevice, count: int) -> None:
    copies = torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
        source = torch.ones(BYTES, **OPTIONS)
        target = pinned(0)
        fake.hold("kernels")
        source.add_(1)
        if is_in_order:
            copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        expect(fake, is_in_order, "a copy to the host reads bytes that aten::add_ writes")
        fake.release()
        # The memory is freed with nothing on it: what comes next is in order.
        torch.cuda.synchronize()
        assert not is_in_order or target.eq(2).all()


@on_fake_device()
def test_memory_freed_and_used_again_under_a_copy(fake: FakeDevice, count: int) -> None:
    copies = torch.cuda.Stream()
    target = pinned(0)
    for is_in_order in rounds(fake, count):
        source = torch.ones(BYTES, **OPTIONS)
        address = source.data_ptr()
        copies.wait_stream(torch.cuda.current_stream())
        fake.hold("copies to the host")
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        if is_in_order:
            torch.cuda.current_stream().wait_stream(copies)
        del source
        others = torch.full((BYTES,), 7, **OPTIONS)
        assert others.data_ptr() == address
        expect(fake, is_in_order, "aten::fill_ writes bytes that a copy to the host reads")


@on_fake_device()
def test_record_stream_left_out(fake: FakeDevice, count: int) -> None:
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
        tensor = torch.ones(BYTES, **OPTIONS)
        address = tensor.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        fake.hold(side)
        with torch.cuda.stream(side):
            used = tensor * 3
        if is_in_order:
            tensor.record_stream(side)
        del tensor
        others = torch.full((BYTES,), 7, **OPTIONS)
        assert (others.data_ptr() == address) is not is_in_order
        expect(fake, is_in_order, "aten::fill_ writes bytes that aten::mul reads")
        del used


@on_fake_device()
def test_wait_for_the_wrong_stream(fake: FakeDevice, count: int) -> None:
    side, copies = torch.cuda.Stream(), torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
        target = pinned(0)
        with torch.cuda.stream(side):
            source = torch.ones(BYTES, **OPTIONS)
        # The default stream is not the one on which the tensor was made.
        copies.wait_stream(side if is_in_order else torch.cuda.default_stream())
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        expect(fake, is_in_order, "a copy to the host reads bytes that aten::fill_ writes")
        torch.cuda.synchronize()


@on_fake_device()
def test_event_recorded_too_early(fake: FakeDevice, count: int) -> None:
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
        tensor = torch.zeros(BYTES, **OPTIONS)
        event = torch.cuda.Event()
        event.record()
        tensor.add_(1)
        if is_in_order:
            event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            used = tensor * 3
        expect(fake, is_in_order, "aten::mul reads bytes that aten::add_ writes")
        torch.cuda.synchronize()
        del used


@on_fake_device()
def test_write_before_later_reads(fake: FakeDevice, count: int) -> None:
    """Reads that came since, of all the bytes or of some, do not stand in for it."""
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
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
def test_other_device_that_does_not_wait(fake: FakeDevice, count: int) -> None:
    for is_in_order in rounds(fake, count):
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
def test_rows_of_one_tensor(fake: FakeDevice, count: int) -> None:
    """Views that lie between each other's rows share no byte; ranges of bytes are told exactly."""
    side = torch.cuda.Stream()
    for is_in_order in rounds(fake, count):
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
def test_host_reads_what_a_copy_writes(fake: FakeDevice, count: int) -> None:
    source = torch.full((BYTES,), 3, **OPTIONS)
    target = pinned(0)
    for is_in_order in rounds(fake, count):
        fake.hold("copies to the host")
        target.copy_(source, non_blocking=True)
        if is_in_order:
            fake.release()
            torch.cuda.current_stream().synchronize()
        target.sum()
        expect(fake, is_in_order, "the host reads bytes that a copy to the host writes")


@on_fake_device()
def test_host_reads_what_was_copied_unseen(fake: FakeDevice, count: int) -> None:
    """Whether or not the copy had ended: nobody has looked."""
    source = torch.full((BYTES,), 3, **OPTIONS)
    target = pinned(0)
    for is_in_order in rounds(fake, count):
        event = torch.cuda.Event()
        target.copy_(source, non_blocking=True)
        event.record()
        while is_in_order and not event.query():
            os.sched_yield()
        target[-1].item()
        expect(fake, is_in_order, "the host reads bytes that a copy to the host writes")


@on_fake_device()
def test_host_writes_what_a_copy_reads(fake: FakeDevice, count: int) -> None:
    source = pinned(1)
    for is_in_order in rounds(fake, count):
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
def test_memory_that_was_registered(fake: FakeDevice, count: int) -> None:
    """Memory that the host brought is watched as well, and shares its pages with nobody."""
    source = torch.full((BYTES,), 3, **OPTIONS)
    whole = torch.zeros(BYTES + 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    target = whole[start : start + BYTES]
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(target.data_ptr(), BYTES, 0).value == 0
    for is_in_order in rounds(fake, count):
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
def test_two_buffers_on_one_page(fake: FakeDevice, count: int) -> None:
    """What only shares a page with a copy is no race, and what comes after on it is seen again."""
    source = torch.full((64,), 3, **OPTIONS)
    buffer = torch.zeros(128, dtype=torch.uint8).pin_memory()
    for is_in_order in rounds(fake, count):
        fake.hold("copies to the host")
        buffer[:64].copy_(source, non_blocking=True)
        buffer[64:].add_(1)
        if not is_in_order:
            buffer[:32].copy_(source[:32], non_blocking=True)
            buffer[40].item()
        expect(fake, is_in_order, "the host reads bytes that a copy to the host writes")


# System calls of the host


@on_fake_device()
def test_file_written_from_a_buffer_under_a_copy(fake: FakeDevice, count: int) -> None:
    source = torch.full((BYTES,), 3, **OPTIONS)
    target = pinned(0)
    with tempfile.TemporaryFile(dir=SCRATCH, buffering=0) as file:
        for is_in_order in rounds(fake, count):
            fake.hold("copies to the host")
            target.copy_(source, non_blocking=True)
            if is_in_order:
                fake.release()
                torch.cuda.current_stream().synchronize()
            written = os.pwrite(file.fileno(), target.numpy(), 0)
            assert written == BYTES
            expect(fake, is_in_order, "pwrite64 reads bytes that a copy to the host writes")


@on_fake_device()
def test_file_read_into_a_buffer_under_a_copy(fake: FakeDevice, count: int) -> None:
    source = pinned(1)
    with tempfile.TemporaryFile(dir=SCRATCH, buffering=0) as file:
        file.write(bytes(BYTES))
        for is_in_order in rounds(fake, count):
            fake.hold("copies to the device")
            target = torch.empty(BYTES, **OPTIONS)
            target.copy_(source, non_blocking=True)
            if is_in_order:
                fake.release()
                torch.cuda.current_stream().synchronize()
            assert os.preadv(file.fileno(), [source.numpy()], 0) == BYTES
            expect(fake, is_in_order, "preadv64v2 writes bytes that a copy to the device reads")


@on_fake_device()
def test_copy_into_a_buffer_that_is_being_written_to_a_file(fake: FakeDevice, count: int) -> None:
    source = torch.full((BYTES,), 3, **OPTIONS)
    target = pinned(0)
    with tempfile.TemporaryFile(dir=SCRATCH, buffering=0) as file:
        for is_in_order in rounds(fake, count):
            fake.hold("disk")
            writer = threading.Thread(target=os.pwrite, args=(file.fileno(), target.numpy(), 0))
            before = fake.calls()["pwrite64"]
            writer.start()
            while fake.calls()["pwrite64"] == before:
                os.sched_yield()
            if is_in_order:
                fake.release()
                writer.join()
            target.copy_(source, non_blocking=True)
            expect(fake, is_in_order, "a copy to the host writes bytes that pwrite64 reads")
            fake.release()
            writer.join()
            torch.cuda.synchronize()
