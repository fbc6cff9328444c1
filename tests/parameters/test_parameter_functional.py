"""Weights that a program uses outside of the forward of their module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support

WIDTH = 160
ROWS = 32


class Parent(nn.Module):
    """Uses the weight of the module in it by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.inner.weight, self.inner.bias).sin()


class Product(torch.autograd.Function):
    """Saves a weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


def parents() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(torch.ones(2, WIDTH, 4, 4) / WIDTH)
        return found.square().mean()

    return nn.Sequential(*(Parent() for _ in range(6))), loss


def recurrent() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        y = torch.linspace(-1, 1, 8 * 4 * WIDTH).reshape(8, 4, WIDTH)
        for one in model.children():
            y, _ = one.forward(y)  # not one(y)
        return y.square().mean()

    return nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(4)), loss


def multiplied() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        y = torch.ones(ROWS, WIDTH) / WIDTH
        for one in model.children():
            assert isinstance(one, nn.Linear)
            y = (y @ one.weight + one.weight.mean() * one.weight.norm()).tanh()
        return y.square().mean()

    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), loss


def by_own_function() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        y = torch.ones(ROWS, WIDTH, requires_grad=True) / WIDTH
        for one in model.children():
            assert isinstance(one, nn.Linear)
            y = Product.apply(y, one.weight).tanh()
        return y.square().mean()

    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), loss


def recomputed() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def block(y: Tensor, one: nn.Linear) -> Tensor:
        return (F.linear(y, one.weight, one.bias) * one.weight.mean()).tanh()

    def loss(model: nn.Module) -> Tensor:
        y = torch.ones(ROWS, WIDTH) / WIDTH
        for one in model.children():
            y = checkpoint(block, y, one, use_reentrant=False)
        return y.square().mean()

    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), loss


PROGRAMS = {
    "a parent": parents,
    "forward itself": recurrent,
    "products": multiplied,
    "own function": by_own_function,
    "checkpoint": recomputed,
}
BLOCKS: dict[str, Callable[[Path], contextlib.AbstractContextManager[object]]] = {
    "no block": lambda _: contextlib.nullcontext(),
    "offload": lambda directory: ssdtrain.offload(directory, min_bytes=1),
}


@pytest.mark.defends(
    "a weight that was saved is brought back", "weights stay that a graph or another library has"
)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_used_outside_of_their_module(program: str, block: str, tmp_path: Path) -> None:
    def trained(directory: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, loss = PROGRAMS[program]()
        if directory is not None:
            largest_bytes = max(
                sum(one.nbytes for one in module.parameters(recurse=False))
                for module in model.modules()
            )
            ssdtrain.offload_parameters(model, directory, max_resident_bytes=2 * largest_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with contextlib.nullcontext() if directory is None else BLOCKS[block](directory):
                loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        if directory is not None:
            stats = ssdtrain.parameter_stats(model)
            assert stats.read_bytes > 0, "no weight was away"
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    support.assert_equal_bits(trained(tmp_path), trained(None))
