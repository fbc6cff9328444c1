"""Updates of an ``overlap="backward"``: the optimizer's own step over copies of weights."""
# ruff: noqa: SLF001 - what an offloaded optimizer has for its schedules is private

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ssdtrain.errors import UnsupportedError
from ssdtrain.optimizer.chunks import Chunk, own_step, update
from ssdtrain.optimizer.in_backward_round import Host, Round
from ssdtrain.optimizer.masters import Leaf, drop_stale, wants_master
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.taken import Taken

__all__ = ["update_copies"]

ALIAS = (
    'the optimizer keeps a view of the weight in its state, and with overlap="backward" an update '
    'works on a copy of the weight; use overlap="forward" or "step". No weight was changed by this '
    "step; optimizer.zero_grad() discards it"
)


def update_copies(host: Host, now: Round, records: list[Taken], states: Any) -> None:
    """Run the optimizer's own step over copies of weights, with the states of the weights."""
    chunks: dict[int, Chunk] = {}
    view: defaultdict[Tensor, Any] = defaultdict(ParameterState)
    updated: list[tuple[Taken, Leaf]] = []
    for record in records:
        leaf = _leaf_of(host, record, view)
        chunks.setdefault(id(record.group), Chunk(record.group, [])).params.append(leaf.tensor)
        updated.append((record, leaf))
    vars(now.stand_in)["state"] = view
    try:
        _update_all(host, now, chunks)
    finally:
        vars(now.stand_in)["state"] = {}
    if any(one.tensor in view and _has_view_of(view[one.tensor], one.tensor) for _, one in updated):
        raise UnsupportedError(ALIAS)
    # What refers to a leaf would keep its master in memory.
    chunks.clear()
    for record, leaf in updated:
        state = view.pop(leaf.tensor, None)
        record.updated = leaf.rounded()
        if leaf.master is not None:
            assert host._masters is not None
            host._masters.end(leaf, states, state, record.updated, stays=False)
        elif state is not None:
            states[record.param] = state
        else:
            states.pop(record.param, None)


def _leaf_of(host: Host, record: Taken, view: dict[Tensor, Any]) -> Leaf:
    """Return what is updated in the place of a weight; ``view`` gets its state."""
    param, state = record.param, host._states.get(record.param)
    assert record.gradient is not None, "its update was not made yet"
    if host._masters is not None and wants_master(param):
        leaf = host._masters.begin(param, state, record.gradient)
        if leaf.inner is not None:
            view[leaf.tensor] = leaf.inner
        return leaf
    if host._masters is not None:
        drop_stale(state, param)
    weight = param.detach().clone()
    if type(param) is Parameter:
        weight = Parameter(weight, requires_grad=param.requires_grad)
    else:
        weight.requires_grad_(param.requires_grad)
    vars(weight).update(vars(param))
    weight.grad = record.gradient
    if state is not None:
        view[weight] = state
    return Leaf(param, weight, None)


def _update_all(host: Host, now: Round, chunks: dict[int, Chunk]) -> None:
    own = own_step(host._own_kind)
    for chunk in chunks.values():
        update(now.stand_in, own, chunk, now.settings, {})


def _has_view_of(state: dict[Any, Any], weight: Tensor) -> bool:
    """Whether a tensor of a state lies on the memory of a weight."""
    address = weight.untyped_storage().data_ptr()
    return any(
        type(value) is Tensor and value.untyped_storage().data_ptr() == address
        for value in dict.values(state)
    )
