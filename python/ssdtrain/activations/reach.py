"""What a call of a block can reach besides what it returns, and so could change or depend on.

[Note: what may be computed again] A block that changes its arguments, its weights, its buffers (the
running statistics of a batch normalisation), its attributes, or draws from a generator that is not
torch's own, would do so twice. So each block is called plainly first, once for each way in which
its modules are in training or in evaluation, and is not computed again if anything of that moved
meanwhile, or if between two of its calls something else changed its buffers. Kernels change
statistics without a version counter, so bytes of buffers and of other tensors that are no weights
are compared, too. Seen is what modules have, and what methods and closures have in their hands.
What a later call changes shows at its end: then what it saved stays in memory.

What a call reads may also be changed by its caller. Between forward and backward that shows in
what is saved (see `fingerprints.py`), and is an error. So a block that reads something which has
changed between two of its calls is not computed again.
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dis import get_instructions
from functools import lru_cache, partial
from inspect import isfunction, ismethod, ismodule
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import is_wrapped

__all__ = ["Reach", "Snapshot", "Versions", "are_same"]

Versions = list[tuple[Tensor, int | None]]
Codes = list[tuple[CodeType, dict[str, Any]]]
"""Code, each with its global names."""
DRAWN = (Generator, random.Random, np.random.Generator, np.random.RandomState)
"""What random numbers are drawn from."""

CODES_MAX = 4096
"""Functions whose names are remembered."""
READS_OF_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
CONTAINERS = (list, tuple, dict, deque)
PLAIN_CONTAINERS = frozenset((*CONTAINERS, OrderedDict))
"""Types that have nothing besides what is in them."""
UNPACKED_MAX = 256
"""Things in a container that is looked into."""
UNPACKED_DEPTH = 2
"""Containers in containers that are looked into."""
ARRAY_BYTES_MAX = 1 << 20
"""Of an array of numpy whose bytes are compared."""
PLAIN = (int, float, complex, str, bytes, type(None))
"""What is compared by its value: an equal number may be another object."""
PLAIN_TYPES = frozenset((*PLAIN, bool))
"""Types of most of what a module has; quicker to ask than ``isinstance``."""
NAMED = (*PLAIN, *DRAWN, Tensor)
"""What is looked at of classes and of global names."""
Mark = tuple[object, object]
"""Something that a call can read, and what tells whether it has changed."""
TENSORS_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules that are compared as weights, buffers and modules."""

OTHER_MODE = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), was put into another "
    "mode (train(), eval()) since its forward: no gradient was computed from it. Change the mode "
    "after backward, or take the mark off with ssdtrain.remove_checkpoint"
)


class Snapshot(NamedTuple):
    """What a call can reach, at one moment."""

    given: Versions
    """The tensors among its arguments."""
    weights: Versions
    """Those of its modules, and the tensors that the block itself holds."""
    buffers: Versions
    of_modules: list[Mark]
    """What its modules have as attributes."""
    held: list[Mark]
    """What a method or a closure holds, and the global values that the code names."""
    others: list[Mark]
    """Arguments that are no tensors."""

    def is_as(self, before: Snapshot) -> bool:
        """Whether nothing was changed in place or replaced since ``before``."""
        return are_same(before._all(), self._all())

    def _all(self) -> list[Mark]:
        tensors = (*self.given, *self.weights, *self.buffers)
        return [*tensors, *self.of_modules, *self.held, *self.others]

    def standing(self) -> list[object]:
        """Return what tells between two calls whether something else changed what a call reads.

        Buffers are compared apart. No object is held here, as one may hold the block again.
        Arguments, and things that a closure holds, may be others in each call.
        """
        held = (mark for mark in self.held if mark[0] is None)
        return [(id(one), sign) for one, sign in (*self.of_modules, *held)]


