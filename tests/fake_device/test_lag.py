"""What a test holds stands still until it lets go, and nothing else does."""

from __future__ import annotations

import sysconfig
from time import perf_counter_ns

import pytest
import torch

from fake_device import KINDS, FakeDevice
from on_fake import on_fake_device

BYTES = 1 << 12


@on_fake_device()
def test_what_is_held_stands_still(fake: FakeDevice) -> None:
    near, far = (torch.zeros(BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = [torch.zeros(BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
    torch.cuda.synchronize()
    operations = {
        "kernels": lambda: near.add_(1),
        "copies to the device": lambda: far.copy_(pinned[0], non_blocking=True),
        "copies to the host": lambda: pinned[1].copy_(near, non_blocking=True),
    }
    streams = {kind: torch.cuda.Stream() for kind in operations}
    for held, last in operations.items():
        fake.hold(held)
        events = {}
        for kind, operation in operations.items():
            # One after the other, so that nothing is out of order; what is held comes last.
            if kind == held:
                continue
            with torch.cuda.stream(streams[kind]):
                operation()
                events[kind] = streams[kind].record_event()
            events[kind].synchronize()
        with torch.cuda.stream(streams[held]):
            last()
            event = streams[held].record_event()
        assert not event.query()
        fake.release(held)
        event.synchronize()


@on_fake_device()
def test_stream_that_is_held(fake: FakeDevice) -> None:
    held, other = torch.cuda.Stream(), torch.cuda.Stream()
    fake.hold(held)
    events = []
    for stream in (held, other):
        with torch.cuda.stream(stream):
            tensor = torch.ones(8, device="cuda")
            events.append(stream.record_event())
    events[1].synchronize()
    assert not events[0].query()
    fake.release(held)
    events[0].synchronize()
    del tensor


@on_fake_device()
def test_kinds_that_there_are(fake: FakeDevice) -> None:
    fake.lag(10)
    for function in (fake.hold, fake.release, lambda kind: fake.lag(10, kind)):
        for kind in KINDS:
            function(kind)
        with pytest.raises(ValueError, match="'copies to the moon' is none of"):
            function("copies to the moon")


@on_fake_device(watch_host=False)
def test_host_that_is_not_watched(fake: FakeDevice) -> None:
    source, target = torch.ones(8, device="cuda"), torch.zeros(8).pin_memory()
    fake.hold("copies to the host")
    target.copy_(source, non_blocking=True)
    target.sum()
    fake.release()
    torch.cuda.synchronize()
    assert target.eq(1).all()


@on_fake_device()
def test_time_in_functions_of_cuda(fake: FakeDevice) -> None:
    stream = torch.cuda.Stream()
    before_ns = fake.ns_in_calls()
    stream.query()
    assert fake.ns_in_calls() == before_ns
    fake.time_calls(is_on=True)
    began_ns = perf_counter_ns()
    for _ in range(100):
        stream.query()
    took_ns = perf_counter_ns() - began_ns
    fake.time_calls(is_on=False)
    # A function of the runtime calls one of the driver, whose time is a part of its own.
    counted_ns = fake.ns_in_calls() - before_ns
    assert 0 < counted_ns < took_ns
    stream.query()
    assert fake.ns_in_calls() == before_ns + counted_ns


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="this Python is no library of its own"
)
@on_fake_device()
def test_time_without_the_interpreters_lock(fake: FakeDevice) -> None:
    tensor = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    tensor.sum().item()
    assert fake.ns_without_lock() == 0
    fake.time_calls(is_on=True)
    began_ns = perf_counter_ns()
    # Torch waits for the device without the lock, and a sum of Python's own gives it up to nobody.
    tensor.sum().item()
    took_ns = perf_counter_ns() - began_ns
    without_ns = fake.ns_without_lock()
    assert 0 < without_ns < took_ns
    sum(range(1000))
    assert fake.ns_without_lock() == without_ns
    fake.time_calls(is_on=False)
    without_ns = fake.ns_without_lock()
    tensor.sum().item()
    assert fake.ns_without_lock() == without_ns
