"""Modules that were built on ``torch.device("meta")`` get their weights, one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ssdtrain.errors import ConfigError

__all__ = ["born", "refuse_unborn"]

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods in which torch's modules, and those of others, give their weights first values."""


def refuse_unborn(model: nn.Module) -> None:
    """Raise ``ConfigError`` for a module without bytes that cannot give itself first values."""
    for name, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]  # noqa: SLF001 - its own ones
        without = [key for key, tensor in own if tensor is not None and tensor.is_meta]
        if without and _reset_of(module) is None:
            raise ConfigError(
                f"{', '.join(without)} of the module {name or 'itself'} ({type(module).__name__}) "
                "have no bytes, as it was built on the meta device, and it has no method "
                "reset_parameters() that gives them first values; write one, or build this module "
                'with torch.device("cpu")'
            )


def born(model: nn.Module) -> Iterator[nn.Module]:
    """Give each module that has none its weights and buffers; yield it when they have first values.

    Inner modules come before the one around them, as in a constructor, so that random numbers are
    drawn in the order of the plain construction wherever constructors do nothing but build and
    reset. Parameters are new objects, one in all places where an old one was.
    """
    places = _places(model)
    unborn = {id(params) for found in places.values() for params, _ in found}
    for module in _inner_first(model, set()):
        reset = _reset_of(module)
        params = module._parameters  # noqa: SLF001 - its own ones
        buffers = module._buffers  # noqa: SLF001 - as above
        new = {name: param for name, param in params.items() if param is not None}
        missing = {name: one for name, one in buffers.items() if one is not None and one.is_meta}
        if reset is None or not (missing or id(params) in unborn):
            continue
        # What another module has given values to is drawn for here in vain, as it is where weights
        # are tied after the construction.
        given = {name: param for name, param in new.items() if not param.is_meta}
        for name, buffer in missing.items():
            buffers[name] = torch.empty_like(buffer, device="cpu")
        params.update({name: _on_cpu(param) for name, param in new.items()})
        reset()
        fresh = {name: param for name, param in params.items() if name not in given}
        params.update(given)
        for name, param in new.items():
            for other, key in places.pop(id(param), []):
                other[key] = fresh[name]
        yield module


def _places(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Return where each parameter without bytes stands, by its number."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        params = module._parameters  # noqa: SLF001 - its own ones
        for name, param in params.items():
            if param is not None and param.is_meta:
                places.setdefault(id(param), []).append((params, name))
    return places


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            found: Callable[[], object] = reset
            return found
    return None


def _on_cpu(param: Tensor) -> Parameter:
    return Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
