"""What a step changes besides parameters and state: options of groups, and attributes.

A step is run over one part of the parameters after the other. So each part begins with what there
was before the step, and what one part changes no other may change to something else: then all parts
together leave what one step over all parameters leaves, as a count of steps.
"""

from __future__ import annotations

import operator
import random
import reprlib
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
from ssdtrain.optimizer.options import of_classes, of_torch
from ssdtrain.optimizer.same import is_same, slots_of

__all__ = ["NAMES", "Followed", "Settings", "followed"]

NAMES = "param_names"
"""The option with a list of names, one for each parameter of the group."""

NONE = object()
"""What an attribute, or an entry, is that is not there."""
VALUE = "value"
"""The place of all that a tensor or an array holds."""
ORDER = object()
"""The place, among changes of a dict, of the order of the entries that it had before."""
FOR_EACH_PART = (
    "more than once, as it is run over one part of the parameters after the other; have it keep "
    "that in the state of each parameter (self.state[p]), or compute it outside of step()"
)
FOLLOWED_BYTES_MAX = 4 << 10
"""Of a tensor or an array that is given to each part of a step as it was before."""
CONTAINERS = (OrderedDict, dict, list, deque, set)
OPAQUE = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(nn.Module, Optimizer, random.Random),
)
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
        self._generators: list[tuple[torch.Generator, Tensor]] = []
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
            self._of_attributes.append(Followed(type(optimizer), "class"))
            found = [one for _, one in named if isinstance(one, torch.Generator)]
            self._generators = [(one, one.get_state()) for one in found]
        else:
            for name in now.keys() - self._before.keys():
                del vars(optimizer)[name]
            vars(optimizer).update(self._before)
        if group is not None and id(group) not in self._of_options:
            named = [(f"option {name!r}", one) for name, one in group.items() if name != "params"]
            self._of_options[id(group)] = followed(named)

    def undo(self, optimizer: Optimizer) -> None:
        """Give the optimizer and its groups what they had before the step."""
        self.begin(optimizer)
        for several in (self._of_attributes, *self._of_options.values()):
            for one in several:
                one.restore()
        for generator, state in self._generators:
            generator.set_state(state)

    def note(self, optimizer: Optimizer, group: dict[str, Any], after: dict[str, Any]) -> None:
        """Remember what a part has changed; raise ``UnsupportedError`` if others did otherwise.

        ``after`` is what the part had in the place of the group.
        """
        _, known = self._groups.setdefault(id(group), (group, {}))
        changes = _changed(group, after)
        for name in ("params", NAMES):
            changes.pop(name, None)
        _add(known, changes)
        _add(self._changes, _changed(self._before or {}, self._attributes(optimizer)))
        changed = [one.name for one in self._in_place(group) if one.note()]
        self.in_place.update(changed)
        # defence: what changes in place beside a backward is an error
        if changed and self._on_copies:
            raise UnsupportedError(
                f"the step of this optimizer has changed its {changed[0]} in place, in a copy, as "
                'its updates are made in a backward; use overlap="step"'
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

    def __init__(self, value: Any, name: str, *, is_watched: bool = False) -> None:
        self.name = name
        self._value = value
        self._is_watched = is_watched or not _is_restorable(value)
        """Whether it is not given what it held before, so that one part only may change it."""
        self._first = self._before = _read(value)
        self._changes: dict[Any, Any] = {}

    def note(self) -> bool:
        """Note what a part has changed, and give it what it held before; return whether it did.

        Raises ``UnsupportedError`` if others have changed it otherwise.
        """
        if _is_unchanged(self._value, self._before):
            return False
        now = _read(self._value)
        if self._is_watched:
            if self._before is not self._first:
                raise UnsupportedError(
                    f"the step of this optimizer changes what is in its {self.name} (a "
                    f"{type(self._value).__name__}) {FOR_EACH_PART}"
                )
            self._before = now
            return True
        changes = _changed_entries(self._before, now)
        _write(self._value, self._before)
        _add(self._changes, changes, f"in its {self.name} ")
        return True

    def restore(self) -> None:
        """Give it what it held before the step, also what cannot be given back to each part."""
        if not isinstance(self._value, Tensor | type) or _is_restorable(self._value):
            _write(self._value, self._first)
        self._before = self._first

    def apply(self) -> None:
        """Give it all that parts have changed."""
        if self._changes:
            changes = dict(self._changes)
            before = _entries(self._before)
            first = changes.pop(ORDER, ())
            entries = {place: before[place] for place in [*first, *before]}
            _put(entries, changes)
            _write(self._value, _of_entries(self._value, entries))


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
    address = value.__array_interface__["data"][0]
    reach = [(count - 1) * stride for count, stride in zip(value.shape, value.strides, strict=True)]
    before, after = (sum(one for one in reach if (one < 0) == is_before) for is_before in (1, 0))
    return address + before, address + after + value.itemsize


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return is_dense and tensor.is_cpu and not tensor.is_inference()


def followed(values: Iterable[tuple[str, Any]], memory: _Memory | None = None) -> list[Followed]:
    """Return all that may be changed in place of some values, and of what they contain."""
    found: list[Followed] = []
    known: set[int] = set()
    left = [(name, value, False) for name, value in values]
    while left:
        name, value, is_watched = left.pop()
        # A proxy whose object is gone raises at any other look.
        if id(value) in known or type(value) in ProxyTypes or isinstance(value, OPAQUE):
            continue
        known.add(id(value))
        if isinstance(value, Tensor | numpy.ndarray):
            if _is_followed(value) and not (memory is not None and memory.has(value)):
                found.append(Followed(value, name, is_watched=is_watched))
            continue
        if isinstance(value, CONTAINERS) and hasattr(value, "__dict__"):
            # What a class of a user has besides.
            found.append(Followed(vars(value), name, is_watched=is_watched))
        if isinstance(value, UserDict | UserList):
            value = value.data
        if isinstance(value, (*CONTAINERS, tuple)):
            within = value.values() if isinstance(value, dict) else value
            left += [(name, one, is_watched) for one in list(within)]
            if not isinstance(value, tuple):
                found.append(Followed(value, name, is_watched=is_watched))
        elif not is_watched and (hasattr(value, "__dict__") or slots_of(type(value))):
            found.append(Followed(value, name))
            # Others may use what an object has, so it is not touched.
            inside = list(_read(value).values())
            left += [(name, one, True) for one in inside if isinstance(one, CONTAINERS)]
    return found


def _is_followed(value: Tensor | numpy.ndarray) -> bool:
    if isinstance(value, Tensor):
        return _is_plain(value)
    return value.nbytes <= FOLLOWED_BYTES_MAX and not value.dtype.hasobject


def _is_restorable(value: Any) -> bool:
    """Whether something can be given what it held before, for each part of a step."""
    if isinstance(value, Tensor):
        return value.nbytes <= FOLLOWED_BYTES_MAX
    return isinstance(value, (*CONTAINERS, numpy.ndarray))


def _read(value: Any) -> Any:
    """Return what something holds now, in a plain container or a copy."""
    if isinstance(value, Tensor):
        # What large ones hold is not compared: how often they were changed tells.
        return value.detach().clone() if _is_restorable(value) else value._version  # noqa: SLF001
    if isinstance(value, numpy.ndarray):
        return value.copy(order="K")
    for kind, plain in ((dict, dict), ((list, deque), list), (set, set)):
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, type):
        return of_classes(value)
    slots = {name: getattr(value, name, NONE) for name in slots_of(type(value))}
    return {**slots, **getattr(value, "__dict__", {})}


