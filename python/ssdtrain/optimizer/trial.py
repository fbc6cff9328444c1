"""Whether an optimizer can be offloaded: looked up, and tried on small tensors, not assumed.

Some couple their parameters: by one norm over all of them, by a line search, by a step size that is
learned. Run over one part of the parameters after the other they would compute something else, and
no name of a class tells. So a copy of the optimizer is tried on a few small parameters, together
and one after the other, and the results must have the same bits.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import BuiltinMethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayParameter
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import (
    communications,
    is_in_shards,
    like_shards,
    own_shard,
)
from ssdtrain.optimizer.chunks import Chunk, Settings, own_step, update
from ssdtrain.optimizer.masters import MASTER, wants_master
from ssdtrain.optimizer.options import is_same, kept
from ssdtrain.optimizer.sharded import has_shards
from ssdtrain.watched import look_at

__all__ = [
    "Habits",
    "refuse_habits",
    "refuse_lists_of_parameters",
    "refuse_unfit",
    "take_over_step",
    "tried",
]

NO_ATTRIBUTES = frozenset({"state", "param_groups"})
"""What each optimizer has; all else are attributes of its own."""
STEPS = 3
SAME_KIND_MAX = 2
"""Parameters of one group that are tried for each number of dimensions and dtype."""
LISTS_DEPTH = 3
LENGTH_MAX = 3
"""Of each dimension."""
SEED = 20_112_026
UNLESS = (
    "If another thread has drawn random numbers meanwhile, that may have been taken for this: call "
    "it before such a thread begins"
)


@dataclass
class Habits:
    """What a step does besides updating parameters and their state."""

    draws_random_numbers: bool = False
    changes_groups: bool = False
    changed_attributes: set[str] = field(default_factory=set)
    state_share: float = 0.0
    """Bytes of state for each byte of a parameter, or of its master, but for what is factored."""


@dataclass(frozen=True)
class Trial:
    """What is tried: copies of an optimizer."""

    optimizer: Optimizer
    has_masters: bool
    has_state: bool
    """Whether they begin with state for each parameter, cut to its size, as this one has some."""
    in_shards: bool = False
    """Whether small parameters are in shards where those of the optimizer are."""


def tried(optimizer: Optimizer, *, has_masters: bool) -> Habits:
    """Try steps; raise ``UnsupportedError`` for an optimizer whose update is not per parameter.

    With ``has_masters`` they are made over float32 parameters in the place of those of 16 bits. The
    optimizer itself, its parameters and the generators of random numbers stay as they are.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step needs a closure, which computes the loss of all "
            "parameters together; use an optimizer that updates each by itself, such as AdamW"
        )
    try:
        # A seed of its own: optimizers that round at random must draw the same numbers twice.
        with torch.random.fork_rng(devices=[]):
            trial = Trial(optimizer, has_masters, _needs_state(optimizer, has_masters))
            sparse = _wants_sparse(trial)
            habits = Habits()
            together = _trained(trial, at_once=True, sparse=sparse, habits=habits)
            apart = _trained(trial, at_once=False, sparse=sparse)
            if has_shards(optimizer):
                _refuse_communication(trial)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step was tried on small tensors first, without a "
            f"closure and attributes that cannot be copied, and raised {type(error).__name__}: "
            f"{error}; use an optimizer whose step updates each parameter by itself, whatever its "
            "size, such as AdamW"
        ) from error
    if not is_same(together[:3], apart[:3]):
        raise UnsupportedError(
            f"{name} cannot be offloaded: it couples its parameters (updated one after the other "
            "they get other values than updated together), so all of its state is needed at once; "
            f"use an optimizer that updates each parameter by itself, such as AdamW. {UNLESS}"
        )
    _refuse_counts(name, together[3], apart[3])
    if has_masters and any(MASTER in state for state in together[1]):
        raise UnsupportedError(
            f"{name} cannot be offloaded with master_dtype: its state has a {MASTER!r} of its own, "
            "the name under which the masters are kept; use master_dtype=None"
        )
    habits.state_share = max(map(_state_share, together[0], together[1]), default=0.0)
    return habits


def _refuse_counts(name: str, together: dict[str, Any], apart: dict[str, Any]) -> None:
    """Refuse a step that leaves other attributes if it is run over a part after the other."""
    others = [
        one
        for one in together.keys() | apart.keys()
        if not (one in together and one in apart and is_same(together[one], apart[one]))
    ]
    if others:
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step leaves other attributes "
            f"({', '.join(sorted(others))}) if it is run over one part of the parameters after the "
            "other, as one does that notes its calls in a list; count them in a number, or in the "
            "state of each parameter, as AdamW does"
        )


