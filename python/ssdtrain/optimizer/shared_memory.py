"""What others have too: parameters that lie on one memory, and gradients that are given away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.machine.torch_internals import holders_of, own_shard, plainly

__all__ = ["is_given", "sharing_memory"]


def is_given(gradient: Tensor, param: Tensor | None) -> bool:
    """Whether a graph or another library (DLPack) has a gradient, which Python does not count.

    Its parameter may have it as well, but not autograd, which has it while it accumulates.
    """
    alone_count, of_a_parameter_count = _holders_alone()
    is_its_own = param is not None and param.grad is gradient
    return holders_of(gradient) > (of_a_parameter_count if is_its_own else alone_count)


@cache
def _holders_alone() -> tuple[int, int]:
    """Return what ``holders_of`` tells of a tensor, and of the gradient of one parameter."""
    with plainly():
        param, gradient = Parameter(torch.zeros(1)), torch.zeros(1)
        alone_count = holders_of(gradient)
        param.grad = gradient
        return alone_count, holders_of(gradient)


def sharing_memory(params: Iterable[Tensor]) -> set[int]:
    """Return the ids of those parameters whose storage others of these have, too."""
    found = []
    for param in params:
        own = own_shard(param)
        # What is away had its memory alone; whoever is to share it has it brought. Of other classes
        # nobody knows where their bytes lie.
        if type(own) not in (Tensor, Parameter) or own.layout is not torch.strided:
            continue
        storage = own.untyped_storage()
        # Storages without bytes have one address.
        if storage.nbytes():
            found.append((id(param), storage.data_ptr()))
    count = Counter(address for _, address in found)
    return {number for number, address in found if count[address] > 1}
