"""The contract of an optimizer's step, which is run over one part of the parameters after another.

``step()`` writes parameters and ``state[param]``. It may rebind numbers on its groups or on the
optimizer, to the same value for each part. It changes nothing else in place. So each part begins
with what the groups and the optimizer had before the step, and a count of steps counts one.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from ssdtrain.away.classes import AwayParameter
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import is_in_shards, own_shard

__all__ = [
    "CONTRACT",
    "NAMES",
    "Rebound",
    "has_shards",
    "is_same",
    "kept",
    "own_attributes",
    "params_of",
    "refuse_lists_of_parameters",
    "refuse_options_of_shards",
    "refuse_unfit",
    "take_over_step",
]

CONTRACT = (
    "The contract: step() writes parameters and state[param], and may rebind numbers on its groups "
    "or on itself, to the same value for each part of the parameters; it changes nothing else in "
    'place (docs/guides/weights-and-optimizer.md, "Which optimizers"). Keep counts in '
    "self.state[p], and compute what needs all gradients before step(), as clip_grad_norm_ does; "
    "or use AdamW or another optimizer of torch"
)
NAMES = "param_names"
"""The option with a list of names, one for each parameter of the group."""
NOTHING = object()
"""The value of an attribute or an option that is not there."""
DEFAULTS = "defaults"
"""The attribute with the options that an optimizer was made with."""
LISTS_DEPTH = 3
Key = TypeVar("Key")


class Rebound:
    """The attributes and options that the parts of one step have rebound.

    ``ours`` are the names of attributes that the optimizer has only since it is offloaded.
    """

    def __init__(self, ours: Collection[str] = ()) -> None:
        self._others = {"state", "param_groups", *ours}
        self._before: dict[str, Any] | None = None
        self._attributes: dict[str, Any] = {}
        self._groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Give the optimizer the attributes that it had before the step."""
        now = self._attributes_of(optimizer)
        if self._before is None:
            self._before = now
            return
        for name in now.keys() - self._before.keys():
            del vars(optimizer)[name]
        vars(optimizer).update(self._before)

    def note(self, optimizer: Optimizer, group: dict[str, Any], after: dict[str, Any]) -> None:
        """Note what a part has rebound; ``after`` is what the part had in the place of the group.

        Raises ``UnsupportedError`` if another part has rebound it to something else.
        """
        _, known = self._groups.setdefault(id(group), (group, {}))
        changes = _changed(group, after)
        for name in ("params", NAMES):
            changes.pop(name, None)
        _add(known, changes)
        _add(self._attributes, _changed(self._before or {}, self._attributes_of(optimizer)))

    def apply(self, optimizer: object, to: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Rebind it on the optimizer and its groups: by ``id`` on those in ``to``."""
        for number, (group, changes) in self._groups.items():
            _put((to or {}).get(number, group), changes)
        _put(vars(optimizer), self._attributes)

    def _attributes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return {name: one for name, one in vars(optimizer).items() if name not in self._others}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: after.get(name, NOTHING)
        for name in {**after, **before}
        if after.get(name, NOTHING) is not before.get(name, NOTHING)
    }


def _put(into: dict[str, Any], changes: dict[str, Any]) -> None:
    into.update({name: value for name, value in changes.items() if value is not NOTHING})
    for name in [name for name, value in changes.items() if value is NOTHING]:
        into.pop(name, None)


def _add(known: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        # defence: a number that parts of a step rebind to different values is an error
        if name in known and not is_same(known[name], value):
            raise UnsupportedError(
                f"the step of this optimizer rebinds {name!r} to {reprlib.repr(known[name])} for "
                f"some parameters, and to {reprlib.repr(value)} for others. {CONTRACT}"
            )
        known[name] = value


def is_same(one: Any, other: Any, _known: dict[tuple[int, int], Any] | None = None) -> bool:
    """Whether two values are the same to a step that computes with them, to the last bit.

    Of objects is compared what a pickle of them would hold. What has no pickle, such as a lock,
    counts as the same.
    """
    known = {} if _known is None else _known
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or _has_same_bytes(one, other)
    pair = id(one), id(other)
    if one is other or type(one) is not type(other) or pair in known:
        return type(one) is type(other)
    # Held here: else other objects get the ids.
    known[pair] = one, other
    if isinstance(one, float | complex):
        # As text: zero has two signs, and what is no number equals nothing.
        return repr(one) == repr(other)
    if callable(one) or isinstance(one, int | str | bytes | set | frozenset):
        return bool(one == other)
    parts, others = _parts_of(one), _parts_of(other)
    return len(parts) == len(others) and all(
        is_same(*each, known) for each in zip(parts, others, strict=True)
    )


def _parts_of(value: Any) -> list[Any]:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return list(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return [value.dtype, value.shape, content]
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - whatever it is: the value does not show what it holds
        return []
    if isinstance(reduced, str):
        return [reduced]
    # What makes it, its state, and its items if it is a list or a dict.
    return [*reduced[1:3], *(list(one) for one in reduced[3:5] if one is not None)]


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    flat = (each.detach().resolve_conj().resolve_neg().reshape(-1) for each in (one, other))
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in flat))


def kept(values: dict[Key, Any], params: Iterable[Tensor]) -> dict[Key, Any]:
    """Return a deep copy of options or attributes. Parameters and functions stay what they are."""
    memo = {id(one): one for one in (*params, *filter(callable, values.values()))}
    return copy.deepcopy(values, memo)


@cache
def _of_torch() -> frozenset[str]:
    """Return the names of what each optimizer of torch has, and its step does not compute with."""
    plain = SGD([Parameter(torch.zeros(1, device="cpu"))], lr=0.1)
    return frozenset({*vars(plain), "_opt_called", "_step_count"} - {DEFAULTS})


def own_attributes(optimizer: object, ours: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes that the optimizer's own step may use besides groups and state."""
    known = _of_torch()
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in known and name not in ours
    }


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def refuse_lists_of_parameters(optimizer: Optimizer, option: str, instead: str) -> None:
    """Refuse an optimizer that knows its parameters by identity: updates are made on others."""
    params = {id(param) for param in params_of(optimizer)}
    for name, value in own_attributes(optimizer).items():
        if _has_one_of(params, value, LISTS_DEPTH):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot be offloaded with {option}: its attribute "
                f"{name!r} has parameters or their ids, and updates are then made on copies of "
                f"them; use {instead}"
            )


