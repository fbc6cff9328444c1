"""Operations that move elements and leave their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdtrain.rematerialize.operation import Operation, Table, number_of, shape_of, signed

__all__ = ["SHAPES"]

aten = torch.ops.aten


def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    return x.unsqueeze(dim)


def _squeeze(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    return x.squeeze(dims)


def _slice(x: Tensor, dim: int, start: int, end: int, step: int) -> Any:
    return aten.slice(x, dim, start, end, step)


def _split(x: Tensor, sizes: int | tuple[int, ...], dim: int, number: int) -> Tensor:
    return torch.split(x, sizes if isinstance(sizes, int) else list(sizes), dim)[number]


def _unbind(x: Tensor, dim: int, number: int) -> Tensor:
    return x.unbind(dim)[number]


def _concatenate(*tensors_and_dim: Any) -> Tensor:
    *tensors, dim = tensors_and_dim
    return torch.cat(tensors, dim)


def _is_whole(node: Any, _number: int) -> bool:
    """Return whether a concatenation has no element of a tensor without an edge."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(edges) == len(node.next_functions):
        return True
    # A cache of keys begins with an empty tensor, to which the first keys are joined.
    shapes = [shape_of(*edge) for edge in edges]
    dim, whole = signed(node._saved_dim), shape_of(node, 0)  # noqa: SLF001
    return all(len(shape) == len(whole) for shape in shapes) and whole[dim] == sum(
        shape[dim] for shape in shapes
    )


def _has_all_edges(node: Any, _number: int) -> bool:
    return all(before is not None for before, _ in node.next_functions)


def _stack(*tensors_and_dim: Any) -> Tensor:
    *tensors, dim = tensors_and_dim
    return torch.stack(tensors, dim)


def _index(x: Tensor, *indices: Tensor | None) -> Any:
    return aten.index(x, indices)


def _view(name: str, function: Any, *constants: Any) -> Operation:
    return Operation(name, function, constants=constants, is_view=True)


_RESHAPE = _view("view", torch.reshape, shape_of)

SHAPES: Table = {
    "ViewBackward0": _RESHAPE,
    "UnsafeViewBackward0": _RESHAPE,
    "ReshapeAliasBackward0": _RESHAPE,
    "AliasBackward0": _view("alias", torch.Tensor.detach),
    "TBackward0": _view("t", torch.t),
    "TransposeBackward0": _view("transpose", torch.transpose, "dim0", "dim1"),
    "PermuteBackward0": _view("permute", torch.permute, "dims"),
    "ExpandBackward0": _view("expand", torch.Tensor.expand, shape_of),
    "UnsqueezeBackward0": _view("unsqueeze", _unsqueeze, "dim"),
    "SqueezeBackward0": _view("squeeze", torch.squeeze),
    "SqueezeBackward1": _view("squeeze", _squeeze, "dim"),
    "SqueezeBackward2": _view("squeeze", _squeeze, "dim"),
    "SelectBackward0": _view("select", torch.select, "dim", "index"),
    "SliceBackward0": _view("slice", _slice, "dim", "start", "end", "step"),
    "SplitBackward0": _view("split", _split, "split_size", "dim", number_of),
    "SplitWithSizesBackward0": _view("split", _split, "split_sizes", "dim", number_of),
    "UnbindBackward0": _view("unbind", _unbind, "dim", number_of),
    "DiagonalBackward0": _view("diagonal", torch.diagonal, "offset", "dim1", "dim2"),
    "CloneBackward0": Operation("clone", torch.Tensor.contiguous, is_view=True),
    "CatBackward0": Operation(
        "cat", _concatenate, (), ("dim",), takes_edges=True, is_known=_is_whole
    ),
    "StackBackward0": Operation(
        "stack", _stack, (), ("dim",), takes_edges=True, is_known=_has_all_edges
    ),
    "RepeatBackward0": Operation("repeat", torch.Tensor.repeat, constants=("repeats",)),
    "RollBackward0": Operation("roll", torch.roll, constants=("shifts", "dims")),
    "FlipBackward0": Operation("flip", torch.flip, constants=("dims",)),
    "TrilBackward0": Operation("tril", torch.tril, constants=("diagonal",)),
    "TriuBackward0": Operation("triu", torch.triu, constants=("diagonal",)),
    "IndexBackward0": Operation("index", _index, ("self", "indices"), optional=("indices",)),
}
