"""How a tensor lies in its storage, and which part of the storage holds it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, UntypedStorage

__all__ = ["Geometry", "empty", "part_of", "span_bytes"]

PART_ALIGNMENT_BYTES: Final = 16
"""Parts begin on a multiple of the largest item of any dtype, so that tensors of every dtype that
lie in a part can be put back on it: their offsets are whole numbers of items."""
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


class Geometry:
    """Dtype, size, strides and offset of a tensor; strides too, because kernels choose by them."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset: int = int(tensor.storage_offset()) * tensor.itemsize  # defence: storage offset
        """Bytes from the start of the storage."""

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in its storage like this."""
        return (
            tensor.dtype == self.dtype
            and tensor.size() == self.size
            and tensor.stride() == self.stride
            and int(tensor.storage_offset()) * tensor.itemsize == self.offset
        )

    def build(self, storage: UntypedStorage, start: int) -> Tensor:
        """Return a tensor on ``storage``, whose first byte was at ``start`` of the original."""
        offset = (self.offset - start) // self.dtype.itemsize
        return empty(self.dtype).data.set_(
            storage,
            offset,
            self.size,
            self.stride,  # defence: strides
        )


def empty(dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor without elements; it may be shared, so never change it."""
    made = _EMPTY.get(dtype)
    return torch.empty(0, dtype=dtype, device="cpu") if made is None else made


def part_of(tensor: Tensor, storage_bytes: int) -> tuple[int, int]:
    """Return start and length, in bytes, of the part of its storage that is managed for ``tensor``.

    The whole storage if the tensor spans half of it or more: the slices of a fused projection are
    saved one after the other, and one write serves them all. A small view of something large (a
    batch of a data set in memory) takes its own part only.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return 0, 0
    span = nbytes if tensor.is_contiguous() else span_bytes(tensor)
    if 2 * span >= storage_bytes:
        return 0, storage_bytes
    offset = int(tensor.storage_offset()) * tensor.itemsize
    start = offset - offset % PART_ALIGNMENT_BYTES
    return start, offset + span - start


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    size, stride = tensor.size(), tensor.stride()
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (reach + 1) * tensor.itemsize
