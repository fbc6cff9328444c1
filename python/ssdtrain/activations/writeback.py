"""The way of saved storages to the disk: when a write begins, and when its memory is freed.

There is one record per saved storage and version.

The gate. An operation may save a tensor before it has filled it (``rrelu`` does), so no byte may be
read while its node is being made. Autograd numbers nodes per thread; once this thread sees a larger
number at a later pack, or runs a backward, the node has been passed and the write may begin.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Kept
from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.activations.gate import Gate, Local
from ssdtrain.activations.lender import Lender, is_held_by_others
from ssdtrain.activations.names import saving
from ssdtrain.activations.saved_tensor import Record, root_of
from ssdtrain.activations.seen import Seen, kept_parts
from ssdtrain.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    DiskBoundError,
    SsdtrainError,
    StorageError,
)
from ssdtrain.geometry import Geometry
from ssdtrain.machine.process_memory import release_free_memory
from ssdtrain.machine.torch_internals import sequence_number
from ssdtrain.notices import Notices
from ssdtrain.planning.policy import Policy
from ssdtrain.residency import Residency
from ssdtrain.shortage import Held
from ssdtrain.transfer.base import Handle, Transfer

__all__ = ["Writeback"]

BATCH_BYTES = 4 << 20
BATCH_COUNT = 16
"""So many bytes, or so many of the smallest tensors, are given to the disk together: to wake its
thread costs more than all else that a pack does (`benches/training/hook_overhead.py`)."""
REAP_MAX = 64
"""Writes that a hook frees at most: bounds the work of one call."""
GIVE_BACK_BYTES = 64 << 20
"""Once writes have freed so much, free memory goes back to the system: glibc keeps what lies
between blocks that are in use, and the next tensors of other sizes do not fit there. Less often
leaves more of it, more often costs more page faults (`benches/training/import_order.py`)."""
FORGET_AT_MIN = 1024
"""At so many known storages, those that are gone are forgotten for the first time."""
RESERVE_BATCH_BYTES = 8 << 20
"""So much of a reserve is written when room is short: what comes next then finds writes under way
to wait for, and not much more is written than must be."""


class Writeback:
    """Keeps the records; called with the session's lock held."""

    def __init__(
        self,
        transfer: Transfer,
        residency: Residency,
        policy: Policy,
        notices: Notices,
        seen: Seen,
        *,
        min_bytes: int,
    ) -> None:
        self._transfer = transfer
        self._residency = residency
        self._policy = policy
        self._notices = notices
        self._seen = seen
        self._min_bytes = min_bytes
        # Under a bound, a write that begins later frees memory later, for which somebody may wait.
        self._batch_bytes = 0 if residency.is_bounded else min(BATCH_BYTES, BATCH_COUNT * min_bytes)
        self._lender = Lender()
        self._known: dict[int, weakref.ref[Record]] = {}
        """The last record of each storage, by the identity of the storage; some are dead."""
        self._forget_at = FORGET_AT_MIN
        self._local = Local()
        self._gates: list[Gate] = []
        """Of all threads; those of threads that have ended go when another is made."""
        self._writing: deque[weakref.ref[Record]] = deque()
        self._look_at = 0
        """Which of the writes behind the oldest was looked at last."""
        self.failed_count = 0
        """Writes that failed, or for which the disk had no space; their tensors were kept."""
        self.refused_count = 0
        """Writes that `max_disk_bytes` did not allow; their tensors were kept."""
        self._freed_bytes = 0
        """Of sources, since free memory was given back last."""
        self.failure: str | None = None
        """Why the last write failed; the error itself would hold its frames, and their records."""
        residency.add_user(self)

    # What the hooks ask.

    def keep(self, tensor: Tensor, nbytes: int, storage_bytes: int) -> Kept:
        """Return a packed object that holds the tensor in memory, and is counted."""
        residency = self._residency
        account = residency.account
        if residency.is_bounded:
            sequence = sequence_number()
            self._open_gate(sequence)
            identity = tensor.untyped_storage().data_ptr()
            more_bytes = account.shared_more_bytes(identity, nbytes, storage_bytes)
            residency.admit(more_bytes, lambda: saving(tensor, sequence))
        # Autograd packs with grad mode off, a selective checkpoint inside an operation with it on.
        kept = account.keep(tensor, nbytes, storage_bytes, torch.is_grad_enabled())
        residency.note_peak()
        return kept

    def record_for(
        self,
        tensor: Tensor,
        geometry: Geometry,
        start: int,
        nbytes: int,
        *,
        sequence: int,
        key: int,
    ) -> tuple[Record, bool]:
        """Return the record of the tensor's storage at its version, and whether it is new.

        The version is that of one counter; tensors that count apart never share a record.
        ``sequence`` and ``key`` are for a new one. Writes of nodes that have been passed begin, and
        memory of those that have ended is freed.
        """
        self._open_gate(sequence)
        self._reap()
        storage = tensor.untyped_storage()
        identity = id(storage)
        version = tensor._version  # noqa: SLF001 - the identity of the content
        known = self._known.get(identity)
        record = known() if known is not None else None
        if (
            record is not None
            and record.storage() is storage  # defence: identity with a look at life
            and record.root() is root_of(tensor)  # defence: identity with the version counter
            and record.version == version  # defence: version at pack
            and record.covers(geometry.offset, start + nbytes)
        ):
            return record, False
        may_be_lent = False
        if self._residency.is_bounded:
            for returned in self._lender.take_back():
                if not self._begin_write(returned):
                    self.write_later(returned)
            may_be_lent = self._lender.knows(storage)
            more_bytes = 0 if may_be_lent else nbytes
            self._residency.admit(more_bytes, lambda: saving(tensor, sequence))
        record = Record(
            tensor, start, nbytes, sequence=sequence, key=key, residency=self._residency
        )
        if may_be_lent:
            self._lender.lend(record)
        # `id` is an identity only while the storage lives, which the look-up above checks.
        self._remember(identity, weakref.ref(record))
        return record, True

    def write_later(self, record: Record) -> None:
        """Write this record once its node has been passed."""
        self._own_gate().add(record)

    def write_if_short(self, record: Record) -> None:
        """Write this record only if room is short: it will be needed in a moment.

        That is so for what a reentrant checkpoint computes again. Under a bound a whole region may
        not fit, and its backward begins with what was packed last: the oldest is needed last.
        """
        self._own_gate().add_to_reserve(record)

    def recall(self, record: Record) -> UntypedStorage | None:
        """Return the storage if its bytes are still in memory; then its write is not needed.

        A backward asks, so this thread has passed all its nodes: their writes begin.
        """
        self._open_gate(None)
        storage = self._in_memory(record)
        self._reap()
        return storage

    def cancel_queued(self) -> None:
        """Keep what is still in the queue, unless there is a bound.

        Called when a backward begins of which nothing is known: what was not written by now may be
        needed before it is, and on a slow disk the reads need its time.
        """
        if self._residency.is_bounded:
            return
        for reference in self._writing:
            record = reference()
            if record is not None and record.handle is not None and record.handle.cancel():
                record.handle = None

    def begin_all(self) -> list[Handle]:
        """Begin every write of this thread's nodes; return all writes that are under way.

        For a thread that is in no operation: then it has passed all its nodes.
        """
        self._open_gate(None)
        records = (reference() for reference in self._writing)
        return [one.handle for one in records if one is not None and one.handle is not None]

    def end_all(self) -> None:
        """Free the memory of all that has reached the disk, however much it is."""
        writing = self._writing
        for _ in range(len(writing)):
            if not writing:
                break
            if self._take_ended(writing[0]):
                writing.popleft()
            else:
                writing.rotate(-1)

    # What the residency asks.

    def wait_for_room(self) -> bool:
        """Wait for something that frees memory when it ends; ``False`` if there is nothing."""
        if self._wait_for_transfer():
            return True
        for gate in self._gates:
            if gate.owner() is None:
                self._open(gate, None)
            self._write_reserve(gate)
        return self._wait_for_transfer()

    def give_way(self) -> None:
        """Let go of what a backward that raised left behind; see ``residency.User``."""
        drop_failed_backwards()

    def held(self) -> list[Held]:
        """Return what cannot leave memory, and why."""
        records = [one for held in self._known.values() if (one := held()) is not None]
        unwritten = [one.nbytes for one in records if one.source is not None and not one.is_lent]
        kept_bytes = self._residency.account.held_bytes - sum(unwritten)
        return [
            *kept_parts(self._seen, kept_bytes, self._min_bytes),
            Held(
                sum(unwritten),
                f"in {len(unwritten)} tensors whose operation has not ended or whose write failed",
                "if torch.compile made one operation of the whole model, compile it block by "
                "block (block.compile())",
            ),
        ]

    # The gate.

    def _own_gate(self) -> Gate:
        """Return the gate of this thread."""
        local = self._local
        gate = local.gate
        if gate is None:
            needed = [one for one in self._gates if one.is_needed()]
            gate = Gate(weakref.ref(local.token))
            self._gates = [*needed, gate]
            local.gate = gate
        return gate

    def _write_reserve(self, gate: Gate) -> None:
        """Begin to write the oldest of a reserve whose nodes have been passed."""
        if not gate.reserve:
            return
        passed = gate.passed()
        rest = []
        nbytes = 0
        for reference in gate.reserve:
            record = reference()
            if record is None or record.source is None or record.handle is not None:
                continue
            is_wanted = nbytes < RESERVE_BATCH_BYTES and record.sequence < passed
            if is_wanted and self._begin_write(record):
                nbytes += record.nbytes
            else:
                rest.append(reference)
        gate.reserve = rest

    def _open_gate(self, sequence: int | None) -> None:
        """Begin the writes of this thread's nodes before ``sequence``, once there is a batch.

        Of all nodes, however few, if it is ``None``.
        """
        gate = self._local.gate
        if gate is None:
            return
        if gate.reserve:
            gate.passed_sequence = sequence_number() if sequence is None else sequence
        if not gate.records:
            return
        if sequence is None:
            self._open(gate, None)
        elif gate.nbytes >= self._batch_bytes and gate.first_sequence < sequence:
            self._open(gate, sequence)

    def _open(self, gate: Gate, sequence: int | None) -> None:
        """Begin the writes of the records before ``sequence``; what cannot begin now stays."""
        closed: list[weakref.ref[Record]] = []
        closed_bytes = first_sequence = 0
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
                closed_bytes += record.nbytes
        gate.records = closed
        gate.first_sequence = first_sequence
        gate.nbytes = closed_bytes

    # Records.

    def _remember(self, identity: int, reference: weakref.ref[Record]) -> None:
        """Find this record by its storage from now on; drop dead entries as the table doubles."""
        if len(self._known) >= self._forget_at:
            alive = {one: held for one, held in self._known.items() if held() is not None}
            self._known = alive
            self._forget_at = max(FORGET_AT_MIN, 2 * len(alive))
        self._known[identity] = reference

    def _in_memory(self, record: Record) -> UntypedStorage | None:
        if record.source is not None:
            if record.handle is not None:
                # Under a bound the write goes on: the memory may be needed while this tensor lives.
                if not self._residency.is_bounded and record.handle.cancel():
                    record.handle = None
                else:
                    record.holding.forward()
                    self._note_held(record)
            record.was_found = True
            return record.source.untyped_storage()
        storage = record.storage()
        # defence: live memory before the disk
        if storage is None or storage.nbytes() < record.start + record.nbytes:
            return None
        record.holding.forward()
        if not record.was_found:
            # Somebody else holds it: offloading it freed nothing, so do not do it again.
            self._policy.note_futile(record.key)
            if self._residency.is_bounded:
                self._lender.learn(storage)
        return storage

    def _note_held(self, record: Record) -> None:
        """Learn the same of what is needed before its write has ended, from who uses it."""
        assert record.source is not None
        if self._residency.is_bounded and not record.was_found and is_held_by_others(record):
            self._policy.note_futile(record.key)
            self._lender.learn(record.source.untyped_storage())

    # Writes.

    def _begin_write(self, record: Record) -> bool:
        """Give a record to the disk, or keep it; ``False`` if the disk can take no more now."""
        assert record.source is not None
        if not record.is_whole() or self._is_lent(record):
            return True
        try:
            # An earlier call may have begun it, and been interrupted before it was entered below.
            if record.handle is None:
                record.handle = self._transfer.save(record.source, record.start, record.nbytes)
        except BusyError as error:
            if not self._residency.is_bounded:
                self._notices.say("busy", "kept a tensor: %s", error)
                return True
            return self._wait_for_transfer() and self._begin_write(record)
        except ClosedError:
            # A forked process inherited the hooks but not the disk: it keeps its tensors.
            return True
        except StorageError as error:
            self._note_failure(error)
            return True
        self._writing.append(weakref.ref(record))
        return True

    def _is_lent(self, record: Record) -> bool:
        """Whether others hold what is about to be written, so that to write it frees nothing."""
        if record.is_lent or not self._residency.is_bounded:
            return record.is_lent
        # In an earlier step others held the tensor at this place: do they hold this one, too?
        return self._policy.is_futile(record.key) and self._lender.lend(record)

    def _reap(self) -> None:
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

    def _take_ended(self, reference: weakref.ref[Record]) -> bool:
        """End a write that is done; ``False`` if it is still under way."""
        record = reference()
        if record is None or record.handle is None or record.source is None:
            return True
        if not record.handle.done():
            return False
        self._end_write(record)
        return True

    def _end_write(self, record: Record) -> None:
        """Wait for a write and free its source, unless the bytes on the disk are not its own."""
        assert record.handle is not None
        assert record.source is not None
        try:
            record.handle.wait()
        except (CancelledError, ClosedError):
            # Cancelled, or the store was closed while the graph lived: the source is still here.
            record.handle = None
        except SsdtrainError as error:
            # The source is still here, so nothing is lost: the tensor is kept.
            record.handle = None
            record.holding.keep()
            self._note_failure(error)
        else:
            if record.is_unchanged():
                record.free_source()
                self._freed_bytes += record.nbytes
                if self._freed_bytes >= GIVE_BACK_BYTES:
                    self._freed_bytes = 0
                    release_free_memory()
            else:
                # The bytes on the disk are not those that were saved; the source is what plain
                # autograd would use, and unpack raises if it was changed in place.
                record.handle = None

    def _wait_for_transfer(self) -> bool:
        oldest = self._oldest_write()
        if oldest is None:
            return self._transfer.wait_for_abandoned()
        self._end_write(oldest)
        return True

    def _oldest_write(self) -> Record | None:
        """Return the oldest write under way; it leaves the list when it is seen to have ended."""
        writing = self._writing
        while writing:
            record = writing[0]()
            if record is not None and record.handle is not None and record.source is not None:
                return record
            writing.popleft()
        return None

    def _note_failure(self, error: SsdtrainError) -> None:
        self.failure = str(error)
        if isinstance(error, DiskBoundError):
            self.refused_count += 1
            message = "keeping tensors in memory, as max_disk_bytes is reached: %s"
            self._notices.say("max_disk_bytes", message, error, level=logging.INFO)
            return
        self.failed_count += 1
        self._notices.say(type(error).__name__, "keeping tensors in memory: %s", error)
        for note in self._transfer.notes():
            self._notices.say(note, "%s", note)
