"""What a step reads besides weights, gradients and state: options of groups, and attributes.

An update that is made later, or earlier, than the user's ``step()`` needs them as they are at one
moment, whoever changes them in place after it. Of what cannot be kept so nobody knows when it
changes, and the update has to be made in ``step()``.
"""

from __future__ import annotations

import copy
from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = [
    "attributes",
    "is_same",
    "kept",
    "kept_attributes",
    "kept_group",
    "stand_in_of",
    "why_not_kept",
]

LISTS = (list, deque, UserList)
DICTS = (dict, UserDict)
SETS = (set, frozenset)
UNCHANGING = (
    *(NoneType, bool, int, float, complex, str, bytes, Decimal, Fraction, Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, numpy.dtype),
    BuiltinFunctionType,
)
"""Classes whose objects nobody can change."""


def kept(value: Any, own: Collection[int] = ()) -> Any:
    """Return a value as it is now, whoever changes what is in it in place.

    ``own`` has the ids of the optimizer's parameters, which stay what they are.
    """
    return _kept(value, own, {})


def _kept(value: Any, own: Collection[int], known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [_kept(one, own, known) for one in value])
    if isinstance(value, LISTS + DICTS):
        # First: a container may be in itself.
        found: Any = copy.copy(value)
        known[id(value)] = found
        for place, one in enumerate(value) if isinstance(value, LISTS) else list(value.items()):
            found[place] = _kept(one, own, known)
        return found
    if isinstance(value, set | numpy.ndarray | numpy.generic):
        return value.copy()
    if isinstance(value, Tensor) and id(value) not in own:
        return value.detach().clone()
    return value


def kept_group(group: dict[str, Any], own: Collection[int]) -> dict[str, Any]:
    """Return a group of parameters with its options as they are now."""
    return {
        name: list(value) if name == "params" else kept(value, own) for name, value in group.items()
    }


def attributes(optimizer: object, read: Collection[str]) -> dict[str, Any]:
    """Return what the optimizer's own step may use besides groups and state.

    ``read`` names the attributes that it was seen to read. Of others those with an underscore are
    torch's, or ours.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in {"state", "param_groups"} and (name in read or not name.startswith("_"))
    }


def kept_attributes(optimizer: Any, read: Collection[str]) -> dict[str, Any]:
    """Return these attributes as they are now."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {name: kept(value, own) for name, value in attributes(optimizer, read).items()}


def stand_in_of(optimizer: Optimizer, kind: type[Optimizer], read: Collection[str]) -> Optimizer:
    """Return an optimizer of a class, for updates, as this one is now."""
    made: Optimizer = object.__new__(kind)
    vars(made).update({**vars(optimizer), **kept_attributes(optimizer, read)})
    return made


def why_not_kept(optimizer: Any, read: Collection[str]) -> str | None:
    """Return why options or attributes cannot be kept as they are at one moment, or ``None``."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            kind = None if name == "params" else _changing(value, set())
            if kind is not None:
                return _named(f"param_groups[{number}][{name!r}]", kind)
    for name in sorted(read):
        kind = _changing(vars(optimizer).get(name), set())
        if kind is not None:
            return _named(f"the optimizer's attribute {name!r}", kind)
    return None


def _named(what: str, kind: type) -> str:
    return (
        f"{what} has an object of the class {kind.__qualname__}, which may change in place without "
        "being noticed (numbers, texts, tensors, arrays and containers of such are copied)"
    )


def _changing(value: Any, known: set[int]) -> type | None:
    """Return the class of something in a value that a copy would not hold, or ``None``."""
    if id(value) in known or isinstance(value, UNCHANGING):
        return None
    known.add(id(value))
    parts = _parts_of(value)
    # A container of a class of its own may have attributes, too; `data` is where others have all.
    if parts is not None and getattr(value, "__dict__", {}).keys() - {"data"}:
        return type(value)
    if parts is None:
        # defence: what may change unseen is read in step() only
        return None if _is_copied(value) else type(value)
    keys, values = parts
    found = chain(map(_changing_key, keys), (_changing(one, known) for one in values))
    return next(filter(None, found), None)


def _parts_of(value: Any) -> tuple[Iterable[Any], Iterable[Any]] | None:
    """Return the keys (or elements of a set) and the values of a container; of others ``None``."""
    if isinstance(value, SETS):
        return value, ()
    if isinstance(value, (tuple, *LISTS)):
        return (), value
    if isinstance(value, DICTS):
        return value, value.values()
    if isinstance(value, FunctionType):
        # What it takes from around it may be changed there.
        return (), (value.__closure__, value.__defaults__, value.__kwdefaults__)
    return None


def _is_copied(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) in (Tensor, Parameter) and value.layout is torch.strided
    return isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject


def _changing_key(value: Any) -> type | None:
    """Return the same of an element of a set or a key, which are not copied."""
    if isinstance(value, (tuple, frozenset)):
        return next(filter(None, map(_changing_key, value)), None)
    return None if isinstance(value, (Parameter, *UNCHANGING)) else type(value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to whoever computes with them, to the last bit."""
    return _is_same(one, other, set())


def _is_same(one: Any, other: Any, known: set[tuple[int, int]]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # What was kept of a parameter is a plain tensor.
        return one is other or _has_same_bytes(one, other)
    if one is other or type(one) is not type(other) or (id(one), id(other)) in known:
        return type(one) is type(other)
    known.add((id(one), id(other)))
    if isinstance(one, (tuple, *LISTS, *DICTS)):
        return _has_same_parts(one, other, known)
    compares: Any = type(one).__eq__
    if compares is object.__eq__ and hasattr(one, "__dict__"):
        return _is_same(vars(one), vars(other), known)
    if isinstance(one, numpy.ndarray) and not one.dtype.hasobject:
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and one.tobytes() == other.tobytes()
    # As text: zero has two signs, and what is no number equals nothing.
    is_number = isinstance(one, float | complex)
    return repr(one) == repr(other) if is_number else bool(numpy.all(one == other))


def _has_same_parts(one: Any, other: Any, known: set[tuple[int, int]]) -> bool:
    if len(one) != len(other):
        return False
    if not isinstance(one, DICTS):
        return all(_is_same(*pair, known) for pair in zip(one, other, strict=True))
    # In their order, which a step may go by.
    pairs = zip(one.items(), other.items(), strict=True)
    return all(_is_same(*pair, known) for pair in pairs)


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    flat = (each.detach().resolve_conj().resolve_neg().reshape(-1) for each in (one, other))
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in flat))
