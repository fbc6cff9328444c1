"""How a tensor lies in its storage: what the compiled part needs of torch to put it back on one."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ssdtrain._core import Torch, checksum
from ssdtrain.machine.torch_internals import (
    current_backward,
    current_node,
    is_below_autograd,
    plainly,
    sequence_number,
)

__all__ = ["TORCH", "checksum_of"]

UNUSUAL_DTYPES: Final = ("torch.q", "torch.complex32", "torch.bcomplex32")
"""Quantised dtypes, which are not managed, and those that torch warns of at their first use."""


with torch.inference_mode(mode=False):
    _EMPTY: Final = {
        dtype: torch.empty(0, dtype=dtype, device="cpu")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(UNUSUAL_DTYPES)
    }
"""Made at import: under a mode of torch that is on later, `torch.empty` could make another kind of
tensor. Shared, because to make one costs more than all the rest of `Geometry.build`."""


def checksum_of(tensor: Tensor) -> int:
    """Return what tells the elements of a strided tensor of the CPU from others (xxh3).

    Nobody may change them meanwhile. Tensors of different forms may have the same checksum.
    """
    return checksum(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())


def _make_empty(dtype: torch.dtype, gpu: int | None) -> Tensor:
    # An interrupt in here could leave the modes off, so the caller keeps what is made.
    with plainly():
        return torch.empty(0, dtype=dtype, device="cpu" if gpu is None else gpu)


TORCH: Final = Torch(
    empties=_EMPTY,
    make_empty=_make_empty,
    frombuffer=torch.frombuffer,
    byte_type=torch.uint8,
    sequence_number=sequence_number,
    current_backward=current_backward,
    current_node=current_node,
    is_below_autograd=is_below_autograd,
)
"""What the compiled part calls of torch."""
