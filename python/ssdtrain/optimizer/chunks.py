"""One step of an optimizer, as the optimizer's own code run over a few parameters at a time."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import has_hooks_on_all_steps
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
NO_CLOSURE = (
    "the step of this optimizer does something else with a closure than to call it once, before "
    "all else (it calls it twice, or goes by the loss), and it is run over one part of the "
    "parameters after the other; compute loss and gradients yourself, and call step() without a "
    "closure"
)
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch has the hooks on the steps of an optimizer."""


@dataclass(frozen=True)
class Chunk:
    """Parameters of one group that are updated together."""

    group: dict[str, Any]
    params: list[Tensor]
    stand_for: list[Tensor] | None = None
    """The parameters of the group in whose place these are updated, if they are others."""

    def names(self) -> list[Any] | None:
        """Return their names, where the group has a name for each of its parameters."""
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
    """Name a parameter as its optimizer knows it."""
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
    """Cut chunks into parts of about ``bytes_max``, in the order of their parameters.

    ``nbytes`` says how much a parameter brings into memory. One that is larger makes a part alone.
    Groups without parameters come last.
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
    """Whether a gradient has only some of its rows."""
    return gradient is not None and gradient.layout is not torch.strided


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of an optimizer's class without what torch puts around it (hooks, a record).

    That is run once around all chunks, not once for each.
    """
    step: Callable[..., Any] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def arguments_of(
    kind: type[Optimizer],
    given: tuple[Any, ...],
    named: dict[str, Any],
    *,
    takes_closure: bool,
) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    """Return the closure that a step is given, and all else by name.

    Raises ``TypeError``, as the optimizer's own step, for what it does not take, and
    ``UnsupportedError`` for a closure if the step does not call one once before all else.
    """
    closure, others = _arguments_of(kind, given, named)
    if closure is not None and not takes_closure:
        raise UnsupportedError(NO_CLOSURE)
    return closure, others


def _arguments_of(
    kind: type[Optimizer], given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    if not given and named.keys() <= {CLOSURE}:
        return named.get(CLOSURE), {}
    signature = inspect.signature(own_step(kind))
    own, *others = signature.parameters.values()
    found = dict(signature.bind(None, *given, **named).arguments)
    del found[own.name]
    for parameter in others:
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(parameter.name, {}))
        by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        if by_place and parameter.name in found:
            raise UnsupportedError(
                f"the step of an offloaded {kind.__name__} was given {parameter.name!r} by its "
                "place alone, and it is run once for each part of the parameters; give it by name"
            )
    # Whatever its name: one that is called for each part of the parameters would be called often.
    names = [CLOSURE, *(parameter.name for parameter in others[:1])]
    closure = next((found.pop(name) for name in names if callable(found.get(name))), None)
    found.pop(CLOSURE, None)
    return closure, found


class _NoHooks(OrderedDict[int, Any]):
    """In the place of hooks on steps, which run around all parts, while one part is updated."""

    def values(self) -> Any:
        """Refuse: torch is about to run the hooks, once more for each part."""
        raise UnsupportedError(
            "there are hooks on steps, and the step of this optimizer calls super().step() of a "
            "class in which torch runs them once more, and that is done for one part of the "
            "parameters after the other; remove the hooks, or call super().step.__wrapped__(self) "
            "in its step, which runs none"
        )


def run(optimizer: Optimizer, step: Callable[..., Any], options: dict[str, Any]) -> None:
    """Run an optimizer's own step, without hooks on it."""
    own = vars(optimizer)
    hooks = {name: own[name] for name in STEP_HOOKS if name in own}
    try:
        for name in hooks if any(hooks.values()) or has_hooks_on_all_steps() else ():
            own[name] = _NoHooks()
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
