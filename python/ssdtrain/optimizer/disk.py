"""Reads and writes of an optimizer's state, and the entries of tensors that are away."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.away.classes import AwayParameter
from ssdtrain.errors import BusyError, ConfigError, NoSpaceError, SsdtrainError
from ssdtrain.machine.process_memory import FreedMemory
from ssdtrain.machine.torch_internals import (
    STORAGE_USERS_ALONE,
    in_shards,
    own_shard,
    plainly,
    storage_users,
)
from ssdtrain.notices import Notices
from ssdtrain.store import PendingRead, StoredTensor, TensorStore
from ssdtrain.watched import look_at

__all__ = ["Away", "Disk", "ShardAway"]


class Away:
    """Stands in a state for a tensor that is on the disk, or on its way there."""

    __slots__ = ("_disk", "_form", "_pending", "nbytes", "source", "stored")

    def __init__(self, disk: Disk, stored: StoredTensor[Tensor] | None, source: Tensor) -> None:
        self._disk = disk
        self._pending: PendingRead[Tensor] | None = None
        self._form = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device="meta"
        )
        self.nbytes = source.nbytes
        self.stored = stored
        """The place on the disk; ``None`` after a failed write."""
        self.source: Tensor | None = source
        """The tensor itself, until its write has ended; for good if the write fails."""

    @property
    def brought_bytes(self) -> int:
        """The memory that the tensor takes once it is back."""
        return self.nbytes if self.stored is None else max(self.nbytes, self.stored.slot_bytes)

    @property
    def is_in_memory(self) -> bool:
        """True if the bytes are in memory, or a read of them is under way."""
        return self.source is not None or self._pending is not None

    def prefetch(self) -> None:
        """Begin to read, if the bytes are not in memory."""
        if self.source is None and self._pending is None:
            assert self.stored is not None, "without a source the write has ended well"
            self._pending = self._disk.store.read(self.stored)

    def drop_read(self) -> None:
        """Forget a read that has begun; the next use reads again."""
        self._pending = None

    def end_write(self) -> None:
        """Wait for the write; after a failed write the tensor stays in memory."""
        if self.source is None or self.stored is None:
            return
        try:
            self.stored.wait()
        except SsdtrainError as error:
            self.stored = None
            self._disk.note_failure(error)
        else:
            self.source = None

    def unsent(self) -> Tensor | None:
        """Return bytes that were never written, or ``None``."""
        return None

    def settled(self) -> Away | Tensor:
        """Wait for the write; return this, or the tensor itself if the write failed."""
        self.end_write()
        return self if self.source is None else self.source

    def tensor(self) -> Tensor:
        """Return the tensor, once no read or write uses its memory.

        Raises:
            StorageError: The read failed.

        """
        began_s = perf_counter()
        source = self.source
        # Until then the kernel reads the memory, which the caller may change.
        self.end_write()
        if source is None:
            self.prefetch()
            assert self._pending is not None
            try:
                source = self._pending.result()
            finally:
                # The next call reads again after a failure.
                self._pending = None
            self._disk.note_read(self.nbytes)
        self._disk.stall_s += perf_counter() - began_s
        return source

    @property
    def form(self) -> Tensor:
        """A tensor without bytes that has the shape, strides and dtype of this one."""
        return self._form

    def begin_look(self) -> Callable[[], Tensor]:
        """Begin to read, and return a function that waits for the tensor.

        A write of the tensor may be under way: the caller must not change it.
        """
        source = self.source
        if source is not None:
            return lambda: source
        assert self.stored is not None, "without a source the write has ended well"
        return self._disk.store.read(self.stored).result

    def copy(self) -> Tensor:
        """Return a copy of the tensor; the bytes on the disk stay there."""
        if self.source is not None:
            with plainly():
                return self.source.clone()
        assert self.stored is not None
        return self._disk.store.read(self.stored).result()


class ShardAway(Away):
    """Stands in a state for a ``DTensor`` whose shard of this process is on the disk."""

    __slots__ = ("_spec",)

    def __init__(self, disk: Disk, whole: Any) -> None:
        super().__init__(disk, None, own_shard(whole))
        self._spec = whole._spec  # noqa: SLF001 - torch itself makes similar tensors from it

    def settled(self) -> Away | Tensor:
        """Wait for the write; return this, or the tensor itself if the write failed."""
        settled = super().settled()
        return settled if isinstance(settled, Away) else in_shards(settled, self._spec)

    def tensor(self) -> Tensor:
        """Return the ``DTensor``, once no read or write uses the memory of its shard."""
        return in_shards(super().tensor(), self._spec)

    def copy(self) -> Tensor:
        """Return a ``DTensor`` with a copy of the shard."""
        return in_shards(super().copy(), self._spec)


class Disk:
    """The store of an optimizer's state, its writes under way, and counts."""

    def __init__(self, store: TensorStore, *, in_flight_bytes_max: int, min_bytes: int) -> None:
        self.store = store
        self._in_flight: deque[tuple[Away, int]] = deque()
        """Entries whose writes are under way, with the memory that they take."""
        self.in_flight_bytes = 0
        """Memory of the writes under way."""
        self.in_flight_bytes_max = in_flight_bytes_max
        self.min_bytes = min_bytes
        self._freed = FreedMemory(in_flight_bytes_max)
        self.notices = Notices()
        self.read_bytes = 0
        self.written_bytes = 0
        self.stall_s = 0.0
        """Time in which updates waited for the disk."""
        self.failed_count = 0
        """Failed writes."""
        self.give_up_undo: Callable[[SsdtrainError], bool] | None = None
        """Gives back the space of the undo log; returns whether there was a log."""

    def is_large(self, tensor: Tensor) -> bool:
        """Return whether a tensor is plain, dense, on the CPU, and of ``min_bytes`` or more."""
        tensor = own_shard(tensor)
        return (
            type(tensor) in (Tensor, Parameter, AwayParameter)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
        )

    def keep(self, source: Tensor) -> StoredTensor[Tensor]:
        """Begin to write a tensor, which must not change before the ``wait`` of the result."""
        look_at(source)
        while True:
            try:
                stored = self.store.write(source)
            except BusyError:
                if not self._in_flight:
                    raise
                self._end_oldest()
                continue
            self.written_bytes += source.nbytes
            return stored

    def takes(self, value: object) -> bool:
        """Return whether a value of a state is a plain large tensor with memory of its own."""
        value = own_shard(value)
        return (
            type(value) is Tensor
            and value.is_cpu
            and value.layout is torch.strided
            and not value.requires_grad
            and value.nbytes >= self.min_bytes
            # A view, of the parameter say, would come back as a copy.
            and storage_users(value) == STORAGE_USERS_ALONE
        )

    def send(
        self,
        source: Tensor,
        older: dict[Any, StoredTensor[Tensor]],
        key: Any,
        away: Away | None = None,
    ) -> Away | None:
        """Begin to write a tensor in the place ``older[key]``, and return its entry.

        Returns ``None`` if the tensor has to stay in memory. ``away`` is its entry, if it has one.
        The older bytes stay on the disk until the new ones are whole.
        """
        # No other reference to the older place: its space is free once the last one is gone.
        stored = older.pop(key, None)
        while True:
            try:
                if stored is None:
                    stored = self.store.write(source)
                else:
                    self.store.overwrite(stored, source)
            except ConfigError:
                if stored is None:
                    raise
                # The optimizer gave the tensor another shape.
                stored = None
                continue
            except BusyError as error:
                if self._in_flight:
                    self._end_oldest()
                    continue
                self.note_failure(error)
                return None
            except SsdtrainError as error:
                if self._has_made_space(error) or self._has_ended_a_write(error):
                    continue
                if isinstance(error, NoSpaceError) and stored is not None:
                    # The tensor is in memory: give up its older bytes for it.
                    stored = None
                    continue
                self.note_failure(error)
                return None
            away = away or Away(self, stored, source)
            away.stored = stored
            nbytes = away.brought_bytes
            self._in_flight.append((away, nbytes))
            self.in_flight_bytes += nbytes
            self.written_bytes += away.nbytes
            return away

    def make_room(self, bytes_max: int | None = None) -> None:
        """Wait until writes under way take at most ``bytes_max``, or the bound."""
        self._settle(self.in_flight_bytes_max if bytes_max is None else max(0, bytes_max))

    def flush(self) -> None:
        """Wait for all writes."""
        self._settle(0)

    def note_read(self, nbytes: int) -> None:
        """Count bytes that were read for an update."""
        self.read_bytes += nbytes
        self._freed.note_read(nbytes)

    def note_failure(self, error: SsdtrainError) -> None:
        """Count a failed write, whose tensor stays in memory, and log the first one."""
        self.failed_count += 1
        self._has_made_space(error)
        self.notices.say(
            "failed write",
            "the state of an optimizer stays in memory, because the disk did not take it; training "
            "goes on, and the next step tries again: %s",
            error,
        )

    def _has_made_space(self, error: SsdtrainError) -> bool:
        return (
            isinstance(error, NoSpaceError)
            and self.give_up_undo is not None
            and self.give_up_undo(error)
        )

    def _has_ended_a_write(self, error: SsdtrainError) -> bool:
        """Wait for a write if the disk is full: its end frees the place of older bytes."""
        if not isinstance(error, NoSpaceError) or not self._in_flight:
            return False
        self._end_oldest()
        return True

    def _settle(self, bytes_max: int) -> None:
        began_s = perf_counter()
        while self.in_flight_bytes > bytes_max or (self._in_flight and bytes_max == 0):
            self._end_oldest()
        self.stall_s += perf_counter() - began_s

    def _end_oldest(self) -> None:
        oldest, nbytes = self._in_flight[0]
        oldest.end_write()
        # After an interrupt above, it is in the queue still.
        self._in_flight.popleft()
        self.in_flight_bytes -= nbytes
        self._freed.note_freed(oldest.nbytes)
