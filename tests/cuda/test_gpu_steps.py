"""What a step takes on a GPU is learned by the GPU's clock, which Python runs ahead of."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import pytest
import torch

from fake_device import FakeDevice
from offloading import Everything, chain, check, made, offloaded, settle
from on_fake import on_fake_device
from ssdtrain.activations.prefetch import _spare_bytes as spare_bytes
from ssdtrain.errors import CudaError
from ssdtrain.planning.controller import SETTLED_COUNT, Controller, Step
from ssdtrain.planning.policy import Plan
from test_captures import captured, on_a_stream

COUNT = 6
HELD_S = 0.05
HELD_BYTES = 64 << 20


class Noted(Controller):
    """Remembers the steps that it is told of; offloads all."""

    def __init__(self) -> None:
        super().__init__(0.02)
        self.steps: list[Step] = []

    def note(self, step: Step) -> None:
        self.steps.append(step)

    def allowance(self, *arguments: Any) -> None:
        return None


def controlled(controller: Controller) -> Everything:
    policy = Everything()
    policy.controller = controller
    return policy


@on_fake_device()
def test_a_step_lasts_until_the_gpu_has_come_to_the_next_one(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(controlled(noted), pinned_bytes=64 << 20) as session:
        saved = chain(leaf, COUNT)
        settle(session)
        fake.hold("kernels")
        began_s = perf_counter()
        saved.sum().backward()
        del saved
        # Python has gone through it, and through the next ones.
        for _ in range(3):
            chain(leaf, 1).sum().backward()
        assert not noted.steps, "its end has not come"
        threading.Event().wait(HELD_S)
        held_s = perf_counter() - began_s
        fake.release()
        torch.cuda.synchronize()
        chain(leaf, 1)
        step = noted.steps[0]
        assert step.seconds >= held_s - 1e-3
        assert step.saved_bytes == step.offered_bytes == COUNT * leaf.nbytes
        assert step.hooks_s == 0


@on_fake_device()
def test_the_price_of_a_byte_is_learned(fake: FakeDevice) -> None:
    class PlansAll(Everything):
        def learn(self, signature: int, items: Any, *arguments: Any) -> None:
            self.plans[signature] = Plan(written_bytes=sum(item.nbytes for item in items))

    policy = PlansAll()
    policy.controller = Controller(0.02)
    leaf = made(0)
    with offloaded(policy) as session:
        for _ in range(SETTLED_COUNT + 8):
            leaf.grad = None
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
            torch.cuda.synchronize()
        assert session.stats.price_pair_count > 0
        assert not fake.races()


@on_fake_device(devices=2)
def test_a_step_between_two_gpus_has_no_time(fake: FakeDevice) -> None:
    noted = Noted()
    leaves = [
        torch.randn(1 << (13 + gpu), device=f"cuda:{gpu}", requires_grad=True) for gpu in (0, 1)
    ]
    with offloaded(controlled(noted)):
        for leaf in (*leaves, leaves[1], leaves[1]):
            saved = chain(leaf, COUNT)
            saved.sum().backward()
            del saved
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
        chain(leaves[1], 1)
    assert len(noted.steps) >= 2
    told = {step.saved_bytes for step in noted.steps}
    assert told == {COUNT * leaves[1].nbytes}, "of the first nobody knows the end"


@on_fake_device()
def test_a_graph_that_is_captured_is_not_broken_and_is_no_step(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(controlled(noted), pinned_bytes=64 << 20) as session, on_a_stream():
        for _ in range(2):
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
        torch.cuda.synchronize()
        result = torch.zeros_like(leaf, requires_grad=False)
        with captured() as graph:
            result.copy_(chain(leaf, 1).detach())
            assert len(noted.steps) == 1, "the end of the second one is not marked"
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, chain(leaf, 1).detach())
        chain(leaf, 1).sum().backward()
        chain(leaf, 1)
    assert len(noted.steps) == 1
    assert not fake.races()


@on_fake_device()
def test_a_driver_that_refuses_is_named_and_the_next_step_works(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(controlled(noted), pinned_bytes=64 << 20) as session:
        for _ in range(2):
            chain(leaf, COUNT).sum().backward()
            torch.cuda.synchronize()
        for symbol in ("cuStreamIsCapturing", "cuEventRecord"):
            fake.fail(symbol)
            with pytest.raises(CudaError, match=symbol):
                chain(leaf, COUNT)
            leaf.grad = None
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
            check(leaf, COUNT)
        fake.fail("cuEventElapsedTime", nth=None)
        known_count = len(noted.steps)
        for _ in range(3):
            chain(leaf, COUNT).sum().backward()
            torch.cuda.synchronize()
        assert len(noted.steps) == known_count, "a step without a time tells nothing"
        fake.recover()
    assert not fake.races()


@on_fake_device()
def test_memory_that_torch_has_cached_is_spare(fake: FakeDevice) -> None:
    made(0)
    before = spare_bytes(0)
    held = torch.empty(HELD_BYTES, dtype=torch.uint8, device="cuda")
    assert spare_bytes(0) == before - HELD_BYTES * 3 // 4
    del held
    assert torch.cuda.memory_reserved() >= HELD_BYTES
    assert spare_bytes(0) == before
