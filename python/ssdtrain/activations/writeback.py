"""One record per saved storage and version: when its write begins, when its memory is freed.

The gate. An operation may save a tensor before it has filled it (``rrelu`` does), so no byte may be
read while its node is being made. Autograd numbers nodes per thread; once this thread sees a larger
number at a later pack, or runs a backward, the node has been passed and the write may begin.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter

from torch import Tensor, UntypedStorage

from ssdtrain.activations.saved_tensor import Geometry, Loading, Record, SavedTensor, root_of
from ssdtrain.errors import (
    BudgetError,
    BusyError,
    CancelledError,
    ClosedError,
    SsdtrainError,
    StorageError,
)
from ssdtrain.planning.policy import Policy
from ssdtrain.stats import Holding, Ledger
from ssdtrain.transfer.host import Transfer

__all__ = ["Tracker"]

log = logging.getLogger("ssdtrain")

BATCH_BYTES = 4 << 20
BATCH_COUNT = 16
"""So many bytes, or so many of the smallest tensors, are given to the disk together: to wake its
thread is the dearest part of a pack."""
REAP_MAX = 64
"""Writes that a hook frees at most: bounds the work of one call."""


class Gate:
    """What one thread saved and has not been given to the disk, in the order of packing."""

    __slots__ = ("first_sequence", "nbytes", "owner", "records")

    def __init__(self, owner: weakref.ref[Token]) -> None:
        self.owner = owner
        """Dead means: the thread has ended, and has passed all its nodes."""
        self.records: list[Holding[Record]] = []
        self.nbytes = 0
        self.first_sequence = 0
        """Of its first record; those of the others are not lower."""


class Token:
    """Lives as long as a thread does; identities of threads are used again."""

    __slots__ = ("__weakref__",)


class Local(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.token = Token()
        self.gate: Gate | None = None


class Tracker:
    """Keeps the records; called with the session's lock held."""

    def __init__(
        self,
        transfer: Transfer,
        ledger: Ledger,
        policy: Policy,
        *,
        min_bytes: int,
        max_resident_bytes: int | None,
    ) -> None:
        self._transfer = transfer
        self._ledger = ledger
        self._policy = policy
        self._budget = max_resident_bytes
        # Under a bound every byte that goes early may be missed.
        is_bounded = max_resident_bytes is not None
        self._batch_bytes = 0 if is_bounded else min(BATCH_BYTES, BATCH_COUNT * min_bytes)
        self.give_way: Callable[[], Callable[[], None] | None] = lambda: None
        """Gives up what was read ahead; called before a bound is found too small."""
        self._by_storage: dict[int, Holding[Record]] = {}
        self._local = Local()
        self._gates: list[Gate] = []
        """Of all threads; those of threads that have ended go when another is made."""
        self._writing: deque[Holding[Record]] = deque()
        self._look_at = 0
        """Which of the writes behind the oldest was looked at last."""
        self._failure: str | None = None
        """Why the last write failed; the error itself would hold its frames, and their records."""
        self._said: set[str] = set()

    def record_for(
        self, tensor: Tensor, geometry: Geometry, start: int, nbytes: int, sequence: int
    ) -> tuple[Record, bool]:
        """Return the record of the tensor's storage at its version, and whether it is new.

        The version is that of one counter; tensors that count apart never share a record.
        """
        storage = tensor.untyped_storage()
        identity = id(storage)
        version = tensor._version  # noqa: SLF001 - the identity of the content
        known = self._by_storage.get(identity)
        record = known() if known is not None else None
        if (
            record is not None
            and record.storage() is storage
            and record.root() is root_of(tensor)
            and record.version == version
            and record.covers(geometry.offset, start + nbytes)
        ):
            return record, False
        self.admit(nbytes)
        # `id` is an identity only while the storage lives, which the look-up above checks.
        ledger, registry = self._ledger, self._by_storage
        return Record(tensor, start, nbytes, sequence, ledger=ledger, registry=registry), True

    def write_later(self, record: Record) -> None:
        """Write this record once its node has been passed."""
        local = self._local
        gate = local.gate
        if gate is None:
            self._gates = [one for one in self._gates if one.records or one.owner() is not None]
            gate = Gate(weakref.ref(local.token))
            self._gates.append(gate)
            local.gate = gate
        if not gate.records:
            gate.first_sequence = record.sequence
        gate.records.append(record.holding)
        gate.nbytes += record.nbytes

    def open_gate(self, sequence: int | None) -> None:
        """Begin the writes of this thread's nodes before ``sequence``, once there is a batch.

        Of all nodes, however few, if it is ``None``.
        """
        gate = self._local.gate
        if gate is None or not gate.records:
            return
        if sequence is None:
            self._open(gate, None)
        elif gate.nbytes >= self._batch_bytes and gate.first_sequence < sequence:
            self._open(gate, sequence)

    def _open(self, gate: Gate, sequence: int | None) -> None:
        """Begin the writes of the records before ``sequence``; what cannot begin now stays."""
        closed: list[Holding[Record]] = []
        first_sequence = 0
        is_busy = False
        for reference in gate.records:
            record = reference()
            if record is None or record.source is None:
                continue
            is_closed = sequence is not None and record.sequence >= sequence
            is_busy = is_busy or (not is_closed and not self._begin_write(record))
            if is_closed or is_busy:
                first_sequence = first_sequence if closed else record.sequence
                closed.append(reference)
        gate.records = closed
        gate.first_sequence = first_sequence
        gate.nbytes = sum(reference.nbytes for reference in closed)

    def reap(self) -> None:
        """Free the memory of what has reached the disk.

        Writes end nearly in order, so the oldest tells. One that hangs must not hold the others
        back, so each call looks at one more of them.
        """
        writing = self._writing
        for _ in range(REAP_MAX):
            if not writing:
                return
            if not self._take_ended(writing[0]):
                break
            writing.popleft()
        else:
            return
        self._look_at = (self._look_at + 1) % len(writing)
        if self._take_ended(writing[self._look_at]):
            del writing[self._look_at]

    def _take_ended(self, reference: Holding[Record]) -> bool:
        """End a write that is done; ``False`` if it is still under way."""
        record = reference()
        if record is None or record.stored is None or record.source is None:
            return True
        if not record.stored.done():
            return False
        self._end_write(record)
        return True

    def recall(self, record: Record) -> UntypedStorage | None:
        """Return the storage if its bytes are still in memory; then its write is not needed."""
        if record.source is not None:
            if record.stored is not None:
                # Under a bound the write goes on: the memory may be needed while this tensor lives.
                if self._budget is None and record.stored.cancel():
                    record.stored = None
                else:
                    record.holding.fate = "forwarded"
            return record.source.untyped_storage()
        storage = record.storage()
        if storage is None or storage.nbytes() < record.start + record.nbytes:
            return None
        # Somebody else holds it: offloading it freed nothing, so do not do it again.
        record.holding.fate = "forwarded"
        self._policy.note_futile(record.key)
        return storage

    def cancel_queued(self) -> None:
        """Keep what is still in the queue.

        Called when a backward begins of which nothing is known: what was not written by now may be
        needed before it is, and on a slow disk the reads need its time.
        """
        for reference in self._writing:
            record = reference()
            if record is not None and record.stored is not None and record.stored.cancel():
                record.stored = None

    def load(self, saved: SavedTensor) -> Loading | None:
        """Begin to read ahead; ``None`` if it is in memory or cannot be read now.

        A refusal is not lost: the demand read meets it again and raises.
        """
        record = saved.record
        if record.source is not None or record.storage() is not None or record.stored is None:
            return None
        try:
            return self._transfer.load(record)
        except SsdtrainError as error:
            log.debug("did not read ahead: %s", error)
            return None

    def demand(self, saved: SavedTensor) -> Loading:
        """Begin the read of a tensor that is needed now."""
        self.admit(saved.record.slot_bytes())
        return self._transfer.load(saved.record)

    def resident_bytes(self) -> int:
        """Return the saved bytes in memory."""
        return self._ledger.held_bytes + self._transfer.resident_bytes()

    def room_bytes(self) -> int:
        """Return how many more bytes may become resident."""
        if self._budget is None:
            return 1 << 62
        return max(0, self._budget - self.resident_bytes())

    def admit(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more fit under the bound on resident bytes, if there is one."""
        if self._budget is None:
            return
        give_way = self.give_way()
        while self._is_short_of(nbytes, self._budget):
            began_s = perf_counter()
            if self._wait_for_memory():
                self._ledger.note_stall(perf_counter() - began_s)
            elif give_way is not None:
                give_way()
                give_way = None
            # What ended between the question and the look for something to wait for is free now.
            elif self._is_short_of(nbytes, self._budget):
                raise self._over_budget(self._budget, nbytes)

    def _is_short_of(self, nbytes: int, budget: int) -> bool:
        self._ledger.settle()
        return self.resident_bytes() + nbytes > budget

    def _wait_for_memory(self) -> bool:
        """Wait for something that frees memory when it ends; ``False`` if there is nothing."""
        if self._wait_for_transfer():
            return True
        for gate in self._gates:
            if gate.owner() is None:
                self._open(gate, None)
        return self._wait_for_transfer()

    def _wait_for_transfer(self) -> bool:
        oldest = self._oldest_write()
        if oldest is None:
            return self._transfer.wait_for_given_up()
        self._end_write(oldest)
        return True

    def _over_budget(self, budget: int, nbytes: int) -> BudgetError:
        what = (
            f"max_resident_bytes={budget} cannot be kept: {nbytes} more bytes are needed at once, "
            f"{self.resident_bytes()} are in memory, and none of them is on its way to the disk"
        )
        if self._failure is None:
            return BudgetError(f"{what}; raise it, or lower min_bytes")
        return BudgetError(
            f"{what}, because writes fail: {self._failure}. Mend that, or raise max_resident_bytes"
        )

    def _oldest_write(self) -> Record | None:
        """Return the oldest write under way; it leaves the list when it is seen to have ended."""
        writing = self._writing
        while writing:
            record = writing[0]()
            if record is not None and record.stored is not None and record.source is not None:
                return record
            writing.popleft()
        return None

    def _begin_write(self, record: Record) -> bool:
        """Give a record to the disk, or keep it; ``False`` if the disk can take no more now."""
        if not record.is_whole():
            return True
        try:
            # It has begun already if an interrupt came before it was entered below.
            if record.stored is None:
                self._transfer.save(record)
        except BusyError as error:
            if self._budget is None:
                self._say_once("busy", f"kept a tensor: {error}")
                return True
            return self._wait_for_transfer() and self._begin_write(record)
        except ClosedError:
            # A forked process inherited the hooks but not the disk: it keeps its tensors.
            return True
        except StorageError as error:
            self._note_failure(error)
            return True
        self._writing.append(record.holding)
        return True

    def _end_write(self, record: Record) -> None:
        """Wait for a write and free its source, unless the bytes on the disk are not its own."""
        assert record.stored is not None
        assert record.source is not None
        try:
            record.stored.wait()
        except (CancelledError, ClosedError):
            # Given up, or the session was closed under a live graph: the source is here.
            record.stored = None
        except SsdtrainError as error:
            # The source is here, nothing is lost: keep it and train on.
            record.stored = None
            record.holding.fate = "kept"
            self._note_failure(error)
        else:
            if record.is_unchanged():
                record.free_source()
            else:
                # The bytes on the disk are not those that were saved; the source is what plain
                # autograd would use, and unpack raises if it was changed in place.
                record.stored = None

    def _note_failure(self, error: SsdtrainError) -> None:
        self._ledger.write_failed_count += 1
        self._failure = str(error)
        self._say_once(type(error).__name__, f"keeping tensors in memory: {error}")
        for note in self._transfer.notes():
            self._say_once(note, note)

    def _say_once(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s", message)
