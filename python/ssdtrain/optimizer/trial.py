"""A trial of a step on small tensors: how much state it makes, and whether it keeps the contract.

A class that is not torch's steps over a few small parameters together, and over each alone. Both
must leave the same bits, and the same attributes and options.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import own_shard
from ssdtrain.optimizer.chunks import CLOSURE, Chunk, own_step, run, update
from ssdtrain.optimizer.contract import (
    CONTRACT,
    Rebound,
    difference,
    is_of_torch,
    is_plain,
    is_same,
    own_attributes,
    params_of,
)
from ssdtrain.optimizer.masters import MASTER, wants_master

__all__ = ["state_share_of"]

STEPS = 3
SCALES = {torch.float16: (1.0, 0.125, 8.0)}
"""Of the gradients of each step: a bound on a norm acts above it only."""
ANY_SCALES = (1.0, 1e-3, 1e3)
SAME_KIND_MAX = 2
"""Parameters of one group that are tried for each number of dimensions and dtype."""
LENGTH_MAX = 3
"""Of each dimension."""
GROUPS_APART = 16
"""The rate of each group is a sixteenth less than that of the group before."""
RATE = 1e-3
"""In the place of a rate of zero, with which a step would show nothing."""
SEED = 20_112_026
STATE_SHARE_ASSUMED = 2.0
"""As AdamW has."""


def state_share_of(optimizer: Optimizer, *, has_masters: bool, per_parameter: bool) -> float:
    """Return how many bytes of state a step makes for each byte of a parameter, or of its master.

    With ``per_parameter`` the user says that the class keeps the contract, so it is not tried. The
    optimizer and its parameters stay as they are; so does torch's generator of random numbers.

    Raises:
        UnsupportedError: The step needs a closure, or the trial shows a breach of the contract.

    """
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get(CLOSURE)
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: its step needs a closure, which computes the "
            f"loss of all parameters together. {CONTRACT}"
        )
    if per_parameter and not is_of_torch(kind):
        return STATE_SHARE_ASSUMED
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            made = _trained(optimizer, has_masters=has_masters, steps=1)
            if has_masters:
                _refuse_own_master(made)
            if not is_of_torch(kind):
                _refuse_coupling(optimizer, has_masters=has_masters)
        except UnsupportedError as error:
            raise UnsupportedError(f"{kind.__name__} cannot be offloaded: {error}") from error
        except Exception as error:
            if is_of_torch(kind):
                # SparseAdam takes no dense gradient, and Adagrad makes its state beforehand.
                return STATE_SHARE_ASSUMED
            raise UnsupportedError(
                f"{kind.__name__} cannot be offloaded: its step was tried on small tensors first, "
                f"without a closure and without state, and raised {type(error).__name__}: {error}. "
                "Mend that, such as a mode to switch on first; or, if it keeps the contract, pass "
                f"per_parameter=True. {CONTRACT}"
            ) from error
    return max((_share(param, made.state[param]) for param in params_of(made)), default=0.0)


def _share(param: Tensor, state: dict[Any, Any]) -> float:
    alike = [one for one in state.values() if isinstance(one, Tensor) and one.shape == param.shape]
    return sum(one.nbytes for one in alike) / max(1, param.nbytes)


def _refuse_own_master(optimizer: Optimizer) -> None:
    if any(MASTER in optimizer.state[param] for param in params_of(optimizer)):
        raise UnsupportedError(
            f"its state has a {MASTER!r} of its own, the name under which the masters are kept; "
            "use master_dtype=None"
        )


def _refuse_coupling(optimizer: Optimizer, *, has_masters: bool) -> None:
    """Compare steps over all parameters with steps over one after the other."""
    together, apart = (
        _trained(optimizer, has_masters=has_masters, steps=STEPS, at_once=at_once)
        for at_once in (True, False)
    )
    params, others = params_of(together), params_of(apart)
    states = [[dict(one.state[param]) for param in params_of(one)] for one in (together, apart)]
    if not (is_same(params, others) and is_same(*states)):
        raise UnsupportedError(
            "it couples its parameters: updated one after the other they get other values than "
            f"updated together. {CONTRACT}"
        )
    name = difference(_values_of(together), _values_of(apart))
    if name is not None:
        raise UnsupportedError(
            f"its step leaves another {name} if it is run over one part of the parameters after "
            f"the other. {CONTRACT}"
        )


def _values_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return attributes and options, but for objects, by their names in a message."""
    found = {
        f"attribute {name!r}": value
        for name, value in own_attributes(optimizer, ("state", "param_groups")).items()
    }
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"option {name!r} of group {number}": value for name, value in group.items()}
    return {name: value for name, value in found.items() if is_plain(value)}


def _trained(
    optimizer: Optimizer, *, has_masters: bool, steps: int, at_once: bool = True
) -> Optimizer:
    """Return a small copy of an optimizer after some steps."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    # Steps that draw random numbers draw the same ones in each trial.
    torch.default_generator.manual_seed(SEED)
    copied = _small_copy(optimizer, generator, has_masters=has_masters)
    own = own_step(type(copied))
    for number in range(steps):
        for param in params_of(copied):
            param.grad = torch.empty_like(param).normal_(generator=generator).detach()
            param.grad *= SCALES.get(param.dtype, ANY_SCALES)[number]
        if at_once:
            run(copied, own, {})
            continue
        rebound = Rebound()
        for group in copied.param_groups:
            for part in [[param] for param in group["params"]] or [[]]:
                update(copied, own, Chunk(group, part), rebound, {})
        rebound.apply(copied)
    return copied


def _small_copy(
    optimizer: Optimizer, generator: torch.Generator, *, has_masters: bool
) -> Optimizer:
    """Return a copy of an optimizer, of a few small parameters without state."""

    def small(param: Tensor) -> Tensor:
        own = own_shard(param)
        size = [min(n, LENGTH_MAX) for n in own.shape]
        dtype = torch.float32 if has_masters and wants_master(param) else param.dtype
        made = torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)
        return made.requires_grad_(param.requires_grad)

    memo: dict[int, Any] = {id(param): small(param) for param in params_of(optimizer)}
    memo[id(optimizer.state)] = defaultdict[Any, Any](dict)
    copied: Optimizer = copy.deepcopy(optimizer, memo)
    memo[id(optimizer)] = copied
    for name, value in own_attributes(optimizer, ("state", "param_groups")).items():
        # Copies of torch's optimizers lack what their classes do not know.
        if name not in vars(copied):
            vars(copied)[name] = value if callable(value) else copy.deepcopy(value, memo)
    for number, group in enumerate(copied.param_groups):
        rate = group.get("lr")
        if isinstance(rate, int | float | Tensor):
            # Other rates show a step that reads the rate of another group.
            group["lr"] = (rate or RATE) * (1 - number % GROUPS_APART / GROUPS_APART)
        _take_few(group)
    return copied


def _take_few(group: dict[str, Any]) -> None:
    """Take a few parameters of each kind, with their places in lists beside the parameters."""
    params = group["params"]
    taken: defaultdict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for place, param in enumerate(params):
        same = taken[param.dim(), param.dtype]
        if len(same) < SAME_KIND_MAX:
            same.append(place)
    places = [place for same in taken.values() for place in same]
    for name, value in group.items():
        if isinstance(value, list) and len(value) == len(params):
            group[name] = [value[place] for place in places]
