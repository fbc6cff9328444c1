"""Weights that have left and are on their way to the disk."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ssdtrain.errors import BusyError, NoSpaceError, SsdtrainError
from ssdtrain.parameters.weight import Weight
from ssdtrain.store import TensorStore

__all__ = ["Writes"]


class Writes:
    """Writes that have begun, in their order.

    ``ended`` is called with a weight whose bytes are on the disk, ``failed`` with one that the disk
    did not take, and why.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        ended: Callable[[Weight], None],
        failed: Callable[[Weight, SsdtrainError], None],
    ) -> None:
        self._store = store
        self._queue: deque[Weight] = deque()
        # Methods of who has this: without cycles all goes with the last weight.
        self._ended = weakref.WeakMethod(ended)
        self._failed = weakref.WeakMethod(failed)
        self.written_bytes = 0

    def __bool__(self) -> bool:
        """Whether there are some."""
        return bool(self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes that are free as soon as these writes have ended."""
        return sum(weight.nbytes for weight in self._queue)

    def send(self, weight: Weight) -> None:
        """Have the disk take the bytes of a weight that has left, unless it has them already."""
        total = weight.checksum()
        if weight.sum == total:  # defence: a changed weight is written again
            weight.source = None
            return
        if weight.sum is None:
            # An interrupt or a failure left there what nobody knows.
            weight.stored = None
        weight.sum = None
        while True:
            try:
                self._begin(weight)
            except SsdtrainError as error:
                if not self._can_try_again(weight, error):
                    self._fail(weight, error)
                    return
            else:
                break
        self.written_bytes += weight.nbytes
        self.add(weight, total)

    def lack(self, weight: Weight) -> bool:
        """Whether a weight has left and is not here, because of an interrupt in between."""
        return weight.source is not None and weight not in self._queue

    def add(self, weight: Weight, total: int) -> None:
        """Wait later for a write that has begun, of bytes with this checksum."""
        weight.written_sum = total
        self._queue.append(weight)

    def forget(self, weight: Weight) -> None:
        """Wait for a weight no more: it is gone, or what is written is out of date."""
        with suppress(ValueError):  # mostly it is not among them
            self._queue.remove(weight)

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

    def end(self, weight: Weight) -> None:
        """Wait for the write of one, if there is one."""
        if weight not in self._queue:
            if weight.source is not None and weight.sum is None:
                # What an interrupt has left there may be half a write, which holds the memory.
                weight.stored = None
            return
        try:
            if weight.stored is not None:
                weight.stored.wait()
        except SsdtrainError as error:
            self._queue.remove(weight)
            self._fail(weight, error)
            return
        weight.sum = weight.written_sum
        weight.source = None
        # An interrupt above leaves it in the queue, and asks again.
        self._queue.remove(weight)
        ended = self._ended()
        if ended is not None:
            ended(weight)

    def _fail(self, weight: Weight, error: SsdtrainError) -> None:
        failed = self._failed()
        if failed is not None:
            failed(weight, error)

    def _begin(self, weight: Weight) -> None:
        assert weight.source is not None
        if weight.stored is None:
            weight.stored = self._store.write(weight.source)
        else:
            self._store.overwrite(weight.stored, weight.source)

    def _can_try_again(self, weight: Weight, error: SsdtrainError) -> bool:
        """Make what the store lacks, if that can be done."""
        if isinstance(error, BusyError | NoSpaceError) and self._queue:
            # One that ends makes room in the queue, and gives the place of its older bytes back.
            self.end_oldest()
            return True
        if isinstance(error, NoSpaceError) and weight.stored is not None:
            # The bytes are in memory, so the older ones are of no use.
            weight.stored = None
            return True
        return False
