"""What an update in backward does on its thread: it makes what takes the place of weights."""
# ruff: noqa: SLF001 - what an offloaded optimizer has for its schedules is private

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ssdtrain.away.known import in_use
from ssdtrain.errors import SsdtrainError, UnsupportedError
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import clone_of, with_default_device
from ssdtrain.optimizer.chunks import Chunk, own_step, update
from ssdtrain.optimizer.disk import Away
from ssdtrain.optimizer.in_backward_round import Host, Round
from ssdtrain.optimizer.masters import Leaf, drop_stale, wants_master
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.taken import Taken
from ssdtrain.parameters.successor import Successor
from ssdtrain.parameters.weights import weight_of
from ssdtrain.watched import HOLDER

__all__ = ["CHANGED", "make_updates", "put_in_place", "roll_back"]

CHANGED = (
    "was changed after updates of this step had begun in backward, so they would not have the bits "
    'of the plain run. Change it before backward or after step(), or use overlap="step". '
    "No weight was updated; optimizer.zero_grad() discards what has begun"
)
ALIAS = (
    'the optimizer keeps a view of the weight in its state, and with overlap="backward" an update '
    'works on a copy of the weight; use overlap="step". No weight was changed by this step; '
    "optimizer.zero_grad() discards it"
)


def make_updates(host: Host, now: Round, records: list[Taken]) -> None:
    """Update copies of some weights, whose states are the new ones from then on."""
    states = host._states
    gradients = [record.gradient for record in records if record.gradient is not None]
    with in_use([*(record.param for record in records), *gradients]):
        del gradients
        for record in records:
            if host._masters is not None and record.is_gradient_taken:
                # To bring a master looks at the weight as well.
                record.note_bytes()
            state = states.get(record.param)
            if state is None:
                record.is_state_new = True
            else:
                record.before = _set_aside(state)
                _bring(state)
        with with_default_device(host._default_device):
            _run(host, now, records, states)
    for record in records:
        let_weight_go(record)


def let_weight_go(record: Taken) -> None:
    """Let a weight leave that stayed for its update."""
    weight = weight_of(record.param)
    if weight is not None:
        weight.end_use(record)


def put_in_place(host: Host, record: Taken) -> None:
    """Give a weight its updated bytes, and the tensors of its state, which others may have."""
    param, updated = record.param, record.updated
    weight = weight_of(param)
    if isinstance(updated, Successor):
        assert weight is not None, "it had an owner, which only goes with it"
        weight.owner.succeed(weight, updated)
    elif updated is not None:
        param.copy_(updated)
    state = host._states.get(param)
    for key, older in (record.before or {}).items():
        newer = dict.get(state, key) if isinstance(state, ParameterState) else None
        if isinstance(older, Tensor) and isinstance(newer, Tensor) and _are_alike(older, newer):
            older.copy_(newer)
            state[key] = older


def _put_into(chunks: dict[int, Chunk], record: Taken, tensor: Tensor) -> None:
    chunk = chunks.setdefault(id(record.group), Chunk(record.group, [], []))
    chunk.params.append(tensor)
    assert chunk.stand_for is not None, "it was made so"
    chunk.stand_for.append(record.param)


def _run(host: Host, now: Round, records: list[Taken], states: Any) -> None:
    """Run the optimizer's own step over copies of weights, with the states of the weights."""
    chunks: dict[int, Chunk] = {}
    view: defaultdict[Tensor, Any] = defaultdict(ParameterState)
    updated: list[tuple[Taken, Leaf]] = []
    for record in records:
        leaf = _leaf_of(host, record, view)
        _put_into(chunks, record, leaf.tensor)
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
        weight = weight_of(record.param)
        if weight is not None and isinstance(record.updated, Tensor):
            # What refers to the leaf refers to these bytes, which the disk takes now.
            leaf.let_go()
            record.updated = weight.owner.precede(record.updated)


def _leaf_of(host: Host, record: Taken, view: dict[Tensor, Any]) -> Leaf:
    """Return what is updated in the place of a weight; ``view`` gets its state."""
    param, state = record.param, host._states.get(record.param)
    assert record.gradient is not None, "its update was not made yet"
    if host._masters is not None and wants_master(param):
        leaf = host._masters.begin(param, state, record.gradient)
        if record.has_other_bytes:
            raise UnsupportedError(f"a weight {CHANGED}")
        if leaf.inner is not None:
            view[leaf.tensor] = leaf.inner
        return leaf
    if host._masters is not None:
        drop_stale(state, param)
    weight = param.detach().clone()
    if record.is_gradient_taken:
        # Of the copy: a weight that is changed, and changed back before `step()`, is told as well.
        record.sum = checksum_of(weight)
    if isinstance(param, Parameter):
        weight = Parameter(weight, requires_grad=param.requires_grad)
    else:
        weight.requires_grad_(param.requires_grad)
    vars(weight).update({name: value for name, value in vars(param).items() if name != HOLDER})
    weight.grad = record.gradient
    if state is not None:
        view[weight] = state
    return Leaf(param, weight, None)


def _update_all(host: Host, now: Round, chunks: dict[int, Chunk]) -> None:
    own = own_step(host._own_kind)
    for chunk in chunks.values():
        update(now.stand_in, own, chunk, now.rebound, {})


def _has_view_of(state: dict[Any, Any], weight: Tensor) -> bool:
    """Whether a tensor of a state lies on the memory of a weight."""
    if weight.untyped_storage().nbytes() == 0:
        # Memory of no bytes has no address of its own.
        return False
    address = weight.untyped_storage().data_ptr()
    return any(
        type(value) is Tensor and value.untyped_storage().data_ptr() == address
        for value in dict.values(state)
    )


def _bring(state: ParameterState) -> None:
    try:
        state.bring()
    except SsdtrainError:
        # It may have been asked for before an earlier step() failed: ask the disk as it is now.
        state.drop_reads()
        state.bring()


def _set_aside(state: ParameterState) -> dict[Any, Any]:
    """Return what a state has now, to be put back: an update may change all but an ``Away``.

    It changes copies of tensors: before ``step()`` nothing changes that a ``state_dict`` refers to.
    """
    before = {}
    for key, value in state.take_entries().items():
        before[key] = value if isinstance(value, Tensor | Away) else copy.deepcopy(value)
        if isinstance(value, Tensor):
            state[key] = clone_of(value)
    return before


def _are_alike(older: Tensor, newer: Tensor) -> bool:
    return (
        older is not newer
        and (older.shape, older.dtype) == (newer.shape, newer.dtype)
        and older.layout is newer.layout
        and older.device == newer.device
    )


def roll_back(host: Host, record: Taken) -> None:
    """Give a parameter the state from before its update, if that was not put in place."""
    states = host._states
    if record.before is not None:
        state = states.get(record.param)
        if not isinstance(state, ParameterState):
            states[record.param] = state = ParameterState()
        state.put_entries(record.before)
    elif record.is_state_new:
        states.pop(record.param, None)
    record.before = record.updated = None
    record.is_state_new = False
    let_weight_go(record)
