"""Attacks that once succeeded, or nearly: each stays as a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdtrain
from ssdtrain.errors import ConfigError
from ssdtrain.planning.policy import PLANS_MAX, Item, Policy, Rates
from support import (
    Rig,
    chain,
    functions_of,
    in_child,
    wait_until,
)

MIB = 1 << 20
DEAD_ROUND_COUNT = 4096
"""At so many tensors a round is looked at whether it is dead (rust/core/src/round.rs)."""


def moved_by_sharing(tensor: Tensor) -> None:
    tensor.share_memory_()


def moved_by_growing(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.nbytes)


@pytest.mark.defends("memory that moved")
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
        rig.begin_writes()
        move(data)
        # Whatever lay at the old address is overwritten now.
        others = [torch.full((100_000,), 7.0) for _ in range(4)]
        rig.disk.resume()
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
    current = rig.prefetcher.rounds.current
    assert current is not None
    assert current.count <= 2 * DEAD_ROUND_COUNT
    rig.assert_empty()


def test_plans_of_rounds_that_never_repeat_are_forgotten() -> None:
    policy = Policy()
    for signature in range(10 * PLANS_MAX):
        items = [Item(signature * 10 + place, 1 << 20, place * 0.1, 9.0) for place in range(3)]
        policy.learn(signature, items, Rates(1e9, 1e9), 0.0)
    assert len(policy.plans) <= PLANS_MAX
    assert len(policy._basis) <= PLANS_MAX
    assert 10 * PLANS_MAX - 1 in policy.plans


def test_generators_and_coroutines_cannot_be_decorated(tmp_path: Path) -> None:
    def generator() -> object:
        yield 1

    async def coroutine() -> None:
        await asyncio.sleep(0)

    for function in (generator, coroutine):
        with pytest.raises(ConfigError, match="put `with"):
            ssdtrain.offload(tmp_path)(function)


def test_a_class_cannot_be_decorated_nor_a_function_without_a_directory(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        pass

    with pytest.raises(ssdtrain.ConfigError, match="is a class"):
        ssdtrain.offload(tmp_path)(Model)
    with pytest.raises(ssdtrain.ConfigError, match=r"@ssdtrain\.offload\(dir\)"):
        ssdtrain.offload(chain)  # type: ignore[arg-type]


def test_a_home_is_found_and_a_block_is_left_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spill").mkdir()
    block = ssdtrain.offload("~/spill")
    with block as session:
        assert session.stats.engines[0][0] == str(tmp_path / "spill")
    with pytest.raises(ssdtrain.ConfigError, match="has not entered"):
        block.__exit__(None, None, None)


def test_a_second_backward_reads_no_further_ahead_than_the_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    peaks = []
    with rig.context():
        for _ in range(3):
            x = torch.randn(MIB // 4, requires_grad=True)
            loss = chain(x * 1.0, 60).sum()
            rig.flush()
            peaks = []
            for is_last in (False, True):
                rig.forget_peak()
                loss.backward(retain_graph=not is_last)
                peaks.append(rig.stats.resident_bytes_peak)
            del loss
    assert rig.stats.bytes_read > 0
    assert peaks[1] <= peaks[0] + 8 * MIB, peaks


def test_a_read_that_failed_is_not_joined(tmp_path: Path) -> None:
    faults = {"seed": 3, "bit_flip_rate": 0.2}
    rig = Rig(tmp_path, backend="simulated", faults=faults, verify=True)
    held = []
    x = torch.randn(MIB // 4, requires_grad=True)
    with rig.context():
        loss = chain(x).sum()
        rig.flush()
        for _ in range(200):
            try:
                loss.backward(retain_graph=True)
            except ssdtrain.CorruptError as error:
                held.append(error)
            else:
                if held:
                    break
        else:
            raise AssertionError("an error that somebody holds came back for ever, or none came")


def test_the_users_of_a_tensor_share_one_read_though_its_write_ended_as_it_was_needed(
    tmp_path: Path,
) -> None:
    """The first user has it from memory, which is freed under the eyes of the others."""
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True})
    x = torch.randn(MIB // 4, requires_grad=True)
    scale = torch.ones((), requires_grad=True)
    with rig.context():
        y = x.exp()
        total = sum(((y * scale)[:1].sum() for _ in range(100)), torch.zeros(()))
        del y
        rig.begin_writes()
        rig.disk.resume()
        rig.end_writes_unseen()
        total.backward()
    assert scale.grad is not None
    assert rig.store.stats()["read_count"] <= 3


def export_and_train(place: str) -> None:
    """Export a model under a mode that makes fake tensors of real ones; then train."""

    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.shift = torch.ones(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.shift).sin()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(x.exp()).sum().backward()
        assert model.layer.weight.grad is not None
        return model.layer.weight.grad.clone()

    model, x = Shifted(), torch.randn(64, 64)
    expected = gradient()
    # In a process in which nothing was packed before.
    with ssdtrain.offload(place, min_bytes=1, direct_io="optional"):
        torch.export.export(model, (x,))
        found = gradient()
    assert torch.equal(found, expected)


@pytest.mark.long
def test_an_export_inside_the_block_spoils_no_later_step(tmp_path: Path) -> None:
    in_child(export_and_train, tmp_path)


def take_memory_away_under_writes(place: str) -> None:
    for backend in ("psync", "auto"):
        options: Any = {"backend": backend, "direct_io": "optional", "verify": True}
        with ssdtrain.offload(place, **options) as session:
            y = torch.ones(16 * MIB, requires_grad=True).exp()
            session.flush(wait=False)
            y.untyped_storage().resize_(0)
            session.flush()
            assert session.stats.resident_bytes <= y.nbytes


def test_memory_that_goes_under_its_write_ends_no_process_that_verifies(tmp_path: Path) -> None:
    in_child(take_memory_away_under_writes, tmp_path)


def test_other_threads_go_on_while_one_waits_for_a_flush(tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend="simulated", faults={"paused": True})
    x = torch.randn(1000, requires_grad=True)
    with rig.context():
        loss = chain(x).sum()
        flusher = threading.Thread(target=rig.session.flush)
        kept = chain(x).sum()
        rig.begin_writes()
        flusher.start()
        wait_until(lambda: "flush" in functions_of(flusher.ident or 0), "the wait for the disk")
        # The disk stands still; these need only what is in memory.
        assert rig.stats.resident_bytes > 0
        kept.backward()
        loss.backward()
        rig.disk.resume()
        flusher.join()
    del loss, kept
    rig.assert_empty()
