"""Small copies of an optimizer, on which its step is tried."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from dataclasses import dataclass, field
from types import BuiltinMethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.machine.torch_internals import is_in_shards, like_shards, own_shard
from ssdtrain.optimizer.masters import wants_master
from ssdtrain.optimizer.settings import NAMES

__all__ = [
    "Trial",
    "attributes_of",
    "begun",
    "gradient",
    "numbers_drawn",
    "params_of",
    "set_numbers",
]

NO_ATTRIBUTES = frozenset({"state", "param_groups"})
"""What each optimizer has; all else are attributes of its own."""
SAME_KIND_MAX = 2
"""Parameters of one group that are tried for each number of dimensions and dtype."""
LENGTH_MAX = 3
"""Of each dimension."""
GROUPS_APART = 16
"""Groups have other options in a trial: each a sixteenth less than the one before."""
SEED = 20_112_026
RATE = 1e-3
"""In the place of a rate of zero, with which a step would show nothing."""


@dataclass(frozen=True)
class Trial:
    """What is tried: copies of an optimizer."""

    optimizer: Optimizer
    has_masters: bool
    has_state: bool
    """Whether they begin with state for each parameter, cut to its size, as this one has some."""
    in_shards: bool = False
    """Whether small parameters are in shards where those of the optimizer are."""
    is_seeded: bool = False
    """Whether each try begins with the same state of the generators that all threads share."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"))
    """Gives small parameters and gradients; no other thread draws from it."""
    left_out: dict[str, Exception] = field(default_factory=dict)
    """Attributes that could not be copied, and why."""


def numbers_drawn() -> list[Any]:
    """Return the states of the generators that all threads share: torch's, Python's and numpy's."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - somebody may use it
    return [torch.random.get_rng_state(), random.getstate(), of_numpy]


def set_numbers(numbers: list[Any]) -> None:
    """Set the generators that all threads share to these states."""
    torch.random.set_rng_state(numbers[0])
    random.setstate(numbers[1])
    np.random.set_state(numbers[2])  # noqa: NPY002 - somebody else may use it


def _seed() -> None:
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - somebody else may use it


def begun(trial: Trial) -> Optimizer:
    """Return a small copy, for a try. Each try has the same parameters and gradients."""
    trial.generator.manual_seed(SEED)
    if trial.is_seeded:
        _seed()
    return _small_copy(trial)


def _small_copy(trial: Trial) -> Optimizer:
    """Return a copy of the optimizer, of a few small parameters."""
    optimizer = trial.optimizer
    small = {id(param): _small(param, trial) for param in params_of(optimizer)}
    state = _small_state(trial, small)
    copied: Optimizer = copy.deepcopy(optimizer, {**small, id(optimizer.state): state})
    shared: dict[int, Tensor] = {}
    for number, group in enumerate(copied.param_groups):
        _set_apart(group, number, shared)
        _take_few(group)
    if len(small) == 1:
        # One alone would not show what couples it to those of groups that are added later.
        (one,) = params_of(copied)
        twin = one.detach().clone().requires_grad_(one.requires_grad)
        group = next(group for group in copied.param_groups if group["params"])
        group["params"].append(twin)
        if NAMES in group:
            group[NAMES] = [*group[NAMES], "twin"]
        if one in state:
            state[twin] = copy.deepcopy(state[one])
    # What torch leaves out of copies.
    known: dict[int, Any] = {**small, id(optimizer): copied}
    for name, value in attributes_of(optimizer).items():
        if name not in vars(copied):
            try:
                vars(copied)[name] = _own_copy(value, known)
            except Exception as error:  # noqa: BLE001 - whatever it is: a step that needs it tells
                trial.left_out[name] = error
    return copied


def _small_state(trial: Trial, small: dict[int, Tensor]) -> dict[Any, Any]:
    state = defaultdict[Any, Any](dict)
    for param, values in list(trial.optimizer.state.items()) if trial.has_state else ():
        one = small.get(id(param))
        if one is not None:
            state[one] = {name: _cut(value, param, one) for name, value in values.items()}
        elif not isinstance(param, Tensor):
            state[param] = copy.deepcopy(values)
    return state


def _own_copy(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of an attribute; raise for what would be called itself."""
    owner = getattr(value, "__self__", None) if isinstance(value, BuiltinMethodType) else None
    if owner is not None and not isinstance(owner, ModuleType):
        raise TypeError(f"a method of a {type(owner).__name__} has no copy of it")
    return copy.deepcopy(value, known)


def _set_apart(group: dict[str, Any], number: int, shared: dict[int, Tensor]) -> None:
    """Give a group other options than the others have: one for another would go unseen.

    Numbers that are no whole ones get smaller, so that they keep within their bounds. A tensor that
    several groups have stays one, by ``shared``.
    """
    factor = 1 - number % GROUPS_APART / GROUPS_APART
    for name, value in group.items():
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            if id(value) not in shared:
                value.detach().mul_(factor)
            shared[id(value)] = value
        elif name != "params":
            group[name] = _less(value, factor)
    rate = group.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        group["lr"] = RATE * factor
    elif isinstance(rate, Tensor) and rate.dim() == 0 and not rate:
        rate.fill_(RATE * factor)


def _less(value: Any, factor: float) -> Any:
    if type(value) is tuple:
        return tuple(_less(one, factor) for one in value)
    return value * factor if type(value) is float else value


def attributes_of(copied: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, but for groups and state."""
    return {name: value for name, value in vars(copied).items() if name not in NO_ATTRIBUTES}


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small(param: Tensor, trial: Trial) -> Tensor:
    size = [min(n, LENGTH_MAX) for n in param.shape]
    dtype = torch.float32 if trial.has_masters and wants_master(param) else param.dtype
    with torch.no_grad():
        made = torch.randn(size, generator=trial.generator, dtype=torch.float32).to(dtype)
        if trial.in_shards and is_in_shards(param):
            made = like_shards(made, param)
    return made.requires_grad_(param.requires_grad)


def gradient(param: Tensor, generator: torch.Generator) -> Tensor:
    """Return a gradient for a small parameter, at random."""
    with torch.no_grad():
        made = torch.empty_like(own_shard(param)).normal_(generator=generator)
    return like_shards(made, param) if is_in_shards(param) else made


def _cut(value: Any, param: Tensor, small: Tensor) -> Any:
    """Return a copy of a value of a parameter's state that fits a small one in its place."""
    if is_in_shards(value):
        # Another process may have the beginning of it; what counts is that there is some.
        return torch.zeros_like(small, dtype=value.dtype)
    if isinstance(value, Tensor) and value.shape == param.shape:
        return value.detach()[tuple(map(slice, small.shape))].clone()
    return copy.deepcopy(value)


def _take_few(group: dict[str, Any]) -> None:
    """Take a few parameters of each kind, and of lists beside them what belongs to these."""
    params = group["params"]
    taken: defaultdict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for place, param in enumerate(params):
        same = taken[param.dim(), param.dtype]
        if len(same) < SAME_KIND_MAX:
            same.append(place)
    places = [place for same in taken.values() for place in same]
    for name, value in group.items():
        if isinstance(value, list) and len(value) == len(params):
            # Numbers differ, so that it is seen where each part would take those of the first.
            each = [value[place] for place in places]
            group[name] = [_other(one, number) for number, one in enumerate(each)]


def _other(value: Any, number: int) -> Any:
    return value + number if type(value) is int else _less(value, 1 - number / GROUPS_APART)
