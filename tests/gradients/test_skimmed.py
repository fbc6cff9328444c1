"""Rounds of which nothing goes to the disk: only the first tensor of each is followed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssdtrain.activations.followed import Scope
from ssdtrain.machine.torch_internals import current_backward
from ssdtrain.planning.policy import Policy
from support import Rig

LAYERS = 6
PASSED_MAX = 16_384
"""So many tensors of a round are not followed at most."""
SCOPES: tuple[Scope, ...] = ("whole", "skimmed")


class OfForwards(set[int]):
    """The keys of all that a forward packs."""

    def __contains__(self, key: object) -> bool:
        return current_backward() == -1


class KeepAll(Policy):
    """A policy whose plans keep everything, so that followed rounds write nothing either."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = OfForwards()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(LAYERS)))


def step(rig: Rig, model: nn.Module, x: Tensor) -> list[Tensor]:
    with rig.context():
        loss = model(x).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))


def count(rig: Rig) -> int:
    """How many tensors of the round were followed that is packed now."""
    current = rig.prefetcher.rounds.current
    return 0 if current is None else current.count


def test_the_figures_are_those_of_followed_rounds(tmp_path: Path) -> None:
    model, x = layers(), torch.randn(32, 64)
    expected = list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    told = []
    for scope in SCOPES:
        rig = Rig(tmp_path, policy=KeepAll(), scope=scope)
        for _ in range(3):
            assert all(map(torch.equal, step(rig, model, x), expected))
        stats, seen = rig.stats, rig._hooks._seen
        told.append((
            stats.bytes_eligible, stats.resident_bytes_peak, stats.bytes_kept, stats.tensors_kept,
            stats.bytes_written, seen.planned.nbytes, seen.count(),
        ))  # fmt: skip
        assert "the plan keeps tensors" in str(rig.session)
        rig.assert_empty()
    assert told[0] == told[1]
    assert told[0][0] > 0


