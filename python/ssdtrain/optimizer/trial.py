"""A short trial on small tensors: whether an optimizer's step keeps the contract.

A copy of the optimizer is tried on a few small parameters, all together and one after the other.
Both must leave the same bits. torch's own classes are held to the contract by a test, so of these
only one small step is made, which tells how much state a parameter has.
"""

from __future__ import annotations

import copy
import inspect
import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import communications, is_in_shards, like_shards, own_shard
from ssdtrain.optimizer.chunks import CLOSURE, Chunk, own_step, run, update
from ssdtrain.optimizer.contract import (
    CONTRACT,
    NAMES,
    Rebound,
    has_shards,
    is_same,
    kept,
    own_attributes,
    params_of,
)
from ssdtrain.optimizer.masters import MASTER, wants_master

__all__ = ["Behaviour", "behaviour_of", "is_of_torch"]

STEPS = 3
SCALES = {torch.float16: (1.0, 0.125, 8.0)}
"""Of the gradients of each step: what a bound on a norm does is seen above it, or below."""
ANY_SCALES = (1.0, 1e-3, 1e3)
SAME_KIND_MAX = 2
"""Parameters of one group that are tried for each number of dimensions and dtype."""
LENGTH_MAX = 3
"""Of each dimension."""
GROUPS_APART = 16
"""Groups have other options in a trial: each a sixteenth less than the group before."""
SEED = 20_112_026
RATE = 1e-3
"""In the place of a rate of zero, with which a step would show nothing."""
LOSSES = (1.0, float("nan"), 2.0)
"""What closures return in a trial."""
STATE_SHARE_ASSUMED = 2.0
"""As AdamW has, for an optimizer that was not tried."""
ALONE = threading.RLock()
"""A second trial waits: each puts the generators of random numbers back."""
OF_TORCH = frozenset(
    kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)
) - {Optimizer, optim.LBFGS}
"""The classes of torch that a test holds to the contract."""


@dataclass
class Behaviour:
    """What an optimizer's step does besides updating parameters and their state."""

    takes_closure: bool = True
    """Whether it calls a closure once, before all else."""
    is_trusted: bool = True
    """Whether it is known to keep the contract: a class of torch, or the user has said so."""
    is_tried: bool = False
    """Whether its step was tried, on parameters that began without state."""
    state_share: float = STATE_SHARE_ASSUMED
    """Bytes of state for each byte of a parameter, or of its master, but for what is factored."""


