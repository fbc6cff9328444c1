"""What a step changes besides parameters and state: options of groups, and attributes.

A step is run over one part of the parameters after the other. So each part begins with what there
was before the step, and what one part changes no other may change to something else: then all parts
together leave what one step over all parameters leaves, as a count of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import plainly
from ssdtrain.optimizer.options import ATTRIBUTE_BYTES_MAX, of_classes, of_torch
from ssdtrain.optimizer.same import is_same, slots_of

__all__ = ["Followed", "Settings", "followed"]

NONE = object()
"""What an attribute, or an entry, is that is not there."""
VALUE = "value"
"""The place of all that a tensor or an array holds."""
ORDER = object()
"""The place, among changes of a dict, of the order of the entries that it had before."""
ONE_AFTER_THE_OTHER = (
    "and it is run over one part of the parameters after the other; use an optimizer that does "
    "not, such as AdamW"
)
CONTAINERS = (OrderedDict, dict, list, deque, set)
OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, Optimizer)
"""What is no setting of a step, whatever happens to it."""


class Settings:
    """What the parts of one step have changed besides parameters and state.

    Options and attributes that are set anew, and what is in containers, small tensors and arrays
    among them, also if it is changed in place. ``ours`` are attributes that belong to no step. With
    ``on_copies`` updates work on copies of what may change in place, so no part may change it.
    """

    def __init__(self, ours: Collection[str] = (), *, on_copies: bool = False) -> None:
        self._ours = {"state", "param_groups", *ours}
        self._on_copies = on_copies
        self._groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._before: dict[str, Any] | None = None
        self._changes: dict[str, Any] = {}
        self._of_attributes: list[Followed] = []
        self._of_options: dict[int, list[Followed]] = {}
        self.in_place: set[str] = set()
        """What was changed in place, in words."""

    def begin(self, optimizer: Optimizer, group: dict[str, Any] | None = None) -> None:
        """Give the optimizer, and the group of a part, what they had before the step."""
        now = self._attributes(optimizer)
        if self._before is None:
            self._before = now
            own = {**of_classes(type(optimizer)), **now}
            named = [(f"attribute {name!r}", own[name]) for name in own.keys() - of_torch()]
            self._of_attributes = followed(named, _Memory(optimizer))
        else:
            for name in now.keys() - self._before.keys():
                del vars(optimizer)[name]
            vars(optimizer).update(self._before)
        if group is not None and id(group) not in self._of_options:
            named = [(f"option {name!r}", one) for name, one in group.items() if name != "params"]
            self._of_options[id(group)] = followed(named)
        for one in self._in_place(group):
            one.restore()

    def undo(self, optimizer: Optimizer) -> None:
        """Give the optimizer and its groups what they had before the step."""
        self.begin(optimizer)
        for several in self._of_options.values():
            for one in several:
                one.restore()

    def note(self, optimizer: Optimizer, group: dict[str, Any], after: dict[str, Any]) -> None:
        """Remember what a part has changed; raise ``UnsupportedError`` if others did otherwise.

        ``after`` is what the part had in the place of the group.
        """
        _, known = self._groups.setdefault(id(group), (group, {}))
        changes = _changed(group, after)
        changes.pop("params", None)
        _add(known, changes)
        _add(self._changes, _changed(self._before or {}, self._attributes(optimizer)))
        changed = [one.name for one in self._in_place(group) if one.note()]
        self.in_place.update(changed)
        # defence: what changes in place beside a forward or a backward is an error
        if changed and self._on_copies:
            raise UnsupportedError(
                f"the step of this optimizer has changed its {changed[0]} in place, in a copy, as "
                'its updates are made beside a forward or a backward; use overlap="step"'
            )

    def apply(self, optimizer: object, to: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Put the changes into the optimizer and its groups: by ``id`` into those in ``to``."""
        for number, (group, changes) in self._groups.items():
            _put((to or {}).get(number, group), changes)
        _put(vars(optimizer), self._changes)
        for several in (self._of_attributes, *self._of_options.values()):
            for one in several:
                one.apply()

    def _attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        return {name: one for name, one in vars(optimizer).items() if name not in self._ours}

    def _in_place(self, group: dict[str, Any] | None) -> list[Followed]:
        return [*self._of_attributes, *self._of_options.get(id(group), ())]


class Followed:
    """Something that may be changed in place: what it held before a step, and what parts change."""

    def __init__(self, value: Any, name: str) -> None:
        self.name = name
        self._value = value
        self._before = _read(value)
        self._changes: dict[Any, Any] = {}

    def restore(self) -> None:
        """Give it what it held before the step, where that is possible."""
        if not _is_restorable(self._value):
            self._before = _read(self._value)
        elif self._changed():
            _write(self._value, self._before)

    def note(self) -> bool:
        """Note what a part has changed, and return whether it did; raise if others did, too."""
        changes = self._changed()
        if changes and self._changes and not _is_restorable(self._value):
            raise UnsupportedError(
                f"the step of this optimizer changes what is in its {self.name} (a "
                f"{type(self._value).__name__}), {ONE_AFTER_THE_OTHER}"
            )
        _add(self._changes, changes, f"in its {self.name} ")
        return bool(changes)

    def apply(self) -> None:
        """Give it all that parts have changed."""
        if self._changes and _is_restorable(self._value):
            changes = dict(self._changes)
            first = changes.pop(ORDER, ())
            entries = {place: self._before[place] for place in [*first, *self._before]}
            _put(entries, changes)
            _write(self._value, entries)

    def _changed(self) -> dict[Any, Any]:
        before, now = self._before, _read(self._value)
        if isinstance(self._value, Tensor | numpy.ndarray):
            return {} if is_same(before, now) else now
        changes = _changed(before, now)
        if isinstance(self._value, dict):
            number_of = {place: number for number, place in enumerate(before)}
            order = [place for place in now if place in before]
            numbers = [number_of[place] for place in order]
            if numbers != sorted(numbers):
                changes[ORDER] = tuple(order)
        return changes