def _is_unchanged(value: Any, before: Any) -> bool:
    """Whether something holds what it held: the same objects, if it is a container."""
    now: Any = value if isinstance(value, CONTAINERS) else _read(value)
    if isinstance(before, dict):
        is_alike = len(before) == len(now) and all(map(operator.is_, before, now))
        return is_alike and all(map(operator.is_, before.values(), now.values()))
    if isinstance(before, list):
        return len(before) == len(now) and all(map(operator.is_, before, now))
    return bool(before == now) if isinstance(before, set | int) else is_same(before, now)


def _entries(held: Any) -> dict[Any, Any]:
    """Return the result of a ``_read`` by places."""
    if isinstance(held, dict):
        return held
    if isinstance(held, list):
        return dict(enumerate(held))
    return dict.fromkeys(held, VALUE) if isinstance(held, set) else {VALUE: held}


def _of_entries(value: Any, entries: dict[Any, Any]) -> Any:
    if isinstance(value, dict | set):
        return entries
    return entries[VALUE] if isinstance(value, Tensor | numpy.ndarray) else list(entries.values())


def _changed_entries(before: Any, now: Any) -> dict[Any, Any]:
    if not isinstance(before, dict | list | set):
        return {VALUE: now}
    changes = _changed(_entries(before), _entries(now))
    if isinstance(before, dict):
        number_of = {place: number for number, place in enumerate(before)}
        order = [place for place in now if place in before]
        numbers = [number_of[place] for place in order]
        if numbers != sorted(numbers):
            changes[ORDER] = tuple(order)
    return changes


def _write(value: Any, held: Any) -> None:
    """Give something what a ``_read`` has returned, past what classes of users make of it."""
    if isinstance(value, Tensor):
        with torch.no_grad(), plainly():
            value.detach().copy_(held)
    elif isinstance(value, numpy.ndarray):
        value[...] = held
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), held)
    elif isinstance(value, deque):
        deque.clear(value)
        deque.extend(value, held)
    elif isinstance(value, set):
        set.intersection_update(value, held)
        set.update(value, held)
    elif isinstance(value, dict):
        _write_dict(value, held)
    else:
        slots = slots_of(type(value))
        for name in slots:
            if held[name] is not NONE:
                setattr(value, name, held[name])
        _write_dict(getattr(value, "__dict__", {}), {k: held[k] for k in held if k not in slots})


def _write_dict(value: dict[Any, Any], held: dict[Any, Any]) -> None:
    """Change what differs only: another thread may read the rest."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    both = [place for place in held if place in value]
    if not all(map(operator.is_, both, [place for place in value if place in held])):
        kind.clear(value)
    for place in [place for place in value if place not in held]:
        kind.__delitem__(value, place)
    for place, one in held.items():
        if place not in value or dict.__getitem__(value, place) is not one:
            kind.__setitem__(value, place, one)


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
                f"the step of this optimizer sets {where}{_told(place)} to something else for some "
                f"parameters than for others ({_told(known[place])} and {_told(value)}), and it is "
                "run over one part of them after the other; have it keep that in the state of "
                "each parameter (self.state[p]), or compute it outside of step()"
            )
        known[place] = value


def _told(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    if value is NONE or value is ORDER:
        return "nothing" if value is NONE else "the order"
    return reprlib.repr(value)
