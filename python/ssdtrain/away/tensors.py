"""Keeps tensors under one bound: decides which are in memory, reads and writes the others."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from time import perf_counter
from typing import ClassVar

from torch import Tensor

from ssdtrain._core import run_if_free
from ssdtrain.away.known import KNOWN, known_of
from ssdtrain.away.tensor import HELD, OffloadedTensor
from ssdtrain.away.threads import is_held_here, refuse_handlers
from ssdtrain.away.use_order import UseOrder
from ssdtrain.away.writes import Writes
from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.process_memory import FreedMemory
from ssdtrain.machine.torch_internals import plainly
from ssdtrain.notices import Notices
from ssdtrain.sharing import Figures, Room, Tenant
from ssdtrain.sizes import shown_bytes
from ssdtrain.store import TensorStore
from ssdtrain.watched import User

__all__ = ["OffloadedTensors"]

AHEAD_COUNT_MAX = 64
"""The read-ahead looks at most so many uses ahead."""
LOOKED_COUNT_MAX = 8
"""Later looks try again to let so many tensors leave that earlier looks have brought."""
FREED_SHARE = 4
"""The C library holds freed memory of one part in so many of the bound at most."""
AHEAD_SHARE = 2
"""Reads that were begun ahead take one part in so many of the bound at most."""
KEPT_SHARE = 4
"""Tensors that wait for updates in backward take one part in so many of the bound at most."""


class OffloadedTensors(Tenant):
    """Keeps tensors under a bound; ``entry`` is the `OffloadedTensor` of a tensor."""

    name: ClassVar[str]
    """Their name in the report of a session."""
    too_many: ClassVar[str]
    """The message if they do not fit, before the causes; ``%s`` stands for the bound."""

    def __init__(
        self, store: TensorStore, max_resident_bytes: int, room: Room | None = None
    ) -> None:
        self._store = store
        self._room = room
        """A part of the bound of a session, reserved as long as one of these tensors lives."""
        self.max_resident_bytes = max_resident_bytes
        self._lock = threading.RLock()
        self._order = UseOrder()
        self._all: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()
        """By id, in the order in which they came."""
        self._by_use_key: weakref.WeakValueDictionary[int, OffloadedTensor] = (
            weakref.WeakValueDictionary()
        )
        """The newest tensor with each key in the order of uses."""
        freed = FreedMemory(max_resident_bytes // FREED_SHARE)
        self._writes = Writes(store, freed, ended=self._note, failed=self._keep)
        self._reads: dict[int, OffloadedTensor] = {}
        """Tensors whose read has begun and that are not yet used, by id."""
        self._resident: dict[int, int] = {}
        """The bytes of each tensor in memory, by id of the entry."""
        self._resident_bytes = 0
        self._looked = deque[weakref.ref[OffloadedTensor]](maxlen=LOOKED_COUNT_MAX)
        """Tensors that looks brought last and emptied again; ``source`` still has their bytes."""
        self._is_over = False
        """True if a read did not fit under the bound, and nothing has fitted since."""
        self._notices = Notices()
        self._process = os.getpid()
        self._peak_bytes = self._read_bytes = self._failed_count = 0
        self._stall_s = 0.0
        self._gone = deque[OffloadedTensor]()
        """Entries whose tensor is gone; the next holder of the lock forgets them."""
        self._error: SsdtrainError | None = None
        """The error of the last failed write."""
        self.is_failure_raised = False
        """True if ``offload_parameters`` raises a failed write; else the log names it."""
        _alive.add(self)

    @property
    def kept_bytes_max(self) -> int:
        """The most bytes that may wait in memory for updates in backward."""
        return self.max_resident_bytes // KEPT_SHARE

    def leave_to_parent(self) -> None:
        """Take a new lock in a forked child, where the old lock may be held for ever."""
        self._lock = threading.RLock()

    def take(self, entry: OffloadedTensor) -> None:
        """Take a tensor over: its bytes may leave from now on."""
        tensor = entry.tensor
        assert tensor is not None, "the caller has it"
        number = id(tensor)

        def forget(_: object) -> None:
            known = KNOWN.pop(number, None)
            if known is not None:
                known[1].forget()

        before = known_of(tensor)
        assert before is None, "it would have two owners"
        with self._lock:
            self._forget_gone()
            # First: after an interrupt between these lines, give_back() brings what is in here.
            self._all[id(entry)] = self._by_use_key[entry.use_key] = entry
            KNOWN[number] = weakref.ref(tensor, forget), entry
            self._note(entry)

    def give_back(self) -> None:
        """Bring all tensors back for good, because the call that took them over has failed."""
        with self._lock:
            # No tensor leaves to make room for another.
            self.max_resident_bytes = sys.maxsize
            for entry in self._alive():
                self._bring(entry)
            for number in [id(entry.tensor) for entry in self._alive()]:
                KNOWN.pop(number, None)
        if self._room is not None:
            self._room.end()  # a traceback may keep this object alive

    def forget(self, entry: OffloadedTensor) -> None:
        """Forget an entry whose tensor is gone.

        A tensor may die while its thread holds any lock, so this waits for no lock. If another
        thread has ours, the next call that takes the lock forgets the entry.
        """
        self._gone.append(entry)
        run_if_free(self._lock, self._forget_gone)

    def begin_use(self, entries: Iterable[OffloadedTensor], user: object) -> None:
        """Have tensors in memory until ``end_use``."""
        refuse_handlers(self._lock)
        for entry in entries:
            entry.note_user(user)
        with self._lock:
            self._looked.clear()
            for entry in entries:
                self._order.note(entry.use_key)
                self._bring(entry)
                self._note(entry)
            self._go_on()

    def look(self, entry: OffloadedTensor) -> None:
        """Bring back a tensor that training uses now."""
        refuse_handlers(self._lock)
        user = User()
        # A tensor with a user does not leave for a read ahead.
        entry.note_user(user)
        try:
            with self._lock:
                self._use(entry)
        finally:
            entry.end_use(user)

    def begin_look(
        self, entry: OffloadedTensor, user: object, *, in_training: bool
    ) -> Tensor | None:
        """Bring back a tensor that a function of the program uses until ``end_look``.

        [Note: looks] A look at a tensor lets no other tensor leave that was in memory before: the
        program may have asked for an address and read there later, as safetensors does. So beyond
        the bound, looks take the memory of one tensor more, of tensors whose addresses were asked
        for, and of tensors that share memory with a living tensor (`weight.data`). Forwards,
        backwards and changes in place let all others leave.
        """
        if is_held_here(self._lock):  # a signal handler interrupts a line that holds it
            return entry.copy(self._store)
        entry.note_user(user)
        with self._lock:
            if in_training:
                self._use(entry)
            elif not entry.is_attached():
                self._let_looked_leave(but=entry)
                self._end_writes(entry.nbytes)
                # defence: looks let none leave that was in memory
                self._bring(entry, makes_room=False)
                others_bytes = self._resident_bytes - entry.nbytes
                if others_bytes > self.max_resident_bytes:
                    self._note_over(others_bytes, looked=entry)
        return None

    def end_look(self, entry: OffloadedTensor, user: object, *, stays: bool) -> None:
        """Let a tensor leave again that a look has brought, unless its address was given out."""
        entry.end_use(user)
        if is_held_here(self._lock):
            return
        with self._lock, plainly():
            if entry.tensor is None or entry.users or not entry.is_attached():
                return
            # `source` keeps the bytes for the next look, and for tensors that share them.
            if not stays and entry.may_leave() and self._empty(entry, shared=True):
                self._let_looked_leave(but=entry)
                self._looked.append(weakref.ref(entry))
            self._note(entry)

    def bring(self, entry: OffloadedTensor) -> None:
        """Bring back a tensor without a note in the order of uses."""
        refuse_handlers(self._lock)
        with self._lock:
            self._bring(entry)

    def note_use(self, entry: OffloadedTensor) -> None:
        """Note that a tensor in memory was used."""
        with self._lock:
            self._order.note(entry.use_key)
            self._note(entry)
            self._go_on()

    def figures(self) -> Figures:
        """Return the figures for a session, without the lock, which a wait may hold."""
        found = self._alive()
        resident_bytes = sum(self._resident.get(id(entry), 0) for entry in found)
        return Figures(
            resident_bytes=resident_bytes,
            on_disk_bytes=sum(entry.nbytes for entry in found) - resident_bytes,
            bytes_written=self._writes.written_bytes,
            bytes_read=self._read_bytes,
            stall_s=self._stall_s,
        )

    def _alive(self) -> list[OffloadedTensor]:
        """Return all entries; a collection of garbage may end some during an iteration."""
        return [entry for reference in self._all.valuerefs() if (entry := reference()) is not None]

    # From here on the lock is held.

    def _forget_gone(self) -> None:
        while self._gone:
            entry = self._gone[0]
            self._forget(entry)
            # Last: after an interrupt above it is done again. A collection of garbage comes here
            # as well, and may have removed it.
            with suppress(ValueError):
                self._gone.remove(entry)

    def _forget(self, entry: OffloadedTensor) -> None:
        """Take an entry out of all tables; the second time it does nothing."""
        # A traceback may keep the entry alive for longer.
        self._all.pop(id(entry), None)
        if self._by_use_key.get(entry.use_key) is entry:
            del self._by_use_key[entry.use_key]
        self._resident.pop(id(entry), None)
        self._resident_bytes = sum(self._resident.values())
        self._reads.pop(id(entry), None)
        self._writes.forget(entry)

    def _note(self, entry: OffloadedTensor) -> None:
        """Count the bytes that a tensor has in memory now."""
        if entry.tensor is None:
            return
        nbytes = entry.nbytes if entry.is_in_memory() else 0
        if self._resident.get(id(entry), 0) != nbytes:
            self._resident[id(entry)] = nbytes
            # Recomputed, not adjusted: Ctrl-C between two updates would corrupt the sum.
            self._resident_bytes = sum(self._resident.values())
            self._peak_bytes = max(self._peak_bytes, self._resident_bytes)

    def _bring(self, entry: OffloadedTensor, *, makes_room: bool = True) -> None:
        """Give a tensor its bytes."""
        tensor = entry.tensor
        if tensor is None or entry.is_attached():
            return
        began_s = perf_counter()
        memory = entry.source
        if memory is not None:
            # The write reads this memory, and the program may change it from now on.
            self._writes.end(entry)
        else:
            memory = self._read(entry, makes_room)
        if not entry.is_attached():  # a failed write has brought it back
            with plainly():
                entry.return_to(tensor, memory)
        self._reads.pop(id(entry), None)
        self._note(entry)
        self._stall_s += perf_counter() - began_s

    def _read(self, entry: OffloadedTensor, makes_room: bool) -> Tensor:
        try:
            if entry.pending is None:
                if makes_room:
                    self._make_room(entry.nbytes)
                self._begin_read(entry)
            assert entry.pending is not None
            with plainly():
                memory = entry.pending.result()
        except SsdtrainError as error:
            # The next use begins another read.
            self._drop_read(entry)
            error.add_note(
                f"ssdtrain could not bring back the {entry.noun} {entry.name!r}; it is on the disk "
                "still, and the next use reads it again"
            )
            raise
        self._read_bytes += entry.nbytes
        self._writes.freed.note_read(entry.nbytes)
        return memory

    def _use(self, entry: OffloadedTensor) -> None:
        self._looked.clear()
        self._order.note(entry.use_key)
        self._bring(entry)
        self._go_on()

    def _end_writes(self, nbytes: int) -> None:
        """Wait for writes until so many bytes fit."""
        self._writes.end_done()
        while self._resident_bytes + nbytes > self.max_resident_bytes and self._writes:
            self._writes.end_oldest()

    def _let_looked_leave(self, *, but: OffloadedTensor) -> None:
        """Let tensors leave that earlier looks have brought, unless others have their memory."""
        for _ in range(len(self._looked)):
            reference = self._looked.popleft()
            entry = reference()
            if entry is None or entry is but or entry.users:
                continue
            if self._writes.lack(entry) and not self._leave(entry):
                self._looked.append(reference)

    def _begin_read(self, entry: OffloadedTensor) -> None:
        assert entry.stored is not None, "what is not in memory is on the disk"
        entry.pending = self._store.read(entry.stored)
        self._reads[id(entry)] = entry
        self._note(entry)

    def _drop_read(self, entry: OffloadedTensor) -> None:
        """Give up a read ahead; its memory is free as soon as the read has ended."""
        entry.pending = None
        self._reads.pop(id(entry), None)
        self._note(entry)

    def _go_on(self) -> None:
        """Make room if too much is in memory, and read ahead."""
        self._forget_gone()
        if self._resident_bytes > self.max_resident_bytes:
            # Uses at the same time, or others that had the memory, may have ended by now.
            self._make_room(0)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read the tensors that are expected next, as far as there is room.

        If there is no room, because tensors that leave have to be written first, their writes begin
        now, so that the next uses find room.
        """
        if os.getpid() != self._process:
            return
        self._writes.end_done()
        reading_bytes = sum(entry.nbytes for entry in list(self._reads.values()))
        waiting_bytes = 0
        for use_key in self._order.coming(AHEAD_COUNT_MAX):
            entry = self._by_use_key.get(use_key)
            if entry is None or entry.is_in_memory():
                continue
            nbytes = entry.nbytes
            if reading_bytes + waiting_bytes + nbytes > self.max_resident_bytes // AHEAD_SHARE:
                return
            if not self._let_leave(waiting_bytes + nbytes, before=self._order.distance(use_key)):
                return
            if waiting_bytes or self._resident_bytes + nbytes > self.max_resident_bytes:
                waiting_bytes += nbytes
            else:
                self._begin_read(entry)
                reading_bytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        """Have others leave until so many bytes fit, and wait for their writes."""
        if os.getpid() != self._process:
            return
        self._forget_gone()
        self._writes.end_done()
        self._let_leave(nbytes)
        self._end_writes(nbytes)
        if self._resident_bytes + nbytes <= self.max_resident_bytes:
            self._is_over = False
        elif nbytes:
            self._note_over(self._resident_bytes + nbytes)

    def _note_over(self, resident_bytes: int, looked: OffloadedTensor | None = None) -> None:
        """Log why more than the bound is in memory, once for each main cause."""
        if self._is_over:  # a search for the causes is too slow for each of many reads
            return
        self._is_over = True
        causes = Counter[str]()
        for entry in self._alive():
            # The log has named tensors whose write has failed.
            if entry is looked or entry.stays:
                continue
            if entry.is_attached():
                causes[entry.why_in_memory(in_look=looked is not None)] += entry.nbytes
            elif entry.is_shared():
                causes[HELD] += entry.nbytes
        if causes:
            told = [cause.format(shown_bytes(nbytes)) for cause, nbytes in causes.most_common()]
            sizes = shown_bytes(self.max_resident_bytes), shown_bytes(resident_bytes)
            words = f"{self.too_many}, %s in all; of these %s"
            self._notices.say(causes.most_common(1)[0][0], words, *sizes, "; ".join(told))

    def _let_leave(self, nbytes: int, before: float = -math.inf) -> bool:
        """Have others leave until so many bytes will fit; return whether they will.

        Only tensors that are expected later than ``before`` leave.
        """
        wanted = self.max_resident_bytes - nbytes
        if os.getpid() != self._process:
            return False
        if self._resident_bytes - self._writes.nbytes <= wanted:
            return True
        for entry in self._farthest_first():
            if self._order.distance(entry.use_key) <= before:
                return False
            if entry.pending is None:
                self._leave(entry)
            else:
                self._drop_read(entry)
            if self._resident_bytes - self._writes.nbytes <= wanted:
                return True
        return False

    def _farthest_first(self) -> list[OffloadedTensor]:
        """Return the tensors that may leave, the last to be needed first."""
        idle = [
            entry
            for entry in self._alive()
            if not entry.users
            and not entry.stays
            and (entry.is_attached() or entry.pending is not None or self._writes.lack(entry))
        ]
        # Unused tensors have the same distance; of these, the end of a model is needed last.
        idle.reverse()
        return sorted(idle, key=lambda entry: -self._order.distance(entry.use_key))

    def _leave(self, entry: OffloadedTensor) -> bool:
        """Have a tensor leave memory, now or as soon as its write has ended."""
        if entry.tensor is None:
            return False
        # In a look by the compiler, torch's modes would make other tensors.
        with plainly():
            if self._writes.lack(entry):
                if entry.is_shared():
                    return False
            else:
                if not entry.may_leave():
                    return False
                if not self._empty(entry):
                    self._note(entry)
                    return False
            self._note(entry)
            self._writes.send(entry)
        self._note(entry)
        return True

    def _empty(self, entry: OffloadedTensor, *, shared: bool = False) -> bool:
        """Take the bytes out of a tensor, unless others use or have them."""
        return entry.leave(shared=shared)

    def _keep(self, entry: OffloadedTensor, error: SsdtrainError) -> None:
        """Keep a tensor in memory after its write has failed."""
        if entry.sum is None:
            entry.stored = None
        tensor, memory = entry.tensor, entry.source
        if tensor is not None and memory is not None:
            entry.return_to(tensor, memory)
            self._note(entry)
        entry.stays = True
        self._failed_count += 1
        if self.is_failure_raised:
            # begin() clears it: an error holds the frames of its callers, and so their tensors.
            self._error = error
            return
        self._notices.say(
            "failed write",
            "%ss stay in memory, because the disk did not take them; training goes on: %s",
            entry.noun,
            error,
        )


_alive: weakref.WeakSet[OffloadedTensors] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for tensors in list(_alive):
        tensors.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
