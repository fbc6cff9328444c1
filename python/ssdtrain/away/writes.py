"""Writes of tensors that have left and are on their way to the disk."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ssdtrain.away.tensor import OffloadedTensor
from ssdtrain.errors import BusyError, NoSpaceError, SsdtrainError
from ssdtrain.machine.process_memory import FreedMemory
from ssdtrain.store import TensorStore

__all__ = ["Writes"]


class Writes:
    """Writes that have begun, in their order.

    ``ended`` is called with an entry whose bytes are on the disk, ``failed`` with an entry whose
    write has failed and the error.
    """

    def __init__(
        self,
        store: TensorStore,
        freed: FreedMemory,
        *,
        ended: Callable[[OffloadedTensor], None],
        failed: Callable[[OffloadedTensor, SsdtrainError], None],
    ) -> None:
        self._store = store
        self._queue: deque[OffloadedTensor] = deque()
        # Weak, as the methods' object has this one: a cycle would wait for the collector.
        self._ended = weakref.WeakMethod(ended)
        self._failed = weakref.WeakMethod(failed)
        self.freed = freed
        self.written_bytes = 0

    def __bool__(self) -> bool:
        """Return whether a write is under way."""
        return bool(self._queue)

    @property
    def nbytes(self) -> int:
        """The bytes that are free as soon as all these writes have ended."""
        return sum(entry.nbytes for entry in list(self._queue))

    def send(self, entry: OffloadedTensor) -> None:
        """Write the bytes of a tensor that has left, unless the disk has them already."""
        total = entry.checksum()
        if entry.sum == total:  # defence: a changed weight is written again
            entry.source = None
            return
        if entry.sum is None:
            # An interrupt or a failure may have left half a write there.
            entry.stored = None
        entry.sum = None
        while True:
            try:
                self._begin(entry)
            except SsdtrainError as error:
                if not self._can_try_again(entry, error):
                    self._fail(entry, error)
                    return
            else:
                break
        self.written_bytes += entry.nbytes
        self.add(entry, total)

    def lack(self, entry: OffloadedTensor) -> bool:
        """Return whether a tensor has left and an interrupt kept it from this queue."""
        return entry.source is not None and entry not in self._queue

    def add(self, entry: OffloadedTensor, total: int) -> None:
        """Add a write that has begun, of bytes with this checksum."""
        entry.written_sum = total
        self._queue.append(entry)

    def forget(self, entry: OffloadedTensor) -> None:
        """Wait no more for a write whose tensor is gone or whose bytes are out of date."""
        with suppress(ValueError):  # mostly it is not among them
            self._queue.remove(entry)

    def end_done(self) -> None:
        """Free the memory of all writes that have ended."""
        while self._queue:
            oldest = self._queue[0]
            if oldest.stored is not None and not oldest.stored.done():
                return
            self.end_oldest()

    def end_oldest(self) -> None:
        """Wait for the oldest write."""
        self.end(self._queue[0])

    def end_all(self) -> None:
        """Wait for all writes."""
        while self._queue:
            self.end_oldest()

    def end(self, entry: OffloadedTensor) -> None:
        """Wait for the write of a tensor, if it has one."""
        if entry not in self._queue:
            if entry.source is not None and entry.sum is None:
                # An interrupt may have left half a write there, which holds the memory.
                entry.stored = None
            return
        try:
            if entry.stored is not None:
                entry.stored.wait()
        except SsdtrainError as error:
            self.forget(entry)
            self._fail(entry, error)
            return
        entry.sum = entry.written_sum
        entry.source = None
        self.freed.note_freed(entry.nbytes)
        # Last: after an interrupt above it is still in the queue, and is ended again.
        self.forget(entry)
        ended = self._ended()
        if ended is not None:
            ended(entry)

    def _fail(self, entry: OffloadedTensor, error: SsdtrainError) -> None:
        failed = self._failed()
        if failed is not None:
            failed(entry, error)

    def _begin(self, entry: OffloadedTensor) -> None:
        assert entry.source is not None
        if entry.stored is None:
            entry.stored = self._store.write(entry.source)
        else:
            self._store.overwrite(entry.stored, entry.source)

    def _can_try_again(self, entry: OffloadedTensor, error: SsdtrainError) -> bool:
        """Make room for a write that the store refused; return whether that was possible."""
        if isinstance(error, BusyError | NoSpaceError) and self._queue:
            # A write that ends makes room in the queue, and gives its older extent back.
            self.end_oldest()
            return True
        if isinstance(error, NoSpaceError) and entry.stored is not None:
            # The newer bytes are in memory, so the older extent can be given back.
            entry.stored = None
            return True
        return False