class Reach:
    """What a call of ``block`` with these ``leaves`` of its arguments can reach."""

    def __init__(self, block: Callable[..., Any], leaves: Sequence[Any]) -> None:
        self.block = block
        self.name = getattr(block, "__qualname__", type(block).__name__)
        """As messages name the block."""
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
        self._codes = _codes_of(block, [type(one) for one in self._modules])
        code = getattr(getattr(block, "__func__", block), "__code__", None)
        apart = tuple(id(one) for one in own_modules[1:])
        flags = tuple(one for one in leaves if one is None or isinstance(one, bool | str))
        modes = ((type(one).__name__, one.training) for one in self._modules)
        self.mode = (code, apart, flags, *modes)
        """In which way it is called, as far as that shows."""

    def snapshot(self) -> Snapshot:
        """Return what the call can reach as it is now."""
        look = _Look(self._modules)
        parameters = (one for module in self._modules for one in _of(module._parameters))  # noqa: SLF001 - faster than to look for doubles
        return Snapshot(
            _with_versions(self.given),
            _with_versions((*self._captured, *parameters)),
            _with_versions(self._buffers()),
            look.at_modules(),
            look.at_held(self.block, self._codes),
            look.at(self._roots),
        )

    def counters(self) -> Versions:
        """Return what tells later whether the arguments were changed in place, without them."""
        plain = (one for one in self.given if _has_bytes(one) and not is_wrapped(one))
        return [(_counter_of(one), _version(one)) for one in plain if not one.is_inference()]

    def refuse_mode(self, mode: tuple[object, ...]) -> None:
        """Raise unless it is called as a forward was, which found that it changes nothing."""
        if mode != self.mode:
            raise UnsupportedError(OTHER_MODE.format(self.name))

    def closely(self, now: Snapshot) -> Callable[[], bool]:
        """Return what tells whether bytes of buffers, and generators, are as they are now.

        A tensor that a module or a closure has as it likes may be a buffer as well.
        """
        reached = [one for one, _ in (*now.buffers, *now.of_modules, *now.held, *now.others)]
        tensors = (one for one in reached if isinstance(one, Tensor) and _has_bytes(one))
        compared = list({id(one): one for one in tensors}.values())
        own = {id(one): one for one in reached if isinstance(one, DRAWN)}
        # The two that functions of these libraries draw from come first.
        generators = (np.random.mtrand._rand, random, *own.values())  # noqa: SLF001
        with torch.no_grad():
            copies = [one.clone() for one in compared]
        drawn = [*map(_state_of, generators)]
        return lambda: (
            [*map(_state_of, generators)] == drawn and all(map(torch.equal, compared, copies))
        )

    def _buffers(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from _of(module._buffers)  # noqa: SLF001 - faster than to look for doubles


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


class _Look:
    """One look at what can be read; what is met twice is looked into once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._met = {id(one) for one in modules}
        """Modules whose tensors are compared apart, and objects that were looked into."""
        self._marks: list[Mark] = []

    def at_modules(self) -> list[Mark]:
        """Tell of what modules have as attributes, and what of their classes has a value."""
        for module in self._modules:
            own = vars(module)
            self._add(own[name] for name in own if name not in TENSORS_OF_MODULES)
        kinds = {kind: None for one in self._modules for kind in type(one).__mro__}
        for kind in kinds:
            if not _is_of_torch(kind) and kind is not object:
                named = [one for name, one in list(vars(kind).items()) if not name.startswith("__")]
                self._add(one for one in named if isinstance(one, NAMED))
        return self._taken()

    def at_held(self, block: Any, codes: Codes) -> list[Mark]:
        """Tell of what a method or a closure holds, and the global values that code names."""
        self._add(_held_by(block))
        for code, names in codes:
            found = (names[name] for name in _global_names(code) if name in names)
            self._add(one for one in found if isinstance(one, NAMED))
        return self._taken()

    def at(self, values: Iterable[object]) -> list[Mark]:
        """Tell of ``values``."""
        self._add(values)
        return self._taken()

    def _taken(self) -> list[Mark]:
        marks, self._marks = self._marks, []
        return marks

    def _add(self, values: Iterable[Any], depth: int = 1, unpacked: int = UNPACKED_DEPTH) -> None:
        """Add what tells whether values change; objects of the user's are looked into."""
        add = self._marks.append
        for one in values:
            kind = type(one)
            if kind in PLAIN_TYPES:
                add((None, (kind, one)))
            elif unpacked and isinstance(one, CONTAINERS) and len(one) <= UNPACKED_MAX:
                if one or kind not in PLAIN_CONTAINERS:
                    self._add(_inside(one), depth, unpacked - 1)
            elif isinstance(one, Tensor):
                add((one, _version(one)))
            elif isinstance(one, PLAIN):
                add((None, (kind, one)))
            elif isinstance(one, np.ndarray):
                is_small = one.nbytes <= ARRAY_BYTES_MAX and not one.dtype.hasobject
                add((one, one.tobytes() if is_small else None))
            elif isinstance(one, (set, frozenset)):
                # By value what has one: another thing may get the address of one that is gone.
                add((one, frozenset(it if type(it) in PLAIN_TYPES else (id(it),) for it in one)))
            else:
                add((one, None))
                if id(one) not in self._met:
                    self._look_into(one, depth)

    def _look_into(self, one: object, depth: int) -> None:
        if isinstance(one, nn.Module):
            self._met.add(id(one))
            self._marks += _with_versions((*one.parameters(), *one.buffers()))
        elif depth:
            self._met.add(id(one))
            self._add(_attributes_of(one), depth - 1)


def _inside(container: Any) -> Iterator[Any]:
    """Give what a container has, and what a subclass has besides."""
    yield from container
    if isinstance(container, dict):
        yield from container.values()
    if type(container) not in PLAIN_CONTAINERS:
        yield from _attributes_of(container)


def _version(tensor: Tensor) -> int | None:
    if is_lazy(tensor) or tensor.is_inference():
        return None
    return tensor._version  # noqa: SLF001


def _counter_of(tensor: Tensor) -> Tensor:
    """Return a tensor without bytes that shares the version counter."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


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
        names = [name for name in _global_names(block.__code__) if name in block.__globals__]
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
    if isinstance(one, nn.Module | type) or isfunction(one) or ismodule(one):
        return []
    own = [*getattr(one, "__dict__", {}).values()]
    for name in _slots_of(type(one)):
        # One that nothing was put into has no attribute.
        own += [getattr(one, name)] if hasattr(one, name) else []
    return list(_unpacked(own))


def _slots_of(kind: type) -> Iterator[str]:
    """Give the names of attributes that lie in slots; those that are a class's own are left out."""
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if not name.startswith("__"))


