"""Dicts for the state of an optimizer: a tensor on the disk comes back when code asks for it.

The entry of such a tensor is an ``Away``; every way to a value returns the tensor.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, SupportsIndex

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ssdtrain.machine.torch_internals import (
    clone_of,
    is_in_shards,
    memory_bytes,
    own_shard,
    plainly,
)
from ssdtrain.optimizer.disk import Away, Disk, ShardAway
from ssdtrain.store import StoredTensor

__all__ = ["ParameterState", "States"]

_ALONE = {0: object()}
REFERENCES_ALONE = sys.getrefcount(dict.__getitem__(_ALONE, 0))
"""The reference count of a value that only its dict has, counted as below."""


class ParameterState(dict[Any, Any]):
    """The state of one parameter."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._stored: dict[Any, StoredTensor[Tensor]] = {}
        """The places on the disk where each tensor was written last; the next write reuses them."""

    def bring(self) -> None:
        """Have every tensor in memory."""
        for key in super().__iter__():
            self[key]

    def prefetch(self) -> None:
        """Begin to read what is on the disk."""
        for value in super().values():
            if isinstance(value, Away):
                value.prefetch()

    def drop_reads(self) -> None:
        """Forget reads that have begun, which may have failed long ago."""
        for value in super().values():
            if isinstance(value, Away):
                value.drop_read()

    def send(self, disk: Disk) -> None:
        """Begin to write the large tensors to the disk."""
        for key in self._stored.keys() - super().keys():
            del self._stored[key]
        for key in list(super().__iter__()):
            entry = super().__getitem__(key)
            if isinstance(entry, Away):
                payload = entry.unsent()
                if payload is not None:
                    disk.send(payload, self._stored, key, entry)
                    if entry.stored is not None:
                        self._stored[key] = entry.stored
                continue
            if sum(map(memory_bytes, _tensors_in(entry))) >= disk.min_bytes:
                disk.notices.say(
                    f"nested state {key!r}",
                    "the optimizer state %r stays in memory: its tensors are in a %s, and only "
                    "those that are in the state itself go to the disk",
                    key,
                    type(entry).__name__,
                )
            del entry
            if self.may_leave(key, disk):
                value = super().__getitem__(key)
                entry = ShardAway(disk, value) if is_in_shards(value) else None
                away = disk.send(own_shard(value), self._stored, key, entry)
                del value
                if away is not None and away.stored is not None:
                    self._stored[key] = away.stored
                    super().__setitem__(key, away)

    def may_leave(self, key: Any, disk: Disk) -> bool:
        """Return whether a value is large and plain, and only this dict has it."""
        return (
            super().__contains__(key)
            and self._is_held_alone(key)
            and disk.takes(super().__getitem__(key))
        )

    def take_entries(self) -> dict[Any, Any]:
        """Return the entries as they are, once their writes have ended.

        The bytes of each ``Away`` stay on the disk: later writes go to other places.
        """
        self._stored.clear()
        entries = {}
        for key, value in super().items():
            entries[key] = value.settled() if isinstance(value, Away) else value
        return entries

    def put_entries(self, entries: dict[Any, Any]) -> None:
        """Replace all entries."""
        super().clear()
        super().update(entries)
        self._stored = {
            key: value.stored
            for key, value in entries.items()
            if isinstance(value, Away) and value.stored is not None
        }

    def _is_held_alone(self, key: Any) -> bool:
        """Return whether no other code has this tensor, which would look at it while it is away."""
        if sys.getrefcount(super().__getitem__(key)) > REFERENCES_ALONE:
            return False
        # Other code may have the shard of a `DTensor` alone (`to_local`).
        return sys.getrefcount(own_shard(super().__getitem__(key))) <= REFERENCES_ALONE

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of tensors in memory, and of those on the disk only."""
        resident = on_disk = 0
        # A copy: another thread may look while one updates.
        for value in list(super().values()):
            if isinstance(value, Away) and not value.is_in_memory:
                on_disk += value.nbytes
            elif isinstance(value, Tensor | Away):
                resident += value.nbytes if isinstance(value, Away) else memory_bytes(value)
            else:
                resident += sum(map(memory_bytes, _tensors_in(value)))
        return resident, on_disk

    def copied(self) -> dict[Any, Any]:
        """Return a plain dict with copies of all tensors; tensors on the disk stay there."""
        return {key: tree_map(_copy_of, value) for key, value in super().items()}

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Away):
            tensor = value.tensor()
            if value.stored is None:
                self._stored.pop(key, None)
            super().__setitem__(key, tensor)
            return tensor
        return value

    # Every other way to a value goes through `__getitem__`. With an `__iter__` of its own,
    # `dict(state)` and `{**state}` do so too.

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value."""
        return self[key] if super().__contains__(key) else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a value, or put one there."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a value out."""
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Take the last entry out."""
        self.bring()
        return super().popitem()

    def items(self) -> Any:
        """Bring all tensors back, and return a view."""
        self.bring()
        return super().items()

    def values(self) -> Any:
        """Bring all tensors back, and return a view."""
        self.bring()
        return super().values()

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict with all tensors in memory."""
        return dict(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # `torch.load(weights_only=True)` rebuilds an OrderedDict, and refuses a call of `dict`.
        return OrderedDict, (), None, None, iter(self.items())


def _copy_of(value: Any) -> Any:
    if isinstance(value, Away):
        return value.copy()
    if not isinstance(value, Tensor):
        return value
    with plainly():
        return clone_of(value)


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a container."""
    leaves = [] if isinstance(value, Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class States(defaultdict[Any, Any]):
    """The states of all parameters, by parameter."""

    def __init__(self, states: dict[Any, Any]) -> None:
        """Take over states, plain dicts among them."""
        super().__init__(ParameterState)
        for key, state in states.items():
            self[key] = ParameterState(state) if type(state) is dict else state

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))
