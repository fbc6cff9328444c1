"""What a step with ``overlap="backward"`` begins with, and its updates on copies of weights.

Everything that an update uses is noted when the first gradient is complete, and compared in
``step()``: what has changed meanwhile would have counted in the plain run.
"""
# ruff: noqa: SLF001 - what an offloaded optimizer has for its schedules is private

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayGradient
from ssdtrain.away.known import in_use, known_of
from ssdtrain.errors import SsdtrainError, UnsupportedError
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import (
    clone_of,
    is_shared,
    mode_count,
    trains_with_others,
    with_default_device,
)
from ssdtrain.optimizer.buffers import Buffers
from ssdtrain.optimizer.chunks import Chunk, own_step, update
from ssdtrain.optimizer.contract import Rebound, is_same, kept, own_attributes
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.gradients import Gradients
from ssdtrain.optimizer.masters import Leaf, Masters, drop_stale, wants_master
from ssdtrain.optimizer.shared_memory import is_given, is_of_others, sharing_memory
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.taken import Taken
from ssdtrain.optimizer.trial import Behaviour, is_of_torch
from ssdtrain.optimizer.undo import Undo
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.weights import weight_of
from ssdtrain.watched import HOLDER

__all__ = [
    "CHANGED",
    "Host",
    "Round",
    "make_updates",
    "put_in_place",
    "roll_back",
    "why_not",
    "why_nothing",
]

Key = TypeVar("Key")
PARTS_MIN = 16
"""So many at least: the first ones soon, and the last one, which backward cannot hide, small."""
PART_BYTES_MIN = 1 << 20
CHANGED = (
    "was changed after updates of this step had begun in backward, so they would not have the bits "
    'of the plain run. Change it before backward or after step(), or use overlap="step". '
    "No weight was updated; optimizer.zero_grad() discards what has begun"
)
UNTRUSTED = (
    "the optimizer's class is not torch's; pass per_parameter=True to offload_optimizer if its "
    "step keeps the contract and draws no random numbers"
)
ALIAS = (
    'the optimizer keeps a view of the weight in its state, and with overlap="backward" an update '
    'works on a copy of the weight; use overlap="step". No weight was changed by this step; '
    "optimizer.zero_grad() discards it"
)


class Host(Protocol):
    """What is used of an offloaded optimizer."""

    _own_kind: type[Optimizer]
    _behaviour: Behaviour
    _disk: Disk
    _buffers: Buffers
    _part_bytes: int
    _masters: Masters | None
    _gradients: Gradients | None
    _undo: Undo | None
    _default_device: torch.device
    _ours: frozenset[str]
    """Names of the attributes that it has only since it is offloaded."""

    @property
    def _states(self) -> Any: ...
    @property
    def param_groups(self) -> Any:
        """Its groups of parameters."""

    def _bytes_of(self, param: Tensor) -> int: ...
    def _bytes_with_gradient(self, param: Tensor) -> int: ...


