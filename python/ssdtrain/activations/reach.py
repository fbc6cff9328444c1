"""What a call of a block can reach besides what it returns, and so could change or depend on.

[Note: what may be computed again] A block that changes its arguments, its weights, its buffers (the
running statistics of a batch normalisation), its attributes, or draws from a generator that is not
torch's own, would do so twice. So each block is called plainly first, once for each way in which
its modules are in training or in evaluation, and is never computed again if anything of that
moved meanwhile, or if between two of its calls something else changed its buffers. Kernels change
statistics without a version counter, so bytes of buffers are compared, too. Seen is what modules
have, and what methods and closures have in their hands.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isfunction, ismethod, ismodule
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from ssdtrain.errors import UnsupportedError

__all__ = ["Reach", "Used", "Versions", "are_same"]

Versions = list[tuple[Tensor, int | None]]
Drawn = Generator | random.Random | np.random.Generator | np.random.RandomState

UNPACKED_MAX = 256
"""Things in a container that is looked into."""

CHANGED = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), {}: no gradient was "
    "computed from it. {}, or take the mark off with ssdtrain.remove_checkpoint"
)


class Used(NamedTuple):
    """What a forward used: while it stays, the same can be computed again."""

    mode: tuple[object, ...]
    tensors: Versions
    """Weights and buffers, with their versions."""


class Reach:
    """What a call of ``block`` with these ``leaves`` of its arguments can reach."""

    def __init__(self, block: Callable[..., Any], leaves: Sequence[Any]) -> None:
        self._block = block
        self.given = [one for one in leaves if isinstance(one, Tensor)]
        """The tensors among the arguments."""
        held = [block] if isinstance(block, nn.Module) else list(_held_by(block))
        others = (one for one in leaves if not isinstance(one, Tensor))
        roots = list({id(one): one for one in (*held, *others)}.values())
        own_modules = [one for one in roots if isinstance(one, nn.Module)]
        self._captured = [one for one in held if isinstance(one, Tensor)]
        self._roots = [one for one in roots if not isinstance(one, nn.Module)]
        self._modules = list(
            {id(one): one for root in own_modules for one in root.modules()}.values()
        )
        self.owner: Any = own_modules[0] if own_modules else block
        """By whom the block is known."""
        code = getattr(getattr(block, "__func__", block), "__code__", None)
        apart = tuple(id(one) for one in own_modules[1:])
        flags = tuple(one for one in leaves if one is None or isinstance(one, bool | str))
        modes = ((type(one).__name__, one.training) for one in self._modules)
        self.mode = (code, apart, flags, *modes)
        """In which way it is called, as far as that shows."""

    def used(self) -> Used:
        """Return what a call that has just been made used."""
        return Used(self.mode, _with_versions(self._own_tensors()))

    def refuse_changed(self, used: Used) -> None:
        """Raise unless what a forward used is there still."""
        name = getattr(self._block, "__qualname__", type(self._block).__name__)
        if used.mode != self.mode:
            what = "was put into another mode (train(), eval()) since its forward"
            raise UnsupportedError(CHANGED.format(name, what, "Change the mode after backward"))
        if not are_same(used.tensors, _with_versions(self._own_tensors())):
            what = "or its forward has changed or replaced a weight or a buffer since then"
            raise UnsupportedError(CHANGED.format(name, what, "Change weights after backward"))

    def buffers(self) -> Versions:
        """Return the buffers, with their versions."""
        return _with_versions(
            one
            for module in self._modules
            for one in _of(module._buffers)  # noqa: SLF001
        )

    def watched(self) -> Callable[[], bool]:
        """Return what tells whether no tensor was changed in place or replaced since now."""
        before = self._versions()
        return lambda: are_same(before, self._versions())

    def closely(self) -> Callable[[], bool]:
        """Return what tells whether all that the call can reach is as it is now."""
        compared = [one for one, _ in self.buffers() if _has_bytes(one)]
        with torch.no_grad():
            copies = [one.clone() for one in compared]
        has_same_tensors, drawn = self.watched(), self._random_states()
        attributes = list(self._attributes())

        def is_unchanged() -> bool:
            now = list(self._attributes())
            return (
                len(now) == len(attributes)
                and all(one is other for one, other in zip(now, attributes, strict=True))
                and has_same_tensors()
                and self._random_states() == drawn
                and all(map(torch.equal, compared, copies))
            )

        return is_unchanged

    def _versions(self) -> Versions:
        return _with_versions((*self.given, *self._own_tensors()))

    def _own_tensors(self) -> Iterator[Tensor]:
        yield from self._captured
        for module in self._modules:
            yield from _of(module._parameters)  # noqa: SLF001 - faster than to look for doubles
            yield from _of(module._buffers)  # noqa: SLF001

    def _attributes(self) -> Iterator[object]:
        for module in self._modules:
            yield from vars(module).values()
        yield from (one for root in self._roots for one in _attributes_of(root))
        yield from _held_by(self._block)

    def _random_states(self) -> list[object]:
        reached = (*self._attributes(), *self._roots)
        own = {id(one): one for one in reached if isinstance(one, Drawn)}
        global_ones = (np.random.mtrand._rand, random)  # noqa: SLF001 - what its functions draw from
        return [_state_of(one) for one in (*global_ones, *own.values())]


def _of(found: Mapping[str, Tensor | None]) -> Iterator[Tensor]:
    return (one for one in found.values() if one is not None)


def _with_versions(tensors: Iterable[Tensor]) -> Versions:
    return [(one, _version(one)) for one in tensors]


def are_same(before: Versions, now: Versions) -> bool:
    """Whether no tensor was changed in place or has another one in its place."""
    return len(now) == len(before) and all(
        one is other and version == other_version
        for (one, version), (other, other_version) in zip(now, before, strict=True)
    )


def _version(tensor: Tensor) -> int | None:
    if is_lazy(tensor) or tensor.is_inference():
        return None
    return tensor._version  # noqa: SLF001


def _has_bytes(tensor: Tensor) -> bool:
    """Whether the bytes of a buffer can be compared; subclasses may do with that as they like."""
    if is_lazy(tensor) or type(tensor) is not Tensor:
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _held_by(block: Any) -> Iterator[Any]:
    """Give what a function has in its hands besides its arguments, its containers unpacked."""
    if ismethod(block):
        yield block.__self__
        yield from _attributes_of(block.__self__)
        yield from _held_by(block.__func__)
    elif isinstance(block, partial):
        yield from _unpacked([*block.args, *block.keywords.values()])
        yield from _held_by(block.func)
    elif isfunction(block):
        names = [name for name in block.__code__.co_names if name in block.__globals__]
        found = [block.__globals__[name] for name in names]
        yield from (one for one in found if isinstance(one, nn.Module))
        for cell in block.__closure__ or ():
            yield from _unpacked(_contents(cell))
    elif not isinstance(block, nn.Module):
        yield from _attributes_of(block)


def _contents(cell: Any) -> list[Any]:
    """Return what a name of an enclosing function stands for, if it stands for something yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _attributes_of(one: object) -> list[Any]:
    """Return what an object of the user's has as attributes, containers unpacked."""
    is_plain = isinstance(one, nn.Module | type) or isfunction(one) or ismodule(one)
    return [] if is_plain else list(_unpacked(getattr(one, "__dict__", {}).values()))


def _unpacked(values: Iterable[Any], depth: int = 2) -> Iterator[Any]:
    """Give values, those that are containers unpacked; large ones hold data and no modules."""
    for one in values:
        is_small = isinstance(one, list | tuple | dict) and len(one) <= UNPACKED_MAX
        if depth and is_small:
            yield from _unpacked(one.values() if isinstance(one, dict) else one, depth - 1)
        else:
            yield one


def _state_of(drawn: Any) -> object:
    """Return the state of a generator in a form that can be compared."""
    if isinstance(drawn, Generator):
        return bytes(drawn.get_state().numpy())
    if isinstance(drawn, np.random.Generator):
        return pickle.dumps(drawn.bit_generator.state)
    if isinstance(drawn, np.random.RandomState):
        return pickle.dumps(drawn.get_state(legacy=False))
    return drawn.getstate()