def test_one_tensor_of_a_round_is_followed_until_its_backward(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    model, x = layers(), torch.randn(32, 64)
    for _ in range(3):
        with rig.context():
            loss = model(x).square().sum()
            assert count(rig) == 1
            loss.backward()
    current = rig.prefetcher.rounds.current
    assert current is not None
    assert current.is_skimmed
    assert not rig.prefetcher.recorded, "nothing is learned from it"


@pytest.mark.defends("a skimmed round ends with its backward")
def test_a_graph_that_is_retained_does_not_go_on_with_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    x = torch.randn(64, requires_grad=True)
    with rig.context():
        retained = x.sin().cos().sum()
        retained.backward(retain_graph=True)
        assert len(rig.records.alive()) == 1
        loss = x.sin().cos().exp().sum()
        assert len(rig.records.alive()) == 2, "the next round has a first tensor of its own"
        (loss + retained).backward()


def test_a_forward_without_backward_ends_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    model, x = layers(), torch.randn(32, 64)
    with rig.context():
        for _ in range(2):
            target = model(x).detach()
            assert count(rig) == 1
            loss = (model(x) - target).square().sum()
            assert len(rig.records.alive()) == 1, "the next round is skimmed as well"
            loss.backward()
    gc.collect()
    assert not rig.records.alive()


def test_a_graph_that_lives_on_does_not_end_the_following_for_good(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    x = torch.randn(8, requires_grad=True)
    with rig.context():
        held = [(x * 1.0).sin() for _ in range(PASSED_MAX + 1)]
        assert len(rig.records.alive()) == 1
        held += [(x * 1.0).sin() for _ in range(3)]
    assert len(rig.records.alive()) == 2, "another round has begun"
    plain = [(x * 1.0).sin() for _ in held]
    actual, expected = (torch.autograd.grad(torch.stack(one).sum(), x) for one in (held, plain))
    assert torch.equal(*actual, *expected)


SAVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the first one twice": lambda x, w: x @ ((h := w * 2).sin() + h.cos()),
    "the first one in a view": lambda x, w: x @ ((h := w * 2).sin() + h.t().cos()),
    "slices": lambda x, w: sum(one.cos() for one in (x @ w).sin().chunk(4, dim=1)),  # type: ignore[return-value, arg-type, misc]
    "memory of others": lambda x, w: ((x @ w).sin() - FOREIGN).square() * FOREIGN,
    "a part of something large": lambda x, w: (x @ w).sin() * LARGE[70:102],
    "the same part of something large, many times": lambda x, w: (
        ((x @ w).sin() * LARGE[70:102]).cos() * LARGE[70:102]
    ),
    "made anew": lambda x, w: (x @ w).sin() * torch.rand(32, 1),
    "gates of a cell, which count apart": lambda x, w: CELL(x @ w)[0],
    "a mask without history": lambda x, w: (x @ w).sin() * (torch.rand(32, 64) > 0.5).float(),
    "a large mask of another type": lambda x, w: (x @ w).masked_fill(torch.ones(32, 64) > 0, 2.0),
    "columns": lambda x, w: (x @ w).sin() * torch.rand(32, 128)[:, ::2],
    "a negative view": lambda x, w: torch.complex(x @ w, x @ w).conj().imag * (x @ w).sin(),
    "a cast weight": lambda x, w: x @ (HALF.float() * w.sin()),
    "a copy of a weight": lambda x, w: x @ (FULL.t().contiguous() * w.sin()),
    "a lazy conjugate": lambda x, w: (torch.complex(x @ w, x @ w).conj() * (x @ w)).abs(),
    "what backward computes again": lambda x, w: checkpoint(
        lambda y: (y @ w).sin().cos(), x @ w, use_reentrant=True
    ),
}
CELL = nn.LSTMCell(64, 64)
HALF = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
FULL = nn.Parameter(torch.randn(64, 64))
FOREIGN = torch.from_numpy(np.random.default_rng(0).random((32, 64), dtype=np.float32))
LARGE = torch.randn(5000, 64)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", SAVES)
def test_the_bytes_are_those_of_followed_rounds(name: str, tmp_path: Path) -> None:
    w = torch.randn(64, 64, requires_grad=True)
    told = []
    for scope in SCOPES:
        rig = Rig(tmp_path, min_bytes=1024, policy=KeepAll(), scope=scope)
        x = torch.randn(32, 64)
        for _ in range(3):
            with rig.context():
                SAVES[name](x, w).sum().backward()
        stats, seen = rig.stats, rig._hooks._seen
        told.append((
            stats.bytes_eligible, stats.bytes_kept, stats.resident_bytes_peak, seen.planned.nbytes,
            seen.unusual.nbytes, seen.apart.nbytes,
        ))  # fmt: skip
    assert told[0] == told[1]
    assert told[0][0] > 0


def saved_bytes(rig: Rig, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that a round may give away, as the report counts them."""
    before = rig.stats.bytes_eligible
    with rig.context():
        loss().backward()
    return rig.stats.bytes_eligible - before


def with_a_weight(x: Tensor) -> Tensor:
    """Save a tensor and a cast weight."""
    return (x @ FULL).sin().cos().sum() + (HALF.float() * FULL).sum()


def without_one(x: Tensor) -> Tensor:
    """Save the same, but that the second one is as large and no weight."""
    return (x @ FULL).sin().cos().sum() + (FULL * 2).sin().sum()


def test_a_round_that_saves_something_else_is_looked_at_in_full(tmp_path: Path) -> None:
    x, told = torch.randn(32, 64), []
    for scope in SCOPES:
        rig = Rig(tmp_path, min_bytes=1024, policy=KeepAll(), scope=scope)
        losses: list[Callable[[], Tensor]] = [
            lambda: with_a_weight(x[:16]), lambda: without_one(x),
        ]  # fmt: skip
        told.append([saved_bytes(rig, losses[number // 2 % 2]) for number in range(8)])
    assert told[0] == told[1]


def test_a_backward_of_an_older_graph_ends_nothing_of_a_newer_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    x = torch.randn(64, requires_grad=True)
    with rig.context():
        older = x.sin().cos().sum()
        older.backward(retain_graph=True)
        y = x.sin()
        older.backward(retain_graph=True)
        loss = y.cos().exp().sum()
        assert len(rig.records.alive()) == 2, "the newer one is one round"
        (loss + older).backward()


def test_after_an_interrupt_as_a_round_begins_the_next_one_asks_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def scope(opening: int) -> Scope:
        asked.append(opening)
        if len(asked) == 1:
            raise InterruptedError
        return "skimmed"

    rig = Rig(tmp_path)
    rig.prefetcher.scope = scope  # type: ignore[method-assign]
    model, x = layers(), torch.randn(32, 64)
    with rig.context():
        with pytest.raises(InterruptedError):
            model(x)
        loss = model(x).square().sum()
        assert len(asked) == 2
        rig.flush()
        loss.backward()
    assert rig.stats.bytes_written == 0


def test_of_something_large_a_view_counts_with_its_own_part(tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    large, x = torch.randn(100_000), torch.randn(1000, requires_grad=True)
    with rig.context():
        loss = (x.sin().cos() * large[5000:6000]).sum()
        assert rig.stats.resident_bytes < 20_000
        loss.backward()
    rig.assert_empty()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tensor_changed_in_place_is_refused(is_first: bool, tmp_path: Path) -> None:
    rig = Rig(tmp_path, scope="skimmed")
    x = torch.randn(1000, requires_grad=True)
    with rig.context():
        first = x * 2
        saved = first.sin().cos() if is_first else first.sin()
        changed = first if is_first else saved
        loss = saved.exp().sum() if is_first else saved.cos().sum()
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