def _has_one_of(params: set[int], value: Any, depth: int) -> bool:
    if isinstance(value, nn.Module):
        return any(id(param) in params for param in value.parameters())
    if isinstance(value, Tensor):
        return id(value) in params
    if type(value) is int:
        return value in params
    if depth and isinstance(value, dict):
        return any(_has_one_of(params, one, depth - 1) for pair in value.items() for one in pair)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return any(_has_one_of(params, one, depth - 1) for one in value)
    return False


def refuse_unfit(optimizer: object) -> None:
    """Refuse what is no optimizer, and parameters whose state cannot be offloaded."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"offload_optimizer takes a torch.optim.Optimizer, not {type(optimizer)!r}: "
            "offload_optimizer(torch.optim.AdamW(model.parameters()), dir)"
        )
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise ConfigError(
            f"this {name} has no state of its own: it stands before another optimizer, as what "
            "Accelerate's prepare() returns. Give that one to offload_optimizer (it is mostly its "
            "attribute `optimizer`), or call offload_optimizer before prepare()"
        )
    slots = [one for base in type(optimizer).__mro__ for one in vars(base).get("__slots__", ())]
    if slots:
        raise UnsupportedError(
            f"{name} cannot be offloaded: it has attributes in __slots__ ({', '.join(slots)}), "
            f"which no part of a step could be given as they were. {CONTRACT}"
        )
    inner = [one for one, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise UnsupportedError(
            f"{name} cannot be offloaded: it stands before another optimizer (its attribute "
            f"{inner[0]!r}); give that one to offload_optimizer"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UnsupportedError(
                f"{name}(differentiable=True) cannot be offloaded: autograd would need each state"
            )
    for param in params_of(optimizer):
        _refuse_param(name, param)


def _refuse_param(name: str, param: Tensor) -> None:
    if param.is_meta:
        raise UnsupportedError(
            f"{name} cannot be offloaded: it has a parameter without bytes, on the meta "
            "device. Make the optimizer after ssdtrain.offload_parameters(model, dir) or "
            "model.to_empty(device='cpu'), which give the model its parameters"
        )
    own = own_shard(param)
    if not own.is_cpu or type(own) not in (Tensor, Parameter, AwayParameter):
        raise UnsupportedError(
            f"{name} cannot be offloaded: it has a parameter that is a "
            f"{type(param).__name__} on {param.device}, and only the state of plain "
            "tensors on the CPU, whole or in shards, can be offloaded so far; leave this "
            "optimizer as it is"
        )


def take_over_step(optimizer: Optimizer) -> None:
    """Take away what a scheduler put on ``step``; refuse what others did."""
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return
    if not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"the step of this {type(optimizer).__name__} was replaced by other code, which would "
            "go past the state on the disk; call offload_optimizer before that"
        )
    # Ours tells the scheduler by itself that a step was made.
    del optimizer.step


def has_shards(optimizer: Optimizer) -> bool:
    """Whether some parameters of an optimizer are in shards."""
    return any(map(is_in_shards, params_of(optimizer)))


def refuse_options_of_shards(
    optimizer: Optimizer,
    *,
    overlap: str,
    has_masters: bool,
    has_gradient_bound: bool,
    was_tried: bool = True,
) -> None:
    """Raise ``UnsupportedError`` for options that parameters in shards cannot have.

    ``was_tried`` says whether there were some when offload_optimizer was called.
    """
    if not has_shards(optimizer):
        return
    if not was_tried:
        raise UnsupportedError(
            f"{type(optimizer).__name__} was offloaded without parameters in shards (DTensor), and "
            "whether its update communicates was not tried; give it some before offload_optimizer"
        )
    refused = {
        f"overlap={overlap!r}": overlap != "step",
        "master_dtype": has_masters,
        "max_gradient_bytes": has_gradient_bound,
    }
    for option, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has parameters in shards (DTensor, as FSDP2 makes "
                f"them), which cannot be offloaded with {option} so far; use overlap='step', "
                "without master_dtype and max_gradient_bytes"
            )
