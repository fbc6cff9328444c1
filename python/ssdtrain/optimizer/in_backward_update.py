"""The options that a step with ``overlap="backward"`` begins with, and its updates of copies."""
# ruff: noqa: SLF001 - an offloaded optimizer keeps the names of its own class free

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayGradient
from ssdtrain.away.known import in_use, known_of
from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.torch_internals import (
    clone_of,
    is_foreign,
    is_given,
    is_shared,
    mode_count,
    trains_with_others,
)
from ssdtrain.optimizer.chunks import Chunk, own_step, update
from ssdtrain.optimizer.contract import (
    Rebound,
    difference,
    is_plain,
    own_attributes,
    params_of,
)
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.masters import Leaf, drop_stale, wants_master
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.taken import Taken
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.weights import weight_of
from ssdtrain.watched import HOLDER

if TYPE_CHECKING:
    from ssdtrain.optimizer.offloaded import Offloaded

__all__ = [
    "CHANGED",
    "Round",
    "let_weight_go",
    "make_updates",
    "put_in_place",
    "roll_back",
    "why_not",
    "why_nothing",
]

PARTS_MIN = 16
"""A step has at least so many parts, so that the last one, which backward cannot hide, is small."""
PART_BYTES_MIN = 1 << 20
CHANGED = (
    "was changed after updates of this step had begun in backward, so they would not have the bits "
    'of the plain run. Change it before backward or after step(), or use overlap="step". '
    "No weight was updated; optimizer.zero_grad() discards the updates"
)
UNTRUSTED = (
    "the optimizer's class is not torch's; pass per_parameter=True to offload_optimizer if its "
    "step keeps the contract and draws no random numbers"
)


class Round:
    """The options of a step as they are when its first gradient is complete."""

    def __init__(self, host: Offloaded) -> None:
        params = params_of(host)
        self.unkept: str | None = None if host._is_trusted else UNTRUSTED
        """Why ``step()`` makes all updates."""
        # defence: options that cannot be copied are read in step() only
        self.unkept = self.unkept or _why_unkept(host)
        self.has_failed = False
        """True if an update in backward has failed, so that ``step()`` makes the others."""
        self.groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each group of the optimizer, after the copy of it that updates use."""
        self.group_of: dict[int, dict[str, Any]] = {}
        for real in host.param_groups:
            options = _options_of(real) if self.unkept else copy.deepcopy(_options_of(real))
            group = {**options, "params": list(real["params"])}
            self.groups.append((group, real))
            self.group_of.update({id(param): group for param in group["params"]})
        self.attributes = copy.deepcopy(_plain_attributes(host))
        self.rebound = Rebound(host._ours)
        self.stand_in: Optimizer = object.__new__(host._own_kind)
        """The optimizer whose step runs: the state of the real one stays that of the last step."""
        vars(self.stand_in).update(vars(host) if self.unkept else {**vars(host), **self.attributes})
        total = sum(map(host._bytes_of, params))
        self.bytes_max = min(host._part_bytes, max(PART_BYTES_MIN, total // PARTS_MIN))

    def changed(self, host: Offloaded) -> str | None:
        """Name an option that differs from what the updates used."""
        reals = host.param_groups
        if [id(real) for _, real in self.groups] != [id(real) for real in reals]:
            return "param_groups"
        for number, (group, real) in enumerate(self.groups):
            if list(map(id, group["params"])) != list(map(id, real["params"])):
                return f"param_groups[{number}]['params']"
            name = difference(_options_of(group), _options_of(real))
            if name is not None:
                return f"param_groups[{number}][{name!r}]"
        # Last: `defaults` has the first group's options, too.
        name = difference(self.attributes, _plain_attributes(host))
        return None if name is None else f"the optimizer's attribute {name!r}"


def _why_unkept(host: Offloaded) -> str | None:
    for group in host.param_groups:
        for name, value in _options_of(group).items():
            if not is_plain(value):
                return f"the option {name!r} of a group is no number, text, tensor or list of them"
    return None


def _plain_attributes(host: Offloaded) -> dict[str, Any]:
    own = own_attributes(host, host._ours)
    return {name: value for name, value in own.items() if is_plain(value)}


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _references(param: Tensor) -> int:
    return sys.getrefcount(param.grad)


_alone = Parameter(torch.zeros(1, device="cpu"))
_alone.grad = torch.zeros(1, device="cpu")
REFERENCES_ALONE = max(_references(_alone) for _ in range(2))
"""References to a gradient that only its parameter has."""


def why_nothing(options: dict[str, Any] | None = None) -> str | None:
    """Return why no update can be made on a copy now, or ``None``; ``options`` are step()'s."""
    if options:
        return "step() was given more than a closure"
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or mode_count():
        return "autocast, inference mode or a mode of torch is on"
    if trains_with_others():
        return "gradients are not complete before processes have exchanged them"
    return None


def why_not(host: Offloaded, param: Tensor) -> str | None:
    """Return why ``step()`` has to update a parameter in place, or ``None``."""
    if not param.requires_grad:
        return "they were frozen in the backward"
    if torch.empty_like(param, device="meta").stride() != param.stride():
        return "a copy of them has other strides"
    # First the references: `gradient` is one more.
    is_held, gradient = _references(param) > REFERENCES_ALONE, param.grad
    assert gradient is not None, "its update is due"
    if is_held or not _is_free(gradient, param):
        return "their gradients are sparse, part of a graph, or shared with other code"
    state = host._states.get(param)
    if state is not None and not _is_streamed(state, host._disk):
        return "their state is in memory, because code has looked at it, or the disk has no room"
    return None


