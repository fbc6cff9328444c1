"""Which parameters of an optimizer lie on one memory, so that an update of one changes others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.machine.torch_internals import own_shard

__all__ = ["sharing_memory"]


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