@dataclass(frozen=True)
class Trial:
    """What is tried: copies of an optimizer."""

    optimizer: Optimizer
    has_masters: bool
    has_state: bool = False
    """Whether copies begin with state, cut to their size, as their steps look for some."""
    is_sparse: bool = False
    """Whether the step takes sparse gradients only."""
    in_shards: bool = False
    """Whether small parameters are in shards where those of the optimizer are."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"))
    """Gives small parameters and gradients; no other thread draws from it."""
    left_out: dict[str, Exception] = field(default_factory=dict)
    """Attributes that could not be copied, and why."""


def is_of_torch(kind: type[Optimizer]) -> bool:
    """Whether this is a class of torch that a test of ours holds to the contract."""
    return kind in OF_TORCH


def behaviour_of(
    optimizer: Optimizer, *, has_masters: bool, per_parameter: bool = False
) -> Behaviour:
    """Return what a step does; raise ``UnsupportedError`` for one that breaks the contract.

    With ``has_masters`` steps are tried over float32 parameters in the place of those of 16 bits.
    ``per_parameter``: the user says that it keeps the contract, so it is not tried. The optimizer
    and its parameters stay as they are. The trial puts the generators of random numbers back, which
    all threads share; call it before threads that draw random numbers begin.
    """
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get(CLOSURE)
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: its step needs a closure, which computes the "
            f"loss of all parameters together. {CONTRACT}"
        )
    if per_parameter and not is_of_torch(kind):
        return Behaviour()
    with ALONE, torch.device("cpu"):
        if is_of_torch(kind):
            return _tried(optimizer, has_masters=has_masters)
        numbers = _numbers_drawn()
        try:
            return _tried(optimizer, has_masters=has_masters)
        finally:
            _set_numbers(numbers)


def _tried(optimizer: Optimizer, *, has_masters: bool) -> Behaviour:
    name, trial = type(optimizer).__name__, Trial(optimizer, has_masters)
    try:
        if optimizer.state and _fails_for(trial, LookupError):
            trial = replace(trial, has_state=True)
        if _fails_for(trial, RuntimeError, "sparse"):
            trial = replace(trial, is_sparse=True)
        found = _small_step(trial) if is_of_torch(type(optimizer)) else _compared(trial)
        if has_shards(optimizer):
            _refuse_communication(trial)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name} cannot be offloaded: {error}") from error
    except Exception as error:
        missing = [
            f" (its attribute {one!r} could not be copied for that: {why})"
            for one, why in trial.left_out.items()
            if one in str(error)
        ]
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step was tried on small tensors first, without a "
            f"closure and attributes that cannot be copied, and raised {type(error).__name__}: "
            f"{error}{''.join(missing)}. Mend that, such as a mode to switch on first; or, if it "
            f"keeps the contract, pass per_parameter=True. {CONTRACT}"
        ) from error
    return found


def _fails_for(trial: Trial, kind: type[Exception], text: str = "") -> bool:
    """Return whether a step fails in this way; other errors are met again, and told."""
    try:
        _small_step(trial)
    except kind as error:
        return text in str(error).lower()
    except Exception:  # noqa: BLE001 - whatever it is: the next step raises it again
        return False
    return False


def _small_step(trial: Trial) -> Behaviour:
    """Make a step of small parameters; return how much state it makes."""
    copied = _small_copy(trial)
    _give_gradients(trial, copied, 0)
    run(copied, own_step(type(copied)), {})
    shares = (_state_share(param, copied.state[param]) for param in params_of(copied))
    return Behaviour(state_share=max(shares, default=0.0))


def _state_share(param: Tensor, state: dict[Any, Any]) -> float:
    alike = [one for one in state.values() if isinstance(one, Tensor) and one.shape == param.shape]
    return sum(one.nbytes for one in alike) / max(1, param.nbytes)


def _compared(trial: Trial) -> Behaviour:
    """Compare steps over all parameters with steps over one after the other."""
    numbers, found = _numbers_drawn(), _small_step(trial)
    found.is_trusted = False
    _set_numbers(numbers)
    together = _trained(trial, at_once=True)
    # Optimizers that round at random are compared where they draw the same numbers twice.
    _set_numbers(numbers)
    apart = _trained(trial, at_once=False)
    if not is_same(together[:3], apart[:3]):
        raise UnsupportedError(
            "it couples its parameters (updated one after the other they get other values than "
            f"updated together). {CONTRACT}. Another thread that draws random numbers during the "
            "call can cause this error: call offload_optimizer before such threads begin"
        )
    attributes = together[3].keys() | apart[3].keys()
    others = [one for one in attributes if not is_same(together[3].get(one), apart[3].get(one))]
    if others:
        raise UnsupportedError(
            f"its step leaves another {' and '.join(sorted(others))} if it is run over one part of "
            f"the parameters after the other. {CONTRACT}"
        )
    if trial.has_masters and any(MASTER in state for state in together[1]):
        raise UnsupportedError(
            f"its state has a {MASTER!r} of its own, the name under which the masters are kept; "
            "use master_dtype=None"
        )
    found.takes_closure = _takes_closure(trial)
    found.is_tried = not trial.has_state
    return found


def _trained(trial: Trial, *, at_once: bool) -> list[Any]:
    """Return all that a copy of the optimizer ends with after some steps on small parameters."""
    copied = _small_copy(trial)
    for number in range(STEPS):
        _give_gradients(trial, copied, number)
        before = _named_values(copied)
        copies = kept(before, params_of(copied))
        if at_once:
            run(copied, own_step(type(copied)), {})
        else:
            _step_apart(copied)
        changed = {
            name
            for name, value in _named_values(copied).items()
            if value is before.get(name) and not is_same(value, copies[name])
        }
        # The first step may fill a table.
        if changed and number:
            raise UnsupportedError(f"its step changes its {min(changed)} in place. {CONTRACT}")
    return _left(copied)


def _step_apart(copied: Optimizer) -> None:
    rebound = Rebound()
    for group in copied.param_groups:
        for part in [[param] for param in group["params"]] or [[]]:
            update(copied, own_step(type(copied)), Chunk(group, part), rebound, {})
    rebound.apply(copied)


def _named_values(copied: Optimizer) -> dict[str, Any]:
    """Return attributes and options, by their names in words."""
    found = {f"attribute {name!r}": value for name, value in _attributes_of(copied).items()}
    for number, group in enumerate(copied.param_groups):
        found |= {f"option {name!r} of group {number}": one for name, one in _options_of(group)}
    return found


def _attributes_of(copied: Optimizer) -> dict[str, Any]:
    return own_attributes(copied, ("state", "param_groups"))


def _options_of(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in group.items() if name != "params"]


def _left(copied: Optimizer) -> list[Any]:
    """Return parameters, their state, options, and attributes."""
    params = params_of(copied)
    left = {f"attribute {name!r}": value for name, value in _attributes_of(copied).items()}
    for key, value in copied.state.items():
        if not isinstance(key, Tensor):
            left[f"state[{key!r}]"] = value
    options = [dict(_options_of(group)) for group in copied.param_groups]
    return [params, [dict(copied.state[param]) for param in params], options, left]


def _takes_closure(trial: Trial) -> bool:
    """Return whether a step with a closure is that closure and then a step without a closure.

    It is not where a step calls the closure twice, or goes by the loss.
    """
    if CLOSURE not in inspect.signature(own_step(type(trial.optimizer))).parameters:
        return True
    calls: list[int] = []
    try:
        given, before = (_left_with_closures(trial, calls, is_given) for is_given in (1, 0))
    except Exception:  # noqa: BLE001 - whatever it is: without a closure nothing was raised
        return False
    return len(calls) == 2 * len(LOSSES) and is_same(given, before)


def _left_with_closures(trial: Trial, calls: list[int], is_given: int) -> list[Any]:
    """Return what steps leave that are given a closure each, or before which it is called."""
    numbers, copied = _numbers_drawn(), _small_copy(trial)
    for loss in LOSSES:
        _give_gradients(trial, copied, 0)

        def closure(loss: float = loss) -> Tensor:
            calls.append(is_given)
            _give_gradients(trial, copied, 1)
            return torch.tensor(loss)

        if not is_given:
            closure()
        run(copied, own_step(type(copied)), {CLOSURE: closure} if is_given else {})
    _set_numbers(numbers)
    return _left(copied)


def _refuse_communication(trial: Trial) -> None:
    """Refuse a step that communicates for parameters in shards.

    Where state cannot be read, an update is left out or undone in one process alone, and what the
    others wait for would be another parameter's.
    """
    of_shards = replace(trial, in_shards=True)
    count = communications(lambda: _small_step(of_shards))
    if count:
        raise UnsupportedError(
            "its parameters are in shards (DTensor), and its update communicates between "
            f"processes ({count} times in a small step): a process that could not read its "
            "state would put the others out of step; use an optimizer that updates each shard by "
            "itself, such as AdamW"
        )


def _numbers_drawn() -> list[Any]:
    """Return the states of the generators that all threads share: torch's, Python's and numpy's."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - somebody may use it
    return [torch.random.get_rng_state(), random.getstate(), of_numpy]


