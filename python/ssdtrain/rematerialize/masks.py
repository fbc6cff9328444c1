"""Masks of dropout on a CPU: a bit for each element is kept, and the floats are made from it.

A CPU's dropout multiplies by a tensor of zeros and of one scale. It is filled at random, so that no
graph tells its values. They are looked at in each step instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssdtrain._core import Kept
from ssdtrain.rematerialize.operation import Operation
from ssdtrain.rematerialize.recipe import Layout, Recipe, Step, as_in_forward

__all__ = ["find_mask"]

BITS = 8
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: its bits are compared and made, so no number is special."""
SCALE_AMONG = 1024
"""The scale is looked for among so many elements. A mask that has dropped all of these is kept."""
GATHERS = 0x0102040810204080
"""Times eight bytes that are 0 or 1, it has their bits in its highest byte, the first lowest."""


def find_mask(root: Tensor) -> Recipe | None:
    """Return how a mask of dropout is made again from a bit for each element, or None.

    ``root`` covers its storage. No node has made it, and each element is zero or has the bits of
    one positive number. The recipe holds the bits.
    """
    if not root.is_cpu or not root.is_floating_point() or root.itemsize not in INTEGERS:
        return None
    if root.requires_grad or root.is_inference():
        return None
    # The node that saves a tensor which nobody has filled may fill it yet.
    if root._is_view() or not root._version or root.numel() % BITS:  # noqa: SLF001
        return None
    layout = Layout.of(root)
    if layout.storage_bytes != root.nbytes:
        return None
    with as_in_forward("cpu"):
        elements = torch.empty(0, dtype=INTEGERS[root.itemsize], device="cpu")
        elements.set_(root.untyped_storage(), 0, (root.numel(),), (1,))
        scale = int(elements[:SCALE_AMONG].max())
        bits = _bits(elements, scale) if scale > 0 else None
    if bits is None:
        return None
    step = Step(MASK, (-2,), (scale, layout), root.dtype)
    return Recipe((Kept(bits, bits._version),), (step,), {-2: 0}, layout)  # noqa: SLF001


def _bits(elements: Tensor, scale: int) -> Tensor | None:
    """Return a bit for each element, set where it is the scale; None if others are not zero."""
    is_kept = elements == scale
    if torch.count_nonzero(elements) != torch.count_nonzero(is_kept):  # defence: values of a mask
        return None
    return is_kept.view(torch.int64).mul_(GATHERS).bitwise_right_shift_(64 - BITS).to(torch.uint8)


def _mask(bits: Tensor, scale: int, layout: Layout) -> Tensor:
    places = torch.arange(BITS, device="cpu")
    rows = torch.arange(1 << BITS, device="cpu").unsqueeze(1).bitwise_right_shift(places) & 1
    table = (rows * scale).to(INTEGERS[layout.dtype.itemsize])
    elements = table.index_select(0, bits.int())
    return elements.view(-1).view(layout.dtype).as_strided(layout.size, layout.stride)


MASK = Operation("mask", _mask)
