"""Rare cases on the way of saved storages to the disk: failures, bounds, and other holders.

The compiled part (`_core.Records`) handles each tensor, and calls the `Writeback` for these.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Handle, Kept, Record, Records, Timeline
from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.activations.lender import Lender
from ssdtrain.activations.names import saving
from ssdtrain.errors import DiskBoundError, SsdtrainError, UnsupportedError
from ssdtrain.machine.process_memory import GrownMemory, release_free_memory
from ssdtrain.machine.torch_internals import count_users, sequence_number
from ssdtrain.notices import Held, Notices
from ssdtrain.planning.policy import Policy
from ssdtrain.residency import Refused, Residency
from ssdtrain.seen import Seen
from ssdtrain.sizes import shown_count
from ssdtrain.transfer.device_bound import empty_caches
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Writeback"]

BATCH_BYTES = 4 << 20
BATCH_COUNT = 16
"""Writes begin in batches of so many bytes, or of so many of the smallest tensors: to wake the
disk's thread costs more than all else that a pack does (`benches/training/hook_overhead.py`)."""
WHOLE_MODEL_TENSORS_MIN = 4
"""A message names torch.compile as a cause only if at least so many tensors wait."""
GIVE_BACK_BYTES = 64 << 20
"""Each time writes have freed so much, free memory may go back to the system: glibc keeps holes
between blocks that are in use, and tensors of other sizes do not fit there. A larger number leaves
more holes, a smaller one costs more page faults (`benches/training/import_order.py`)."""

_grown = GrownMemory()
"""Of the process, as its heap is, and as a program may enter a block for each step."""


