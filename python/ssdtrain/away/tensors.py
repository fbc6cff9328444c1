"""Tensors under one bound: which are in memory, and what is read and written for it."""

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
from ssdtrain.sharing import Figures, Room
from ssdtrain.sizes import shown_bytes
from ssdtrain.store import TensorStore
from ssdtrain.watched import User

__all__ = ["OffloadedTensors"]

AHEAD_COUNT_MAX = 64
"""So many uses ahead are looked at for reads at most."""
LOOKED_COUNT_MAX = 8
"""So many tensors that looks have brought are tried again by later looks."""
FREED_SHARE = 4
"""The C library holds freed memory of one part in so many of the bound at most."""
AHEAD_SHARE = 2
"""Reads that were begun ahead take one part in so many of the bound at most."""
KEPT_SHARE = 4
"""What stays for updates in backward takes one part in so many of the bound at most."""


class OffloadedTensors:
    """Keeps tensors under a bound."""

    name: ClassVar[str]
    """Their name in the report of a session."""
    too_many: ClassVar[str]
    """The message where they do not fit, before the causes; it has a place for the bound."""

    def __init__(
        self, store: TensorStore, max_resident_bytes: int, room: Room | None = None
    ) -> None:
        self._store = store
        self._room = room
        """As much of a session's bound, as long as there is such a tensor."""
        self.max_resident_bytes = max_resident_bytes
        self._lock = threading.RLock()
        self._order = UseOrder()
        self._all: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()
        """By number, in the order in which they came."""
        self._at: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()
        """The newest of each place in the order of uses."""
        freed = FreedMemory(max_resident_bytes // FREED_SHARE)
        self._writes = Writes(store, freed, ended=self._note, failed=self._keep)
        self._reads: dict[int, OffloadedTensor] = {}
        """Begun, and not yet used."""
        self._resident: dict[int, int] = {}
        """The bytes of each that is in memory, and their sum."""
        self._resident_bytes = 0
        self._looked = deque[weakref.ref[OffloadedTensor]](maxlen=LOOKED_COUNT_MAX)
        """Tensors that looks brought last and emptied again; ``source`` has their bytes still."""
        self._is_over = False
        """Whether a read did not fit under the bound, and nothing has fitted since."""
        self._notices = Notices()
        self._process = os.getpid()
        self._peak_bytes = self._read_bytes = self._failed_count = 0
        self._stall_s = 0.0
        self._gone = deque[OffloadedTensor]()
        """Those whose tensor is gone, until somebody with the lock takes them out of the books."""
        self._error: SsdtrainError | None = None
        """Why the disk did not take one, the last time."""
        self.is_failure_raised = False
        """Whether a write that fails now is raised by the call that takes these over, and so need
        not be said."""
        _alive.add(self)

    @property
    def kept_bytes_max(self) -> int:
        """So many bytes may wait in memory for updates in backward."""
        return self.max_resident_bytes // KEPT_SHARE

    def leave_to_parent(self) -> None:
        """In a forked child: the disk is not ours, and the lock may be held for ever."""
        self._lock = threading.RLock()

    def take(self, one: OffloadedTensor) -> None:
        """Take a tensor over, whose bytes may leave from now on."""
        tensor = one.tensor
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
            # First: who is interrupted in between gives back what is in here.
            self._all[id(one)] = self._at[one.place] = one
            KNOWN[number] = weakref.ref(tensor, forget), one
            self._note(one)

    def give_back(self) -> None:
        """Bring all back, for good, because the call that took them over failed."""
        with self._lock:
            # None leaves to make room for another.
            self.max_resident_bytes = sys.maxsize
            for one in self._alive():
                self._bring(one)
            for number in [id(one.tensor) for one in self._alive()]:
                KNOWN.pop(number, None)
        if self._room is not None:
            self._room.end()  # the traceback of what went wrong may keep all of this

    def forget(self, one: OffloadedTensor) -> None:
        """Forget one whose tensor is gone.

        A tensor may go while its thread holds any lock, so this waits for none: where another
        thread has ours, it or the next one does the rest.
        """
        self._gone.append(one)
        run_if_free(self._lock, self._forget_gone)

    def begin_use(self, some: Iterable[OffloadedTensor], user: object) -> None:
        """Have these in memory until ``end_use``."""
        refuse_handlers(self._lock)
        for one in some:
            one.note_user(user)
        with self._lock:
            self._looked.clear()
            for one in some:
                self._order.note(one.place)
                self._bring(one)
                self._note(one)
            self._go_on()

    def look(self, one: OffloadedTensor) -> None:
        """Bring back what training uses now."""
        refuse_handlers(self._lock)
        user = User()
        # Nothing that is read ahead takes its place.
        one.note_user(user)
        try:
            with self._lock:
                self._use(one)
        finally:
            one.end_use(user)

    def begin_look(self, one: OffloadedTensor, user: object, *, in_training: bool) -> Tensor | None:
        """Bring back what a function of the program uses until ``end_look``.

        [Note: looks] A look at one tensor lets none leave that was in memory before: whoever asked
        for its address may read there later, as safetensors does. So looks take the memory of one
        more tensor than the bound, of all whose addresses were asked for, and of all that share
        memory with a living tensor (`weight.data`). Forwards, backwards and changes in place let
        all others leave.
        """
        if is_held_here(self._lock):  # by a line that a signal handler interrupts
            return one.copy(self._store)
        one.note_user(user)
        with self._lock:
            if in_training:
                self._use(one)
            elif not one.is_attached():
                self._let_looked_leave(but=one)
                self._end_writes(one.nbytes)
                # defence: looks let none leave that was in memory
                self._bring(one, makes_room=False)
                others_bytes = self._resident_bytes - one.nbytes
                if others_bytes > self.max_resident_bytes:
                    self._note_over(others_bytes, looked=one)
        return None

    def end_look(self, one: OffloadedTensor, user: object, *, stays: bool) -> None:
        """Let a tensor leave again that a look brought, unless its memory was given out."""
        one.end_use(user)
        if is_held_here(self._lock):
            return
        with self._lock, plainly():
            if one.tensor is None or one.users or not one.is_attached():
                return
            # `source` keeps the bytes, for the next look at it and for whoever shares them.
            if not stays and one.may_leave() and self._empty(one, shared=True):
                self._let_looked_leave(but=one)
                self._looked.append(weakref.ref(one))
            self._note(one)

    def bring(self, one: OffloadedTensor) -> None:
        """Bring back what is in use, outside of the order that is learned."""
        refuse_handlers(self._lock)
        with self._lock:
            self._bring(one)

    def note_use(self, one: OffloadedTensor) -> None:
        """Note that one, which is in memory, was used."""
        with self._lock:
            self._order.note(one.place)
            self._note(one)
            self._go_on()

    def figures(self) -> Figures:
        """Return what a session reports, without the lock, which may be held during a wait."""
        found = self._alive()
        resident_bytes = sum(self._resident.get(id(one), 0) for one in found)
        return Figures(
            resident_bytes=resident_bytes,
            on_disk_bytes=sum(one.nbytes for one in found) - resident_bytes,
            bytes_written=self._writes.written_bytes,
            bytes_read=self._read_bytes,
            stall_s=self._stall_s,
        )

    def _alive(self) -> list[OffloadedTensor]:
        """Return all; a collection of garbage may end some while somebody goes through them."""
        return [one for reference in self._all.valuerefs() if (one := reference()) is not None]

    # From here on the lock is held.

    def _forget_gone(self) -> None:
        while self._gone:
            one = self._gone[0]
            self._forget(one)
            # After that: an interrupt has it done again. It may be gone by now, as a collection of
            # garbage comes here as well.
            with suppress(ValueError):
                self._gone.remove(one)

    def _forget(self, one: OffloadedTensor) -> None:
        """Take one out of the books; nothing if it was done before."""
        # An error that was kept may have it for longer.
        self._all.pop(id(one), None)
        if self._at.get(one.place) is one:
            del self._at[one.place]
        self._resident.pop(id(one), None)
        self._resident_bytes = sum(self._resident.values())
        self._reads.pop(id(one), None)
        self._writes.forget(one)

    def _note(self, one: OffloadedTensor) -> None:
        """Note where a tensor is now."""
        if one.tensor is None:
            return
        nbytes = one.nbytes if one.is_in_memory() else 0
        if self._resident.get(id(one), 0) != nbytes:
            self._resident[id(one)] = nbytes
            # Anew: an interrupt between a change of an entry and one of a sum would stay for ever.
            self._resident_bytes = sum(self._resident.values())
            self._peak_bytes = max(self._peak_bytes, self._resident_bytes)

    def _bring(self, one: OffloadedTensor, *, makes_room: bool = True) -> None:
        """Give a tensor its bytes."""
        tensor = one.tensor
        if tensor is None or one.is_attached():
            return
        began_s = perf_counter()
        memory = one.source
        if memory is not None:
            # The disk may be reading this memory, which others change from now on.
            self._writes.end(one)
        else:
            memory = self._read(one, makes_room)
        if not one.is_attached():  # unless it came back because the disk did not take it
            with plainly():
                one.return_to(tensor, memory)
        self._reads.pop(id(one), None)
        self._note(one)
        self._stall_s += perf_counter() - began_s

    def _read(self, one: OffloadedTensor, makes_room: bool) -> Tensor:
        try:
            if one.pending is None:
                if makes_room:
                    self._make_room(one.nbytes)
                self._begin_read(one)
            assert one.pending is not None
            with plainly():
                memory = one.pending.result()
        except SsdtrainError as error:
            # What was begun has failed; who asks again has it read again.
            self._drop_read(one)
            error.add_note(
                f"ssdtrain could not bring back the {one.noun} {one.name!r}; it is on the disk "
                "still, and the next use reads it again"
            )
            raise
        self._read_bytes += one.nbytes
        self._writes.freed.note_read(one.nbytes)
        return memory

    def _use(self, one: OffloadedTensor) -> None:
        self._looked.clear()
        self._order.note(one.place)
        self._bring(one)
        self._go_on()

    def _end_writes(self, nbytes: int) -> None:
        """Wait for writes until so much fits beside what is in memory."""
        self._writes.end_done()
        while self._resident_bytes + nbytes > self.max_resident_bytes and self._writes:
            self._writes.end_oldest()

    def _let_looked_leave(self, *, but: OffloadedTensor) -> None:
        """Let those leave that earlier looks have brought, unless somebody has their memory."""
        for _ in range(len(self._looked)):
            reference = self._looked.popleft()
            one = reference()
            if one is None or one is but or one.users:
                continue
            if self._writes.lack(one) and not self._leave(one):
                self._looked.append(reference)

    def _begin_read(self, one: OffloadedTensor) -> None:
        assert one.stored is not None, "what is not in memory is on the disk"
        one.pending = self._store.read(one.stored)
        self._reads[id(one)] = one
        self._note(one)

    def _drop_read(self, one: OffloadedTensor) -> None:
        """Give up what was read ahead; its memory is free as soon as the disk has done with it."""
        one.pending = None
        self._reads.pop(id(one), None)
        self._note(one)

    def _go_on(self) -> None:
        """Do what is due at each use."""
        self._forget_gone()
        if self._resident_bytes > self.max_resident_bytes:
            # Much was used at once, or somebody had its memory, which may be over by now.
            self._make_room(0)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read what is expected next, as far as there is room.

        Where there is none yet, because what leaves has to be written first, those writes begin for
        all that is to be read, so that the next uses find room.
        """
        if os.getpid() != self._process:
            return
        self._writes.end_done()
        reading_bytes = sum(one.nbytes for one in list(self._reads.values()))
        waiting_bytes = 0
        for place in self._order.coming(AHEAD_COUNT_MAX):
            one = self._at.get(place)
            if one is None or one.is_in_memory():
                continue
            nbytes = one.nbytes
            if reading_bytes + waiting_bytes + nbytes > self.max_resident_bytes // AHEAD_SHARE:
                return
            if not self._let_leave(waiting_bytes + nbytes, before=self._order.distance(place)):
                return
            if waiting_bytes or self._resident_bytes + nbytes > self.max_resident_bytes:
                waiting_bytes += nbytes
            else:
                self._begin_read(one)
                reading_bytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        """Have others leave until so much fits, and wait for their writes."""
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
        """Say why so much is in memory, unless that was so at the last read."""
        if not self._is_over:
            # To look for causes takes a moment: not at each of the reads that follow.
            self._is_over = True
            self._say_why_over(resident_bytes, looked)

    def _say_why_over(self, resident_bytes: int, looked: OffloadedTensor | None) -> None:
        """Say why more than the bound is in memory, for each main cause once."""
        causes = Counter[str]()
        for one in self._alive():
            # Of those that the disk did not take it was said.
            if one is looked or one.stays:
                continue
            if one.is_attached():
                causes[one.why_in_memory(in_look=looked is not None)] += one.nbytes
            elif one.is_shared():
                causes[HELD] += one.nbytes
        if causes:
            told = [cause.format(shown_bytes(nbytes)) for cause, nbytes in causes.most_common()]
            sizes = shown_bytes(self.max_resident_bytes), shown_bytes(resident_bytes)
            words = f"{self.too_many}, %s in all; of these %s"
            self._notices.say(causes.most_common(1)[0][0], words, *sizes, "; ".join(told))

    def _let_leave(self, nbytes: int, before: float = -math.inf) -> bool:
        """Have others leave until so much will fit; return whether it will.

        Only what is expected later than ``before`` leaves.
        """
        wanted = self.max_resident_bytes - nbytes
        if os.getpid() != self._process:
            return False
        if self._resident_bytes - self._writes.nbytes <= wanted:
            return True
        for one in self._farthest_first():
            if self._order.distance(one.place) <= before:
                return False
            if one.pending is None:
                self._leave(one)
            else:
                self._drop_read(one)
            if self._resident_bytes - self._writes.nbytes <= wanted:
                return True
        return False

    def _farthest_first(self) -> list[OffloadedTensor]:
        """Return those that may leave, the last one to be needed first."""
        idle = [
            one
            for one in self._alive()
            if not one.users
            and not one.stays
            and (one.is_attached() or one.pending is not None or self._writes.lack(one))
        ]
        # What never was used has one distance, and the end of a model is needed last.
        idle.reverse()
        return sorted(idle, key=lambda one: -self._order.distance(one.place))

    def _leave(self, one: OffloadedTensor) -> bool:
        """Have a tensor leave the memory, now or as soon as the disk has it."""
        if one.tensor is None:
            return False
        # A look may come from the compiler, whose modes make other tensors.
        with plainly():
            if self._writes.lack(one):
                if one.is_shared():
                    return False
            else:
                if not one.may_leave():
                    return False
                if not self._empty(one):
                    self._note(one)
                    return False
            self._note(one)
            self._writes.send(one)
        self._note(one)
        return True

    def _empty(self, one: OffloadedTensor, *, shared: bool = False) -> bool:
        """Take the bytes out of a tensor, unless others may be using them, or have them."""
        return one.leave(shared=shared)

    def _keep(self, one: OffloadedTensor, error: SsdtrainError) -> None:
        """Keep a tensor in memory that the disk did not take."""
        if one.sum is None:
            one.stored = None
        tensor, memory = one.tensor, one.source
        if tensor is not None and memory is not None:
            one.return_to(tensor, memory)
            self._note(one)
        one.stays = True
        self._failed_count += 1
        if self.is_failure_raised:
            # Only for a moment: an error has the frames, and so the tensors, of all who called.
            self._error = error
            return
        self._notices.say(
            "failed write",
            f"{one.noun}s stay in memory, because the disk did not take them; training goes on: %s",
            error,
        )


_alive: weakref.WeakSet[OffloadedTensors] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for tensors in list(_alive):
        tensors.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
