"""The weights of a model: which are in memory, and what is read and written for it."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.process_memory import release_free_memory
from ssdtrain.machine.torch_internals import plainly
from ssdtrain.notices import Notices
from ssdtrain.parameters.keeping import Keeping, keeping_hooks
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.parameters.successor import Successor
from ssdtrain.parameters.use_order import UseOrder
from ssdtrain.parameters.weight import Weight, storage_key
from ssdtrain.parameters.writes import Writes
from ssdtrain.sharing import Figures, Room
from ssdtrain.sizes import shown_bytes
from ssdtrain.store import TensorStore
from ssdtrain.watched import User

__all__ = ["NAME", "Weights", "in_use", "on_storage_of", "weight_of"]

NAME = "weights"
"""What they are called in the report of a session."""

AHEAD_COUNT_MAX = 64
"""So many uses ahead are looked at for reads at most."""
AHEAD_SHARE = 2
"""Reads that were begun ahead take one part in so many of the bound at most."""

_known: dict[int, tuple[weakref.ref[Tensor], Weight]] = {}
"""By the number of the parameter: the weights of all models. An entry goes with its parameter."""


def weight_of(param: Tensor) -> Weight | None:
    """Return what is known of a parameter, if it may be away."""
    entry = _known.get(id(param))
    return None if entry is None else entry[1]


_on_storage: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
"""By the address of the storage: the weights of all models."""


def on_storage_of(tensor: Tensor) -> Weight | None:
    """Return the weight on whose storage a tensor lies, whether it has its bytes or not."""
    key = storage_key(tensor)
    weight = _on_storage.get(key)
    if weight is None:
        return None
    param = weight.param
    # Somebody may have given the parameter other memory, and this storage another's address.
    return weight if param is not None and storage_key(param) == key else None


@contextmanager
def in_use(params: Iterable[Tensor]) -> Iterator[None]:
    """Have parameters in memory while a block runs, on a thread that says what it uses."""
    user = User()
    found = [weight for param in params if (weight := weight_of(param)) is not None]
    try:
        for weight in found:
            weight.note_user(user)
            weight.owner.bring(weight)
        yield
    finally:
        for weight in found:
            weight.end_use(user)


class Weights:
    """Keeps the weights of one model under a bound."""

    name = NAME

    def __init__(
        self, store: TensorStore, max_resident_bytes: int, room: Room | None = None
    ) -> None:
        self._store = store
        self._room = room
        """As much of a session's bound, as long as there is a weight."""
        self.max_resident_bytes = max_resident_bytes
        self._lock = threading.RLock()
        self._order = UseOrder()
        self._all: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        """By number, in the order of the model."""
        self._writes = Writes(store, ended=self._note, failed=self._keep)
        self._reads: dict[int, Weight] = {}
        """Begun, and not yet used."""
        self._resident: dict[int, int] = {}
        """The bytes of each that is in memory, and their sum."""
        self._resident_bytes = 0
        self._notices = Notices()
        self._keeping: Keeping | None = None
        self._process = os.getpid()
        self._peak_bytes = self._read_bytes = self._failed_count = 0
        self._stall_s = 0.0
        self.staying_bytes = 0
        """Bytes of the model's weights that never leave."""
        self._error: SsdtrainError | None = None
        """Why the disk did not take a weight, the last time."""
        _alive.add(self)

    def leave_to_parent(self) -> None:
        """In a forked child: the disk is not ours, and the lock may be held for ever."""
        self._lock = threading.RLock()

    def add(self, param: Tensor, name: str) -> None:
        """Take a parameter over, whose bytes may leave from now on."""
        if not param.untyped_storage().resizable():
            # Memory of a file, of numpy or of another library: others may have it, unseen by torch.
            with torch.no_grad():
                param.data = param.detach().clone()
        weight = Weight(self, param, name)
        number = id(param)

        def forget(_: object) -> None:
            known = _known.pop(number, None)
            if known is not None:
                known[1].forget()

        with self._lock:
            # First: who is interrupted in between gives back what is in here.
            self._all[id(weight)] = weight
            _known[number] = weakref.ref(param, forget), weight
            self._note(weight)

    def give_back(self) -> None:
        """Bring all back, for good, because the call that took them over failed."""
        with self._lock:
            # None leaves to make room for another.
            self.max_resident_bytes = sys.maxsize
            for weight in list(self._all.values()):
                self._bring(weight)
            for number in [id(weight.param) for weight in self._all.values()]:
                _known.pop(number, None)
        if self._room is not None:
            # The traceback of what went wrong may keep all of this.
            self._room.end()

    def begin(self) -> None:
        """Let so many leave as the bound wants; raise what the disk refuses."""
        with self._lock:
            self._make_room(0)
            self._writes.end_all()
            self._peak_bytes = self._resident_bytes
        if self._error is not None:
            raise self._error
        release_free_memory()

    def forget(self, weight: Weight) -> None:
        """Forget a weight whose parameter is gone."""
        with self._lock:
            self._resident.pop(id(weight), None)
            self._resident_bytes = sum(self._resident.values())
            self._reads.pop(id(weight), None)
            self._order.forget(id(weight))
            self._writes.forget(weight)

    def begin_use(self, weights: Iterable[Weight], user: object) -> None:
        """Have these in memory until ``end_use``."""
        for weight in weights:
            weight.note_user(user)
        with self._lock:
            for weight in weights:
                self._order.note(id(weight))
                self._bring(weight)
                self._note(weight)
            self._go_on()

    def look(self, weight: Weight) -> None:
        """Bring back what somebody wants to use now."""
        user = User()
        # Nothing that is read ahead takes its place.
        weight.note_user(user)
        try:
            with self._lock:
                self._order.note(id(weight))
                self._bring(weight)
                self._go_on()
        finally:
            weight.end_use(user)

    def bring(self, weight: Weight) -> None:
        """Bring back what is in use, outside of the order that is learned."""
        with self._lock:
            self._bring(weight)

    def precede(self, updated: Tensor) -> Successor:
        """Begin to write the bytes that a weight is to have, beside those that it has."""
        self._writes.written_bytes += updated.nbytes
        return Successor(updated, self._store)

    def succeed(self, weight: Weight, successor: Successor) -> None:
        """Put such bytes in the place of those that a weight has, as an update in place does."""
        with self._lock:
            param = weight.param
            assert param is not None, "its optimizer has it"
            weight.note_memory()
            fits = not weight.has_foreign_memory
            if fits and not weight.is_attached():
                # What is being written is out of date.
                self._writes.forget(weight)
            if fits and successor.stored is not None and self._is_free(weight):
                weight.source, weight.pending = successor.source, None
                weight.stored, weight.sum = successor.stored, successor.sum
                if weight.source is not None:
                    weight.sum = None
                    self._writes.add(weight, successor.sum)
                self._reads.pop(id(weight), None)
                increment_version(param)
            else:
                memory = successor.tensor(self._store)
                self._bring(weight)
                with torch.no_grad():
                    param.copy_(memory)
            self._note(weight)

    def _is_free(self, weight: Weight) -> bool:
        """Have a weight without bytes in memory, unless others have them or may be using them."""
        if not weight.is_attached():
            return True
        param = weight.param
        assert param is not None
        _on_storage.pop(storage_key(param), None)
        return weight.leave()

    def keeping_pair(self) -> tuple[Any, Any]:
        """Return hooks on saved tensors that keep them, as autograd does without any."""
        with self._lock:
            if self._keeping is None:
                self._keeping = keeping_hooks(self._store)
            pair = self._keeping.context()
        return pair.pack_hook, pair.unpack_hook

    def stats(self) -> ParameterStats:
        """Return the figures of this moment."""
        with self._lock:
            return ParameterStats(
                total_bytes=sum(weight.nbytes for weight in self._all.values()),
                resident_bytes=self._resident_bytes,
                peak_resident_bytes=self._peak_bytes,
                on_disk_bytes=sum(
                    weight.nbytes for weight in self._all.values() if not weight.is_in_memory()
                ),
                staying_bytes=self.staying_bytes,
                read_bytes=self._read_bytes,
                written_bytes=self._writes.written_bytes,
                stall_s=self._stall_s,
                write_failed_count=self._failed_count,
            )

    def figures(self) -> Figures:
        """Return what a session reports, without the lock, which may be held during a wait."""
        found = [weight for one in self._all.valuerefs() if (weight := one()) is not None]
        resident_bytes = sum(self._resident.get(id(weight), 0) for weight in found)
        return Figures(
            resident_bytes=resident_bytes,
            on_disk_bytes=sum(weight.nbytes for weight in found) - resident_bytes,
            bytes_written=self._writes.written_bytes,
            bytes_read=self._read_bytes,
            stall_s=self._stall_s,
        )

    # From here on the lock is held.

    def _note(self, weight: Weight) -> None:
        """Note where a weight is now."""
        param = weight.param
        if param is None:
            return
        _on_storage[storage_key(weight.husk)] = weight
        if weight.is_attached():
            _on_storage[storage_key(param)] = weight
        nbytes = weight.nbytes if weight.is_in_memory() else 0
        if self._resident.get(id(weight), 0) != nbytes:
            self._resident[id(weight)] = nbytes
            # Anew: an interrupt between a change of an entry and one of a sum would stay for ever.
            self._resident_bytes = sum(self._resident.values())
            self._peak_bytes = max(self._peak_bytes, self._resident_bytes)

    def _bring(self, weight: Weight) -> None:
        """Give a parameter its bytes."""
        param = weight.param
        if param is None or weight.is_attached():
            return
        began_s = perf_counter()
        memory = weight.source
        if memory is not None:
            # The disk may be reading this memory, which others change from now on.
            self._writes.end(weight)
        else:
            memory = self._read(weight)
        if not weight.is_attached():  # unless it came back because the disk did not take it
            weight.return_to(param, memory)
        self._reads.pop(id(weight), None)
        self._note(weight)
        self._stall_s += perf_counter() - began_s

    def _read(self, weight: Weight) -> Tensor:
        try:
            if weight.pending is None:
                self._make_room(weight.nbytes)
                self._begin_read(weight)
            assert weight.pending is not None
            with plainly():
                memory = weight.pending.result()
        except SsdtrainError as error:
            # What was begun has failed; who asks again has it read again.
            self._drop_read(weight)
            error.add_note(
                f"ssdtrain could not bring back the weight {weight.name!r}; it is on the disk "
                "still, and the next use reads it again"
            )
            raise
        self._read_bytes += weight.nbytes
        return memory

    def _begin_read(self, weight: Weight) -> None:
        assert weight.stored is not None, "what is not in memory is on the disk"
        weight.pending = self._store.read(weight.stored)
        self._reads[id(weight)] = weight
        self._note(weight)

    def _drop_read(self, weight: Weight) -> None:
        """Give up what was read ahead; its memory is free as soon as the disk has done with it."""
        weight.pending = None
        self._reads.pop(id(weight), None)
        self._note(weight)

    def _go_on(self) -> None:
        """Do what is due at each use."""
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
        reading_bytes = sum(weight.nbytes for weight in self._reads.values())
        waiting_bytes = 0
        for number in self._order.coming(AHEAD_COUNT_MAX):
            weight = self._all.get(number)
            if weight is None or weight.is_in_memory():
                continue
            nbytes = weight.nbytes
            if reading_bytes + waiting_bytes + nbytes > self.max_resident_bytes // AHEAD_SHARE:
                return
            if not self._let_leave(waiting_bytes + nbytes, before=self._order.distance(number)):
                return
            if waiting_bytes or self._resident_bytes + nbytes > self.max_resident_bytes:
                waiting_bytes += nbytes
            else:
                self._begin_read(weight)
                reading_bytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        """Have others leave until so much fits, and wait for their writes."""
        if os.getpid() != self._process:
            return
        self._writes.end_done()
        self._let_leave(nbytes)
        while self._resident_bytes + nbytes > self.max_resident_bytes and self._writes:
            self._writes.end_oldest()
        if self._resident_bytes + nbytes > self.max_resident_bytes and nbytes:
            self._notices.say(
                "bound",
                "more than max_resident_bytes=%s of a model's weights are in memory: all others "
                "are in use, somebody has tensors on their memory (a state_dict, say), or another "
                "thread is busy, which may be using them",
                shown_bytes(self.max_resident_bytes),
            )

    def _let_leave(self, nbytes: int, before: float = -math.inf) -> bool:
        """Have others leave until so much will fit; return whether it will.

        Only what is expected later than ``before`` leaves.
        """
        wanted = self.max_resident_bytes - nbytes
        if self._resident_bytes - self._writes.nbytes <= wanted:
            return True
        for weight in self._farthest_first():
            if self._order.distance(id(weight)) <= before:
                return False
            if weight.pending is None:
                self._leave(weight)
            else:
                self._drop_read(weight)
            if self._resident_bytes - self._writes.nbytes <= wanted:
                return True
        return False

    def _farthest_first(self) -> list[Weight]:
        """Return those that may leave, the last one to be needed first."""
        idle = [
            weight
            for weight in self._all.values()
            if not weight.users
            and not weight.stays
            and (weight.is_attached() or weight.pending is not None or self._writes.lack(weight))
        ]
        # What never was used has one distance, and the end of a model is needed last.
        idle.reverse()
        return sorted(idle, key=lambda weight: -self._order.distance(id(weight)))

    def _leave(self, weight: Weight) -> bool:
        """Have a weight leave the memory, now or as soon as the disk has it."""
        param = weight.param
        if param is None:
            return False
        if not self._writes.lack(weight):
            if not weight.may_leave():
                return False
            _on_storage.pop(storage_key(param), None)
            if not weight.leave():
                self._note(weight)
                return False
        self._note(weight)
        self._writes.send(weight)
        self._note(weight)
        return True

    def _keep(self, weight: Weight, error: SsdtrainError) -> None:
        """Keep a weight in memory that the disk did not take."""
        if weight.sum is None:
            weight.stored = None
        param, memory = weight.param, weight.source
        if param is not None and memory is not None:
            weight.return_to(param, memory)
            self._note(weight)
        weight.stays = True
        self._failed_count += 1
        self._error = error
        self._notices.say(
            "failed write",
            "weights stay in memory, because the disk did not take them; training goes on: %s",
            error,
        )


_alive: weakref.WeakSet[Weights] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for weights in list(_alive):
        weights.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