class Writeback:
    """Decides rare cases of records; called with the session's lock held."""

    def __init__(
        self,
        transfer: HostTransfer,
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
        self._lender = Lender()
        self.timeline = Timeline()
        """The moments at which tensors moved, once the user has started it."""
        self.records = Records(
            transfer.store,
            transfer.gpus,
            residency.account,
            self.timeline,
            is_bounded=residency.is_bounded,
            # Under a bound a thread may wait for the memory, so writes begin at once.
            batch_bytes=0 if residency.is_bounded else min(BATCH_BYTES, BATCH_COUNT * min_bytes),
            give_back_bytes=GIVE_BACK_BYTES,
            threads=threading.local(),
            count_users=count_users,
        )
        """The records, with their gates and their writes."""
        self.failed_count = 0
        """Writes that failed, or for which the disk had no space; their tensors were kept."""
        self.refused_count = 0
        """Writes that `max_disk_bytes` did not allow; their tensors were kept."""
        self.failure: str | None = None
        """The text of the last error; the error itself would hold its frames and their records."""
        self.stayed: str | None = None
        """Why the last tensor that cannot leave its GPU stays there; no write has failed."""
        residency.add_user(self)

    # Called by the hooks.

    def keep(self, tensor: Tensor, nbytes: int, storage_bytes: int) -> Kept | Refused:
        """Return a packed object that holds the tensor in memory, and count it.

        If the bound has no room, return a ``Refused``, which no backward can use.
        """
        residency = self._residency
        account = residency.account
        if residency.is_bounded:
            sequence = sequence_number()
            self.records.open_gate(self, sequence)
            storage = tensor.untyped_storage()
            more_bytes = account.shared_more_bytes(storage.data_ptr(), nbytes, storage_bytes)
            wanted = partial(saving, tensor, sequence)
            refused = residency.take_in(storage, more_bytes, wanted, stays=True)
            if refused is not None:
                return refused
        # Autograd packs with grad mode off, a selective checkpoint with grad mode on.
        kept = account.keep(tensor, nbytes, storage_bytes, torch.is_grad_enabled())
        residency.note_peak()
        # Not while the next pack may have to open a gate.
        if residency.is_bounded and not self.records.has_waiting_gate():
            residency.let_small_in()
        return kept

    def begin_write(self, record: Record) -> bool:
        """Begin to write a record, or keep it; ``False`` if the disk can take no more now."""
        return self.records.begin_write(record, self)

    def begin_all(self) -> list[Handle]:
        """Begin every write of this thread's nodes; return all writes that are under way.

        The thread must be in no operation: then it has passed all its nodes.
        """
        self.records.begin_all(self)
        return self.records.under_way()

    def end_all(self) -> None:
        """Free the memory of all records that have reached the disk."""
        self.records.end_all(self)

    # Called by the records.

    def let_go_for(self, nbytes: int) -> None:
        """Let memory of GPUs go, as far as it can, to make room for so many bytes."""
        self._residency.let_go_for(nbytes)

    def empty_caches(self) -> None:
        """Give the memory back that torch keeps for later allocations on GPUs."""
        empty_caches()

    def make_room(
        self, tensor: Tensor, storage: UntypedStorage, nbytes: int, sequence: int
    ) -> bool | Refused:
        """Make room for a new record under the bound; return whether it may be lent.

        Without room, return the ``Refused`` that is packed in its place.
        """
        for returned in self._lender.take_back():
            if not self.begin_write(returned):
                self.records.write_later(returned)
        may_be_lent = self._lender.knows(storage)
        more_bytes = 0 if may_be_lent else nbytes
        wanted = partial(saving, tensor, sequence)
        refused = self._residency.take_in(storage, more_bytes, wanted, stays=False)
        return may_be_lent if refused is None else refused

    def enter(self, record: Record, storage: UntypedStorage, may_be_lent: bool) -> None:
        """Take note of a new record under a bound; lend it if the program holds its bytes."""
        self._lender.enter(record, storage)
        if may_be_lent:
            self._lender.lend(record)

    def renewed(self, record: Record) -> None:
        """Lend a record under a bound that was saved again after its write began.

        The tensor that is being saved holds its bytes, too. They are written again once the program
        has let go of them.
        """
        is_lent = self._lender.lend(record)
        assert is_lent, "a tensor that is being saved lies on the storage of its record"

    def is_held_by_others(self, record: Record) -> bool:
        """Return whether tensors of the program still lie on the storage of a lent record."""
        return self._lender.is_held(record)

    def lends(self, record: Record) -> bool:
        """Lend a record that is about to be written; return whether the program holds its bytes.

        Asked only if in an earlier step the program held the tensor of this key.
        """
        return self._policy.is_futile(record.key) and self._lender.lend(record)

    def learn_held(self, record: Record, storage: UntypedStorage) -> None:
        """Note a key as futile if the program holds the bytes: to write them freed nothing."""
        if self._residency.is_bounded:
            is_held = self._lender.learn(storage)
        else:
            is_held = record.source is None and not record.was_found
        if is_held:
            self._policy.note_futile(record.key)

    def note_busy(self, reason: str) -> None:
        """Log that the disk could take no more, so that a tensor stays in memory."""
        self._notices.say("busy", "kept a tensor: %s", reason)

    def note_failures_on_gpus(self) -> None:
        """Count and log errors of writes whose bytes were copied from a GPU."""
        for error, count in self._transfer.refusals():
            self.note_failure(error, count)

    def note_failure(self, error: SsdtrainError, count: int = 1) -> None:
        """Count and log the error for which ``count`` tensors stay in memory."""
        if isinstance(error, UnsupportedError):
            self.stayed = str(error)
            self._notices.say("stayed", "%s", error, level=logging.INFO)
            return
        self.failure = str(error)
        if isinstance(error, DiskBoundError):
            self.refused_count += count
            message = "keeping tensors in memory, as max_disk_bytes is reached: %s"
            self._notices.say("max_disk_bytes", message, error, level=logging.INFO)
            return
        self.failed_count += count
        self._notices.say(type(error).__name__, "keeping tensors in memory: %s", error)
        for note in self._transfer.notes():
            self._notices.say(note, "%s", note)

    def wait_for_transfer(self) -> bool:
        """Wait for the oldest write or an abandoned transfer; return ``False`` without one."""
        return self.records.wait_for_transfer(self)

    def give_memory_back(self) -> None:
        """Give free memory back to the system: always under a bound, else if it is time."""
        if self._residency.is_bounded:
            release_free_memory()
        else:
            _grown.note_freed(GIVE_BACK_BYTES)

    def sequence_number(self) -> int:
        """Return the number that the next node of this thread will get."""
        return sequence_number()

    # Called by the residency.

    def wait_for_room(self) -> bool:
        """Wait for a transfer that frees memory when it ends; return ``False`` without one."""
        return self.records.wait_for_room(self)

    def give_way(self) -> None:
        """Drop the nodes that a failed backward has left; see ``residency.MemoryUser``."""
        drop_failed_backwards()

    def held(self) -> list[Held]:
        """Return the bytes that cannot leave memory, with reasons."""
        alive = self.records.alive()
        saved = [record for record in alive if record.source is not None and not record.is_lent]
        # A backward uses the others.
        unwritten = [record.nbytes for record in saved if not record.was_found]
        account = self._residency.account
        # Tenants list the bytes that they have reserved.
        saved_bytes = sum(record.nbytes for record in saved)
        kept_bytes = account.held_bytes - account.reserved_bytes - saved_bytes
        return [
            *self._seen.kept_parts(kept_bytes, self._min_bytes),
            Held(
                sum(unwritten),
                f"in {shown_count(len(unwritten), 'tensor')} whose operation has not ended or "
                "whose write failed",
                "if torch.compile made one operation of the whole model, compile it block by "
                "block (block.compile())"
                if len(unwritten) >= WHOLE_MODEL_TENSORS_MIN
                else "",
            ),
        ]
