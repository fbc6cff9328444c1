"""Matrix products, attention and convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from ssdtrain.rematerialize.operation import Operation, Table

__all__ = ["PRODUCTS"]

aten = torch.ops.aten


def _addmm(bias: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha)


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(bias, left, right, beta=beta, alpha=alpha)


PRODUCTS: Table = {
    "MmBackward0": Operation("mm", torch.mm, ("self", "mat2"), is_dear=True),
    "AddmmBackward0": Operation(
        "addmm", _addmm, ("self", "mat1", "mat2"), ("beta", "alpha"), is_dear=True
    ),
    "BmmBackward0": Operation("bmm", torch.bmm, ("self", "mat2"), is_dear=True),
    "BaddbmmBackward0": Operation(
        "baddbmm", _baddbmm, ("self", "batch1", "batch2"), ("beta", "alpha"), is_dear=True
    ),
}
