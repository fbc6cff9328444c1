"""Reentrant checkpoints under a bound: what a region computes again may leave memory too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from disks import MIB
from support import Flush, Result, Rig, Step, assert_equal_bits, chain, nothing, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

REGION_COUNT, REGION_LENGTH = 3, 12
REGION_BYTES = REGION_LENGTH * MIB
"""Of the saved tensors of one region: ``exp`` and ``sin`` save the same one."""


def nested(x: Tensor) -> Tensor:
    """Return what a region returns that is made of two."""
    half = REGION_LENGTH // 2
    for _ in range(2):
        # Torch warns of a region whose gradients nobody asks for, as in the outer one's forward.
        x = checkpoint(chain, x, half, use_reentrant=True) if x.requires_grad else chain(x, half)
    return x


def regions_step(region: Any = chain, *arguments: Any) -> Step:
    def step(_: Flush) -> Result:
        x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        y = x * 1.0
        for _ in range(REGION_COUNT):
            y = checkpoint(region, y, *arguments, use_reentrant=True)
        y.sum().backward()
        assert x.grad is not None
        return {"x": x.grad}

    return step


@pytest.mark.parametrize(
    ("region", "arguments"), [(chain, (REGION_LENGTH,)), (nested, ())], ids=["flat", "nested"]
)
def test_a_region_that_does_not_fit_is_written_and_read(
    region: Any, arguments: tuple[int, ...], tmp_path: Path
) -> None:
    step = regions_step(region, *arguments)
    expected = step(nothing)
    bound_bytes = REGION_BYTES // 3
    rig = Rig(tmp_path, max_resident_bytes=bound_bytes, verify=True)
    with rig.context():
        for _ in range(2):
            assert_equal_bits(step(nothing), expected)
    assert rig.stats.bytes_read > REGION_BYTES
    assert rig.stats.resident_bytes_peak <= bound_bytes
    rig.assert_empty()


@pytest.mark.parametrize("bound_bytes", [None, 4 * REGION_BYTES], ids=["no bound", "wide bound"])
def test_a_region_that_fits_is_not_written(bound_bytes: int | None, tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=bound_bytes)
    step = regions_step(chain, REGION_LENGTH)
    with rig.context():
        # So that a disk which is late writes what the forward saved, too.
        step(rig.flush)
    inputs_bytes = (REGION_COUNT + 1) * MIB
    assert 0 < rig.stats.bytes_written <= inputs_bytes
    rig.assert_empty()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_regions_of_a_transformer_need_no_wider_bound_than_the_model_without_them(
    tmp_path: Path,
) -> None:
    """Dropout is on: what is computed again draws the same random numbers."""
    bound_bytes = 3 * MIB

    def step(options: dict[str, bool] | None, flush: Flush) -> Result:
        torch.manual_seed(0)
        sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 128}
        # The model's own numbers of special tokens lie outside of so few words.
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        model.train()
        if options is not None:
            model.config.use_cache = False
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        words = torch.randint(0, 256, (4, 128))
        loss = model(input_ids=words, labels=words).loss
        # So that a disk which is late writes what the forward saved, too.
        flush()
        loss.backward()
        weights = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {"loss": loss.detach(), **weights}

    expected = step(None, nothing)
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        rig = Rig(tmp_path, min_bytes=16 << 10, max_resident_bytes=bound_bytes)
        with rig.context():
            assert_equal_bits(step(options, rig.flush), expected)
        assert rig.stats.resident_bytes_peak <= bound_bytes
        assert rig.stats.bytes_read > 0
        rig.assert_empty()


def test_a_region_of_another_thread_makes_room(tmp_path: Path) -> None:
    """A thread stands still in its backward; what its region computed again is written for us."""
    rig = Rig(tmp_path, max_resident_bytes=7 * MIB)
    in_backward, may_go_on = threading.Event(), threading.Event()

    def stand(_: Tensor) -> None:
        in_backward.set()
        assert may_go_on.wait(60)

    def region(x: Tensor) -> Tensor:
        y = chain(x, 4)
        if y.requires_grad:
            y.register_hook(stand)
        return y.exp()

    def train() -> None:
        with rig.context():
            x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
            checkpoint(region, x, use_reentrant=True).sum().backward()

    other = threading.Thread(target=train)
    other.start()
    wait_until(in_backward.is_set, "the backward of the region")
    try:
        with rig.context():
            # The other thread's region holds 4 MiB, and this needs 4 at once.
            x = torch.linspace(-1, 1, MIB, requires_grad=True)
            x.exp().sum().backward()
    finally:
        may_go_on.set()
        other.join()
    rig.assert_empty()


def test_regions_of_ended_threads_make_room(tmp_path: Path) -> None:
    """Each leaves a graph that only what it computed again belongs to, and no thread of its own."""
    rig = Rig(tmp_path, max_resident_bytes=4 * MIB)
    sides: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            sides.append(y.exp().sum())
        return y

    def train() -> None:
        with rig.context():
            x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
            checkpoint(region, x, use_reentrant=True).sum().backward()

    for _ in range(3):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert rig.stats.resident_bytes == 3 * MIB
    with rig.context():
        # Of what the threads left, 2 MiB have to go.
        x = torch.linspace(-1, 1, 3 * MIB // 4, requires_grad=True)
        x.exp().sum().backward()
    assert rig.stats.resident_bytes_peak <= 4 * MIB
    sides.clear()
    del thread
    rig.assert_empty()
