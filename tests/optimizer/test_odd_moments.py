"""Failed writes, other optimizers, inference mode and empty parameters: what few programs have."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import support
from ssdtrain import offload_optimizer
from trained import everything

WIDTH = 200
OVERLAPS = ["step", "backward"]


def lines(count: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).to(dtype)


def backward(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    loss: Tensor = module(support.batch(width=WIDTH).to(dtype)).float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def train(module: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    backward(module, dtype)
    optimizer.step()
    optimizer.zero_grad()


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_failed_write_of_a_gradient_keeps_nothing_alive(overlap: Any, tmp_path: Path) -> None:
    def train_without_room() -> list[weakref.ref[Any]]:
        module = lines(6)
        optimizer: Any = offload_optimizer(
            adamw(module),
            tmp_path,
            overlap=overlap,
            max_gradient_bytes="400KiB",
            max_disk_bytes="128KiB",
        )
        optimizer.set_is_last_backward(False)
        backward(module)
        optimizer.set_is_last_backward(True)
        train(module, optimizer)
        assert optimizer.offload_stats.write_failed_count > 0
        return [weakref.ref(one) for one in (optimizer, *module.parameters())]

    gone = train_without_room()
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_look_in_inference_mode(
    overlap: Any, dtype: torch.dtype, is_loaded: bool, tmp_path: Path
) -> None:
    def run(is_looking: bool) -> Any:
        module = lines(dtype=dtype)
        masters = torch.float32 if dtype is torch.bfloat16 else None
        optimizer = adamw(module)
        offload_optimizer(optimizer, tmp_path, overlap=overlap, master_dtype=masters)
        for number in range(4):
            train(module, optimizer, dtype)
            if number == 1 and is_looking:
                with torch.inference_mode():
                    found = optimizer.state_dict()
                    shown = [list(state.values()) for state in optimizer.state.values()]
                if is_loaded:
                    optimizer.load_state_dict(found)
                del found, shown
        return everything(module, optimizer)

    support.assert_equal_bits(run(True), run(False))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_parameter_without_elements(overlap: Any, tmp_path: Path) -> None:
    plain, ours = lines(), lines()
    pair = []
    for module in (plain, ours):
        module.register_parameter("prompt", Parameter(torch.zeros(0, WIDTH)))
        pair.append(adamw(module))
    offload_optimizer(pair[1], tmp_path, overlap=overlap)
    for module, optimizer in zip((plain, ours), pair, strict=True):
        for number in range(3):
            x = torch.cat([module.prompt, support.batch(number, width=WIDTH)])
            module[1](module[0](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    support.assert_equal_bits(everything(ours, pair[1]), everything(plain, pair[0]))


def test_a_parameter_that_has_left_its_group_is_let_go(tmp_path: Path) -> None:
    module = lines()
    optimizer = offload_optimizer(adamw(module), tmp_path, overlap="backward")
    train(module, optimizer)
    older = module[0].weight
    module[0].weight = Parameter(older.detach().clone())
    params = optimizer.param_groups[0]["params"]
    params[0] = module[0].weight
    optimizer.state.pop(older)
    gone = weakref.ref(older)
    del older
    for _ in range(2):
        train(module, optimizer)
    gc.collect()
    assert gone() is None
