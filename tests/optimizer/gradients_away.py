"""What the tests of gradients on the disk share: a model, its optimizer, and what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import support
from ssdtrain import offload_optimizer
from ssdtrain.away.classes import is_away
from ssdtrain.away.tensor import MIN_BYTES
from trained import everything

WIDTH = 136
LAYERS = 8
ONE = WIDTH * WIDTH * 4
BOUND = 3 * ONE
LOOKED = ONE
"""A look at a gradient, as the results are, takes the memory of one more than the bound."""
MICRO_BATCHES = 3
STEPS = 4


def layers(count: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def numbered(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def bounded(optimizer: Any, place: Any, **options: Any) -> Any:
    options = {"max_gradient_bytes": BOUND, "buffer_bytes": "512KiB", **options}
    return offload_optimizer(optimizer, place, **options)


def large(module: nn.Module) -> dict[str, Any]:
    """Return the gradients that may leave, by the names of their parameters, without a look."""
    return {
        name: param.grad
        for name, param in module.named_parameters()
        if param.grad is not None and param.nbytes >= MIN_BYTES
    }


def resident_bytes(module: nn.Module) -> int:
    return sum(one.nbytes for one in large(module).values() if not is_away(one))


def an_away_one(module: nn.Module) -> Any:
    """Return a gradient that is on the disk."""
    return next(one for one in large(module).values() if is_away(one))


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def sgd(module: nn.Module, rate: float = 0.1) -> Any:
    return torch.optim.SGD(module.parameters(), lr=rate)


def backward(module: nn.Module, number: int) -> None:
    module(numbered(number)).square().mean().backward()


def backwards(module: nn.Module, count: int = MICRO_BATCHES) -> None:
    for number in range(count):
        backward(module, number)


def nothing(_: nn.Module) -> None:
    pass


def clipped(module: nn.Module) -> None:
    clip_grad_norm_(module.parameters(), 0.01)


def steps(
    module: nn.Module, optimizer: Any, between: Callable[[nn.Module], object] = nothing
) -> list[dict[str, Tensor]]:
    """Train, and return all there is after each step, its gradients too."""
    seen = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            backward(module, MICRO_BATCHES * step + number)
        between(module)
        optimizer.step()
        seen.append(support.gradients(module) | everything(module, optimizer))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return seen
