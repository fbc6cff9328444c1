"""Which parameters of an optimizer lie on one memory, so that an update of one changes others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from ssdtrain.away.classes import is_away
from ssdtrain.machine.torch_internals import own_shard

__all__ = ["sharing_memory"]


def sharing_memory(params: Iterable[Tensor]) -> set[int]:
    """Return the ids of those parameters whose storage others of these have, too."""
    found = []
    for param in params:
        # What is away had its memory alone; whoever is to share it has it brought.
        if is_away(param) or param.layout is not torch.strided:
            continue
        storage = own_shard(param).untyped_storage()
        # Storages without bytes have one address.
        if storage.nbytes():
            found.append((id(param), storage.data_ptr()))
    count = Counter(address for _, address in found)
    return {number for number, address in found if count[address] > 1}