def _refuse_communication(trial: Trial) -> None:
    """Refuse a step that communicates for parameters in shards.

    Where state cannot be read, an update is left out or undone in one process alone, and what the
    others wait for would be another parameter's.
    """
    of_shards = replace(trial, in_shards=True)
    count = communications(lambda: _trained(of_shards, at_once=True, sparse=False))
    if count:
        raise UnsupportedError(
            f"{type(trial.optimizer).__name__} cannot be offloaded with parameters in shards "
            f"(DTensor): its update communicates between processes ({count} times in {STEPS} small "
            "steps), and a process that could not read its state would put the others out of step; "
            "use an optimizer that updates each shard by itself, such as AdamW"
        )


def _state_share(param: Tensor, state: dict[Any, Any]) -> float:
    alike = [one for one in state.values() if isinstance(one, Tensor) and one.shape == param.shape]
    return sum(one.nbytes for one in alike) / max(1, param.nbytes)


def refuse_habits(name: str, habits: Habits, overlap: str) -> None:
    """Refuse an optimizer whose updates would have other bits beside a forward or a backward."""
    if habits.draws_random_numbers:
        raise UnsupportedError(
            f'{name} cannot be offloaded with overlap="{overlap}": its step draws random numbers, '
            f'which would come in another order beside the {overlap}; use overlap="step". {UNLESS}'
        )
    if habits.changed_attributes:
        raise UnsupportedError(
            f'{name} cannot be offloaded with overlap="{overlap}": its step changes its attributes '
            f"({', '.join(sorted(habits.changed_attributes))}), which would be seen too late; use "
            'overlap="step"'
        )


def refuse_lists_of_parameters(optimizer: Optimizer, option: str, instead: str) -> None:
    """Refuse an optimizer that knows its parameters by identity: updates are made on others."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in NO_ATTRIBUTES and _has_one_of(params, value, LISTS_DEPTH):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot be offloaded with {option}: its attribute "
                f"{name!r} has parameters or their ids, and updates are then made on copies of "
                f"them; use {instead}"
            )


def _has_one_of(params: set[int], value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in params
    if type(value) is int:
        return value in params
    if depth and isinstance(value, dict):
        return any(_has_one_of(params, one, depth - 1) for pair in value.items() for one in pair)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return any(_has_one_of(params, one, depth - 1) for one in value)
    return False


def _needs_state(optimizer: Optimizer, has_masters: bool) -> bool:
    """Return whether its step looks for state that its constructor makes, as Adagrad's may."""
    if not optimizer.state:
        return False
    try:
        _trained(Trial(optimizer, has_masters, has_state=False), at_once=True, sparse=False)
    except LookupError:
        return True
    except Exception:  # noqa: BLE001 - the next try meets it again, and tells
        return False
    return False


def _wants_sparse(trial: Trial) -> bool:
    """Return whether its step takes sparse gradients only."""
    try:
        _trained(trial, at_once=True, sparse=False)
    except RuntimeError as error:
        if "sparse" in str(error).lower():
            return True
        raise
    return False


def _trained(
    trial: Trial,
    *,
    at_once: bool,
    sparse: bool,
    habits: Habits | None = None,
) -> list[Any]:
    """Return all that a copy of the optimizer ends with after some steps on small parameters."""
    torch.manual_seed(SEED)
    copied = _small_copy(trial)
    for number in range(STEPS):
        _give_gradients(copied, sparse=sparse)
        before = _surroundings(copied)
        _make_step(copied, at_once=at_once)
        # In the first step much is made that stays as it is then.
        if habits is not None and number:
            _note(habits, before, _surroundings(copied))
    params = _params_of(copied)
    places = {id(param): place for place, param in enumerate(params)}
    left = {name: _by_place(value, places) for name, value in _attributes_of(copied).items()}
    return [params, [dict(copied.state[param]) for param in params], _options_of(copied), left]


def _give_gradients(copied: Optimizer, *, sparse: bool) -> None:
    for param in _params_of(copied):
        grad = _gradient(param)
        param.grad = grad.to_sparse() if sparse else grad


def _make_step(copied: Optimizer, *, at_once: bool) -> None:
    """Run a step over all parameters, or over one after the other."""
    step = own_step(type(copied))
    if at_once:
        with torch.no_grad():
            step(copied)
        return
    settings = Settings()
    for group in copied.param_groups:
        for part in [[param] for param in group["params"]] or [[]]:
            update(copied, step, Chunk(group, part), settings, {})
    settings.apply(copied)


