"""The state of an optimizer whose large tensors may be on the disk: dicts that bring them back.

What is in a dict is the truth: a tensor that lies in memory, or in its place an `Away`, which says
where the bytes are. Whoever asks a dict for a value gets a tensor, never an `Away`, so that an
update, a look from outside, a copy and a pickle cannot see a state that is not there.
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
"""What Python counts for a value that only its dict has, asked as below."""


class ParameterState(dict[Any, Any]):
    """The state of one parameter: a dict whose tensors come back when somebody asks for them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._stored: dict[Any, StoredTensor[Tensor]] = {}
        """Where the bytes of each tensor were written last, to be overwritten."""

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
        """Forget what was prefetched, which may have failed long ago."""
        for value in super().values():
            if isinstance(value, Away):
                value.drop_read()

    def send(self, disk: Disk) -> None:
        """Let what is large enough go to the disk."""
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
        """Whether a value is worth its way to the disk, and nobody else has it."""
        return (
            super().__contains__(key)
            and self._is_held_alone(key)
            and disk.takes(super().__getitem__(key))
        )

    def take_entries(self) -> dict[Any, Any]:
        """Return what lies in the dict, without bringing it back, and leave it to the caller.

        Each `Away` among it is on the disk in whole, and its bytes stay there: what is sent next
        goes to another place.
        """
        self._stored.clear()
        entries = {}
        for key, value in super().items():
            entries[key] = value.settled() if isinstance(value, Away) else value
        return entries

    def put_entries(self, entries: dict[Any, Any]) -> None:
        """Replace all that lies in the dict."""
        super().clear()
        super().update(entries)
        self._stored = {
            key: value.stored
            for key, value in entries.items()
            if isinstance(value, Away) and value.stored is not None
        }

    def _is_held_alone(self, key: Any) -> bool:
        """Whether nobody else has this very object, who could look at it while it is away."""
        if sys.getrefcount(super().__getitem__(key)) > REFERENCES_ALONE:
            return False
        # Of a tensor in shards somebody may have the shard alone (`to_local`).
        return sys.getrefcount(own_shard(super().__getitem__(key))) <= REFERENCES_ALONE

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of its tensors: those in memory, and those on the disk only."""
        resident = on_disk = 0
        # A copy: another thread may look while one updates.
        for value in list(super().values()):
            if isinstance(value, Away) and not value.is_in_memory:
                on_disk += value.nbytes
            elif isinstance(value, Tensor | Away):
                resident += value.nbytes if isinstance(value, Away) else memory_bytes(value)
        return resident + self.nested_bytes(), on_disk

    def nested_bytes(self) -> int:
        """Return the bytes of tensors in containers, which stay in memory."""
        values = list(super().values())
        return sum(memory_bytes(tensor) for value in values for tensor in _tensors_in(value))

    def small_bytes(self, disk: Disk) -> int:
        """Return the bytes of its tensors that are too small for the disk."""
        tensors = [value for value in list(super().values()) if isinstance(value, Tensor)]
        sizes = map(memory_bytes, tensors)
        return sum(nbytes for nbytes in sizes if nbytes < disk.min_bytes)

    def copied(self) -> dict[Any, Any]:
        """Return a plain dict with copies of all tensors; what is on the disk stays there."""
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

    # What follows leads every other way to a value past `__getitem__`; `__iter__` does so for
    # `dict(state)` and `{**state}`, which would else copy the entries as they lie there.

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, brought back if it was away."""
        return self[key] if super().__contains__(key) else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a value, brought back if it was away, or put one there."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a value out, brought back if it was away."""
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        """Take the last entry out."""
        self.bring()
        return super().popitem()

    def items(self) -> Any:
        """Bring everything back, and show it."""
        self.bring()
        return super().items()

    def values(self) -> Any:
        """Bring everything back, and show it."""
        self.bring()
        return super().values()

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict with everything in memory."""
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
        # A class that `torch.load` takes without further questions; `dict` itself is none.
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
    """The states of all parameters, as an optimizer looks them up."""

    def __init__(self, states: dict[Any, Any]) -> None:
        """Take over states, of which those in plain dicts lie in memory."""
        super().__init__(ParameterState)
        for key, state in states.items():
            self[key] = ParameterState(state) if type(state) is dict else state

    def put_last(self, keys: list[Any]) -> None:
        """Give those of these keys that are there the last places, in this order."""
        for key in keys:
            if key in self:
                self[key] = self.pop(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))
