"""What tests of options and of users' optimizers share: a loop of steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trained import WIDTH, everything

RATE = 0.125
STEPS = 3
OVERLAPS = ["step", "backward"]


def backward(module: nn.Module, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()


def train(module: nn.Module, optimizer: Optimizer, *, steps: int = STEPS) -> Iterator[int]:
    """Make steps; between two of them it is the caller's turn."""
    for seed in range(steps):
        backward(module, seed)
        optimizer.step()
        yield seed
        optimizer.zero_grad()


def trained(module: nn.Module, optimizer: Optimizer, *, steps: int) -> dict[str, Tensor]:
    """Make steps; return all weights and all state."""
    for _ in train(module, optimizer, steps=steps):
        pass
    return everything(module, optimizer)
