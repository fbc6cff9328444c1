"""``overlap="backward"``: updates that are computed in backward, and put in place by ``step()``.

An update works on a copy of its weight, on a thread of its own. What backward still needs is not
changed, so tied and recomputed weights have the bits of the plain run, and whatever goes wrong
before ``step()`` has ended leaves weights and state of the last step whole: the copies are dropped,
and the older state lies where it was. The copy takes the place of the gradient, which is freed.
"""
# ruff: noqa: SLF001 - what an offloaded optimizer has for its schedules is private

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.away.known import known_of
from ssdtrain.errors import SsdtrainError, StorageError, UnsupportedError
from ssdtrain.machine.torch_internals import current_backward, no_compilation, outside_compiler
from ssdtrain.optimizer.chunks import Chunk, name_of
from ssdtrain.optimizer.contract import Rebound
from ssdtrain.optimizer.in_backward_update import (
    CHANGED,
    Host,
    Round,
    let_weight_go,
    make_updates,
    put_in_place,
    roll_back,
    why_not,
    why_nothing,
)
from ssdtrain.optimizer.shared_memory import sharing_memory
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.taken import INSTEAD, LOOKED, Taken, TakenGradient, take
from ssdtrain.optimizer.updating_thread import Job, UpdatingThread
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.weights import weight_of
from ssdtrain.sharing import Room
from ssdtrain.watched import User

__all__ = ["InBackward"]

SPENT = (
    "step() needs gradients that are gone: their updates freed them in an earlier step, or in one "
    "that was discarded by a look at the optimizer's state, or a backward that would add to them "
    "was refused. No weight was changed. Call optimizer.zero_grad() and begin the step again; or "
    'use overlap="step"'
)
OTHERS = (
    'another optimizer with overlap="backward" has taken the gradient of a parameter of this one, '
    "and holds its update. No weight was changed. Drop that optimizer and what refers to it, such "
    "as its scheduler, or call its zero_grad() before each backward that is not its own"
)
ITSELF = (
    "the optimizer's step has looked at the state of the optimizer by another way than self, such "
    "as a method that was bound to it before (self.update = self.update_with), which discards what "
    'backward began. Use overlap="step"'
)
FAILED = (
    "an update in backward failed. Weights and state are those from before this step: call step() "
    "again once the cause is gone, or optimizer.zero_grad() to discard the step"
)


