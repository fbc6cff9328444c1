"""An interrupt in a call that takes over, shows or replaces a state leaves one that is whole."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import support
from moments import AtCall, interrupt
from ssdtrain import TensorStore, offload_optimizer
from ssdtrain.optimizer import offload
from ssdtrain.optimizer.offloaded import Offloaded
from trained import WIDTH, everything, plain_step

EVERY = support.sizes(small=17, whole=1)
MASTERS = pytest.mark.parametrize("master_dtype", [None, torch.float32], ids=["plain", "masters"])
OVERLAPS = pytest.mark.parametrize("overlap", ["step", "backward"])
Options = dict[str, Any]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters())


def step(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    plain_step(module, optimizer, torch.randn(4, WIDTH, generator=generator).bfloat16())


def trained(store: TensorStore, options: Options, count: int) -> tuple[nn.Module, Optimizer]:
    """Return a model after a few steps, and its offloaded optimizer."""
    module = small_model()
    optimizer = offload_optimizer(adamw(module), store, buffer_bytes="1MiB", **options)
    for number in range(count):
        step(module, optimizer, number)
    return module, optimizer


def all_is_given_back(store: TensorStore) -> None:
    gc.collect()
    support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")


def interrupted(number: int, call: Callable[[], object]) -> bool:
    """Interrupt a call at one of its moments; return whether it had that many."""
    try:
        with AtCall(number, interrupt) as signalled:
            call()
    except KeyboardInterrupt:
        assert signalled.came
    return signalled.came


def states_after(options: Options, counts: tuple[int, ...], directory: Path) -> list[Any]:
    """Return all there is after each of these numbers of steps, offloaded without interrupts."""
    with TensorStore(directory) as store:
        return [everything(*trained(store, options, count)) for count in counts]


@pytest.mark.parametrize("every", EVERY)
@MASTERS
@OVERLAPS
def test_in_state_dict(overlap: str, master_dtype: Any, every: int, tmp_path: Path) -> None:
    options = {"overlap": overlap, "master_dtype": master_dtype}
    second, third = states_after(options, (2, 3), tmp_path)
    with TensorStore(tmp_path, verify=True) as store:
        for number in itertools.count(step=every):
            module, optimizer = trained(store, options, 2)
            came = interrupted(number, optimizer.state_dict)
            support.assert_equal_bits(everything(module, optimizer), second)
            step(module, optimizer, 2)
            support.assert_equal_bits(everything(module, optimizer), third)
            del module, optimizer
            if not came:
                break
        all_is_given_back(store)
    assert number > 30


@pytest.mark.parametrize("every", EVERY)
@MASTERS
@OVERLAPS
def test_in_load_state_dict(overlap: str, master_dtype: Any, every: int, tmp_path: Path) -> None:
    options = {"overlap": overlap, "master_dtype": master_dtype}
    first, second, third = states_after(options, (1, 2, 3), tmp_path)
    with TensorStore(tmp_path, verify=True) as store:
        for number in itertools.count(step=every):
            module, optimizer = trained(store, options, 1)
            saved = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
            step(module, optimizer, 1)
            came = interrupted(number, partial(optimizer.load_state_dict, saved[1]))
            weights = {name: param for name, param in second.items() if "state" not in name}
            found = everything(module, optimizer)
            if torch.equal(found["state 0 step"], second["state 0 step"]):
                assert came, "it was not loaded"
                support.assert_equal_bits(found, second)
                step(module, optimizer, 2)
                support.assert_equal_bits(everything(module, optimizer), third)
            else:
                support.assert_equal_bits(found, first | weights)
            assert [id(one) for one in module.parameters()] == [
                id(one) for one in optimizer.param_groups[0]["params"]
            ]
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            for number_of_step in (1, 2):
                step(module, optimizer, number_of_step)
            support.assert_equal_bits(everything(module, optimizer), third)
            del module, optimizer, saved
            if not came:
                break
        all_is_given_back(store)
    assert number > 30


@pytest.mark.parametrize("every", EVERY)
@MASTERS
@OVERLAPS
def test_in_the_call_that_offloads(
    overlap: str, master_dtype: Any, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"overlap": overlap, "master_dtype": master_dtype}
    # The trial of steps on small tensors has most moments, and does not touch the optimizer.
    monkeypatch.setattr(offload, "state_share_of", lambda *_, **__: 2.0)
    module = small_model()
    plain = adamw(module)
    step(module, plain, 0)
    before = everything(module, plain)
    step(module, plain, 1)
    as_plain = everything(module, plain)
    with TensorStore(tmp_path, verify=True) as store:

        def begun() -> tuple[nn.Module, Optimizer]:
            module = small_model()
            optimizer = adamw(module)
            step(module, optimizer, 0)
            return module, optimizer

        module, optimizer = begun()
        offload_optimizer(optimizer, store, buffer_bytes="1MiB", **options)
        step(module, optimizer, 1)
        expected = everything(module, optimizer)
        for number in itertools.count(step=every):
            module, optimizer = begun()
            call = partial(offload_optimizer, optimizer, store, buffer_bytes="1MiB", **options)
            came = interrupted(number, call)
            if not isinstance(optimizer, Offloaded):
                assert came, "it was not offloaded"
                assert type(optimizer) is torch.optim.AdamW
                support.assert_equal_bits(everything(module, optimizer), before)
                if number % 2:
                    step(module, optimizer, 1)
                    support.assert_equal_bits(everything(module, optimizer), as_plain)
                    continue
                call()
            step(module, optimizer, 1)
            support.assert_equal_bits(everything(module, optimizer), expected)
            if not came:
                break
        del module, optimizer, call
        all_is_given_back(store)
    assert number > 30