class _Memory:
    """Where parameters and their state lie: no setting, also if an attribute lies there."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._spans: tuple[list[int], list[int]] | None = None

    def has(self, value: Tensor | numpy.ndarray) -> bool:
        """Whether a tensor or an array shares memory with it."""
        if self._spans is None:
            spans = sorted(map(_span, self._tensors()))
            starts = [start for start, _ in spans]
            self._spans = starts, list(accumulate((end for _, end in spans), max))
        start, end = _span(value)
        place = bisect_left(self._spans[0], end)
        return place > 0 and self._spans[1][place - 1] > start

    def _tensors(self) -> list[Tensor]:
        own = vars(self._optimizer)
        found = [param for group in own["param_groups"] for param in group["params"]]
        for state in list(own["state"].values()):
            # Past what brings a state back: what is away has memory of its own.
            found += dict.values(state) if isinstance(state, dict) else ()
        return [one for one in found if isinstance(one, Tensor) and _is_plain(one)]


def _span(value: Tensor | numpy.ndarray) -> tuple[int, int]:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return numpy.lib.array_utils.byte_bounds(value)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return is_dense and tensor.is_cpu and not tensor.is_inference()


def followed(values: Iterable[tuple[str, Any]], memory: _Memory | None = None) -> list[Followed]:
    """Return all that may be changed in place of some values, and of what they contain."""
    found: list[Followed] = []
    known: set[int] = set()
    left = list(values)
    while left:
        name, value = left.pop()
        # A proxy whose object is gone raises at any other look.
        if id(value) in known or type(value) in ProxyTypes or isinstance(value, OPAQUE):
            continue
        known.add(id(value))
        if isinstance(value, Tensor | numpy.ndarray):
            if _isfollowed(value) and not (memory is not None and memory.has(value)):
                found.append(Followed(value, name))
            continue
        if isinstance(value, UserDict | UserList):
            value = value.data
        if isinstance(value, dict):
            left += [(name, one) for one in list(value.values())]
        elif isinstance(value, tuple | list | deque):
            left += [(name, one) for one in list(value)]
        if isinstance(value, CONTAINERS) or hasattr(value, "__dict__") or slots_of(type(value)):
            found.append(Followed(value, name))
    return found


def _isfollowed(value: Tensor | numpy.ndarray) -> bool:
    if isinstance(value, Tensor):
        return _is_plain(value)
    return value.nbytes <= ATTRIBUTE_BYTES_MAX and not value.dtype.hasobject


def _is_restorable(value: Any) -> bool:
    """Whether something can be given what it held before."""
    if isinstance(value, Tensor):
        return _is_small(value)
    return isinstance(value, (*CONTAINERS, numpy.ndarray))


def _is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= ATTRIBUTE_BYTES_MAX


def _read(value: Any) -> dict[Any, Any]:
    """Return what something holds now, by places."""
    if isinstance(value, Tensor):
        # What large ones hold is not compared: how often they were changed tells.
        return {VALUE: value.detach().clone() if _is_small(value) else value._version}  # noqa: SLF001
    if isinstance(value, numpy.ndarray):
        return {VALUE: value.copy(order="K")}
    if isinstance(value, dict):
        return dict(value.items())
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value, VALUE)
    slots = {name: getattr(value, name, NONE) for name in slots_of(type(value))}
    return {**slots, **getattr(value, "__dict__", {})}


def _write(value: Any, entries: dict[Any, Any]) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad(), plainly():
            value.detach().copy_(entries[VALUE])
    elif isinstance(value, numpy.ndarray):
        value[...] = entries[VALUE]
    else:
        # Past what classes of users make of it.
        kind: Any = next(kind for kind in CONTAINERS if isinstance(value, kind))
        kind.clear(value)
        if isinstance(value, list | deque):
            kind.extend(value, entries.values())
        else:
            kind.update(value, entries)


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    return {
        place: after.get(place, NONE)
        for place in [*after, *[one for one in before if one not in after]]
        if after.get(place, NONE) is not before.get(place, NONE)
    }


def _put(into: dict[Any, Any], changes: dict[Any, Any]) -> None:
    into.update({place: value for place, value in changes.items() if value is not NONE})
    for place in [place for place, value in changes.items() if value is NONE]:
        into.pop(place, None)


def _add(known: dict[Any, Any], changes: dict[Any, Any], where: str = "") -> None:
    for place, value in changes.items():
        # defence: what parts of a step change differently is an error
        if place in known and not is_same(known[place], value):
            raise UnsupportedError(
                f"the step of this optimizer sets {where}{place!r} to something else for some "
                f"parameters than for others ({known[place]!r} and {value!r}), "
                f"{ONE_AFTER_THE_OTHER}"
            )
        known[place] = value