class InBackward:
    """The updates of an optimizer with ``overlap="backward"``."""

    def __init__(self, host: Host) -> None:
        self.is_last = True
        """Whether the next backward completes the gradients of a step."""
        self._host = weakref.ref(host)
        self._thread = UpdatingThread()
        self._watched: dict[Tensor, Any] = {}
        weakref.finalize(host, _remove_all, self._watched).atexit = False
        self._taken: dict[int, Taken] = {}
        self._in_step: list[Taken] = []
        """What `step()` itself gives to the thread, whose gradients stay in place."""
        self._is_in_step = False
        self._round: Round | None = None
        self.lock = threading.RLock()
        """Backwards of several threads may go on at once."""
        self._noted: dict[int, tuple[Tensor, User]] = {}
        """Whose gradient each thread has accumulated last: autograd uses it until the next one
        comes there. The gradient stays in memory as long as there is the user."""
        self._waiting: list[Taken] = []
        self._waiting_bytes = 0
        self._backward = -1
        """The number of the backward that gradients came from last."""
        self._error: BaseException | None = None
        self._kept_bytes = Counter[int]()
        """Of weights and gradients that stay for their updates, since all updates were made, by
        the number of their owner."""
        self._settling: list[ParkedUpdate] = []
        """Updated weights that are on their way to the disk."""

    def watch(self) -> None:
        """Be told of the gradients of all parameters, also of new and unfrozen ones."""
        weak = self._host

        def complete(param: Tensor) -> None:
            host: Any = weak()
            if host is not None:
                outside_compiler(partial(host._in_backward.note, host, param))

        params = {one: None for group in self._of().param_groups for one in group["params"]}
        for gone in self._watched.keys() - params.keys():
            self._watched.pop(gone).remove()
        for param in params:
            if param.requires_grad and param.is_leaf and param not in self._watched:
                self._watched[param] = param.register_post_accumulate_grad_hook(complete)

    def note(self, host: Host, param: Tensor) -> None:
        """Take the gradient that is complete, not this one: autograd still uses it."""
        with self.lock:
            self._note(host, param)

    def _note(self, host: Host, param: Tensor) -> None:
        reason = why_nothing() if self.is_last else None
        user = User() if self.is_last and reason is None else None
        if host._gradients is not None:
            host._gradients.end_adding(param, user)
        if not self.is_last:
            self._noted.clear()
        if reason is not None:
            self._say(host, reason)
        if user is None:
            return
        if self._backward != current_backward():
            self._backward = current_backward()
            self._drop_replaced()
        before = self._noted.pop(threading.get_ident(), None)
        self._noted[threading.get_ident()] = param, user
        if before is not None:
            self._take(host, *before)

    def join(self) -> None:
        """Wait for the updates that have begun."""
        self._thread.join()

    def finish(self, host: Host, options: dict[str, Any]) -> tuple[Rebound, list[Chunk], Optimizer]:
        """Make all updates that are left; return what has to be updated in place, and on what.

        Nothing is changed before ``publish``. What raises may be tried again.
        """
        self.join()
        self._thread.note_threads()
        self._noted.clear()
        self._waiting, self._waiting_bytes = [], 0
        self._drop_in_step(host)
        self._drop_replaced()
        self._refuse_changes(host, options)
        # Backward runs without torch's default device, so its updates take that of this step().
        host._default_device = torch.get_default_device()
        self._raise()
        if not self._taken or self._round is None:
            self._round = Round(host)
        now = self._round
        now.add_groups(host)
        now.sharing = sharing_memory(now.params)
        if not now.sharing.isdisjoint(self._taken):
            raise UnsupportedError(f"a weight {CHANGED}")
        reason = why_nothing(options) or now.unkept
        chunks = [Chunk(group, []) for group, _ in now.groups]
        for (group, _), chunk in zip(now.groups, chunks, strict=True):
            for param in group["params"]:
                if id(param) in self._taken:
                    continue
                if isinstance(param.grad, TakenGradient):
                    own = any(param.grad is one.stands_in for one in self._taken.values())
                    raise UnsupportedError(LOOKED if own else OTHERS)
                if param.grad is None or self._why_not(host, now, param, reason):
                    chunk.params.append(param)
                else:
                    self._in_step.append(take(param, group))
        made = [one for one in self._taken.values() if one.updated is not None]
        left = [one for one in self._taken.values() if one.updated is None]
        self._is_in_step = True
        try:
            for record in [*left, *self._in_step]:
                self._wait(host, now, record)
            self._cut(host, now)
            # Beside the last updates of the thread, for which the user could change nothing.
            # defence: a weight that changed past its counter since its update began
            changed = next((one.param for one in made if one.has_other_bytes), None)
            self.join()
        finally:
            self._is_in_step = False
        self._raise()
        if changed is not None:
            raise UnsupportedError(f"a weight ({self._name_of(changed)}) {CHANGED}")
        vars(now.stand_in)["state"] = host._states
        return now.rebound, chunks, now.stand_in

    def publish(self, host: Host) -> BaseException | None:
        """Put all updates in place, in whole; return an interrupt that came meanwhile.

        Another thread does it, because handlers of signals interrupt this one only.
        """
        if self._round is None:
            raise UnsupportedError(ITSELF)
        interrupt: BaseException | None = None
        try:
            self._thread.add(Job([], lambda _: self._publish(host)))
            self.join()
        except BaseException as error:  # noqa: BLE001 - it is raised when all is whole
            interrupt = error
            self._join_in_spite_of_interrupts()
        # By now there is nothing left of it, unless the interrupt came before the thread had it.
        self._publish(host)
        return interrupt

    def give_up(self) -> None:
        """Have state and weights of the last step, whatever has begun since.

        Gradients that were freed are gone, so the next ``step()`` raises unless they are zeroed.
        """
        if self._round is None:
            return
        host = self._of()
        self._stop(host)
        for record in list(self._taken.values()):
            if record.is_published:
                continue
            if record.updated is None and record.gradient is not None:
                if record.is_in_place:
                    record.param.grad = record.gradient
                self._drop(record)
            else:
                roll_back(host, record)
        # Last: after an interrupt the next look goes on with what is left.
        self._round = None

    def discard(self, *, set_to_none: bool) -> None:
        """Forget the gradients that were taken, and all that their updates have done."""
        if not self._taken and self._round is None and not self._noted:
            return
        host = self._of()
        self._stop(host)
        for record in list(self._taken.values()):
            if record.is_in_place:
                self._zero(host, record.param, set_to_none=set_to_none)
            self._drop(record)
        self._round = None

    @staticmethod
    def _zero(host: Host, param: Tensor, *, set_to_none: bool) -> None:
        if set_to_none:
            param.grad = None
            return
        if host._gradients is not None:
            host._gradients.expect(param)
        param.grad = torch.zeros_like(param).detach()
        if host._gradients is not None:
            host._gradients.end_adding(param)

    def _of(self) -> Host:
        host = self._host()
        assert host is not None, "it has called"
        return host

    def _name_of(self, param: Tensor) -> str:
        host = self._host()
        return name_of([] if host is None else host.param_groups, param)

    def _join_in_spite_of_interrupts(self) -> None:
        while True:
            try:
                return self.join()
            except KeyboardInterrupt:
                # One is raised already when all is whole; whoever is impatient sends more.
                continue

    def _stop(self, host: Host) -> None:
        self._thread.clear()
        self.join()
        self._error = None  # It was logged, and the step is given up.
        self._noted.clear()
        self._waiting, self._waiting_bytes = [], 0
        self._settling = []
        self._drop_in_step(host)

    def _drop_in_step(self, host: Host) -> None:
        for record in self._in_step:
            roll_back(host, record)
        self._in_step = []

    def _drop(self, record: Taken) -> None:
        """Go on as if a gradient had not been taken, which the user has replaced."""
        with self.lock:
            if not record.is_published:
                self.join()
                roll_back(self._of(), record)
            self._waiting = [one for one in self._waiting if one is not record]
            record.leave()
            self._taken.pop(id(record.param), None)

    def _drop_replaced(self) -> None:
        """Go on as if the gradients had not been taken that the user has replaced or zeroed.

        Without any that is left a step begins anew, with the options of now.
        """
        for record in list(self._taken.values()):
            if not record.is_in_place:
                self._drop(record)
        if not self._taken:
            # What failed was logged, and belongs to what is dropped.
            self._round = self._error = None
            self._waiting_bytes = 0

    def _take(self, host: Host, param: Tensor, user: User) -> None:
        if self._round is None:
            self.join()
            self._round = Round(host)
        now = self._round
        group = now.group_of.get(id(param))
        if group is None or id(param) in self._taken or param.grad is None:
            return
        if self._why_not(host, now, param, now.unkept):
            return
        record = take(param, group, user)
        # An interrupt from here on leaves a record whose gradient is in place, or one that step()
        # finds without its update: both are taken into account there.
        self._taken[id(param)] = record
        record.stand_in(self._drop, self._name_of)
        weight = weight_of(record.param)
        if weight is not None:
            # The thread of the updates cannot have others leave, as this one may be using them: so
            # what the backward has just used stays for its update.
            weight.owner.begin_use([weight], record)
        self._wait(host, now, record)
        if self._keeps_much(record):
            self._cut(host, now)
            self.join()
            self._kept_bytes.clear()

    def _keeps_much(self, record: Taken) -> bool:
        """Whether what stays for updates takes more of a bound than it may, with this one."""
        assert record.gradient is not None, "it was taken just now"
        keeps_much = False
        for one in (known_of(record.param), known_of(record.gradient)):
            if one is not None:
                number = id(one.owner)
                self._kept_bytes[number] += one.nbytes
                keeps_much |= self._kept_bytes[number] > one.owner.kept_bytes_max
        return keeps_much

    def _wait(self, host: Host, now: Round, record: Taken) -> None:
        size = host._bytes_with_gradient(record.param)
        if self._waiting and self._waiting_bytes + size > now.bytes_max:
            self._cut(host, now)
        self._waiting.append(record)
        self._waiting_bytes += size

    def _cut(self, host: Host, now: Round) -> None:
        records, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if records:
            begin = self._thread.add if self._is_in_step else self._thread.put
            begin(Job(records, lambda following: self._update(host, now, records, following)))

    def _refuse_changes(self, host: Host, options: dict[str, Any]) -> None:
        """Raise if what the updates used is not what ``step()`` would use."""
        if any(record.is_spent or record.is_refused for record in self._taken.values()):
            raise UnsupportedError(SPENT)
        if not self._taken or self._round is None:
            return
        name = self._round.changed(host)
        if name is not None:
            raise UnsupportedError(f"{name} {CHANGED}")
        if not all(record.is_weight_unchanged for record in self._taken.values()):
            raise UnsupportedError(f"a weight {CHANGED}")
        reason = why_nothing(options)
        if reason:
            raise UnsupportedError(f"{reason}, and updates had begun in backward. {INSTEAD}")

    def _raise(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, StorageError):
            raise StorageError(f"{FAILED}: {error}") from error
        if isinstance(error, UnsupportedError):
            raise error
        if error is not None:
            error.add_note(FAILED)
            raise error

    def _why_not(self, host: Host, now: Round, param: Tensor, reason: str | None) -> str | None:
        reason = reason or why_not(host, now, param)
        if reason:
            self._say(host, reason)
        return reason

    def _say(self, host: Host, reason: str) -> None:
        text = "parameters are updated in step(), and not in backward: %s"
        host._disk.notices.say(reason, text, reason, level=logging.INFO)

    # What follows runs on the thread.

    def _update(self, host: Host, now: Round, records: list[Taken], following: list[Taken]) -> None:
        if self._error is not None:
            return
        try:
            room = self._room_for(host, records)
            if room is None or not self._make(host, now, records, following, room):
                for record in records:
                    let_weight_go(record)
                return
            self._settle(records)
        except BaseException as error:  # noqa: BLE001 - `step()` raises it
            for record in records:
                roll_back(host, record)
            self._error = error
            host._disk.notices.say(
                "failed update",
                "an update in backward failed, which step() raises: %s",
                error,
                level=logging.ERROR,
            )
        else:
            for record in records:
                record.let_gradient_go()

    def _settle(self, records: list[Taken]) -> None:
        """Wait for the weights of the part before, which the disk has taken beside this one."""
        updated = [one.updated for one in records if isinstance(one.updated, ParkedUpdate)]
        settling, self._settling = self._settling, updated
        for parked in settling:
            parked.settle()

    def _make(
        self, host: Host, now: Round, records: list[Taken], following: list[Taken], room: Room
    ) -> bool:
        """Make an update, or return ``False`` to leave it to ``step()``."""
        states, waits = host._states, self._is_in_step
        with host._buffers.filled(room), no_compilation(waits=waits) as nobody_compiles:
            if not nobody_compiles:
                return False
            # The bound has no space left for the next part.
            self._prefetch(states, records if room.is_bounded else [*records, *following])
            make_updates(host, now, records)
            host._buffers.note(room, sum(host._bytes_of(record.param) for record in records))
            for record in records:
                state = states.get(record.param)
                if isinstance(state, ParameterState):
                    state.send(host._disk)
            host._disk.make_room()
            return True

    def _room_for(self, host: Host, records: list[Taken]) -> Room | None:
        """Return room for an update; without any in backward it is left to ``step()``.

        To wait there could be to wait for the backward, which may come to wait for this.
        """
        size = sum(host._bytes_of(record.param) for record in records)
        buffers = host._buffers
        return buffers.reserve([size]) if self._is_in_step else buffers.try_to_reserve(size)

    @staticmethod
    def _prefetch(states: Any, records: list[Taken]) -> None:
        for state in [states.get(one.param) for one in records if one.updated is None]:
            # What cannot be read is asked for again when it is brought, and told then.
            with suppress(SsdtrainError):
                if state is not None:
                    state.prefetch()

    def _publish(self, host: Host) -> None:
        now = self._round
        if now is None:
            return
        with torch.no_grad():
            for record in [*self._taken.values(), *self._in_step]:
                if record.updated is not None:
                    put_in_place(host, record)
                    record.is_published = True
                    record.updated = record.before = None
                    record.is_state_new = False
        now.rebound.apply(host, {id(group): real for group, real in now.groups})
        host._states.put_last([param for param in now.params if param not in now.known])
        if host._undo is not None:
            # From here on an interrupt of the other thread must not undo a part of the step.
            host._undo.forget()
        # What has these has their bytes, which leave with their weights.
        self._settling = []
        self._in_step = []
        self._round = None


def _remove_all(watched: dict[Tensor, Any]) -> None:
    for handle in watched.values():
        handle.remove()
    watched.clear()
