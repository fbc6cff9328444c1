"""Float32 tensors that a cast has made of bfloat16: the narrow numbers are kept in their place.

Norms of models in bfloat16 compute in float32, so that autograd saves the cast of their input. The
input itself is often saved by nobody. The upper half of each float32 has its bits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ssdtrain.rematerialize.operations import OPERATIONS
from ssdtrain.rematerialize.recipe import Layout, Recipe, Step, as_in_forward

__all__ = ["narrowed", "widening_from"]

CAST = "ToCopyBackward0"
UPPER = 1 if sys.byteorder == "little" else 0
"""The half of a float32 that is a bfloat16."""


def narrowed(root: Tensor) -> Tensor | None:
    """Return the bfloat16 numbers, on a storage of their own, of which a cast has made ``root``.

    ``root`` covers its storage. Return None if it is another tensor, or was changed in place; on a
    CPU also if that was done past its version.
    """
    if not _is_wide_cast(root) or root.untyped_storage().nbytes() != root.nbytes:
        return None
    layout = Layout.of(root)
    with as_in_forward(layout.device.type):
        narrow = torch.empty_strided(
            layout.size, layout.stride, dtype=torch.bfloat16, device=layout.device
        )
        halves = _halves(root)
        # A GPU would have to be waited for.
        if root.is_cpu and torch.count_nonzero(halves[1 - UPPER :: 2]):  # defence: rest of a cast
            return None  # defence: rest of a cast
        _halves(narrow).copy_(halves[UPPER::2])
    return narrow


def _is_wide_cast(root: Tensor) -> bool:
    node: Any = root.grad_fn
    if node is None or node.name() != CAST or isinstance(node, FunctionCtx):
        return False
    if root.dtype is not torch.float32 or root._version or root._is_view():  # noqa: SLF001
        return False
    is_known, (before, number) = OPERATIONS[CAST].is_known, node.next_functions[0]
    if is_known is None or not is_known(node, 0):
        return False
    was_narrow: bool = before._input_metadata[number].dtype is torch.bfloat16  # noqa: SLF001
    return was_narrow


def widening_from(packed: object, root: Tensor) -> Recipe:
    """Return how ``root`` is made again from the packed object of its narrow numbers."""
    step = Step(OPERATIONS[CAST], (-2,), (root.dtype,), root.dtype)
    return Recipe((packed,), (step,), {-2: 0}, Layout.of(root))


def _halves(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, which has two bytes for each number or a multiple of them."""
    halves = torch.empty(0, dtype=torch.int16, device=tensor.device)
    return halves.set_(tensor.untyped_storage(), 0, (tensor.nbytes // 2,), (1,))
