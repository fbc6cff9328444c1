"""One step of an optimizer, as the optimizer's own code run over a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.optimizer.options import is_same

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
    """What updates change besides parameters and state: options of a group, and attributes.

    Such as a count of steps. Each chunk begins with what there was before the step, and what one
    changes all have in the end. ``ours`` are attributes that belong to no step.
    """

    def __init__(self, ours: Collection[str] = ()) -> None:
        self._ours = {"state", "param_groups", *ours}
        self._groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._before: dict[str, Any] | None = None
        self._changes: dict[str, Any] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Give the optimizer the attributes that it had before the step."""
        now = self._attributes(optimizer)
        if self._before is None:
            self._before = now
            return
        for name in now.keys() - self._before.keys():
            del vars(optimizer)[name]
        vars(optimizer).update(self._before)

    def note(self, optimizer: Optimizer, group: dict[str, Any], after: dict[str, Any]) -> None:
        """Remember what a chunk has changed; raise ``UnsupportedError`` if others did otherwise."""
        _, known = self._groups.setdefault(id(group), (group, {}))
        _add(known, {name: one for name, one in _changed(group, after) if name != "params"})
        _add(self._changes, dict(_changed(self._before or {}, self._attributes(optimizer))))

    def apply(self, optimizer: object, to: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Put the changes into the optimizer and its groups: by ``id`` into those in ``to``."""
        for number, (group, changes) in self._groups.items():
            _put((to or {}).get(number, group), changes)
        _put(vars(optimizer), self._changes)

    def _attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        return {name: one for name, one in vars(optimizer).items() if name not in self._ours}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in before.keys() | after.keys():
        value = after.get(name, NONE)
        if value is not before.get(name, NONE):
            yield name, value


def _put(into: dict[str, Any], changes: dict[str, Any]) -> None:
    into.update({name: value for name, value in changes.items() if value is not NONE})
    for name in [name for name, value in changes.items() if value is NONE]:
        into.pop(name, None)


def _add(known: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        # defence: what parts of a step change differently is an error
        if name in known and not is_same(known[name], value):
            raise UnsupportedError(
                f"the step of this optimizer sets {name!r} to something else for some parameters "
                f"than for others ({known[name]!r} and {value!r}), and it is run over one part of "
                "them after the other; use an optimizer that does not, such as AdamW"
            )
        known[name] = value


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
    settings.note(optimizer, chunk.group, group)