def _small_copy(trial: Trial) -> Optimizer:
    """Return a copy of the optimizer, of a few small parameters."""
    optimizer = trial.optimizer
    small = {id(param): _small(param, trial) for param in _params_of(optimizer)}
    state = defaultdict[Any, Any](dict)
    if trial.has_state:
        for param, values in list(optimizer.state.items()):
            if id(param) in small:
                state[small[id(param)]] = {
                    name: _cut(value, param, small[id(param)]) for name, value in values.items()
                }
    copied: Optimizer = copy.deepcopy(optimizer, {**small, id(optimizer.state): state})
    for group in copied.param_groups:
        group["params"] = _few(group["params"])
    if len(small) == 1:
        # One alone would not show what couples it to those of groups that are added later.
        (one,) = _params_of(copied)
        twin = one.detach().clone().requires_grad_(one.requires_grad)
        next(group for group in copied.param_groups if group["params"])["params"].append(twin)
        if one in state:
            state[twin] = copy.deepcopy(state[one])
    # What torch leaves out of copies.
    known: dict[int, Any] = {**small, id(optimizer): copied}
    for name, value in _attributes_of(optimizer).items():
        if name not in vars(copied):
            _give(copied, name, value, known)
    return copied


def _give(copied: Optimizer, name: str, value: Any, known: dict[int, Any]) -> None:
    """Give a copy an attribute; what cannot be copied, or would be called itself, it lacks."""
    owner = getattr(value, "__self__", None) if isinstance(value, BuiltinMethodType) else None
    if owner is not None and not isinstance(owner, ModuleType):
        return
    with suppress(Exception):  # whatever the classes of others raise; a step that needs it tells
        vars(copied)[name] = copy.deepcopy(value, known)


def _attributes_of(copied: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(copied).items() if name not in NO_ATTRIBUTES}


def _by_place(value: Any, places: dict[int, int]) -> Any:
    """Return a value with the places of parameters instead of these, to be compared."""
    if isinstance(value, Tensor) and id(value) in places:
        return "parameter", places[id(value)]
    if isinstance(value, list | tuple):
        return [_by_place(one, places) for one in value]
    if isinstance(value, dict):
        return [[_by_place(one, places) for one in pair] for pair in value.items()]
    return value


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _surroundings(optimizer: Optimizer) -> tuple[Any, Any, dict[str, Any]]:
    """Return copies of what a step might change besides parameters and their state."""
    own = set(map(id, _params_of(optimizer)))
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - somebody else may use it
    numbers = [torch.random.get_rng_state(), random.getstate(), legacy]
    return (
        numbers,
        kept(_options_of(optimizer), own),
        kept(_attributes_of(optimizer), own),
    )


def _note(habits: Habits, before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> None:
    habits.draws_random_numbers |= not is_same(before[0], after[0])
    habits.changes_groups |= not is_same(before[1], after[1])
    habits.changed_attributes |= {
        name
        for name in before[2].keys() | after[2].keys()
        if not (name in before[2] and name in after[2] and is_same(before[2][name], after[2][name]))
    }


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small(param: Tensor, trial: Trial) -> Tensor:
    size = [min(n, LENGTH_MAX) for n in param.shape]
    dtype = torch.float32 if trial.has_masters and wants_master(param) else param.dtype
    with torch.no_grad():
        made = torch.randn(size, dtype=torch.float32).to(dtype)
        if trial.in_shards and is_in_shards(param):
            made = like_shards(made, param)
    return made.requires_grad_(param.requires_grad)


def _gradient(param: Tensor) -> Tensor:
    made = torch.randn_like(own_shard(param))
    return like_shards(made, param) if is_in_shards(param) else made


def _cut(value: Any, param: Tensor, small: Tensor) -> Any:
    """Return a copy of a value of a parameter's state that fits a small one in its place."""
    if is_in_shards(value):
        # Another process may have the beginning of it; what counts is that there is some.
        return torch.zeros_like(small, dtype=value.dtype)
    if isinstance(value, Tensor) and value.shape == param.shape:
        return value.detach()[tuple(map(slice, small.shape))].clone()
    return copy.deepcopy(value)


def _few(params: list[Tensor]) -> list[Tensor]:
    taken: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        same = taken[param.dim(), param.dtype]
        if len(same) < SAME_KIND_MAX:
            same.append(param)
    return [param for same in taken.values() for param in same]


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
            f"{name} cannot be offloaded: it has attributes in __slots__ ({', '.join(slots)}), of "
            "which nobody could tell whether a step changes them; make them usual ones"
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
        for param in group["params"]:
            if param.is_meta:
                raise UnsupportedError(
                    f"{name} cannot be offloaded: it has a parameter without bytes, on the meta "
                    "device. Make the optimizer after ssdtrain.offload_parameters(model, dir) or "
                    "model.to_empty(device='cpu'), which give the model its parameters"
                )
            # Another optimizer may have an update of it under way beside the forward.
            look_at(param)
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
