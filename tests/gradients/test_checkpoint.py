"""Activation checkpointing of every kind gives equal bits, with the hooks around it and in it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from checkout import BENCHES
from support import (
    MODES,
    Flush,
    Result,
    Rig,
    Step,
    assert_equal_bits,
    batch,
    gradients,
    nothing,
    prove,
    prove_refused_offloaded,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 32
HIDDEN_BYTES = ROWS * WIDTH * 4
"""Of the input of one block: all that a checkpointed block leaves to save."""

RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
needs_respect = pytest.mark.skipif(not RESPECTS, reason="this torch has no such option")

Contexts = Callable[[], AbstractContextManager[object]]


def selective(policy: Any, *, may_change: bool = False) -> Callable[[], Any]:
    """Return a ``context_fn`` that keeps what the policy says."""
    return partial(
        checkpoints.create_selective_checkpoint_contexts,
        policy,
        allow_cache_entry_mutation=may_change,
    )


def every_value(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    """Keep all, transposed weights too, but not what dropout makes first and fills then."""
    filled_later = operation is torch.ops.aten.empty_like.default or operation._schema.is_mutable
    return CheckpointPolicy.MUST_RECOMPUTE if filled_later else CheckpointPolicy.MUST_SAVE


def by_turns(_: object, operation: Any, *__: object, **___: object) -> CheckpointPolicy:
    policies: dict[Any, CheckpointPolicy] = {
        torch.ops.aten.addmm.default: CheckpointPolicy.PREFER_SAVE,
        torch.ops.aten.gelu.default: CheckpointPolicy.MUST_CPU_OFFLOAD,
        torch.ops.aten.native_dropout.default: CheckpointPolicy.MUST_SAVE,
    }
    return policies.get(operation, CheckpointPolicy.PREFER_RECOMPUTE)


PRODUCTS = [torch.ops.aten.addmm.default]
POLICIES: dict[str, Any] = {"products": PRODUCTS, "by turns": by_turns, "every value": every_value}


class Block(nn.Module):
    """Runs its layers in checkpoints, one in the other: ``way`` names their kinds."""

    def __init__(self, way: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.way = way
        self.options = options or {}
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)
        )
        self.inside: Contexts = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = self.run
        for kind in reversed(self.way.split(" in ")):
            run = partial(checkpoint, run, use_reentrant=kind == "reentrant", **self.options)
        return x + run(x)

    def run(self, x: Tensor) -> Tensor:
        with self.inside():
            out: Tensor = self.layers(x)
            return out


def blocks_step(
    way: str, options: dict[str, Any] | None = None, inside: Contexts = nullcontext
) -> Step:
    """Return two training steps of three blocks."""

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(way, options) for _ in range(3)))
        for block in model:
            block.inside = inside
        x = batch(rows=ROWS, width=WIDTH).requires_grad_()
        losses = []
        for _ in range(2):
            loss = model(x * 2).square().sum()
            flush()
            loss.backward()
            losses.append(loss.detach())
        assert x.grad is not None
        return {"losses": torch.stack(losses), "x": x.grad, **gradients(model)}

    return step


KINDS = ["reentrant", "not reentrant"]
WAYS = [*KINDS, *(f"{outer} in {inner}" for outer in KINDS for inner in KINDS)]


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_inside_the_block_give_equal_bits(way: str, tmp_path: Path) -> None:
    prove(blocks_step(way), tmp_path)


@pytest.mark.parametrize("around", [False, True], ids=["within only", "around too"])
@pytest.mark.parametrize("way", WAYS)
def test_the_block_inside_checkpoints_gives_equal_bits(
    way: str, around: bool, tmp_path: Path
) -> None:
    expected = blocks_step(way)(nothing)
    for mode in MODES:
        inner, outer = Rig.in_mode(tmp_path, mode), Rig.in_mode(tmp_path, mode)

        def flush(inner: Rig = inner, outer: Rig = outer, mode: str = mode) -> None:
            if mode == "disk":
                inner.flush()
                outer.flush()

        with outer.context() if around else nullcontext():
            assert_equal_bits(blocks_step(way, inside=inner.context)(flush), expected)
        assert inner.stats.tensors_kept + inner.stats.tensors_offloaded > 0 or mode == "flight"
        if mode == "disk" and around:
            assert outer.stats.bytes_written > 0, "the inputs of the regions are offloaded"
        if mode == "disk" and way == "not reentrant":
            assert inner.stats.bytes_read > 0, "nothing is computed again, all comes from the disk"
        inner.assert_empty()
        outer.assert_empty()


def test_offload_of_one_region_only_gives_equal_bits(tmp_path: Path) -> None:
    """Every second block is left out by hooks of its own, as ``save_on_cpu`` would."""

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(KINDS[number % 2]) for number in range(4)))
        x = batch(rows=ROWS, width=WIDTH).requires_grad_()
        for number, block in enumerate(model):
            with torch.autograd.graph.save_on_cpu() if number % 2 else nullcontext():
                x = block(x * 2)
        loss = x.square().sum()
        flush()
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    prove(step, tmp_path)


# What is written


@pytest.mark.parametrize("way", KINDS)
def test_the_inputs_of_the_regions_are_written_and_nothing_else(way: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(way) for _ in range(3)))
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()
    with rig.context():
        # Multiplying by a number, and adding, save nothing; the sum saves nothing either.
        loss = (model(x * 2) * 3).sum()
        rig.flush()
        assert rig.stats.resident_bytes == 0
        loss.backward()
    assert rig.stats.bytes_offloaded == 3 * HIDDEN_BYTES
    assert rig.stats.tensors_offloaded == 3
    rig.assert_empty()


@pytest.mark.defends("checkpoint recognition")
@pytest.mark.parametrize("way", ["reentrant", "reentrant in reentrant"])
def test_a_reentrant_checkpoint_writes_no_recomputed_tensor(way: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with rig.context():
        blocks_step(way)(rig.flush)
    # In each of two steps three regions save their input, and the loss saves one tensor; what is
    # computed again, the inputs of inner regions too, is kept.
    stats = rig.stats
    assert stats.bytes_offloaded + stats.bytes_forwarded == 2 * 4 * HIDDEN_BYTES
    assert stats.bytes_kept > 0
    assert rig.store.stats()["write_count"] == 2 * 4
    rig.assert_empty()


# Graphs through checkpoints that are walked more than once


def retain_twice(model: nn.Module, x: Tensor, flush: Flush) -> list[Tensor]:
    loss = model(x).square().sum()
    flush()
    return [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]


def double_backward(model: nn.Module, x: Tensor, flush: Flush) -> list[Tensor]:
    loss = model(x).square().sum()
    flush()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    flush()
    first.square().sum().backward()
    assert x.grad is not None
    return [first.detach(), x.grad]


def micro_batches(model: nn.Module, x: Tensor, flush: Flush) -> list[Tensor]:
    losses = [model(x * factor).square().sum() for factor in (1, 2, 3)]
    flush()
    for number in (1, 0, 2):
        losses[number].backward()
    assert x.grad is not None
    return [x.grad]


def dropped(model: nn.Module, x: Tensor, flush: Flush) -> list[Tensor]:
    loss = model(x).square().sum()
    flush()
    loss = model(x).square().sum()
    flush()
    loss.backward()
    assert x.grad is not None
    return [x.grad]


WALKS = (retain_twice, double_backward, micro_batches, dropped)


@pytest.mark.parametrize(
    ("way", "early_stop"),
    [("not reentrant", True), ("not reentrant", False), ("not reentrant in not reentrant", True)],
)
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_checkpoints_walked_in_any_way_give_equal_bits(
    way: str,
    walk: Callable[[nn.Module, Tensor, Flush], list[Tensor]],
    early_stop: bool,
    tmp_path: Path,
) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(way) for _ in range(2)))
        x = batch(rows=ROWS, width=WIDTH).requires_grad_()
        with checkpoints.set_checkpoint_early_stop(early_stop):
            found = walk(model, x, flush)
        return {**{str(place): one for place, one in enumerate(found)}, **gradients(model)}

    prove(step, tmp_path)


# Selective checkpointing


@needs_respect
@pytest.mark.parametrize("respect", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpoints_give_equal_bits(policy: str, respect: bool, tmp_path: Path) -> None:
    options = {
        "context_fn": selective(POLICIES[policy]),
        "respect_saved_tensors_hooks": respect,
    }
    stats = prove(blocks_step("not reentrant", options), tmp_path)
    written = stats.bytes_offloaded + stats.bytes_forwarded
    if respect:
        assert written > 2 * 4 * HIDDEN_BYTES, "what the policy keeps is offloaded too"
    else:
        assert written == 2 * 4 * HIDDEN_BYTES, "what the policy keeps stays where it is"


def test_selective_checkpoints_that_choose_nothing_give_equal_bits(tmp_path: Path) -> None:
    """Without the choice torch warns that it has to be made; the default keeps its values."""
    options = {"context_fn": selective(PRODUCTS)}
    step = blocks_step("not reentrant", options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = prove(step, tmp_path)
    assert stats.bytes_offloaded + stats.bytes_forwarded == 2 * 4 * HIDDEN_BYTES
    asked = [one for one in caught if "respect_saved_tensors_hooks" in str(one.message)]
    assert bool(asked) == RESPECTS


@needs_respect
@pytest.mark.parametrize("way", ["not reentrant in not reentrant", "within"])
def test_selective_checkpoints_around_others_give_equal_bits(way: str, tmp_path: Path) -> None:
    """One region in another, and a selective one with the block inside it."""
    options = {"context_fn": selective(PRODUCTS), "respect_saved_tensors_hooks": True}
    if way != "within":
        prove(blocks_step(way, options), tmp_path)
        return
    expected = blocks_step("not reentrant", options)(nothing)
    for mode in MODES:
        rig = Rig.in_mode(tmp_path, mode)
        flush = rig.flush if mode == "disk" else nothing
        actual = blocks_step("not reentrant", options, rig.context)(flush)
        assert_equal_bits(actual, expected)
        assert rig.stats.bytes_read > 0 or mode != "disk"
        rig.assert_empty()


CACHED_IN_PLACE = "Tensor cached during selective activation checkpoint has been mutated"


class Doubling(nn.Module):
    """Makes a value that the policy keeps; doubled in place it would be doubled again later."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.first(x)
        if self.where == "in the region":
            product.mul_(2)
        return product, self.second(product.sigmoid())