def _is_free(gradient: Tensor, param: Tensor) -> bool:
    """Return whether only this parameter has the gradient, and its bytes are plain."""
    if gradient.dtype != param.dtype:
        return False
    if isinstance(gradient, AwayGradient):
        # It had memory of its own when it left.
        return True
    if (
        type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or gradient.requires_grad
    ):
        return False
    # A gradient that has come back from the disk lies in memory of ours.
    # defence: gradients on memory of others are used in step()
    if known_of(gradient) is None and is_foreign(gradient):
        return False
    return not is_shared(gradient) and not is_given(gradient, expected_count=1)


def _is_streamed(state: Any, disk: Disk) -> bool:
    """Return whether a copy of the older state takes no memory: its large tensors are away."""
    return isinstance(state, ParameterState) and all(
        value.stored is not None
        if isinstance(value, Away)
        else not (isinstance(value, Tensor) and disk.is_large(value))
        for value in dict.values(state)
    )


def make_updates(host: Offloaded, now: Round, records: list[Taken]) -> None:
    """Update copies of some weights; the optimizer has their new states from then on.

    An error or an interrupt leaves the older states.
    """
    used = [one.gradient for one in records if one.gradient is not None]
    used += [one.param for one in records]
    try:
        with in_use(used):
            used.clear()
            for record in records:
                # An interrupt may have come into an earlier try.
                roll_back(host, record)
                record.note_bytes()
                state = host._states.get(record.param)
                if state is None:
                    record.is_state_new = True
                else:
                    record.before = _set_aside(state)
                    _bring(state)
            _run(host, now, records, host._states)
    except BaseException:
        for record in records:
            roll_back(host, record)
        raise
    for record in records:
        let_weight_go(record)
        record.gradient = record.gradient_user = None


def _run(host: Offloaded, now: Round, records: list[Taken], states: Any) -> None:
    """Run the optimizer's own step over copies of weights, with the states of the weights."""
    chunks: dict[int, Chunk] = {}
    view: defaultdict[Tensor, Any] = defaultdict(ParameterState)
    updated: list[tuple[Taken, Leaf]] = []
    for record in records:
        leaf = _leaf_of(host, record, view)
        chunk = chunks.setdefault(id(record.group), Chunk(record.group, [], []))
        chunk.params.append(leaf.tensor)
        assert chunk.stand_for is not None, "it was made so"
        chunk.stand_for.append(record.param)
        updated.append((record, leaf))
    vars(now.stand_in)["state"] = view
    try:
        for chunk in chunks.values():
            update(now.stand_in, own_step(host._own_kind), chunk, now.rebound, {})
    finally:
        vars(now.stand_in)["state"] = {}
    # A chunk refers to its leaves, which would keep their masters in memory.
    chunks.clear()
    del chunk
    for record, leaf in updated:
        state = view.pop(leaf.tensor, None)
        record.updated = leaf.rounded()
        if leaf.master is not None:
            assert host._masters is not None
            host._masters.end(leaf, states, state, record.updated)
        elif state is not None:
            states[record.param] = state
        else:
            states.pop(record.param, None)
        weight = weight_of(record.param)
        if weight is not None:
            # Before the write: a reference to the leaf refers to these bytes.
            leaf.let_go()
            record.updated = weight.owner.park_update(record.updated)


def _leaf_of(host: Offloaded, record: Taken, view: dict[Tensor, Any]) -> Leaf:
    """Return the tensor that is updated in the place of a weight; ``view`` gets its state."""
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
    if isinstance(param, Parameter):
        weight = Parameter(weight, requires_grad=param.requires_grad)
    else:
        weight.requires_grad_(param.requires_grad)
    vars(weight).update({name: value for name, value in vars(param).items() if name != HOLDER})
    weight.grad = record.gradient
    if state is not None:
        view[weight] = state
    return Leaf(param, weight, None)


def _bring(state: ParameterState) -> None:
    try:
        state.bring()
    except SsdtrainError:
        # The read may have begun before an earlier step() failed: read again.
        state.drop_reads()
        state.bring()


def _set_aside(state: ParameterState) -> dict[Any, Any]:
    """Return the entries of a state, and leave copies of its tensors in memory to the update.

    So a ``state_dict`` from before ``step()`` does not change.
    """
    before = {}
    for key, value in state.take_entries().items():
        before[key] = value if isinstance(value, Tensor | Away) else copy.deepcopy(value)
        if isinstance(value, Tensor):
            state[key] = clone_of(value)
    return before


def let_weight_go(record: Taken) -> None:
    """Let a weight leave memory that has stayed for its update."""
    weight = weight_of(record.param)
    if weight is not None:
        weight.end_use(record)


def put_in_place(host: Offloaded, record: Taken) -> None:
    """Put the updated bytes into a weight, and into tensors of its state that others may have.

    An interrupted call may be repeated.
    """
    param, updated = record.param, record.updated
    weight = weight_of(param)
    if isinstance(updated, ParkedUpdate):
        assert weight is not None, "it had an owner, which only goes with it"
        weight.owner.commit_update(weight, updated)
    elif updated is not None:
        # Not in no_grad(): an interrupt at its end would leave it on.
        param.detach().copy_(updated)
    state = host._states.get(param)
    for key, older in (record.before or {}).items():
        newer = dict.get(state, key) if isinstance(state, ParameterState) else None
        if isinstance(older, Tensor) and isinstance(newer, Tensor) and _are_alike(older, newer):
            older.copy_(newer)
            state[key] = older


def _are_alike(older: Tensor, newer: Tensor) -> bool:
    return (
        older is not newer
        and (older.shape, older.dtype) == (newer.shape, newer.dtype)
        and older.layout is newer.layout
        and older.device == newer.device
    )


def roll_back(host: Offloaded, record: Taken) -> None:
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