def _set_numbers(numbers: list[Any]) -> None:
    """Set the generators that all threads share to these states."""
    torch.random.set_rng_state(numbers[0])
    random.setstate(numbers[1])
    np.random.set_state(numbers[2])  # noqa: NPY002 - somebody else may use it


def _give_gradients(trial: Trial, copied: Optimizer, number: int) -> None:
    for param in params_of(copied):
        with torch.no_grad():
            made = torch.empty_like(own_shard(param)).normal_(generator=trial.generator)
        made *= SCALES.get(param.dtype, ANY_SCALES)[number]
        grad = like_shards(made, param) if is_in_shards(param) else made
        param.grad = grad.to_sparse() if trial.is_sparse else grad


def _small_copy(trial: Trial) -> Optimizer:
    """Return a copy of the optimizer, of a few small parameters.

    Each copy has the same parameters, and gets the same gradients.
    """
    trial.generator.manual_seed(SEED)
    optimizer = trial.optimizer
    small = {id(param): _small(param, trial) for param in params_of(optimizer)}
    state = _small_state(trial, small)
    copied: Optimizer = copy.deepcopy(optimizer, {**small, id(optimizer.state): state})
    shared = set[int]()
    for number, group in enumerate(copied.param_groups):
        _set_apart(group, number, shared)
        _take_few(group)
    if len(small) == 1:
        _add_twin(copied, state)
    # What torch leaves out of copies.
    known: dict[int, Any] = {**small, id(optimizer): copied}
    for name, value in _attributes_of(optimizer).items():
        if name not in vars(copied):
            try:
                vars(copied)[name] = value if callable(value) else copy.deepcopy(value, known)
            except Exception as error:  # noqa: BLE001 - whatever it is: a step that needs it tells
                trial.left_out[name] = error
    return copied


