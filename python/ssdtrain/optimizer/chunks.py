"""Runs an optimizer's own step over a few parameters at a time."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.optimizer.contract import NAMES, Rebound

__all__ = [
    "CLOSURE",
    "Chunk",
    "Part",
    "arguments_of",
    "is_sparse",
    "name_of",
    "own_step",
    "parts_in_order",
    "run",
    "update",
]

CLOSURE = "closure"
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch has the hooks on the steps of an optimizer."""


@dataclass(frozen=True)
class Chunk:
    """Parameters of one group that are updated together."""

    group: dict[str, Any]
    params: list[Tensor]
    stand_for: list[Tensor] | None = None
    """The parameters of the group, if ``params`` are copies of them."""

    def names(self) -> list[Any] | None:
        """Return the names of the parameters, if the group has names."""
        names = self.group.get(NAMES)
        if not isinstance(names, list) or len(names) != len(self.group["params"]):
            return None
        name_of = dict(zip(map(id, self.group["params"]), names, strict=True))
        return [name_of[id(param)] for param in self.stand_for or self.params]


@dataclass(frozen=True)
class Part:
    """Chunks of several groups, whose state is in memory at the same time."""

    chunks: list[Chunk]

    @property
    def params(self) -> list[Tensor]:
        """All their parameters."""
        return [param for chunk in self.chunks for param in chunk.params]


def name_of(groups: list[dict[str, Any]], param: Tensor) -> str:
    """Name a parameter for a message."""
    for number, group in enumerate(groups):
        for place, one in enumerate(group["params"]):
            if one is param:
                names = group.get(NAMES)
                given = f"{names[place]!r}, " if names else ""
                return f"{given}params[{place}] of group {number}, shape {tuple(param.shape)}"
    return f"a parameter of no group, shape {tuple(param.shape)}"


def parts_in_order(
    whole: list[Chunk], nbytes: Callable[[Tensor], int], bytes_max: int
) -> list[Part]:
    """Cut chunks into parts of at most ``bytes_max``, in the order of their parameters.

    ``nbytes`` returns the memory that the update of a parameter takes. A larger parameter is a part
    by itself. Groups without parameters come last.
    """
    parts: list[Part] = []
    chunks: dict[int, Chunk] = {}
    total = 0
    for group, param in [(chunk.group, param) for chunk in whole for param in chunk.params]:
        size = nbytes(param)
        if chunks and total + size > bytes_max:
            parts.append(Part(list(chunks.values())))
            chunks, total = {}, 0
        chunks.setdefault(id(group), Chunk(group, [])).params.append(param)
        total += size
    if chunks:
        parts.append(Part(list(chunks.values())))
    return parts + [Part([chunk]) for chunk in whole if not chunk.params]


def is_sparse(gradient: Tensor | None) -> bool:
    """Return whether a gradient is sparse."""
    return gradient is not None and gradient.layout is not torch.strided


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without torch's wrapper, which runs once around all chunks."""
    step: Callable[..., Any] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def arguments_of(
    kind: type[Optimizer], given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    """Return the closure that a step is given, and all other arguments by name.

    Raises ``TypeError``, as the optimizer's own step, for arguments that it does not take.
    """
    if not given and named.keys() <= {CLOSURE}:
        return named.get(CLOSURE), {}
    signature = inspect.signature(own_step(kind))
    own, *others = signature.parameters.values()
    found = dict(signature.bind(None, *given, **named).arguments)
    del found[own.name]
    for parameter in others:
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(parameter.name, {}))
    # The first argument is a closure, whatever its name.
    names = [CLOSURE, *(parameter.name for parameter in others[:1])]
    closure = next((found.pop(name) for name in names if callable(found.get(name))), None)
    found.pop(CLOSURE, None)
    return closure, found


def run(optimizer: Optimizer, step: Callable[..., Any], options: dict[str, Any]) -> None:
    """Run an optimizer's own step, without the hooks on it, which run once around all parts."""
    own = vars(optimizer)
    hooks = {name: own[name] for name in STEP_HOOKS if own.get(name)}
    try:
        # A step that calls super().step() comes to torch's wrapper, which would run them.
        own.update({name: OrderedDict() for name in hooks})
        with torch.no_grad():
            step(optimizer, **options)
    finally:
        own.update(hooks)


def update(
    optimizer: Optimizer,
    step: Callable[..., Any],
    chunk: Chunk,
    rebound: Rebound,
    options: dict[str, Any],
) -> None:
    """Run the optimizer's own step over one chunk."""
    rebound.begin(optimizer)
    groups = optimizer.param_groups
    group = dict(chunk.group, params=chunk.params)
    names = chunk.names()
    if names is not None:
        group[NAMES] = names
    optimizer.param_groups = [group]
    try:
        run(optimizer, step, options)
    finally:
        optimizer.param_groups = groups
    rebound.note(optimizer, chunk.group, group)
