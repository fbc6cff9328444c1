"""What a call of a block can reach besides what it returns, and so could change or depend on.

[Note: what may be computed again] A block that changes its arguments, its weights, its buffers (the
running statistics of a batch normalisation), its attributes, or draws from a generator that is not
torch's own, would do so twice. So each block is called plainly first, once for each way in which
its modules are in training or in evaluation, and is never computed again if anything of that
moved meanwhile, or if between two of its calls something else changed its buffers. Kernels change
statistics without a version counter, so bytes of buffers are compared, too. Seen is what modules
have, and what methods and closures have in their hands.

What a call reads may also be changed by its caller, between forward and backward: an attribute, a
name of a closure or of the file. So all of it is compared before something is computed again.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isfunction, ismethod, ismodule
from types import CodeType
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
ARRAY_BYTES_MAX = 1 << 20
"""Of an array of numpy whose bytes are compared."""
PLAIN = (int, float, complex, str, bytes, type(None))
"""What is compared by its value: an equal number may be another object."""
NAMED = (*PLAIN, Tensor)
"""What is looked at of classes and of global names."""
Mark = tuple[object, object]
"""Something that a call can read, and what tells whether it has changed."""
TENSORS_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules that are compared as weights, buffers and modules."""

CHANGED = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), {}: no gradient was "
    "computed from it. {}, or take the mark off with ssdtrain.remove_checkpoint"
)


class Used(NamedTuple):
    """What a forward used: while it stays, the same can be computed again."""

    mode: tuple[object, ...]
    tensors: Versions
    """Weights and buffers, with their versions."""
    values: list[Mark]
    """All else that it could read."""


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
        return Used(self.mode, _with_versions(self._own_tensors()), list(self._values()))

    def refuse_changed(self, used: Used) -> None:
        """Raise unless what a forward used is there still."""
        name = getattr(self._block, "__qualname__", type(self._block).__name__)
        if used.mode != self.mode:
            what = "was put into another mode (train(), eval()) since its forward"
            raise UnsupportedError(CHANGED.format(name, what, "Change the mode after backward"))
        if not are_same(used.tensors, _with_versions(self._own_tensors())):
            what = "or its forward has changed or replaced a weight or a buffer since then"
            raise UnsupportedError(CHANGED.format(name, what, "Change weights after backward"))
        if not are_same(used.values, list(self._values())):
            what = (
                "reads something that has changed since its forward (an attribute, what a closure "
                "holds, a global name)"
            )
            raise UnsupportedError(CHANGED.format(name, what, "Change it after backward"))

    def standing(self) -> list[object]:
        """Return what tells between two calls whether something else changed what a call reads.

        Buffers are compared apart. No object is held here, as one may hold the block again.
        Arguments, and things that a closure holds, may be others in each call.
        """
        modules = (mark for module in self._modules for mark in _of_module(module))
        held = (mark for mark in self._held() if mark[0] is None)
        return [(id(one), sign) for one, sign in (*modules, *held)]

    def buffers(self) -> Versions:
        """Return the buffers, with their versions."""
        return _with_versions(
            one
            for module in self._modules
            for one in _of(module._buffers)  # noqa: SLF001
        )

    def watched(self) -> Callable[[], bool]:
        """Return what tells whether nothing was changed in place or replaced since now."""
        before, values = self._versions(), list(self._values())
        return lambda: are_same(before, self._versions()) and are_same(values, list(self._values()))

    def closely(self) -> Callable[[], bool]:
        """Return what tells whether all that the call can reach is as it is now."""
        compared = [one for one, _ in self.buffers() if _has_bytes(one)]
        with torch.no_grad():
            copies = [one.clone() for one in compared]
        is_watched_same, drawn = self.watched(), self._random_states()
        return lambda: (
            is_watched_same()
            and self._random_states() == drawn
            and all(map(torch.equal, compared, copies))
        )

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

    def _values(self) -> Iterator[Mark]:
        """Give what a call can read besides weights, buffers and its own arguments."""
        for module in self._modules:
            yield from _of_module(module)
        yield from _marks(self._roots, {id(one) for one in self._modules})
        yield from self._held()

    def _held(self) -> Iterator[Mark]:
        """Give what a method or a closure holds, and the global values that the code names."""
        yield from _marks(_held_by(self._block), {id(one) for one in self._modules})
        for code, names in self._codes():
            yield from _of_globals(code, names)

    def _codes(self) -> Iterator[tuple[CodeType, dict[str, Any]]]:
        """Give the code that runs, with its global names, as far as it is the user's."""
        functions = [getattr(self._block, "__func__", self._block)]
        functions += {type(one): type(one).forward for one in self._modules}.values()
        for one in functions:
            if isfunction(one) and not one.__module__.startswith("torch."):
                yield one.__code__, one.__globals__

    def _random_states(self) -> list[object]:
        reached = (*self._attributes(), *self._roots)
        own = {id(one): one for one in reached if isinstance(one, Drawn)}
        global_ones = (np.random.mtrand._rand, random)  # noqa: SLF001 - what its functions draw from
        return [_state_of(one) for one in (*global_ones, *own.values())]


def _of(found: Mapping[str, Tensor | None]) -> Iterator[Tensor]:
    return (one for one in found.values() if one is not None)


def _with_versions(tensors: Iterable[Tensor]) -> Versions:
    return [(one, _version(one)) for one in tensors]


def are_same(before: Sequence[Mark], now: Sequence[Mark]) -> bool:
    """Whether nothing was changed in place or has another thing in its place."""
    return len(now) == len(before) and all(
        one is other and (sign is other_sign or sign == other_sign)
        for (one, sign), (other, other_sign) in zip(now, before, strict=True)
    )


def _of_module(module: nn.Module) -> Iterator[Mark]:
    """Give what a module has as attributes; of its class what is compared by its value."""
    own = (value for name, value in vars(module).items() if name not in TENSORS_OF_MODULES)
    yield from _marks(own, {id(module)})
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") or kind is object:
            continue
        named = [one for name, one in list(vars(kind).items()) if not name.startswith("__")]
        yield from _marks((one for one in named if isinstance(one, NAMED)), set())


def _of_globals(code: CodeType, names: dict[str, Any]) -> Iterator[Mark]:
    found = (names[name] for name in code.co_names if name in names)
    yield from _marks((one for one in found if isinstance(one, NAMED)), set())


def _marks(values: Iterable[object], known: set[int], depth: int = 1) -> Iterator[Mark]:
    """Give what tells whether values change; objects of the user's are looked into."""
    for one in _unpacked(values):
        if isinstance(one, PLAIN):
            yield None, (type(one), one)
        elif isinstance(one, Tensor):
            yield one, _version(one)
        elif isinstance(one, nn.Module):
            yield one, None
            if id(one) not in known:
                yield from _with_versions((*one.parameters(), *one.buffers()))
        elif isinstance(one, np.ndarray):
            is_small = one.nbytes <= ARRAY_BYTES_MAX and not one.dtype.hasobject
            yield one, one.tobytes() if is_small else None
        elif isinstance(one, set | frozenset):
            yield one, frozenset(map(id, one))
        else:
            yield one, None
            if depth:
                yield from _marks(_attributes_of(one), known, depth - 1)


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
