"""``overlap="backward"``: updates that backward computes on copies, and ``step()`` puts in place.

No weight changes before ``step()``, so tied and recomputed weights have the bits of the plain run,
and an error or an interrupt leaves weights and state of the last step. The copy of a weight takes
the place of its gradient, which is freed.
"""
# ruff: noqa: SLF001 - an offloaded optimizer keeps the names of its own class free

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.away.known import known_of
from ssdtrain.errors import StorageError, UnsupportedError
from ssdtrain.machine.torch_internals import current_backward, outside_compiler
from ssdtrain.optimizer.chunks import Chunk, Part, name_of, parts_in_order
from ssdtrain.optimizer.contract import Rebound, params_of, refuse_shared_memory
from ssdtrain.optimizer.in_backward_update import (
    CHANGED,
    Round,
    let_weight_go,
    make_updates,
    put_in_place,
    roll_back,
    why_not,
    why_nothing,
)
from ssdtrain.optimizer.taken import INSTEAD, LOOKED, Taken, TakenGradient
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.weights import weight_of
from ssdtrain.sharing import Room
from ssdtrain.watched import User

if TYPE_CHECKING:
    from ssdtrain.optimizer.offloaded import Offloaded

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
FAILED = (
    "an update in backward failed. Weights and state are those from before this step: call step() "
    "again once the cause is gone, or optimizer.zero_grad() to discard the step"
)
PUBLISH_TRIES = 3


