"""What the tests of gradients on the disk share: a model, its optimizer, and what is in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain import offload_optimizer
from ssdtrain.away.classes import is_away
from ssdtrain.away.tensor import MIN_BYTES

WIDTH = 136
LAYERS = 8
ONE = WIDTH * WIDTH * 4
BOUND = 3 * ONE


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
