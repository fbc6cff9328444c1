"""The disk of an optimizer's state: what is written, and what stands in its place meanwhile."""

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
        """What the store gave; ``None`` after a failed write."""
        self.source: Tensor | None = source
        """The tensor itself, until the disk has its bytes in whole; for good if that failed."""

    @property
    def brought_bytes(self) -> int:
        """How much memory it takes once it is back."""
        return self.nbytes if self.stored is None else max(self.nbytes, self.stored.slot_bytes)

    @property
    def is_in_memory(self) -> bool:
        """Whether the bytes are in memory, or on their way there."""
        return self.source is not None or self._pending is not None

    def prefetch(self) -> None:
        """Begin to read, unless the bytes are in memory still or on their way already."""
        if self.source is None and self._pending is None:
            assert self.stored is not None, "without a source the write has ended well"
            self._pending = self._disk.store.read(self.stored)

    def drop_read(self) -> None:
        """Forget a read that has begun: the next one asks the disk as it is then."""
        self._pending = None

    def end_write(self) -> None:
        """Wait for the write; a failed one keeps the tensor, and is said once."""
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
        """Return what is still to be written, or ``None``."""
        return None

    def settled(self) -> Away | Tensor:
        """Wait for the write; return this, or the tensor itself if it had to stay in memory."""
        self.end_write()
        return self if self.source is None else self.source

    def tensor(self) -> Tensor:
        """Wait for the tensor and return it; nothing of the disk uses its memory any more.

        Raises:
            StorageError: It could not be read.

        """
        began_s = perf_counter()
        source = self.source
        # The disk reads the memory until the write has ended; the caller may change it.
        self.end_write()
        if source is None:
            self.prefetch()
            assert self._pending is not None
            try:
                source = self._pending.result()
            finally:
                # A failed read may be asked for again, and its result belongs to the caller.
                self._pending = None
            self._disk.note_read(self.nbytes)
        self._disk.stall_s += perf_counter() - began_s
        return source

    @property
    def form(self) -> Tensor:
        """A tensor without bytes that has the shape, strides and dtype of this one."""
        return self._form

    def begin_look(self) -> Callable[[], Tensor]:
        """Begin to bring the bytes into memory, and return what waits for them.

        The tensor may be the one that is on its way to the disk: it must not be changed.
        """
        source = self.source
        if source is not None:
            return lambda: source
        assert self.stored is not None, "without a source the write has ended well"
        return self._disk.store.read(self.stored).result

    def copy(self) -> Tensor:
        """Return a tensor of its own with these bytes, which stay where they are."""
        if self.source is not None:
            with plainly():
                return self.source.clone()
        assert self.stored is not None
        return self._disk.store.read(self.stored).result()


class ShardAway(Away):
    """Stands in a state for a tensor in shards, of which this process has one on the disk."""

    __slots__ = ("_spec",)

    def __init__(self, disk: Disk, whole: Any) -> None:
        super().__init__(disk, None, own_shard(whole))
        self._spec = whole._spec  # noqa: SLF001 - the way of torch itself to make another such tensor

    def settled(self) -> Away | Tensor:
        """Wait for the write; return this, or the tensor itself if it had to stay in memory."""
        settled = super().settled()
        return settled if isinstance(settled, Away) else in_shards(settled, self._spec)

    def tensor(self) -> Tensor:
        """Wait for the shard, and return the tensor of which it is one."""
        return in_shards(super().tensor(), self._spec)

    def copy(self) -> Tensor:
        """Return a tensor of its own with a copy of the shard, which stays where it is."""
        return in_shards(super().copy(), self._spec)


