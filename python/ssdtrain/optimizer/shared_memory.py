"""What others have too: parameters that lie on one memory, and gradients that are given away."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import is_away
from ssdtrain.away.known import known_of
from ssdtrain.machine.torch_internals import holders_of, is_shared, own_shard, plainly

__all__ = [
    "is_given",
    "note_optimizer",
    "sharing_memory",
    "sharing_with_any",
    "who_has_gradient",
    "who_has_weight",
]

_optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
"""The offloaded ones of this process, by their ids: classes may say what is equal."""


def note_optimizer(optimizer: Optimizer) -> None:
    """Have the parameters of an offloaded optimizer taken into account by the others."""
    _optimizers[id(optimizer)] = optimizer


def sharing_with_any(params: list[Tensor]) -> set[int]:
    """Return the ids of these parameters and others that lie on memory of each other.

    The others are those of all offloaded optimizers. A parameter of two optimizers is one object,
    for which either of them waits.
    """
    all_params = {id(param): param for param in params}
    for optimizer in list(_optimizers.values()):
        # Past the property, which may wait.
        for group in vars(optimizer)["param_groups"]:
            # defence: weights on the memory of another optimizer's are updated in step()
            all_params.update((id(param), param) for param in group["params"])
    return sharing_memory(all_params.values())


def is_given(gradient: Tensor, param: Tensor | None) -> bool:
    """Whether a graph or another library (DLPack) has a gradient, which Python does not count.

    Its parameter may have it as well, but not autograd, which has it while it accumulates.
    """
    alone_count, of_a_parameter_count = _holders_alone()
    is_its_own = param is not None and param.grad is gradient
    return holders_of(gradient) > (of_a_parameter_count if is_its_own else alone_count)


def who_has_gradient(gradient: Tensor, param: Tensor) -> str | None:
    """Return who may change a gradient while nobody waits for it, or ``None``."""
    if is_shared(gradient):
        return "their gradients share memory with other tensors"
    if is_given(gradient, param):
        return "a graph or another library has their gradients"
    # What has come back from the disk lies in memory of ours.
    # defence: gradients on memory of others are used at once
    if known_of(gradient) is None and _is_of_others(gradient):
        return "their gradients lie on memory of another library or process"
    return None


def who_has_weight(param: Tensor) -> str | None:
    """Return who may look at a weight without waiting for its update, or ``None``."""
    # Of memory that another library has given, as all have that were loaded (`from_pretrained`,
    # `load_state_dict(assign=True)`), mostly nobody else makes use.
    if is_shared(param) or param.untyped_storage().is_shared():
        return (
            "they share memory with other tensors, such as those of a state_dict that somebody "
            "holds"
        )
    return None


def _is_of_others(tensor: Tensor) -> bool:
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


def sharing_memory(params: Iterable[Tensor]) -> set[int]:
    """Return the ids of those parameters whose storages lie on memory of others of these, too."""
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
        storage = own.untyped_storage()
        # Storages without bytes have one address.
        if storage.nbytes():
            spans.append((storage.data_ptr(), storage.nbytes(), id(param)))
    # Two storages may be one memory: of an array of numpy each tensor has a storage of its own.
    sharing: set[int] = set()
    end, reaching_there = 0, 0
    for address, nbytes, number in sorted(spans):
        if address < end:
            sharing |= {number, reaching_there}
        if address + nbytes > end:
            end, reaching_there = address + nbytes, number
    return sharing
