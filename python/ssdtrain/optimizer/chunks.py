"""One step of an optimizer, as the optimizer's own code run over a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "Chunk",
    "Part",
    "Settings",
    "chunks_of",
    "name_of",
    "own_step",
    "parts_in_order",
    "update",
]


NONE = object()
"""What an attribute is that is not there."""


@dataclass(frozen=True)
class Chunk:
    """Parameters of one group that are updated together."""

    group: dict[str, Any]
    params: list[Tensor]


@dataclass(frozen=True)
class Part:
    """Chunks of several groups, whose state is in memory at the same time."""

    chunks: list[Chunk]

    @property
    def params(self) -> list[Tensor]:
        """All their parameters."""
        return [param for chunk in self.chunks for param in chunk.params]


def chunks_of(
    groups: Iterable[dict[str, Any]], nbytes: Callable[[Tensor], int], bytes_max: int
) -> Iterator[Chunk]:
    """Cut groups into chunks of about ``bytes_max``, in the order of the parameters.

    A parameter that is larger makes a chunk alone. ``nbytes`` says how much one brings into memory.
    """
    for group in groups:
        params: list[Tensor] = []
        total = 0
        for param in group["params"]:
            size = nbytes(param)
            if params and total + size > bytes_max:
                yield Chunk(group, params)
                params, total = [], 0
            params.append(param)
            total += size
        yield Chunk(group, params)


def name_of(groups: list[dict[str, Any]], param: Tensor) -> str:
    """Name a parameter as its optimizer knows it."""
    for number, group in enumerate(groups):
        for place, one in enumerate(group["params"]):
            if one is param:
                names = group.get("param_names")
                given = f"{names[place]!r}, " if names else ""
                return f"{given}params[{place}] of group {number}, shape {tuple(param.shape)}"
    return f"a parameter of no group, shape {tuple(param.shape)}"


def parts_in_order(
    pairs: Iterable[tuple[dict[str, Any], Tensor]],
    nbytes: Callable[[Tensor], int],
    bytes_max: int,
) -> Iterator[Part]:
    """Cut parameters, each with its group, into parts of about ``bytes_max``, in their order."""
    chunks: dict[int, Chunk] = {}
    total = 0
    for group, param in pairs:
        size = nbytes(param)
        if chunks and total + size > bytes_max:
            yield Part(list(chunks.values()))
            chunks, total = {}, 0
        chunks.setdefault(id(group), Chunk(group, [])).params.append(param)
        total += size
    if chunks:
        yield Part(list(chunks.values()))


def own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of an optimizer's class without what torch puts around it (hooks, a record).

    That is run once around all chunks, not once for each.
    """
    step: Callable[..., Any] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class Settings:
    """What updates change in a group besides parameters, such as a count of steps.

    Each chunk begins with what the group had before the step, and all end with the same. So it is
    with ``attributes`` of the optimizer, which are named.
    """

    def __init__(self, attributes: Iterable[str] = ()) -> None:
        self._changed: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._attributes = list(attributes)
        self._before: dict[str, Any] | None = None

    def begin(self, optimizer: Optimizer) -> None:
        """Give the optimizer the attributes that it had before the step."""
        if self._before is None:
            self._before = {name: getattr(optimizer, name, NONE) for name in self._attributes}
        for name, value in self._before.items():
            if value is NONE:
                vars(optimizer).pop(name, None)
            else:
                vars(optimizer)[name] = value

    def note(self, group: dict[str, Any], after: dict[str, Any]) -> None:
        """Remember what the first chunk of a group changed."""
        if id(group) in self._changed:
            return
        changes = {
            name: value
            for name, value in after.items()
            if name != "params" and (name not in group or value is not group[name])
        }
        self._changed[id(group)] = group, changes

    def apply(self, to: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Put the changes into the groups, or into those that ``to`` has for them, by ``id``."""
        for number, (group, changes) in self._changed.items():
            (to or {}).get(number, group).update(changes)


def update(
    optimizer: Optimizer,
    step: Callable[..., Any],
    chunk: Chunk,
    settings: Settings,
    options: dict[str, Any],
) -> None:
    """Run the optimizer's own step over one chunk."""
    settings.begin(optimizer)
    groups = optimizer.param_groups
    group = dict(chunk.group, params=chunk.params)
    optimizer.param_groups = [group]
    try:
        with torch.no_grad():
            step(optimizer, **options)
    finally:
        optimizer.param_groups = groups
    settings.note(chunk.group, group)
