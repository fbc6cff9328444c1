"""Leaves out most of a model's repeated layers, where one of them stands for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Cut", "NotShortenedError", "cut_layers"]

PLAIN = (bool, int, float, str, type(None))


class NotShortenedError(Exception):
    """The model does not run with fewer layers, or would do something else."""


@dataclass
class Cut:
    """A list of layers of which some are run."""

    layers: nn.ModuleList
    removed: list[nn.Module]

    @property
    def left_out(self) -> int:
        """How many are not run."""
        return len(self.removed)

    def check(self, layers_run: list[int]) -> None:
        """Raise unless the layers have run in their order, each once."""
        if layers_run != list(range(len(self.layers))):
            raise NotShortenedError

    def undo(self, model: nn.Module) -> None:
        """Make the model whole again, which need not be a new one the next time."""
        self.layers.extend(self.removed)
        model.zero_grad(set_to_none=True)


def cut_layers(model: nn.Module, count: int) -> Cut | None:
    """Leave the first ``count`` layers of the longest list of layers that are alike."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 0]
    alike = [one for one in lists if len({_form(layer, i) for i, layer in enumerate(one)}) == 1]
    longest = max(alike, key=len, default=None)
    if longest is None or len(longest) <= count:
        return None
    removed = list(longest)[count:]
    del longest[count:]
    return Cut(longest, removed)


def _form(layer: nn.Module, place: int) -> tuple[Any, ...]:
    """Return what tells a layer from one that computes something else; each may have its place."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = ((name, one.shape, one.dtype, one.requires_grad) for name, one in tensors)
    return (*((type(one), _settings(one, place)) for one in layer.modules()), *shapes)


def _settings(module: nn.Module, place: int) -> frozenset[tuple[str, str]]:
    """Return the numbers and words that a module has as attributes."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, PLAIN))
    return frozenset(
        (name, "its place" if type(value) is int and value == place else repr(value))
        for name, value in own
    )
