"""Operations that look at many elements for each result: norms, softmax, sums, look-ups.

An embedding is missing: its node does not save the weight, so neither torch nor a recipe knows
whether the weight was changed since, and programs do that (``max_norm``, codebooks). A cumulative
sum is missing: its bits vary on a GPU. So is the fused RMS norm, which only GPUs have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssdtrain.rematerialize.operation import (
    Operation,
    Table,
    dtype_of,
)

__all__ = ["EPSILONS", "ROWS"]

aten = torch.ops.aten

Dims = tuple[int, ...]

EPSILONS = [1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-7, 1e-4, 1e-9, 1e-10, 1e-15, 1.5625e-7]
"""The epsilons of norms in use, as no node tells its own; the last that was right comes first.

Rows of large variance tell small ones not apart. So the proof of a norm with one that is missing
here may succeed, and later a row of small variance would have its backward raise.
"""


EXACT_BYTES = torch.float32.itemsize


def _with_epsilon(norm: Callable[[float], Any], scale: Tensor) -> Tensor:
    """Return the result of the norm whose epsilon gives the scale that the node has saved.

    The epsilon has a part in the scale only, so an equal scale makes the result equal.
    """
    for epsilon in tuple(EPSILONS):
        made, *_, again = norm(epsilon)
        if torch.equal(_bits(again), _bits(scale)):
            if epsilon != EPSILONS[0]:
                EPSILONS.sort(key=lambda other: other != epsilon)
            result: Tensor = made
            return result
    raise RuntimeError(f"none of the epsilons {EPSILONS} gives the scale that a norm has saved")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64 if tensor.itemsize == torch.int64.itemsize else torch.int32)


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shape: Dims
) -> Tensor:
    return _with_epsilon(lambda it: aten.native_layer_norm(x, shape, weight, bias, it), scale)


def _has_exact_scale(node: Any, number: int) -> bool:
    # On a GPU the comparison of the scales would stop Python until the GPU has come there, and the
    # scale of a narrow norm may be rounded, so that an equal scale tells nothing.
    result = node._input_metadata[0]  # noqa: SLF001
    return number == 0 and result.device.type == "cpu" and result.dtype.itemsize >= EXACT_BYTES


def _softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return aten._softmax(x, dim, x.dtype is not dtype)  # noqa: SLF001


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return aten._safe_softmax(x, dim, dtype=dtype)  # noqa: SLF001


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


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    sizes: Dims,
) -> Tensor:
    return _with_epsilon(lambda it: aten.native_group_norm(x, weight, bias, *sizes, it), scale)


def _sizes_of_groups(node: Any, _number: int) -> object:
    return node._saved_N, node._saved_C, node._saved_HxW, node._saved_group  # noqa: SLF001


def _variance(x: Tensor, dims: Dims | None, correction: float | None, keepdim: bool) -> Tensor:
    return torch.var(x, dims, correction=correction, keepdim=keepdim)


def _norm(x: Tensor, order: float, dims: Dims | None, keepdim: bool, dtype: torch.dtype) -> Any:
    given = None if x.is_complex() else dtype
    return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=given)


def _gather(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.gather(x, dim, indices)


def _select(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.index_select(x, dim, indices)


ROWS: Table = {
    "NativeLayerNormBackward0": Operation(
        "layer_norm",
        _layer_norm,
        ("input", "weight", "bias", "result2"),
        ("normalized_shape",),
        optional=("weight", "bias"),
        is_known=_has_exact_scale,
    ),
    "SoftmaxBackward0": Operation(
        "softmax", _softmax, constants=("dim", dtype_of), results=("result",)
    ),
    "SafeSoftmaxBackward0": Operation(
        "softmax", _safe_softmax, constants=("dim", dtype_of), results=("result",)
    ),
    "LogSoftmaxBackward0": Operation(
        "log_softmax", _log_softmax, constants=("dim", dtype_of), results=("result",)
    ),
    "MeanBackward0": Operation("mean", _mean_of_all, constants=(dtype_of,)),
    "MeanBackward1": Operation("mean", _mean, constants=("dim", "keepdim", dtype_of)),
    "SumBackward0": Operation("sum", _sum_of_all, constants=(dtype_of,)),
    "SumBackward1": Operation("sum", _sum, constants=("dim", "keepdim", dtype_of)),
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
    "GatherBackward0": Operation("gather", _gather, ("self", "index"), ("dim",)),
    "IndexSelectBackward0": Operation("index_select", _select, ("self", "index"), ("dim",)),
    "NativeGroupNormBackward0": Operation(
        "group_norm",
        _group_norm,
        # The node saves no bias, and a frozen bias has no edge: without an edge nothing is sure.
        ("input", "weight", "bias", "result2"),
        (_sizes_of_groups,),
        optional=("weight",),
        is_known=_has_exact_scale,
    ),
}