def _unpacked(values: Iterable[Any], depth: int = UNPACKED_DEPTH) -> Iterator[Any]:
    """Give values, those that are containers unpacked; large ones hold data and no modules."""
    for one in values:
        is_small = isinstance(one, CONTAINERS) and len(one) <= UNPACKED_MAX
        if depth and is_small:
            yield from _unpacked(one.values() if isinstance(one, dict) else one, depth - 1)
        else:
            yield one


def _codes_of(block: Any, kinds: Iterable[type]) -> Codes:
    """Return the code that may run, with its global names, as far as it is the user's."""
    own = [one for kind in kinds for one in kind.__mro__ if not _is_of_torch(one)]
    methods = (one for kind in dict.fromkeys(own) for one in vars(kind).values())
    functions = [getattr(block, "__func__", block), *methods]
    found = dict.fromkeys(one for one in functions if isfunction(one))
    return [(one.__code__, one.__globals__) for one in found if not _is_of_torch(one)]


def _is_of_torch(one: Any) -> bool:
    # Code that was made at run time, as torch.fx does, may have no module.
    return str(one.__module__).startswith("torch.")


@lru_cache(maxsize=CODES_MAX)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code reads as global ones, in comprehensions and lambdas as well.

    ``co_names`` has those of attributes, too, and another thing may have the same global name.
    """
    own = (one.argval for one in get_instructions(code) if one.opname in READS_OF_NAMES)
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(dict.fromkeys((*own, *(name for one in inner for name in _global_names(one)))))


def _state_of(drawn: Any) -> object:
    """Return the state of a generator in a form that can be compared."""
    if isinstance(drawn, Generator):
        return bytes(drawn.get_state().numpy())
    if isinstance(drawn, np.random.Generator):
        return pickle.dumps(drawn.bit_generator.state)
    if isinstance(drawn, np.random.RandomState):
        return pickle.dumps(drawn.get_state(legacy=False))
    return drawn.getstate()
