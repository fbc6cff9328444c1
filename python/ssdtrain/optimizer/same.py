"""Whether two values are the same to a step that computes with them."""

from __future__ import annotations

import random
import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from types import NoneType
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["DICTS", "LISTS", "UNCHANGING", "is_same", "slots_of"]

LISTS = (list, deque, UserList)
DICTS = (dict, UserDict)
UNCHANGING = frozenset(
    {
        *(NoneType, bool, int, float, complex, str, bytes, range, Decimal, Fraction),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Classes whose objects nobody can change."""
Known = dict[tuple[int, int], tuple[Any, Any]]
"""Pairs that are being compared, by ids. They are held here: else other objects get the ids."""


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to whoever computes with them, to the last bit.

    Of objects of other classes their attributes are compared. Those that show nothing of what they
    hold, such as iterators, locks and what a function closes over, count as the same.
    """
    return _is_same(one, other, {})


def _is_same(one: Any, other: Any, known: Known) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # What was kept of a parameter is a plain tensor.
        return one is other or _has_same_bytes(one, other)
    pair = id(one), id(other)
    if one is other or type(one) is not type(other) or pair in known:
        return type(one) is type(other)
    known[pair] = one, other
    parts = _parts_of(one)
    if parts is not None:
        others = _parts_of(other) or []
        return len(parts) == len(others) and all(
            _is_same(*each, known) for each in zip(parts, others, strict=True)
        )
    return _is_equal(one, other)


def _parts_of(value: Any) -> list[Any] | None:
    """Return what is compared one by one, or ``None`` for what is compared as a whole."""
    if isinstance(value, DICTS):
        # In their order, which a step may go by.
        return [*value.keys(), *value.values(), *_own_of(value)]
    if isinstance(value, (tuple, *LISTS)):
        return [*value, *_own_of(value)]
    if isinstance(value, numpy.ndarray | numpy.generic | Enum) or type(value) in UNCHANGING:
        return None
    found = list(_shown_by(value))
    return found if found or callable(value) else None


def _own_of(container: Any) -> list[Any]:
    """Return what a class of a user has besides what is in the container."""
    return [vars(container)] if getattr(container, "__dict__", None) else []


def _shown_by(value: Any) -> Iterator[Any]:
    """Give what an object shows of itself: attributes, and what is known of some classes."""
    # A method has those of its function.
    if hasattr(value, "__dict__"):
        yield vars(value)
    for name in slots_of(type(value)):
        yield getattr(value, name, None)
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, random.Random):
        yield value.getstate()
    elif isinstance(value, torch.Generator):
        yield value.get_state()
    elif isinstance(value, numpy.random.Generator):
        yield value.bit_generator.state


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes that objects of a user's class have in ``__slots__``."""
    if _is_of_python(kind):
        return []
    found: list[str] = []
    for base in kind.__mro__:
        slots = () if _is_of_python(base) else vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _is_of_python(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, numpy.ndarray | numpy.generic):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and (one.dtype.hasobject or one.tobytes() == other.tobytes())
    if isinstance(one, float | complex):
        # As text: zero has two signs, and what is no number equals nothing.
        return repr(one) == repr(other)
    # Iterators and locks tell nothing of what they hold.
    tells = "__eq__" in {name for base in type(one).__mro__[:-1] for name in vars(base)}
    return not tells or bool(one == other)


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    flat = (each.detach().resolve_conj().resolve_neg().reshape(-1) for each in (one, other))
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in flat))
