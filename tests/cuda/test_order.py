"""Each wait of the staged way, in a program that shows its absence to the detector of races.

What has to be late is held until the test lets it go, so nothing depends on time. A race is
reported whether or not it did harm; every test fails on one. On hardware what has to be late is
late, and a wait that lacks shows by wrong bits, if at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fake_device import FakeDevice
from offloading import (
    ToldWhen,
    chain,
    check,
    let_backward_go,
    made,
    offloaded,
    refuse,
    settle,
    use_memory,
)
from on_devices import Device, on_each_device
from on_fake import on_fake_device
from ssdtrain.planning.policy import Item, Policy
from ssdtrain.transfer.staged import _stream

TO_HOST, TO_DEVICE, DISK = "copies to the host", "copies to the device", "disk"
LARGE_RING = 16 << 20


@pytest.mark.defends(
    "a source is let go after its copy",
    "a slot is written after it is filled",
    "a copy down waits for what computes its source",
)
@on_each_device()
def test_a_source_is_let_go_and_a_slot_is_written_after_the_copy(device: Device) -> None:
    leaf = made(0)
    with offloaded() as session:
        device.hold(TO_HOST)
        before = torch.cuda.memory_allocated()
        saved = chain(leaf, 11)
        # What was let go is used for what comes next, in the order of the stream.
        assert torch.cuda.memory_allocated() - before < 11 * leaf.nbytes
        if device.is_exact:
            asked_count = device.calls()["cuEventQuery"]
            # The worker asks as long as it follows copies, which none of these has ended.
            while device.calls()["cuEventQuery"] < asked_count + 100:
                assert session.stats.bytes_written == 0
        device.release()
        saved.sum().backward()
    check(leaf, 11)


@pytest.mark.parametrize(("packs", "left_count"), [(0, 1), (4, 5), (100, 11)])
@on_fake_device()
def test_a_source_is_let_go_when_its_copy_has_ended_by_the_plan(
    fake: FakeDevice, packs: int, left_count: int
) -> None:
    """What streams wait for before the copy has ended would be lost to computing."""
    leaf = made(0)
    with offloaded(ToldWhen(packs)) as session:
        chain(leaf, 11).sum().backward()
        leaf.grad = None
        settle(session)
        # Learns from the round before, and is not looked at.
        chain(leaf, 1).sum().backward()
        leaf.grad = None
        settle(session)
        fake.hold(TO_HOST)
        before = torch.cuda.memory_allocated()
        saved = chain(leaf, 11)
        left_bytes = torch.cuda.memory_allocated() - before
        fake.release()
        saved.sum().backward()
    check(leaf, 11)
    # The last result itself; and what is packed last is looked at by the next pack.
    assert left_bytes // leaf.nbytes - 2 <= left_count <= left_bytes // leaf.nbytes + 2


class LateAtFirst(ToldWhen):
    """A policy that tells late ends of copies, until they have been measured."""

    def __init__(self) -> None:
        super().__init__(100)

    def learn(self, signature: int, items: Sequence[Item], *rest: Any) -> None:
        if not self.moments:
            super().learn(signature, items, *rest)

    def note_copied(self, copied: Sequence[tuple[int, float]]) -> None:
        Policy.note_copied(self, copied)


@on_fake_device()
def test_a_source_is_let_go_at_the_end_that_its_copy_had_in_the_last_round(
    fake: FakeDevice,
) -> None:
    leaf, left_bytes = made(0), []
    with offloaded(LateAtFirst()) as session:
        for _ in range(3):
            leaf.grad = None
            fake.hold(TO_HOST)
            before = torch.cuda.memory_allocated()
            saved = chain(leaf, 11)
            left_bytes.append(torch.cuda.memory_allocated() - before)
            fake.release()
            saved.sum().backward()
            del saved
            settle(session)
    check(leaf, 11)
    # A pack counts as a second by the first plan, and all of this takes less.
    assert left_bytes[1] >= 11 * leaf.nbytes
    assert left_bytes[2] <= 3 * leaf.nbytes
    assert fake.races() == []


@on_each_device()
def test_a_slot_is_filled_again_after_it_was_written(device: Device) -> None:
    leaf = made(0)
    with offloaded():
        device.hold(DISK)
        # More than there are slots: the last ones stay on the GPU.
        saved = chain(leaf, 30)
        device.release()
        saved.sum().backward()
    check(leaf, 30)


@pytest.mark.defends("a slot is free after it is written")
@on_fake_device()
def test_a_slot_is_filled_again_after_a_write_that_nobody_wants(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded() as session:
        fake.hold(DISK)
        saved = chain(leaf, 12)
        session.flush(wait=False)
        while fake.calls()["pwrite"] + fake.calls()["pwritev"] == 0:
            torch.cuda.synchronize()
        # All slots are taken, and one is being written.
        del saved
        saved = chain(leaf, 12)
        session.flush(wait=False)
        torch.cuda.synchronize()
        fake.release()
        saved.sum().backward()
    check(leaf, 12)


@pytest.mark.defends("a slot is free after it is uploaded")
@on_each_device()
def test_a_slot_is_read_into_again_after_it_was_uploaded(device: Device) -> None:
    leaf = made(0)
    with offloaded() as session:
        saved = leaf
        for _ in range(3):
            # No more at once than there are slots, so that all of it leaves the GPU.
            saved = chain(saved, 10)
            settle(session)
        # Four slots for thirty loads, each of which is late.
        device.lag(20_000, TO_DEVICE)
        saved.sum().backward()
        assert session.stats.bytes_read >= 20 * leaf.nbytes
    check(leaf, 30)


@pytest.mark.defends("a load waits for the memory of its target", "every stream waits for a load")
@on_each_device()
def test_a_load_waits_for_its_memory_and_is_waited_for(device: Device) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        saved = chain(leaf, 20)
        settle(session)
        use_memory(leaf, 40)
        device.hold(TO_DEVICE)
        saved.sum().backward()
        device.release()
        assert session.stats.bytes_read >= 15 * leaf.nbytes
    check(leaf, 20)


@on_each_device()
def test_a_load_from_a_slot_waits_for_the_copy_that_fills_it(device: Device) -> None:
    leaf = made(0)
    with offloaded() as session:
        device.hold(TO_HOST)
        # The first of them have left the GPU, as far as Python knows.
        saved = chain(leaf, 11)
        saved.sum().backward()
        device.release()
        assert not device.is_exact or session.stats.bytes_read == 0
    check(leaf, 11)


@pytest.mark.defends("a source that dies under its copy")
@on_each_device()
def test_a_source_dies_under_its_copy(device: Device) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        device.hold(TO_HOST)
        saved = chain(leaf, 8)
        session.flush(wait=False)
        del saved
        use_memory(leaf, 20)
        device.release()
        torch.cuda.synchronize()


TO_GPU = "cuMemcpyHtoDAsync_v2"


@pytest.mark.defends("a target that is given up")
@on_each_device()
def test_a_load_is_given_up_under_its_copy(device: Device) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        saved = chain(leaf, 20)
        settle(session)
        device.hold(TO_DEVICE)
        middle = chain(saved, 1)
        before = device.calls()[TO_GPU] if isinstance(device, FakeDevice) else 0

        def refuse_once_one_is_loaded(gradient: torch.Tensor) -> torch.Tensor:
            # On hardware a load has mostly begun by now; nobody counts there.
            while isinstance(device, FakeDevice) and device.calls()[TO_GPU] == before:
                torch.cuda.current_stream().query()
            return refuse(gradient)

        middle.register_hook(refuse_once_one_is_loaded)
        fails = torch.sin(middle)
        with pytest.raises(RuntimeError, match="given up here"):
            fails.sum().backward()
        let_backward_go()
        del saved, middle, fails
        session.flush()
        use_memory(leaf, 40)
        device.release()
        torch.cuda.synchronize()


@pytest.mark.defends("the current stream")
@on_each_device()
def test_all_on_a_stream_of_the_user(device: Device) -> None:
    leaf = made(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with offloaded() as session, torch.cuda.stream(stream):
        device.hold(stream)
        saved = chain(leaf, 8)
        session.flush(wait=False)
        device.release()
        saved.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    check(leaf, 8)


@pytest.mark.defends("the stream of the pack")
@on_each_device()
def test_a_copy_belongs_to_the_stream_of_the_pack(device: Device) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with offloaded() as session:
        device.hold(side)
        with torch.cuda.stream(side):
            on_side = torch.sin(leaf * 1.01)
        # This opens the gate for what was saved on the other stream.
        on_main = chain(leaf, 3)
        session.flush(wait=False)
        device.release()
        main.wait_stream(side)
        on_side.record_stream(main)
        (on_side + on_main).sum().backward()
        torch.cuda.synchronize()


@on_each_device()
def test_a_source_is_used_by_a_second_stream(device: Device) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    with offloaded():
        both = leaf * 1.01
        on_main = torch.sin(both)
        side.wait_stream(main)
        device.hold(side)
        with torch.cuda.stream(side):
            # The second stream needs no record: in a plain run autograd holds what it reads.
            on_side = torch.cos(both)
        del both
        on_main = chain(on_main, 12)
        device.release()
        main.wait_stream(side)
        on_side.record_stream(main)
        (on_side + on_main).sum().backward()
        torch.cuda.synchronize()


@pytest.mark.defends("streams that use a source")
@on_fake_device()
def test_a_source_is_saved_under_another_stream_than_its_own(fake: FakeDevice) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    with offloaded():
        # Allocated for the main stream, and saved under the other one alone.
        both = leaf * 1.01
        side.wait_stream(main)
        fake.hold(side)
        with torch.cuda.stream(side):
            on_side = torch.sin(both)
        del both
        # Past the window: it is let go while the stream has not come to it yet.
        on_main = chain(leaf, 10)
        use_memory(leaf, 40)
        fake.release()
        main.wait_stream(side)
        on_side.record_stream(main)
        (on_side + on_main).sum().backward()
        torch.cuda.synchronize()


@on_each_device()
def test_a_source_that_was_let_go_is_renewed_under_a_second_stream(device: Device) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    with offloaded():
        both = leaf * 1.01
        # What autograd held of it is let go now; the program still holds it.
        on_main = chain(torch.sin(both), 10)
        side.wait_stream(main)
        device.hold(side)
        with torch.cuda.stream(side):
            on_side = torch.cos(both)
        del both
        # What was saved again is written again now, and let go.
        later = chain(leaf * 1.02, 10)
        use_memory(leaf, 20)
        device.release()
        main.wait_stream(side)
        on_side.record_stream(main)
        (on_side + on_main + later).sum().backward()
        torch.cuda.synchronize()


@pytest.mark.defends("a target is allocated for the stream of the pack")
@on_fake_device()
def test_a_target_is_allocated_for_the_stream_of_the_pack(fake: FakeDevice) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        with torch.cuda.stream(side):
            on_side = chain(leaf, 10)
        main.wait_stream(side)
        on_side.record_stream(main)
        held = on_side * 1.02
        last = torch.sin(held)
        settle(session)
        # Reads ahead begin under the main stream, which still writes to all its free memory; and
        # no load of its own has waited for that, because what it needs is held by the program.
        fake.hold(main)
        use_memory(leaf, 60)
        backward = threading.Thread(target=last.sum().backward)
        backward.start()
        is_alive = True
        while fake.calls()[TO_GPU] < 5:
            # Looked at before the calls are counted: it may end in between.
            assert is_alive
            is_alive = backward.is_alive()
        fake.release()
        backward.join()
        torch.cuda.synchronize()
        del held


@pytest.mark.defends("streams that use a target")
@on_fake_device()
def test_a_target_is_used_by_a_second_stream(fake: FakeDevice) -> None:
    leaf, main, side = made(0), torch.cuda.current_stream(), torch.cuda.Stream()
    on_main = made(1)
    with torch.cuda.stream(side):
        on_side = made(2)
    side.wait_stream(main)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        # Saved under the main stream first, and needed by a node of the other one alone: what was
        # saved for the first node would be read ahead, and hold the memory.
        both = leaf.detach() * 1.01
        first = both * on_main
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = both * on_side
            ones = torch.ones_like(second)
        del both
        settle(session)
        del first
        fake.hold(side)
        # From the side stream: else the main one would wait for the leaves of this backward.
        with torch.cuda.stream(side):
            second.backward(ones)
        del second
        use_memory(leaf, 60)
        fake.release()
        torch.cuda.synchronize()
        assert session.stats.bytes_read >= leaf.nbytes


@on_each_device()
def test_the_default_stream_is_known_by_its_handle(device: Device) -> None:
    """Else its memory would be allocated for, and counted as used by, a stream that nobody uses."""
    assert _stream(0, 0) == torch.cuda.default_stream(0)
    other = torch.cuda.Stream()
    assert _stream(0, other.cuda_stream).cuda_stream == other.cuda_stream
