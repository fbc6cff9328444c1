"""What others have too: parameters that lie on one memory, and gradients that are given away."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.away.classes import is_away
from ssdtrain.away.known import known_of
from ssdtrain.machine.torch_internals import holders_of, own_shard, plainly

__all__ = [
    "is_given",
    "is_of_others",
    "sharing_memory",
]


def is_given(gradient: Tensor, param: Tensor | None) -> bool:
    """Whether a graph or another library (DLPack) has a gradient, which Python does not count.

    Its parameter may have it as well, but not autograd, which has it while it accumulates.
    """
    alone_count, of_a_parameter_count = _holders_alone()
    is_its_own = param is not None and param.grad is gradient
    return holders_of(gradient) > (of_a_parameter_count if is_its_own else alone_count)


def is_of_others(tensor: Tensor) -> bool:
    """Whether a tensor lies on memory that torch has from somebody else, who may use it past torch.

    Arrays of numpy, DLPack, mapped files, and memory that several processes share.
    """
    storage = tensor.untyped_storage()
    return not storage.resizable() or storage.is_shared()


@cache
def _holders_alone() -> tuple[int, int]:
    """Return what ``holders_of`` tells of a tensor, and of the gradient of one parameter."""
    with plainly():
        param, gradient = (Parameter(torch.zeros(1, device="cpu")), torch.zeros(1, device="cpu"))
        alone_count = holders_of(gradient)
        param.grad = gradient
        return alone_count, holders_of(gradient)


def sharing_memory(params: Iterable[Tensor], *, own_elements: bool = False) -> set[int]:
    """Return the ids of those parameters whose storages lie on memory of others of these, too.

    ``own_elements``: only their elements count, not all of their storages.
    """
    spans = []
    for param in params:
        own = own_shard(param)
        if is_away(own):
            # Its bytes may be in memory still, and shared with what a look has given out.
            known = known_of(own)
            if known is None or known.source is None:
                continue
            own = known.source
        # Of other classes nobody knows where their bytes lie.
        if type(own) not in (Tensor, Parameter) or own.layout is not torch.strided:
            continue
        lying = own if own_elements else own.untyped_storage()
        nbytes = lying.nbytes if isinstance(lying, Tensor) else lying.nbytes()
        # Storages without bytes have one address.
        if nbytes:
            spans.append((lying.data_ptr(), nbytes, id(param)))
    # Two storages may be one memory: of an array of numpy each tensor has a storage of its own.
    sharing: set[int] = set()
    end, reaching_there = 0, 0
    for address, nbytes, number in sorted(spans):
        if address < end:
            sharing |= {number, reaching_there}
        if address + nbytes > end:
            end, reaching_there = address + nbytes, number
    return sharing
