"""Whether an optimizer updates each parameter by itself: tried on small tensors, not assumed.

Some couple their parameters: by one norm over all of them, by a line search, by a step size that is
learned. Run over one part of the parameters after the other they would compute something else, and
no name of a class tells. So a copy of the optimizer is tried on a few small parameters, together
and one after the other, and the results must have the same bits.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.optimizer.chunks import Chunk, Settings, own_step, update

__all__ = ["refuse_coupled"]

STEPS = 3
SAME_KIND_MAX = 2
"""Parameters of one group that are tried for each number of dimensions and dtype."""
LENGTH_MAX = 3
"""Of each dimension."""
SEED = 20_112_026


def refuse_coupled(optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` for an optimizer whose update is not per parameter.

    The optimizer itself, its parameters and the generators of random numbers stay as they are.
    """
    name = type(optimizer).__name__
    try:
        # A seed of its own: optimizers that round at random must draw the same numbers twice.
        with torch.random.fork_rng(devices=[]):
            sparse = _wants_sparse(optimizer)
            together = _trained(optimizer, at_once=True, sparse=sparse)
            apart = _trained(optimizer, at_once=False, sparse=sparse)
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step was tried on small tensors first, without a "
            f"closure, and raised {type(error).__name__}: {error}"
        ) from error
    if not _equal(together, apart):
        raise UnsupportedError(
            f"{name} cannot be offloaded: it couples its parameters (updated one after the other "
            "they get other values than updated together), so all of its state is needed at once; "
            "use an optimizer that updates each parameter by itself, such as AdamW"
        )


def _wants_sparse(optimizer: Optimizer) -> bool:
    """Return whether its step takes sparse gradients only."""
    try:
        _trained(optimizer, at_once=True, sparse=False)
    except RuntimeError as error:
        if "sparse" in str(error).lower():
            return True
        raise
    return False


def _trained(optimizer: Optimizer, *, at_once: bool, sparse: bool) -> list[Any]:
    """Return all that a copy of the optimizer ends with after some steps on small parameters."""
    torch.manual_seed(SEED)
    small = {
        id(param): _small(param) for group in optimizer.param_groups for param in group["params"]
    }
    copied: Optimizer = copy.deepcopy(optimizer, {**small, id(optimizer.state): defaultdict(dict)})
    for group in copied.param_groups:
        group["params"] = _few(group["params"])
    step = own_step(type(copied))
    for _ in range(STEPS):
        for param in _params_of(copied):
            grad = torch.randn_like(param)
            param.grad = grad.to_sparse() if sparse else grad
        settings = Settings()
        for group in copied.param_groups:
            parts = [group["params"]] if at_once else [[param] for param in group["params"]]
            for part in parts:
                update(copied, step, Chunk(group, part), settings, {})
        settings.apply()
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in copied.param_groups
    ]
    params = _params_of(copied)
    return [params, [dict(copied.state[param]) for param in params], options]


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small(param: Tensor) -> Tensor:
    size = [min(n, LENGTH_MAX) for n in param.shape]
    with torch.no_grad():
        made = torch.randn(size, dtype=torch.float32).to(param.dtype)
    return made.requires_grad_(param.requires_grad)


def _few(params: list[Tensor]) -> list[Tensor]:
    taken: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        same = taken[param.dim(), param.dtype]
        if len(same) < SAME_KIND_MAX:
            same.append(param)
    return [param for same in taken.values() for param in same]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.detach().contiguous().view(torch.uint8) if one.dim() else one.detach(),
                other.detach().contiguous().view(torch.uint8) if other.dim() else other.detach(),
            )
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
