"""Tensors that have left and are on their way to the disk."""

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

    ``ended`` is called with one whose bytes are on the disk, ``failed`` with one that the disk
    did not take, and why.
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
        # Methods of who has this: without cycles all goes with the last of them.
        self._ended = weakref.WeakMethod(ended)
        self._failed = weakref.WeakMethod(failed)
        self.freed = freed
        self.written_bytes = 0

    def __bool__(self) -> bool:
        """Whether there are some."""
        return bool(self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes that are free as soon as these writes have ended."""
        return sum(one.nbytes for one in list(self._queue))

    def send(self, one: OffloadedTensor) -> None:
        """Have the disk take the bytes of one that has left, unless it has them already."""
        total = one.checksum()
        if one.sum == total:  # defence: a changed weight is written again
            one.source = None
            return
        if one.sum is None:
            # An interrupt or a failure left there what nobody knows.
            one.stored = None
        one.sum = None
        while True:
            try:
                self._begin(one)
            except SsdtrainError as error:
                if not self._can_try_again(one, error):
                    self._fail(one, error)
                    return
            else:
                break
        self.written_bytes += one.nbytes
        self.add(one, total)

    def lack(self, one: OffloadedTensor) -> bool:
        """Whether one has left and is not here, because of an interrupt in between."""
        return one.source is not None and one not in self._queue

    def add(self, one: OffloadedTensor, total: int) -> None:
        """Wait later for a write that has begun, of bytes with this checksum."""
        one.written_sum = total
        self._queue.append(one)

    def forget(self, one: OffloadedTensor) -> None:
        """Wait for one no more: it is gone, or what is written is out of date."""
        with suppress(ValueError):  # mostly it is not among them
            self._queue.remove(one)

    def end_done(self) -> None:
        """Let those go whose writes have ended."""
        while self._queue:
            oldest = self._queue[0]
            if oldest.stored is not None and not oldest.stored.done():
                return
            self.end_oldest()

    def end_oldest(self) -> None:
        """Wait for the one that was begun first."""
        self.end(self._queue[0])

    def end_all(self) -> None:
        """Wait for all."""
        while self._queue:
            self.end_oldest()

    def end(self, one: OffloadedTensor) -> None:
        """Wait for the write of one, if there is one."""
        if one not in self._queue:
            if one.source is not None and one.sum is None:
                # What an interrupt has left there may be half a write, which holds the memory.
                one.stored = None
            return
        try:
            if one.stored is not None:
                one.stored.wait()
        except SsdtrainError as error:
            self.forget(one)
            self._fail(one, error)
            return
        one.sum = one.written_sum
        one.source = None
        self.freed.note_freed(one.nbytes)
        # An interrupt above leaves it in the queue, and asks again.
        self.forget(one)
        ended = self._ended()
        if ended is not None:
            ended(one)

    def _fail(self, one: OffloadedTensor, error: SsdtrainError) -> None:
        failed = self._failed()
        if failed is not None:
            failed(one, error)

    def _begin(self, one: OffloadedTensor) -> None:
        assert one.source is not None
        if one.stored is None:
            one.stored = self._store.write(one.source)
        else:
            self._store.overwrite(one.stored, one.source)

    def _can_try_again(self, one: OffloadedTensor, error: SsdtrainError) -> bool:
        """Make what the store lacks, if that can be done."""
        if isinstance(error, BusyError | NoSpaceError) and self._queue:
            # One that ends makes room in the queue, and gives the place of its older bytes back.
            self.end_oldest()
            return True
        if isinstance(error, NoSpaceError) and one.stored is not None:
            # The bytes are in memory, so the older ones are of no use.
            one.stored = None
            return True
        return False
