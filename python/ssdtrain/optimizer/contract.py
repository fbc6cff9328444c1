"""The contract of an optimizer's step, which runs over one part of the parameters after another.

``step()`` writes parameters and ``state[param]``. It may rebind numbers on its groups or on the
optimizer, to the same value for each part. It changes nothing else in place. So each part begins
with what the groups and the optimizer had before the step, and a count of steps counts one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from ssdtrain.away.classes import AwayParameter, is_away
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import is_in_shards, own_shard
from ssdtrain.store import is_dense

__all__ = [
    "CONTRACT",
    "NAMES",
    "OF_TORCH",
    "Rebound",
    "difference",
    "is_of_torch",
    "is_plain",
    "is_same",
    "own_attributes",
    "params_of",
    "refuse_lists_of_parameters",
    "refuse_shards",
    "refuse_shared_memory",
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
OF_TORCH = frozenset(
    kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)
) - {Optimizer, optim.LBFGS}
"""The classes of torch that a test holds to the contract."""
USE_WHOLE_PARAMETERS = ("Adafactor", "Muon")
"""Of these: updates that read all of a parameter, so processes with shards of it communicate."""
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, numpy.generic)


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


def is_plain(value: Any) -> bool:
    """Return whether a value is made of numbers, texts and tensors, so that a copy tells all."""
    if type(value) is dict:
        return all(map(is_plain, (*value.keys(), *value.values())))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if isinstance(value, numpy.ndarray):
        return not value.dtype.hasobject
    if isinstance(value, Tensor):
        # torch copies no tensor with a graph.
        return value.is_leaf
    return value is None or isinstance(value, PLAIN)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same to the last bit; objects are compared by ``==``."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _has_same_bytes(one, other)
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        one, other = list(one.items()), list(other.items())
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, numpy.ndarray | numpy.generic):
        return one.dtype == other.dtype and (one.shape, one.tobytes()) == (
            other.shape,
            other.tobytes(),
        )
    # A float as text: zero has two signs, and NaN equals nothing.
    return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    flat = (each.detach().resolve_conj().resolve_neg().reshape(-1) for each in (one, other))
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in flat))


def difference(older: dict[str, Any], newer: dict[str, Any]) -> str | None:
    """Return a name whose value is not the same in both, or ``None``."""
    names = {**older, **newer}
    pairs = {name: (older.get(name, NOTHING), newer.get(name, NOTHING)) for name in names}
    return next((name for name, pair in pairs.items() if not is_same(*pair)), None)


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


def is_of_torch(kind: type[Optimizer]) -> bool:
    """Return whether this is a class of torch that a test holds to the contract."""
    return kind in OF_TORCH


def refuse_lists_of_parameters(optimizer: Optimizer, option: str, instead: str) -> None:
    """Refuse an optimizer that knows its parameters by identity: updates are made on copies."""
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
    """Refuse objects that are no optimizer, and parameters whose state cannot be offloaded."""
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


def refuse_shared_memory(params: list[Tensor], option: str) -> None:
    """Refuse parameters on the same memory: an update of one would change the other."""
    owns = [own_shard(param) for param in params]
    # A tensor with holes may have others in these. A weight that is away lies alone.
    spans = [(one.data_ptr(), one.nbytes) for one in owns if not is_away(one) and is_dense(one)]
    end = 0
    for address, nbytes in sorted(span for span in spans if span[1]):
        if address < end:
            raise UnsupportedError(
                f"two parameters of this optimizer lie in the same memory, and with {option} each "
                "would be updated by itself; use the same Parameter in both places"
            )
        end = address + nbytes


def take_over_step(optimizer: Optimizer) -> None:
    """Remove the wrapper that a scheduler put on ``step``; refuse wrappers of other code."""
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


def refuse_shards(
    optimizer: Optimizer, kind: type[Optimizer], *, is_trusted: bool, **refused: bool
) -> None:
    """Raise ``UnsupportedError`` for parameters in shards that cannot have these options.

    ``refused`` says of each option, by its name, whether it is used.
    """
    if not any(map(is_in_shards, params_of(optimizer))):
        return
    for option, is_used in refused.items():
        if is_used:
            raise UnsupportedError(
                f"{kind.__name__} has parameters in shards (DTensor, as FSDP2 makes "
                f"them), which cannot be offloaded with {option} so far; use overlap='step', "
                "without master_dtype and max_gradient_bytes"
            )
    if not is_trusted or (is_of_torch(kind) and kind.__name__ in USE_WHOLE_PARAMETERS):
        raise UnsupportedError(
            f"{kind.__name__} has parameters in shards (DTensor), and its update may communicate "
            "between processes: a process that could not read its state would put the others out "
            "of step. Use an optimizer that updates each shard by itself, such as AdamW; if yours "
            "is not torch's and does so, pass per_parameter=True"
        )