class InBackward:
    """The updates of an optimizer with ``overlap="backward"``."""

    def __init__(self, host: Offloaded) -> None:
        self.is_last = True
        """True if the next backward completes the gradients of a step."""
        self.lock = threading.RLock()
        """Several threads may run backwards at once; a signal handler finds it held."""
        self._host = weakref.ref(host)
        self._watched: dict[Tensor, Any] = {}
        weakref.finalize(host, _remove_all, self._watched).atexit = False
        self._round: Round | None = None
        self._taken: dict[int, Taken] = {}
        self._in_step: list[Taken] = []
        """Updates that ``step()`` itself computes; their gradients stay in place."""
        self._waiting: list[Taken] = []
        """Taken parameters that are updated together, once they are a part."""
        self._waiting_bytes = 0
        self._kept_bytes = Counter[int]()
        """Bytes of weights and gradients that stay in memory for these, by the id of the owner."""
        self._noted: dict[int, tuple[Tensor, User]] = {}
        """The parameter whose gradient each thread has completed last: autograd uses that gradient
        until the next one comes. The user keeps its bytes in memory."""
        self._backward = -1
        """The number of the backward of the last gradient."""
        self._settling: list[ParkedUpdate] = []
        """Updated weights whose writes are under way."""

    def watch(self) -> None:
        """Put a hook on each parameter, also on new and unfrozen parameters."""
        weak = self._host

        def complete(param: Tensor) -> None:
            host = weak()
            if host is not None and host._in_backward is not None:
                outside_compiler(partial(host._in_backward.note, host, param))

        params: dict[Any, None] = dict.fromkeys(params_of(self._of()))
        for gone in self._watched.keys() - params.keys():
            self._watched.pop(gone).remove()
        for param in params:
            if param.requires_grad and param.is_leaf and param not in self._watched:
                self._watched[param] = param.register_post_accumulate_grad_hook(complete)

    def note(self, host: Offloaded, param: Tensor) -> None:
        """Take the gradient that this thread has completed before this one."""
        with self.lock:
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

    def finish(
        self, host: Offloaded, options: dict[str, Any]
    ) -> tuple[Rebound, list[Chunk], Optimizer]:
        """Compute all updates that are left, and change no weight. What raises may be repeated.

        Returns the numbers that updates rebind, the parameters that ``step()`` has to update in
        place, and the optimizer whose step does so.
        """
        with self.lock:
            self._noted.clear()
            self._clear_waiting()
            self._drop_in_step(host)
            self._drop_replaced()
            refuse_shared_memory(params_of(host), 'overlap="backward"')
            self._refuse_changes(host, options)
            if self._round is None:
                self._round = Round(host)
            now = self._round
            reason = why_nothing(options) or now.unkept
            in_place = [self._chunk_in_place(host, group, reason) for group, _ in now.groups]
            records = [*self._taken.values(), *self._in_step]
            try:
                self._update(host, now, [one for one in records if one.updated is None])
            except StorageError as error:
                raise StorageError(f"{FAILED}: {error}") from error
            except Exception as error:
                if not isinstance(error, UnsupportedError):
                    error.add_note(FAILED)
                raise
            vars(now.stand_in)["state"] = host._states
            return now.rebound, in_place, now.stand_in

    def publish(self, host: Offloaded) -> BaseException | None:
        """Put all updates in place; return an interrupt that came meanwhile."""
        interrupt: BaseException | None = None
        failed_count = 0
        with self.lock:
            while self._round is not None:
                try:
                    self._publish(host, self._round)
                except KeyboardInterrupt as error:
                    # An impatient user sends several.
                    interrupt = error
                except BaseException as error:
                    # The handler of another signal may raise, too.
                    interrupt, failed_count = error, failed_count + 1
                    if failed_count == PUBLISH_TRIES:
                        raise
        return interrupt

    def give_up(self) -> None:
        """Give parameters the state of the last step, and drop updates that have begun since.

        Gradients that were freed are gone: the next ``step()`` raises unless they are zeroed.
        """
        with self.lock:
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
        """Forget the gradients that were taken, and their updates."""
        with self.lock:
            if not self._taken and self._round is None and not self._noted:
                return
            host = self._of()
            self._stop(host)
            for record in list(self._taken.values()):
                if record.is_in_place:
                    self._zero(host, record.param, set_to_none=set_to_none)
                self._drop(record)
            self._round = None

    # From here on the lock is held.

    def _take(self, host: Offloaded, param: Tensor, user: User) -> None:
        if self._round is None:
            self._round = Round(host)
        now = self._round
        group = now.group_of.get(id(param))
        if group is None or id(param) in self._taken or param.grad is None or now.has_failed:
            return
        if self._why_not(host, param, now.unkept):
            return
        record = Taken(param, group, param.grad, user)
        # An interrupt from here on leaves a record whose gradient is in place, or that has no
        # update: step() handles both.
        self._taken[id(param)] = record
        weight = weight_of(param)
        if weight is not None:
            # The backward has just used the weight: it stays for its update.
            weight.owner.begin_use([weight], record)
        record.take_gradient(self._name_of)
        size = host._bytes_with_gradient(param)
        if self._waiting and self._waiting_bytes + size > now.bytes_max:
            self._update_waiting(host, now)
        self._waiting.append(record)
        self._waiting_bytes += size
        if not host._buffers.is_bounded:
            # Read beside the backward. Under a bound, the update reserves its room first.
            host._prefetch(Part([Chunk(group, [param])]))
        if self._keeps_much(record):
            self._update_waiting(host, now)

    def _keeps_much(self, record: Taken) -> bool:
        """Return whether more stays for waiting updates than an owner's bound allows."""
        assert record.gradient is not None, "it was taken just now"
        keeps_much = False
        for one in (known_of(record.param), known_of(record.gradient)):
            if one is not None:
                self._kept_bytes[id(one.owner)] += one.nbytes
                keeps_much |= self._kept_bytes[id(one.owner)] > one.owner.kept_bytes_max
        return keeps_much

    def _clear_waiting(self) -> list[Taken]:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._kept_bytes.clear()
        return waiting

    def _update_waiting(self, host: Offloaded, now: Round) -> None:
        """Compute the updates that wait; ``step()`` makes them where the bound has no room.

        To wait for room here could be to wait for this backward.
        """
        records = self._clear_waiting()
        try:
            nbytes = sum(host._bytes_of(one.param) for one in records)
            room = host._buffers.try_to_reserve(nbytes)
            if room is not None:
                self._update(host, now, records, room)
        except Exception as error:  # noqa: BLE001 - step() tries again, and raises
            now.has_failed = True
            host._disk.notices.say(
                "failed update",
                "an update in backward failed, and step() tries again: %s",
                error,
                level=logging.ERROR,
            )
        finally:
            for record in records:
                let_weight_go(record)
                # Until step() updates it, the gradient may leave.
                record.gradient_user = None

    def _update(
        self, host: Offloaded, now: Round, records: list[Taken], room: Room | None = None
    ) -> None:
        """Compute updates part by part, in a room that is reserved here if none is given."""
        of_param = {id(record.param): record for record in records}
        chunks = [Chunk(record.group, [record.param]) for record in records]
        parts = parts_in_order(chunks, host._bytes_with_gradient, now.bytes_max)
        if room is None:
            room = host._buffers.reserve(map(host._size_of, parts))

        def update(part: Part) -> None:
            of_part = [of_param[id(param)] for param in part.params]
            make_updates(host, now, of_part)
            # The disk has taken the weights of the part before beside this update.
            settling = self._settling
            self._settling = [
                one.updated for one in of_part if isinstance(one.updated, ParkedUpdate)
            ]
            for parked in settling:
                parked.settle()

        with host._buffers.filled(room):
            host._update_all(parts, room, update)

    def _chunk_in_place(self, host: Offloaded, group: dict[str, Any], reason: str | None) -> Chunk:
        """Return the parameters of a group to update in place; the others get a record."""
        chunk = Chunk(group, [])
        for param in group["params"]:
            if id(param) in self._taken:
                continue
            if isinstance(param.grad, TakenGradient):
                own = any(param.grad is one.stand_in for one in self._taken.values())
                raise UnsupportedError(LOOKED if own else OTHERS)
            if param.grad is None or self._why_not(host, param, reason):
                chunk.params.append(param)
            else:
                self._in_step.append(Taken(param, group, param.grad))
        return chunk

    def _refuse_changes(self, host: Offloaded, options: dict[str, Any]) -> None:
        """Raise if ``step()`` would use other values than the updates have used."""
        if any(record.is_spent or record.is_refused for record in self._taken.values()):
            raise UnsupportedError(SPENT)
        if self._round is None:
            return
        name = self._round.changed(host)
        if name is not None:
            raise UnsupportedError(f"{name} {CHANGED}")
        # defence: a weight that changed past its counter since its update began
        changed = next((one.param for one in self._taken.values() if one.has_other_bytes), None)
        if changed is not None:
            raise UnsupportedError(f"a weight ({self._name_of(changed)}) {CHANGED}")
        reason = why_nothing(options)
        if reason:
            raise UnsupportedError(f"{reason}, and updates had begun in backward. {INSTEAD}")

    def _publish(self, host: Offloaded, now: Round) -> None:
        """Put all updates in place. An interrupted call may be repeated."""
        for record in [*self._taken.values(), *self._in_step]:
            if record.updated is not None:
                put_in_place(host, record)
                record.is_published = True
                record.updated = record.before = None
                record.is_state_new = False
        now.rebound.apply(host, {id(group): real for group, real in now.groups})
        if host._undo is not None:
            # From here on an interrupt must not undo a part of the step.
            host._undo.forget()
        # Their bytes leave with their weights.
        self._settling = []
        self._in_step = []
        self._round = None

    def _stop(self, host: Offloaded) -> None:
        self._noted.clear()
        self._clear_waiting()
        self._settling = []
        self._drop_in_step(host)

    def _drop_in_step(self, host: Offloaded) -> None:
        for record in self._in_step:
            roll_back(host, record)
        self._in_step = []

    def _drop(self, record: Taken) -> None:
        """Forget a gradient that was taken, and its update."""
        if not record.is_published:
            roll_back(self._of(), record)
        self._waiting = [one for one in self._waiting if one is not record]
        record.leave()
        self._taken.pop(id(record.param), None)

    def _drop_replaced(self) -> None:
        """Forget the gradients that the user has replaced or zeroed.

        If none is left, a new step begins, with the options of now.
        """
        for record in list(self._taken.values()):
            if not record.is_in_place:
                self._drop(record)
        if not self._taken:
            self._round = None
            self._clear_waiting()

    @staticmethod
    def _zero(host: Offloaded, param: Tensor, *, set_to_none: bool) -> None:
        if set_to_none:
            param.grad = None
            return
        if host._gradients is not None:
            host._gradients.expect(param)
        param.grad = torch.zeros_like(param).detach()
        if host._gradients is not None:
            host._gradients.end_adding(param)

    def _of(self) -> Offloaded:
        host = self._host()
        assert host is not None, "it has called"
        return host

    def _name_of(self, param: Tensor) -> str:
        host = self._host()
        return name_of([] if host is None else host.param_groups, param)

    def _why_not(self, host: Offloaded, param: Tensor, reason: str | None) -> str | None:
        reason = reason or why_not(host, param)
        if reason:
            self._say(host, reason)
        return reason

    def _say(self, host: Offloaded, reason: str) -> None:
        text = "parameters are updated in step(), and not in backward: %s"
        host._disk.notices.say(reason, text, reason, level=logging.INFO)


def _remove_all(watched: dict[Tensor, Any]) -> None:
    for handle in watched.values():
        handle.remove()
    watched.clear()