def _small(param: Tensor, trial: Trial) -> Tensor:
    size = [min(n, LENGTH_MAX) for n in param.shape]
    dtype = torch.float32 if trial.has_masters and wants_master(param) else param.dtype
    with torch.no_grad():
        made = torch.randn(size, generator=trial.generator, dtype=torch.float32).to(dtype)
        if trial.in_shards and is_in_shards(param):
            made = like_shards(made, param)
    return made.requires_grad_(param.requires_grad)


def _small_state(trial: Trial, small: dict[int, Tensor]) -> dict[Any, Any]:
    state = defaultdict[Any, Any](dict)
    for param, values in list(trial.optimizer.state.items()) if trial.has_state else ():
        one = small.get(id(param))
        if one is not None:
            state[one] = {name: _cut(value, param, one) for name, value in values.items()}
        elif not isinstance(param, Tensor):
            state[param] = copy.deepcopy(values)
    return state


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


def _less(value: Any, factor: float) -> Any:
    if type(value) is tuple:
        return tuple(_less(one, factor) for one in value)
    return value * factor if type(value) is float else value


def _add_twin(copied: Optimizer, state: dict[Any, Any]) -> None:
    """Add a copy of the only parameter, which alone would not show what couples it to others."""
    (group,) = (group for group in copied.param_groups if group["params"])
    (param,) = group["params"]
    twin = param.detach().clone().requires_grad_(param.requires_grad)
    group["params"].append(twin)
    if NAMES in group:
        group[NAMES] = [*group[NAMES], "twin"]
    if param in state:
        state[twin] = copy.deepcopy(state[param])


def _set_apart(group: dict[str, Any], number: int, shared: set[int]) -> None:
    """Give a group other options than the others have, so that reading another group's shows.

    Numbers that are no whole ones get smaller, so that they keep within their bounds. A tensor that
    several groups have stays one tensor, by ``shared``.
    """
    factor = 1 - number % GROUPS_APART / GROUPS_APART
    for name, value in group.items():
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            if id(value) not in shared:
                value.detach().mul_(factor)
            shared.add(id(value))
        elif name != "params":
            group[name] = _less(value, factor)
    rate = group.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        group["lr"] = RATE * factor
    elif isinstance(rate, Tensor) and rate.dim() == 0 and not rate:
        rate.fill_(RATE * factor)
