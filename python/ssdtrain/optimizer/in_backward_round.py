"""What a step with ``overlap="backward"`` begins with, and what can be updated in backward.

Everything that an update uses is noted when the first gradient is complete, and compared in
``step()``: what has changed meanwhile would have counted in the plain run.
"""
# ruff: noqa: SLF001 - what an offloaded optimizer has for its schedules is private

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayGradient
from ssdtrain.machine.torch_internals import mode_count, trains_with_others
from ssdtrain.optimizer.buffers import Buffers
from ssdtrain.optimizer.contract import Rebound, is_same, kept, own_attributes
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.gradients import Gradients
from ssdtrain.optimizer.masters import Masters
from ssdtrain.optimizer.shared_memory import sharing_memory, who_has_gradient
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.trial import is_of_torch
from ssdtrain.optimizer.undo import Undo
from ssdtrain.parameters.weights import weight_of

__all__ = ["Host", "Round", "why_not", "why_nothing"]

Key = TypeVar("Key")
PARTS_MIN = 16
"""So many at least: the first ones soon, and the last one, which backward cannot hide, small."""
PART_BYTES_MIN = 1 << 20


class Host(Protocol):
    """What is used of an offloaded optimizer."""

    _own_kind: type[Optimizer]
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
        self.unkept: str | None = None
        """Why no update may be made before ``step()``, if something could not be copied."""
        params = [param for group in host.param_groups for param in group["params"]]
        if not is_of_torch(host._own_kind):
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


def why_nothing() -> str | None:
    """Return why no update can be made on another thread now, or ``None``."""
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or mode_count():
        return "autocast, inference mode or a mode of torch is on"
    if trains_with_others():
        return "gradients are not complete before processes have exchanged them"
    return None


def why_not(host: Host, now: Round, param: Tensor) -> str | None:
    """Return why a parameter has to be updated in place in ``step()``, or ``None``."""
    gradient = param.grad
    assert gradient is not None, "its update is due"
    reason = None
    # A gradient that is away had memory of its own, and is brought for its update.
    if not isinstance(gradient, AwayGradient):
        reason = _why_not_used(gradient, param)
    del gradient
    if reason is None and _references(param) > REFERENCES_ALONE:
        return "somebody holds their gradients"
    if reason is None and id(param) in now.sharing:
        return "they share memory with each other"
    return reason or _why_no_copy(host, param)


def _why_not_used(gradient: Tensor, param: Tensor) -> str | None:
    """Return why the thread of the updates must not use a gradient, or ``None``."""
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return "their gradients are no plain dense tensors"
    if gradient.requires_grad:
        return "their gradients are part of a graph"
    return who_has_gradient(gradient, param)


def _why_no_copy(host: Host, param: Tensor) -> str | None:
    if not param.requires_grad:
        return "they were frozen in the backward"
    # Of a weight that may be away all this was asked before.
    if weight_of(param) is None:
        if type(param) not in (Tensor, Parameter) or param.is_inference():
            return "they are no plain parameters"
        if param.untyped_storage().is_shared():
            return "they share memory with other processes"
    reason = _why_other_copy(param)
    if reason is not None:
        return reason
    state = host._states.get(param)
    if state is not None and not _is_streamed(state, host._disk):
        return "their state is in memory, because somebody looked at it, or the disk has no room"
    return None


def _why_other_copy(param: Tensor) -> str | None:
    """Return what a copy of a weight would not have of it, or ``None``."""
    if torch.empty_like(param, device="meta").stride() != param.stride():
        return "a copy of them has other strides"
    if param.is_conj() or param.is_neg():
        return "a copy of them has other bytes, as they are conjugated or negated lazily"
    if param.grad is not None and param.grad.dtype != param.dtype:
        return "their gradients have another dtype"
    return None


def _is_streamed(state: Any, disk: Disk) -> bool:
    """Whether a copy of the older state costs no memory: what is large is on the disk."""
    return isinstance(state, ParameterState) and all(
        value.stored is not None
        if isinstance(value, Away)
        else not (isinstance(value, Tensor) and disk.is_large(value))
        for value in dict.values(state)
    )
