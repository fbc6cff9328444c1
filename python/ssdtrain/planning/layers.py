"""Leaves out most of the repeated layers of a model, because they are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Cut", "NotShortenedError", "cut_layers"]

PLAIN = (bool, int, float, str, type(None))


class NotShortenedError(Exception):
    """The model does not run with fewer layers, or would not do the same."""


@dataclass
class Cut:
    """A list of layers that has lost its last layers."""

    layers: nn.ModuleList
    removed: list[nn.Module]

    @property
    def left_out(self) -> int:
        """The number of layers that are not run."""
        return len(self.removed)

    def check(self, layers_run: list[int]) -> None:
        """Raise unless the layers have run in their order, each once."""
        if layers_run != list(range(len(self.layers))):
            raise NotShortenedError

    def undo(self, model: nn.Module) -> None:
        """Give the model its layers back, so that it can be used again."""
        self.layers.extend(self.removed)
        model.zero_grad(set_to_none=True)


def cut_layers(model: nn.Module, count: int) -> Cut | None:
    """Leave the first ``count`` layers of the longest list of layers that are alike."""
    lists = [
        layers
        for layers in model.modules()
        if isinstance(layers, nn.ModuleList) and len(layers) > 0
    ]
    alike = [
        layers for layers in lists if len({_form(layer, i) for i, layer in enumerate(layers)}) == 1
    ]
    longest = max(alike, key=len, default=None)
    if longest is None or len(longest) <= count:
        return None
    removed = list(longest)[count:]
    del longest[count:]
    return Cut(longest, removed)


def _form(layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Return a value that is the same for layers that compute the same; each may have its index."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = ((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    return (*((type(module), _settings(module, index)) for module in layer.modules()), *shapes)


def _settings(module: nn.Module, index: int) -> frozenset[tuple[str, str]]:
    """Return the numbers and words among the attributes of a module."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, PLAIN))
    return frozenset(
        (name, "its place" if type(value) is int and value == index else repr(value))
        for name, value in own
    )
