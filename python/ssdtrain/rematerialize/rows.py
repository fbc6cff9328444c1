"""Operations that look at many elements for each result: norms, softmax, sums, look-ups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdtrain.rematerialize.operation import (
    Operation,
    Table,
    dtype_of,
    only_first,
)
from ssdtrain.rematerialize.recipe import Choice

__all__ = ["ROWS"]

aten = torch.ops.aten

Dims = tuple[int, ...]

EPSILON = Choice((1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-7))
"""The epsilon of a layer norm, which no node tells."""


def _epsilon(_node: Any, _number: int) -> object:
    return EPSILON


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Dims, epsilon: float
) -> Any:
    return aten.native_layer_norm(x, shape, weight, bias, epsilon)[0]


def _rms_norm(x: Tensor, weight: Tensor | None, shape: Dims, epsilon: float | None) -> Any:
    return aten._fused_rms_norm(x, shape, weight, epsilon)[0]  # noqa: SLF001


def _softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return aten._softmax(x, dim, x.dtype is not dtype)  # noqa: SLF001


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return aten._log_softmax(x, dim, x.dtype is not dtype)  # noqa: SLF001


def _mean_of_all(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mean(x, dtype=dtype)


def _mean(x: Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype) -> Tensor:
    return torch.mean(x, dims, keepdim, dtype=dtype)


def _sum_of_all(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.sum(x, dtype=dtype)


def _sum(x: Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype) -> Tensor:
    return torch.sum(x, dims, keepdim, dtype=dtype)


def _embedding(weight: Tensor, indices: Tensor) -> Any:
    return aten.embedding(weight, indices)


ROWS: Table = {
    "NativeLayerNormBackward0": Operation(
        "layer_norm",
        _layer_norm,
        ("input", "weight", "bias"),
        ("normalized_shape", _epsilon),
        optional=("weight", "bias"),
        is_known=only_first,
    ),
    "FusedRmsNormBackward0": Operation(
        "rms_norm",
        _rms_norm,
        ("input", "weight"),
        ("normalized_shape", "eps"),
        optional=("weight",),
        is_known=only_first,
    ),
    "SoftmaxBackward0": Operation(
        "softmax", _softmax, constants=("dim", dtype_of), results=("result",)
    ),
    "LogSoftmaxBackward0": Operation(
        "log_softmax", _log_softmax, constants=("dim", dtype_of), results=("result",)
    ),
    "MeanBackward0": Operation("mean", _mean_of_all, constants=(dtype_of,)),
    "MeanBackward1": Operation("mean", _mean, constants=("dim", "keepdim", dtype_of)),
    "SumBackward0": Operation("sum", _sum_of_all, constants=(dtype_of,)),
    "SumBackward1": Operation("sum", _sum, constants=("dim", "keepdim", dtype_of)),
    "EmbeddingBackward0": Operation("embedding", _embedding, ("weight", "indices")),
}
