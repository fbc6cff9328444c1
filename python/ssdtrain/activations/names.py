"""Names a saved tensor, and the operation that saves or needs it, in messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain.machine.torch_internals import current_node

__all__ = ["describe", "needing", "saving"]

LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__))
)
"""Folders of torch and of this package: users know the line that called into them."""


def describe(dtype: torch.dtype, size: Sequence[int]) -> str:
    """Return a tensor's type and shape."""
    return f"[{str(dtype).removeprefix('torch.')} {list(size)}]"


def saving(tensor: Tensor, sequence: int) -> str:
    """Return the operation that saves this tensor; ``sequence`` as for its record.

    While a tensor is being packed, its saving node is known only if the tensor is the node's own
    result. Otherwise the message names the line of the program and the node that made the tensor.
    """
    tensor_text = describe(tensor.dtype, tensor.shape)
    made = tensor.grad_fn
    where = _line_of_caller()
    if made is None:
        return f"the operation {where}, which saves {tensor_text},"
    # The node that is being made has the number before the next.
    if made._sequence_nr() == sequence - 1:  # noqa: SLF001 - the number that the gate compares
        return f"{made.name()} {where}, which saves its result {tensor_text},"
    return f"the operation {where}, which saves {tensor_text} (the result of {made.name()}),"


def needing(dtype: torch.dtype, size: Sequence[int]) -> str:
    """Return the node, or the line of the program, that needs a saved tensor back."""
    node = current_node()
    user = node.name() if node is not None else f"the program {_line_of_caller()}"
    return f"{user}, to which {describe(dtype, size)} has to be read back,"


def _line_of_caller() -> str:
    frame = sys._getframe(1)  # noqa: SLF001 - finds the caller without reading sources
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}"