def doubling_step(policy: Any, *, may_change: bool, where: str) -> Step:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        block = Doubling(where)
        x = batch(rows=ROWS, width=WIDTH).requires_grad_()
        product, out = checkpoint(
            block,
            x * 2,
            use_reentrant=False,
            context_fn=selective(policy, may_change=may_change),
            respect_saved_tensors_hooks=True,
        )
        loss = (out * 2).sum()
        flush()
        if where == "after it":
            with torch.no_grad():
                product.mul_(2)
        loss.backward()
        return {"loss": loss.detach(), **gradients(block)}

    return step


@pytest.mark.defends("shared counters below autograd")
@needs_respect
@pytest.mark.parametrize("where", ["in the region", "after it"])
@pytest.mark.parametrize("policy", ["products", "every value"])
def test_a_change_of_what_a_policy_keeps_is_refused(
    policy: str, where: str, tmp_path: Path
) -> None:
    """Torch checks its cache only where no hooks are: with ours, ours is the only check."""
    step = doubling_step(POLICIES[policy], may_change=False, where=where)
    with pytest.raises(RuntimeError, match=CACHED_IN_PLACE):
        step(nothing)
    prove_refused_offloaded(step, tmp_path)


@needs_respect
def test_a_change_that_a_policy_allows_is_refused_too(tmp_path: Path) -> None:
    """The hooks are not told of the permission, so they raise rather than guess."""
    step = doubling_step(every_value, may_change=True, where="in the region")
    step(nothing)
    prove_refused_offloaded(step, tmp_path)


# The long context, as a benchmark


def program(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_benchmark_of_a_long_context_runs_small(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--sequence", "1024", "--layers", "3", "--pairs", "1", "--threads", "1")
    bench = BENCHES / "training" / "long_context.py"
    said = program(bench, "--dir", tmp_path, *sizes, "--json", figures)
    assert "losses and gradients bit-equal: yes" in said
    found = json.loads(figures.read_text())
    assert found["bytes_written"] > 0
    assert found["saved_bytes_peak"]["checkpoint"] >= 3 * 1024 * 256 * 4
    assert found["pair_count"] == 1
    assert min(found["seconds"].values()) > 0