class Disk:
    """The store, what is on its way there, and counts."""

    def __init__(self, store: TensorStore, *, in_flight_bytes_max: int, min_bytes: int) -> None:
        self.store = store
        self._in_flight: deque[tuple[Away, int]] = deque()
        """What is on its way, with the memory that it takes."""
        self._in_flight_bytes = 0
        self.in_flight_bytes_max = in_flight_bytes_max
        self.min_bytes = min_bytes
        self._freed = FreedMemory(in_flight_bytes_max)
        self.notices = Notices()
        self.read_bytes = 0
        self.written_bytes = 0
        self.stall_s = 0.0
        """Time in which an update waited for the disk."""
        self.failed_count = 0
        """Writes that failed, whose tensors stayed in memory."""
        self.give_up_undo: Callable[[SsdtrainError], bool] | None = None
        """Gives up the space that a way back takes; returns whether there was any."""

    def is_large(self, tensor: Tensor) -> bool:
        """Whether a tensor is worth its way to the disk and can be written as it is."""
        tensor = own_shard(tensor)
        return (
            type(tensor) in (Tensor, Parameter, AwayParameter)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
        )

    def keep(self, source: Tensor) -> StoredTensor[Tensor]:
        """Begin to write a copy of a tensor, which must not change before its ``wait``."""
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
        """Whether a value of a state is worth its way to the disk and can go there."""
        value = own_shard(value)
        return (
            type(value) is Tensor
            and value.is_cpu
            and value.layout is torch.strided
            and not value.requires_grad
            and value.nbytes >= self.min_bytes
            # A view of the parameter, say: on its return it would be one no more.
            and storage_users(value) == STORAGE_USERS_ALONE
        )

    def send(
        self,
        source: Tensor,
        older: dict[Any, StoredTensor[Tensor]],
        key: Any,
        away: Away | None = None,
    ) -> Away | None:
        """Begin to write a tensor, over its older bytes; ``None`` if it has to stay.

        ``away`` stands for it already, if it is given. The older bytes stay on the disk until the
        new ones are there in whole.
        """
        # Not as an argument, which the caller may hold, too: their space is free as soon as nobody
        # has them.
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
                # The optimizer gave it another shape: the older bytes are of no use.
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
                    # The tensor is in memory, so its older bytes are of no use: take their place.
                    stored = None
                    continue
                self.note_failure(error)
                return None
            away = away or Away(self, stored, source)
            away.stored = stored
            nbytes = away.brought_bytes
            self._in_flight.append((away, nbytes))
            self._in_flight_bytes += nbytes
            self.written_bytes += away.nbytes
            return away

    @property
    def being_written_bytes(self) -> int:
        """What is in memory because its write has not ended, or nobody has looked since."""
        entries = (one for one, _ in list(self._in_flight))
        return sum(
            one.nbytes for one in entries if one.source is not None and one.stored is not None
        )

    @property
    def in_flight_bytes(self) -> int:
        """What is on its way to the disk, and so in memory."""
        return self._in_flight_bytes

    def make_room(self, bytes_max: int | None = None) -> None:
        """Wait until no more is on its way to the disk than the bound, or than is given."""
        self._settle(self.in_flight_bytes_max if bytes_max is None else max(0, bytes_max))

    def flush(self) -> None:
        """Wait until all that is on its way is there."""
        self._settle(0)

    def note_read(self, nbytes: int) -> None:
        """Count what was read back for an update."""
        self.read_bytes += nbytes
        self._freed.note_read(nbytes)

    def note_failure(self, error: SsdtrainError) -> None:
        """Count a tensor that stays in memory because the disk did not take it; say it once."""
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
        """Wait for a write if there is no room: one that ends gives its older bytes' place back."""
        if not isinstance(error, NoSpaceError) or not self._in_flight:
            return False
        self._end_oldest()
        return True

    def _settle(self, bytes_max: int) -> None:
        began_s = perf_counter()
        while self._in_flight_bytes > bytes_max or (self._in_flight and bytes_max == 0):
            self._end_oldest()
        self.stall_s += perf_counter() - began_s

    def _end_oldest(self) -> None:
        oldest, nbytes = self._in_flight[0]
        oldest.end_write()
        # An interrupt above leaves it in the queue, and asks again.
        self._in_flight.popleft()
        self._in_flight_bytes -= nbytes
        self._freed.note_freed(oldest.nbytes)
