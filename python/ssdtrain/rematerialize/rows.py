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

__all__ = ["EPSILONS", "ROWS"]

aten = torch.ops.aten

Dims = tuple[int, ...]

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-7)
"""The epsilons of norms in use; no node tells its own."""


def _epsilon(_node: Any, _number: int) -> object:
    return Choice(EPSILONS)


def _epsilon_or_default(_node: Any, _number: int) -> object:
    # None stands for the default, which depends on the dtype.
    return Choice((*EPSILONS, None))


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


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sizes: Dims,
    epsilon: float,
) -> Any:
    return aten.native_group_norm(x, weight, bias, *sizes, epsilon)[0]


def _sizes_of_groups(node: Any, _number: int) -> object:
    return node._saved_N, node._saved_C, node._saved_HxW, node._saved_group  # noqa: SLF001


def _variance(x: Tensor, dims: Dims | None, correction: float | None, keepdim: bool) -> Tensor:
    return torch.var(x, dims, correction=correction, keepdim=keepdim)


def _norm(x: Tensor, order: float, dims: Dims | None, keepdim: bool, dtype: torch.dtype) -> Any:
    return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype)


def _cumulate(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.cumsum(x, dim, dtype=dtype)


def _gather(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.gather(x, dim, indices)


def _select(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.index_select(x, dim, indices)


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
        ("normalized_shape", _epsilon_or_default),
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
    "VarBackward0": Operation("var", _variance, constants=("dim", "correction", "keepdim")),
    "LinalgVectorNormBackward0": Operation(
        "vector_norm",
        _norm,
        constants=("ord", "dim", "keepdim", dtype_of),
        results=("result",),
    ),
    "AmaxBackward0": Operation(
        "amax", torch.amax, constants=("dim", "keepdim"), results=("result",)
    ),
    "LogsumexpBackward0": Operation(
        "logsumexp", torch.logsumexp, constants=("dim", "keepdim"), results=("result",)
    ),
    "CumsumBackward0": Operation("cumsum", _cumulate, constants=("dim", dtype_of)),
    "GatherBackward0": Operation("gather", _gather, ("self", "index"), ("dim",)),
    "IndexSelectBackward0": Operation("index_select", _select, ("self", "index"), ("dim",)),
    "NativeGroupNormBackward0": Operation(
        "group_norm",
        _group_norm,
        # The node saves no bias, and a frozen bias has no edge: without an edge nothing is sure.
        ("input", "weight", "bias"),
        (_sizes_of_groups, _epsilon),
        optional=("weight",),
        is_known=only_first,
    ),
}
