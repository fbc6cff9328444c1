"""How a message names a saved tensor, and the operation that saves or needs it."""

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
"""Folders of torch and of this package: who called them is the line that a user knows."""


def describe(dtype: torch.dtype, size: Sequence[int]) -> str:
    """Return a tensor's type and shape."""
    return f"[{str(dtype).removeprefix('torch.')} {list(size)}]"


def saving(tensor: Tensor, sequence: int) -> str:
    """Return who saves this tensor, while it is being packed; ``sequence`` as for its record.

    Autograd names its node only if the tensor is the node's own result. Otherwise the node is not
    known yet, and the line of the program and what made the tensor have to tell.
    """
    what = describe(tensor.dtype, tensor.shape)
    made = tensor.grad_fn
    where = _line_of_caller()
    if made is None:
        return f"the operation {where}, which saves {what},"
    # The node that is being made has the number before the next.
    if made._sequence_nr() == sequence - 1:  # noqa: SLF001 - the number that the gate goes by
        return f"{made.name()} {where}, which saves its result {what},"
    return f"the operation {where}, which saves the result {what} of {made.name()},"


def needing(dtype: torch.dtype, size: Sequence[int]) -> str:
    """Return who needs a saved tensor back."""
    node = current_node()
    who = node.name() if node is not None else f"the program {_line_of_caller()}"
    return f"{who}, to which {describe(dtype, size)} has to be read back,"


def _line_of_caller() -> str:
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to see one's caller without its source
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}"
