"""Functions of torch for the compiled part, which puts tensors back on storages."""

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
"""Quantised dtypes, which are never offloaded, and dtypes that torch warns of at first use."""


with torch.inference_mode(mode=False):
    _EMPTY: Final = {
        dtype: torch.empty(0, dtype=dtype, device="cpu")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(UNUSUAL_DTYPES)
    }
"""Made at import: under a later mode of torch, `torch.empty` could make another kind of tensor.
Shared, because making a tensor costs more than all the rest of `Geometry.build`."""


def checksum_of(tensor: Tensor) -> int:
    """Return a checksum (xxh3) of the elements of a strided tensor of the CPU.

    The elements must not change meanwhile. Tensors of different forms may have the same checksum.
    """
    return checksum(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())


def _make_empty(dtype: torch.dtype, gpu: int | None) -> Tensor:
    # An interrupt here could leave the modes off, so the caller makes each tensor only once.
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
"""Functions of torch that the compiled part calls."""
