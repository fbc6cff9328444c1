"""What a step reads besides weights, gradients and state: options of groups, and attributes.

An update that is made later, or earlier, than the user's ``step()`` needs them as they are at one
moment, whoever changes them in place after it. What is not sure to be kept so nobody can know: then
the update has to be made in ``step()``.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Collection, Sequence
from enum import Enum
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from ssdtrain.optimizer.same import DICTS, LISTS, UNCHANGING

__all__ = [
    "attributes",
    "kept",
    "kept_groups",
    "of_classes",
    "of_torch",
    "owners_of_data",
    "stand_in_of",
    "why_not_kept",
]


COPIED = frozenset({tuple, list, deque, UserList, dict, OrderedDict, Counter, UserDict})
"""Containers that are copied, with what is in them."""
SAYS_NOTHING = frozenset(
    {
        *("__module__", "__doc__", "__dict__", "__weakref__", "__orig_bases__", "__parameters__"),
        *("__firstlineno__", "__static_attributes__", "__annotations__", "__slotnames__"),
    }
)
"""What a class has that does nothing of its own."""
ATTRIBUTE_BYTES_MAX = 64 << 10
"""Of a tensor that is an attribute, to be copied in each step."""
DEFAULTS = "defaults"
"""The attribute with the options that an optimizer was made with."""


def kept(value: Any, own: Collection[int] = ()) -> Any:
    """Return a value as it is now, whoever changes what is in it in place.

    ``own`` has the ids of the optimizer's parameters, which stay what they are.
    """
    return _kept(value, own, {})


def _kept(value: Any, own: Collection[int], known: dict[int, Any]) -> Any:
    """As ``kept``; what is in it twice, by ``known``, is in its copy twice."""
    if id(value) in known:
        return known[id(value)]
    if _is_container(value):
        if isinstance(value, tuple):
            return tuple.__new__(type(value), [_kept(one, own, known) for one in value])
        # First: a container may be in itself.
        found: Any = copy.copy(value)
        known[id(value)] = found
        for place, one in enumerate(value) if isinstance(value, LISTS) else list(value.items()):
            found[place] = _kept(one, own, known)
    elif id(value) in own or not _is_copied(value):
        found = value
    elif isinstance(value, Tensor):
        found = known[id(value)] = value.detach().clone()
    else:
        found = known[id(value)] = value.copy(order="K")
    return found


def _is_container(value: Any) -> bool:
    """Whether a value is a container of Python's own, or of a class that adds nothing to one."""
    kind = type(value)
    if kind in COPIED or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return True
    adds = vars(kind).keys() - SAYS_NOTHING
    return not adds and kind.__bases__[0] in COPIED and not getattr(value, "__dict__", None)


def kept_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of parameters with their options as they are now."""
    known: dict[int, Any] = {}
    own = {id(param) for group in groups for param in group["params"]}
    return [
        {
            name: list(value) if name == "params" else _kept(value, own, known)
            for name, value in group.items()
        }
        for group in groups
    ]


@cache
def of_torch() -> frozenset[str]:
    """Return the names of what each optimizer of torch has, and its step does not compute with."""
    plain = SGD([Parameter(torch.zeros(1, device="cpu"))], lr=0.1)
    return frozenset({*vars(plain), "_opt_called", "_step_count"} - {DEFAULTS})


def attributes(optimizer: Any, ours: Collection[str]) -> dict[str, Any]:
    """Return what the optimizer's own step may use besides groups and state, as it is now.

    ``ours`` are the names of attributes that it has only since it is offloaded. Also what its
    classes have belongs to it, where it is data.
    """
    known = of_torch()
    found = {**of_classes(type(optimizer)), **vars(optimizer)}
    return {
        name: kept(value) if name == DEFAULTS or _is_small(value) else value
        for name, value in found.items()
        if name not in known and name not in ours
    }


def _is_small(value: Any) -> bool:
    """Whether a value is a tensor that is copied although it may never be used."""
    return isinstance(value, Tensor) and value.nbytes <= ATTRIBUTE_BYTES_MAX and _is_copied(value)


def of_classes(kind: type) -> dict[str, Any]:
    """Return what the classes of an optimizer have that is data."""
    return {name: vars(base)[name] for name, base in owners_of_data(kind).items()}


def owners_of_data(kind: type) -> dict[str, type]:
    """Return the names of what the classes of an optimizer have that is data, and where it is."""
    found: dict[str, type] = {}
    for base in reversed(kind.__mro__):
        # Of ours, and of torch's own, a step changes nothing.
        if issubclass(base, Optimizer) and not base.__module__.startswith(("torch.", "ssdtrain.")):
            for name, value in vars(base).items():
                is_code = callable(value) or hasattr(type(value), "__get__")
                if not (is_code or name.startswith("__")):
                    found[name] = base
    return found


def stand_in_of(optimizer: Optimizer, kind: type[Optimizer], ours: Collection[str]) -> Optimizer:
    """Return an optimizer of a class, for updates, as this one is now."""
    made: Optimizer = object.__new__(kind)
    vars(made).update({**vars(optimizer), **attributes(optimizer, ours)})
    return made


def why_not_kept(optimizer: Any, ours: Collection[str]) -> str | None:
    """Return why options or attributes cannot be kept as they are at one moment, or ``None``."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            kind = None if name == "params" else _changing(value, set())
            if kind is not None:
                return _named(f"param_groups[{number}][{name!r}]", kind)
    for name, value in attributes(optimizer, ours).items():
        # A container that the step itself fills would be filled in a copy. Options as they were
        # given are no such.
        is_kept = _is_unchanging(value) or _is_small(value)
        kind = _changing(value, set()) if name == DEFAULTS else None if is_kept else type(value)
        if kind is not None:
            return _named(f"the optimizer's attribute {name!r}", kind)
    return None


def _named(what: str, kind: type) -> str:
    return (
        f"{what} is or has something of the class {kind.__qualname__}, which may change in place "
        "without being noticed"
    )


def _changing(value: Any, known: set[int]) -> type | None:
    """Return the class of something in a value that a copy would not hold, or ``None``."""
    if id(value) in known or _is_unchanging(value) or _is_copied(value):
        return None
    known.add(id(value))
    if not _is_container(value):
        # defence: what may change unseen is read in step() only
        return type(value)
    is_dict = isinstance(value, DICTS)
    keys = [type(key) for key in value if not _is_key(key)] if is_dict else []
    values: Sequence[Any] = list(value.values()) if is_dict else list(value)
    found = (kind for one in values if (kind := _changing(one, known)) is not None)
    return next(iter(keys), None) or next(found, None)


def _is_key(key: Any) -> bool:
    return isinstance(key, Parameter) or _is_unchanging(key)


def _is_unchanging(value: Any) -> bool:
    if isinstance(value, Enum):
        return type(value.value) in UNCHANGING
    if isinstance(value, numpy.generic):
        return not isinstance(value, numpy.void)
    if type(value) is tuple:
        return all(map(_is_unchanging, value))
    return type(value) in UNCHANGING or isinstance(value, numpy.dtype)


def _is_copied(value: Any) -> bool:
    """Whether a copy of a tensor or an array has all that a step may find in it."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided
        is_whole = is_plain and value.is_contiguous() and not (value.is_conj() or value.is_neg())
        return is_whole and not vars(value) and (not value.is_leaf or value.grad is None)
    is_array = type(value) is numpy.ndarray and not value.dtype.hasobject
    return is_array and (value.flags.c_contiguous or value.flags.f_contiguous)
