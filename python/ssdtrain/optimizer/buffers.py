"""The memory that updates take, in the bound of a session if there is one.

A step reserves room before its first part, so a bound that is too small stops it before any change.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import ConfigError
from ssdtrain.machine.torch_internals import memory_bytes, own_shard
from ssdtrain.optimizer.chunks import name_of
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.masters import WORKING_BYTES, wants_master
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.residency import UNLIMITED_BYTES
from ssdtrain.sharing import Budget, Figures, Room, Tenant
from ssdtrain.sizes import shown_bytes

__all__ = ["NAME", "Buffers", "bytes_of", "part_of", "refuse_small_bound", "within"]

NAME = "optimizer state"
"""The name in the report of a session."""
BUFFER_PARTS = 4
"""One part is updated, one read, one written; the fourth is for parts of uneven sizes."""
BOUND_PARTS = 4
"""The buffer takes at most a quarter of a session's bound: the rest is for activations."""
MASTER_BYTES = 2
"""Stored bytes of each number of a master."""
WIDENING_BYTES = 64 << 10
"""An upper bound on the bytes by which reads for one parameter grow to whole disk blocks."""
WANTED = "an update of the optimizer, whose state shares this bound,"


def bytes_of(param: Tensor, state: Any, state_share: float, *, has_masters: bool) -> int:
    """Return the memory of a parameter's update besides weight and gradient, in bytes.

    Without a state yet, its size is ``state_share`` times that of the parameter or master.
    """
    has_master = has_masters and wants_master(param)
    working = WORKING_BYTES * param.numel() if has_master else 0
    param = own_shard(param)
    if isinstance(state, dict) and len(state):
        return working + sum(map(_brought_bytes, list(dict.values(state))))
    stored = MASTER_BYTES * param.numel() if has_master else 0
    updated = 4 * param.numel() if has_master else param.nbytes
    return working + stored + math.ceil(state_share * updated)


def _brought_bytes(value: Any) -> int:
    if isinstance(value, Away):
        return value.brought_bytes
    # Sparse tensors stay in memory, as do other values.
    is_brought = isinstance(value, Tensor) and value.layout is torch.strided
    return memory_bytes(value) if is_brought else 0


def within(buffer_bytes: int, budget: Budget | None) -> int:
    """Return the memory that updates may use; a single large parameter may take more."""
    left_bytes = None if budget is None else budget.left_bytes
    return buffer_bytes if left_bytes is None else min(buffer_bytes, left_bytes // BOUND_PARTS)


def refuse_small_bound(
    optimizer: Optimizer, budget: Budget | None, state_share: float, *, has_masters: bool
) -> None:
    """Raise ``ConfigError`` if the update of one parameter takes more than the bound leaves."""
    limit_bytes = None if budget is None else budget.limit_bytes
    left_bytes = None if budget is None else budget.left_bytes
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if limit_bytes is None or left_bytes is None or not params:
        return
    standing_bytes = limit_bytes - left_bytes

    def size(param: Tensor) -> int:
        state = optimizer.state.get(param)
        return WIDENING_BYTES + bytes_of(param, state, state_share, has_masters=has_masters)

    largest = max(params, key=size)
    if size(largest) > left_bytes:
        aside = (
            f", of which {shown_bytes(standing_bytes)} are for weights," if standing_bytes else ""
        )
        raise ConfigError(
            f"max_resident_bytes={limit_bytes} ({shown_bytes(limit_bytes)}) of this session{aside} "
            f"is too small for an update of {name_of(optimizer.param_groups, largest)}, which "
            f"brings up to {shown_bytes(size(largest))} of state into memory at once; raise it to "
            f"at least {standing_bytes + size(largest)} and what the activations need meanwhile, "
            "or give offload_optimizer a directory in the place of the session: then its state "
            "does not count there"
        )


def part_of(buffer_bytes: int) -> int:
    """Return the share of a buffer for the state of one part, in bytes."""
    return max(1, buffer_bytes // BUFFER_PARTS)


class Buffers(Tenant):
    """The memory of one optimizer's updates, and its figures in the report of a session."""

    name = NAME

    def __init__(
        self, optimizer: Optimizer, disk: Disk, budget: Budget | None, buffer_bytes: int
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._disk = disk
        self._budget = budget
        self._buffer_bytes = buffer_bytes
        self.part_bytes = part_of(buffer_bytes)
        """Bytes of state in one part of the parameters."""

    @property
    def is_bounded(self) -> bool:
        """True if updates count in the bound of a session."""
        return self._budget is not None and self._budget.limit_bytes is not None

    def figures(self) -> Figures:
        """Return the figures of this moment, on any thread."""
        optimizer, disk = self._optimizer(), self._disk
        states = {} if optimizer is None else vars(optimizer).get("state", {})
        found = [one for one in list(dict.values(states)) if isinstance(one, ParameterState)]
        sizes = [one.nbytes() for one in found]
        return Figures(
            resident_bytes=sum(resident for resident, _ in sizes),
            on_disk_bytes=sum(on_disk for _, on_disk in sizes),
            bytes_written=disk.written_bytes,
            bytes_read=disk.read_bytes,
            stall_s=disk.stall_s,
        )

    def reserve(self, sizes: Iterable[int]) -> Room:
        """Reserve room for updates of parts of these sizes, one after the other.

        Raises ``BudgetError`` if the largest finds none.
        """
        if self._budget is None or not self.is_bounded:
            return Room(UNLIMITED_BYTES)
        sizes = list(sizes)
        least = max(sizes, default=0)
        most = max(least, min(self._buffer_bytes, sum(sizes)))
        return self._budget.reserve(least, most, lambda: WANTED)

    @contextmanager
    def filled(self, room: Room) -> Iterator[None]:
        """Use a room in this thread; at the end, wait for writes and give the room back."""
        room.fill_here()
        try:
            yield
            if room.is_bounded:
                self._disk.flush()
        finally:
            room.end()

    def try_to_reserve(self, nbytes: int) -> Room | None:
        """Reserve room for one part, or return ``None`` if there is not enough now."""
        if self._budget is None:
            return Room(UNLIMITED_BYTES)
        return self._budget.try_to_reserve(nbytes)

    def begin(self, room: Room, nbytes: int) -> None:
        """Wait for writes until a part of this size fits."""
        self._disk.make_room(room.nbytes - nbytes)

    def fits(self, room: Room, *sizes: int) -> bool:
        """Return whether parts of these sizes fit beside the writes under way."""
        return self._disk.in_flight_bytes + sum(sizes) <= room.nbytes

    def note(self, room: Room, *sizes: int) -> None:
        """Note the memory in use: a first step may make more state than expected."""
        room.note(self._disk.in_flight_bytes + sum(sizes))
