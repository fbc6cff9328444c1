"""CUDA graphs: what is let go while a stream captures must not become a part of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import support
from fake_device import FakeDevice
from offloading import (
    chain,
    check,
    gpus_of,
    let_backward_go,
    made,
    offloaded,
    refuse,
    settle,
    use_memory,
)
from on_fake import on_fake_device

TO_HOST, TO_DEVICE = "copies to the host", "copies to the device"
LARGE_RING = 16 << 20


@contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture on the current stream, without the waits of ``torch.cuda.graph``."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        yield graph
    finally:
        graph.capture_end()


@contextmanager
def on_a_stream() -> Iterator[None]:
    """Run on a stream that may capture, which the default stream may not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def run_a_hook() -> None:
    """Let a tensor of the CPU come by."""
    torch.sin(torch.ones(1024, requires_grad=True) * 1.01)


@on_fake_device()
def test_a_source_is_let_go_after_the_capture(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded() as session, on_a_stream():
        fake.hold(TO_HOST)
        # More than the window, so that the next hook would let the first of them go.
        saved = chain(leaf, 8)
        session.flush(wait=False)
        result = torch.ones_like(leaf, requires_grad=False)
        with captured() as graph:
            # A graph of torch 2.11 has memory of its own from here on.
            before = torch.cuda.memory_allocated()
            result.add_(1)
            run_a_hook()
            session.flush(wait=False)
        assert torch.cuda.memory_allocated() == before
        assert session.stats.write_failed_count == 0
        run_a_hook()
        assert torch.cuda.memory_allocated() < before
        fake.release()
        graph.replay()
        assert result.cpu().eq(2).all()
        saved.sum().backward()
    check(leaf, 8)


@pytest.mark.defends("nothing is let go into a graph")
@on_fake_device()
def test_a_source_that_dies_in_a_capture_is_let_go_after_it(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session, on_a_stream():
        fake.hold(TO_HOST)
        saved = chain(leaf, 8)
        session.flush(wait=False)
        result = torch.ones_like(leaf, requires_grad=False)
        before = torch.cuda.memory_allocated()
        with captured() as graph:
            del saved
            result.add_(1)
        assert before - torch.cuda.memory_allocated() <= leaf.nbytes
        run_a_hook()
        assert torch.cuda.memory_allocated() <= before - 8 * leaf.nbytes
        use_memory(leaf, 20)
        fake.release()
        graph.replay()
        assert result.cpu().eq(2).all()


@on_fake_device()
def test_a_load_that_is_given_up_in_a_capture_is_let_go_after_it(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session, on_a_stream():
        saved = chain(leaf, 20)
        settle(session)
        before = torch.cuda.memory_allocated()
        fake.hold(TO_DEVICE)
        middle = chain(saved, 1)
        middle.register_hook(refuse)
        fails = torch.sin(middle)
        with pytest.raises(RuntimeError, match="given up here"):
            fails.sum().backward()
        let_backward_go()
        # A load that the disk has not brought yet is let go at once: no copy needs its memory.
        copied_bytes = gpus_of(session).copied_bytes
        support.wait_until(lambda: copied_bytes()[1] >= 10 * leaf.nbytes, "the copies of ten loads")
        result = torch.ones_like(leaf, requires_grad=False)
        with captured() as graph:
            del saved, middle, fails
            result.add_(1)
        run_a_hook()
        # Nothing is left of the loads; `result` has come.
        assert torch.cuda.memory_allocated() <= before + leaf.nbytes
        use_memory(leaf, 40)
        fake.release()
        graph.replay()
        assert result.cpu().eq(2).all()
