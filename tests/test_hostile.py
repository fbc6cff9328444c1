"""Attacks that once succeeded, or nearly: each stays as a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ssdtrain
from ssdtrain.errors import ClosedError, ConfigError
from ssdtrain.policy import PLANS_MAX, Item, Policy, Rates
from ssdtrain.prefetch import DEAD_ROUND_COUNT
from support import Flush, Result, Rig, prove_refused


def moved_by_sharing(tensor: Tensor) -> None:
    tensor.share_memory_()


def moved_by_growing(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.nbytes)


@pytest.mark.parametrize("move", [moved_by_sharing, moved_by_growing])
def test_memory_that_moves_under_its_write_is_not_freed(
    move: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """The version counter does not move with it, and the old memory is used by others."""
    weight = torch.randn(100_000, requires_grad=True)
    data = torch.randn(100_000)
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True})
    with rig.context():
        loss = (weight * data).sum()
        rig.hooks._tracker.open_gate(None)
        assert rig.hooks._tracker._writing, "the write is on its way"
        move(data)
        # Whatever lay at the old address is overwritten now.
        others = [torch.full((100_000,), 7.0) for _ in range(4)]
        rig.store.resume()
        rig.flush()
        expected = data.clone()
        # With its last holder the memory goes, and what is on the disk would be used.
        del data
        loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert len(others) == 4
    del loss
    rig.assert_empty()


def test_memory_that_was_taken_away_before_its_write_is_left_alone(tmp_path: Path) -> None:
    weight = torch.randn(1000, requires_grad=True)
    data = torch.randn(1000)
    rig = Rig(tmp_path)
    with rig.context():
        loss = (weight * data).sum()
        data.untyped_storage().resize_(0)
        (weight * 2).exp().sum().backward()
    assert torch.equal(weight.grad, 2 * (weight.detach() * 2).exp())
    del loss
    rig.assert_empty()


def test_a_window_of_small_records_stays_under_the_bound(tmp_path: Path) -> None:
    """A slot takes whole pages, however few bytes its tensor has."""
    bound = 256 << 10
    x = torch.randn(100, requires_grad=True)
    expected = torch.randn(0)
    for offloaded in (False, True):
        rig = Rig(tmp_path, min_bytes=256, max_resident_bytes=bound)
        for _ in range(3):
            x.grad = None
            with rig.context() if offloaded else torch.enable_grad():
                hidden = x * 1.0
                for _ in range(200):
                    hidden = (hidden * 1.0).sin()
                hidden.sum().backward()
        assert x.grad is not None
        if not offloaded:
            expected = x.grad.clone()
        else:
            assert torch.equal(x.grad, expected)
            assert 0 < rig.stats.resident_bytes_peak <= bound


def test_forwards_without_a_backward_leave_nothing_to_remember(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    x = torch.randn(64, requires_grad=True)
    with rig.context():
        for _ in range(DEAD_ROUND_COUNT):
            (x * 1.0).sin().sin().sin()
    current = rig.hooks._prefetcher._current
    assert current is not None
    assert len(current.entries) <= 2 * DEAD_ROUND_COUNT
    rig.assert_empty()


def test_plans_of_rounds_that_never_repeat_are_forgotten() -> None:
    policy = Policy()
    for signature in range(10 * PLANS_MAX):
        items = [Item(signature * 10 + place, 1 << 20, place * 0.1, 9.0) for place in range(3)]
        policy.learn(signature, items, Rates(1e9, 1e9), 0.0)
    assert len(policy._plans) <= PLANS_MAX
    assert len(policy._basis) <= PLANS_MAX
    assert policy.plan_of(10 * PLANS_MAX - 1) is not None


def test_what_runs_later_cannot_be_decorated(tmp_path: Path) -> None:
    def generator() -> object:
        yield 1

    async def coroutine() -> None:
        await asyncio.sleep(0)

    for function in (generator, coroutine):
        with pytest.raises(ConfigError, match="put `with"):
            ssdtrain.offload(tmp_path)(function)


def test_a_decorated_function_has_a_session(tmp_path: Path) -> None:
    tool = ssdtrain.offload(tmp_path, min_bytes=1)
    x = torch.randn(1000, requires_grad=True)

    @tool
    def step() -> None:
        (x * 2).exp().sum().backward()

    assert tool.session is None
    step()
    step()
    assert tool.session is not None
    stats = tool.session.stats
    assert stats.tensors_offloaded + stats.tensors_forwarded + stats.tensors_kept > 0
    assert "resident" in repr(tool.session)


def test_a_tensor_released_while_its_read_begins_is_never_handed_out(tmp_path: Path) -> None:
    with ssdtrain.TensorStore(tmp_path, direct_io="optional") as store:
        stored = store.write(torch.randn(1000))
        stored.wait()
        pending = store.read(stored)
        store.release(stored)
        with pytest.raises(ClosedError):
            store.read(stored).result()
        with pytest.raises(ClosedError):
            pending.result()


def test_a_tensor_without_memory_cannot_be_stored(tmp_path: Path) -> None:
    with (
        ssdtrain.TensorStore(tmp_path, direct_io="optional") as store,
        pytest.raises(ConfigError),
    ):
        store.write(torch._efficientzerotensor(5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_that_was_changed_is_refused_in_the_same_words(tmp_path: Path) -> None:
    """It raises when it is asked for its shape, also by whoever words the error."""

    def step(flush: Flush) -> Result:
        rows = [torch.rand(2), torch.rand(3)]
        ragged = torch.nested.nested_tensor(rows, requires_grad=True).clone()
        total = ragged.sum(-1, keepdim=True)
        ragged.add_(ragged)
        flush()
        total.backward(torch.nested.nested_tensor([torch.rand(1), torch.rand(1)]))
        return {}

    prove_refused(step, tmp_path)