class Round:
    """What one step begins with: its options as they are when the first gradient is there."""

    def __init__(self, host: Host) -> None:
        self.groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.group_of: dict[int, dict[str, Any]] = {}
        self.rebound = Rebound(host._ours)
        self.attributes = own_attributes(host, host._ours)
        """Of a class of torch no step reads them, so they are not copied."""
        self.known = set(host._states)
        self.unkept: str | None = None if host._behaviour.is_trusted else UNTRUSTED
        """Why no update may be made before ``step()``, for all of them."""
        params = [param for group in host.param_groups for param in group["params"]]
        if not (self.unkept or is_of_torch(host._own_kind)):
            self.attributes = self._copied(self.attributes, params, "attribute of the optimizer")
        self.stand_in: Optimizer = object.__new__(host._own_kind)
        """What updates run on: a look at the optimizer itself would discard what has begun."""
        vars(self.stand_in).update({**vars(host), **self.attributes})
        self.add_groups(host)
        self.sharing = sharing_memory(params)
        """Those that share memory with each other."""
        total = sum(map(host._bytes_of, params))
        self.bytes_max = min(host._part_bytes, max(PART_BYTES_MIN, total // PARTS_MIN))

    def add_groups(self, host: Host) -> None:
        """Note groups that were added since."""
        added = host.param_groups[len(self.groups) :]
        # Together: two groups may have one tensor.
        options = self._copied(
            {number: _options_of(real) for number, real in enumerate(added)},
            [param for real in added for param in real["params"]],
            "option of a group",
        )
        for number, real in enumerate(added):
            group = {**options[number], "params": list(real["params"])}
            self.groups.append((group, real))
            self.group_of.update({id(param): group for param in group["params"]})

    def _copied(self, values: dict[Key, Any], params: list[Tensor], noun: str) -> dict[Key, Any]:
        """Return copies. If a value cannot be copied, the updates run in ``step()``."""
        try:
            # defence: options that cannot be copied are read in step() only
            _refuse_code(values)
            return kept(values, params)
        except Exception as error:  # noqa: BLE001 - whatever it is: there is no copy
            self.unkept = f"an {noun} cannot be copied ({error})"
            return values

    def changed(self, host: Host) -> str | None:
        """Name an option that differs from what the updates used."""
        if torch.get_default_device() != host._default_device:
            return "torch's default device"
        reals = host.param_groups
        for number, (group, real) in enumerate(self.groups):
            if number >= len(reals) or reals[number] is not real or group.keys() != real.keys():
                return f"param_groups[{number}]"
            if list(map(id, group["params"])) != list(map(id, real["params"])):
                return f"param_groups[{number}]['params']"
            for name, value in _options_of(group).items():
                if not is_same(value, real[name]):
                    return f"param_groups[{number}][{name!r}]"
        # Last: `defaults` has the first group's options, too.
        now = own_attributes(host, host._ours)
        for name in self.attributes.keys() | now.keys():
            both = name in self.attributes and name in now
            if not both or not is_same(self.attributes[name], now[name]):
                return f"the optimizer's attribute {name!r}"
        return None

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [param for group, _ in self.groups for param in group["params"]]


def _refuse_code(value: Any) -> None:
    """Raise ``TypeError`` for a function, which may go by something that no copy of it has."""
    if callable(value):
        raise TypeError(f"a {type(value).__name__} has no copy")
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _refuse_code(one)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _references(param: Tensor) -> int:
    return sys.getrefcount(param.grad)


_alone = Parameter(torch.zeros(1, device="cpu"))
_alone.grad = torch.zeros(1, device="cpu")
REFERENCES_ALONE = max(_references(_alone) for _ in range(2))
"""So many references has a gradient that nobody holds."""


def why_nothing(options: dict[str, Any] | None = None) -> str | None:
    """Return why no update can be made on another thread now, or ``None``.

    ``options`` are those of ``step()``, if it is called.
    """
    if options:
        return "step() was given more than a closure"
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or mode_count():
        return "autocast, inference mode or a mode of torch is on"
    if trains_with_others():
        return "gradients are not complete before processes have exchanged them"
    return None


def why_not(host: Host, now: Round, param: Tensor) -> str | None:
    """Return why a parameter has to be updated in place in ``step()``, or ``None``."""
    if _references(param) > REFERENCES_ALONE:
        return "somebody holds their gradients"
    if id(param) in now.sharing:
        return "they share memory with each other"
    gradient = param.grad
    assert gradient is not None, "its update is due"
    return next(chain(_against(gradient, param), _against_copy(host, gradient, param)), None)


def _against(gradient: Tensor, param: Tensor) -> Iterator[str]:
    """Give reasons against a use of a gradient by the thread of the updates."""
    # A gradient that is away had memory of its own, and is brought for its update.
    if not isinstance(gradient, AwayGradient):
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            yield "their gradients are no plain dense tensors"
        if gradient.requires_grad:
            yield "their gradients are part of a graph"
        if is_shared(gradient):
            yield "their gradients share memory with other tensors"
        if is_given(gradient, param):
            yield "a graph or another library has their gradients"
        # A gradient that has come back from the disk lies in memory of ours.
        # defence: gradients on memory of others are used in step()
        if known_of(gradient) is None and is_of_others(gradient):
            yield "their gradients lie on memory of another library or process"


def _against_copy(host: Host, gradient: Tensor, param: Tensor) -> Iterator[str]:
    """Give reasons against an update of a copy of a weight."""
    state = host._states.get(param)
    if not param.requires_grad:
        yield "they were frozen in the backward"
    # Of a weight that may be away all this was asked before.
    if weight_of(param) is None:
        if type(param) not in (Tensor, Parameter) or param.is_inference():
            yield "they are no plain parameters"
        if param.untyped_storage().is_shared():
            yield "they share memory with other processes"
    if torch.empty_like(param, device="meta").stride() != param.stride():
        yield "a copy of them has other strides"
    if param.is_conj() or param.is_neg():
        yield "a copy of them has other bytes, as they are conjugated or negated lazily"
    if gradient.dtype != param.dtype:
        yield "their gradients have another dtype"
    if state is not None and not _is_streamed(state, host._disk):
        yield "their state is in memory, because somebody looked at it, or the disk has no room"


def _is_streamed(state: Any, disk: Disk) -> bool:
    """Whether a copy of the older state costs no memory: what is large is on the disk."""
    return isinstance(state, ParameterState) and all(
        value.stored is not None
        if isinstance(value, Away)
        else not (isinstance(value, Tensor) and disk.is_large(value))
        for value in dict.values(state)
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
    if isinstance(updated, ParkedUpdate):
        assert weight is not None, "it had an owner, which only goes with it"
        weight.owner.commit_update(weight, updated)
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
            record.updated = weight.owner.park_update(record.updated)


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
