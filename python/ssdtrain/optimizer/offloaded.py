"""The class of an optimizer whose state lies on SSDs, and functions that checkpoints call.

The optimizer stays the same object, for schedulers, scalers and trainers; its new class is derived
from its own.
"""
# ruff: noqa: SLF001 - an offloaded optimizer keeps the names of its own class free

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import ConfigError, SsdtrainError, StorageError
from ssdtrain.optimizer.buffers import Buffers, bytes_of
from ssdtrain.optimizer.chunks import (
    Chunk,
    Part,
    arguments_of,
    is_sparse,
    own_step,
    parts_in_order,
    update,
)
from ssdtrain.optimizer.contract import (
    Rebound,
    params_of,
    refuse_shards,
    refuse_shared_memory,
)
from ssdtrain.optimizer.disk import Disk
from ssdtrain.optimizer.gradients import Gradients
from ssdtrain.optimizer.in_backward import InBackward
from ssdtrain.optimizer.masters import Masters
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.optimizer.undo import UNDONE_LATE, Lost, Undo, undone_if_it_fails
from ssdtrain.optimizer.whole_state import WholeState, of_itself
from ssdtrain.sharing import Room
from ssdtrain.watched import User

__all__ = [
    "Offloaded",
    "Overlap",
    "give_state",
    "has_masters",
    "note_loaded",
    "own_kind",
    "refuse_half_done",
]

Overlap = Literal["step", "backward"]


class Offloaded(WholeState):
    """The methods of an offloaded optimizer that come before those of its own class."""

    _overlap: Overlap
    _buffers: Buffers
    _part_bytes: int
    _is_trusted: bool
    """True if the class is torch's, or the user says that it keeps the contract."""
    _state_share: float
    """Bytes of state that a first step makes for each byte of a parameter."""
    _ours: frozenset[str]
    """Names of the attributes that it has only since it is offloaded."""

    def _begin(
        self,
        kind: type[Optimizer],
        disk: Disk,
        buffers: Buffers,
        overlap: Overlap,
        *,
        is_trusted: bool,
        state_share: float,
        undo: bool,
        has_masters: bool,
        gradients: Gradients | None,
    ) -> None:
        of_user = {*vars(self)}
        self._itself = weakref.ref(self)
        self._own_kind = kind
        self._overlap = overlap
        self._is_trusted = is_trusted
        self._state_share = state_share
        self._disk = disk
        self._buffers = buffers
        self._gradients = gradients
        self._masters = Masters(disk) if has_masters else None
        self._part_bytes = buffers.part_bytes
        # With "backward", step() makes some updates in place; the undo log makes these whole, too.
        self._undo = Undo(disk) if undo or overlap == "backward" else None
        self._lost = Lost()
        self._is_stepping = False
        self._step_count_done = 0
        self._step_s = 0.0
        self._in_backward = InBackward(self) if overlap == "backward" else None
        self._ours = frozenset({*vars(self), "_ours"} - of_user)
        # torch's own wrapper around `step`, which runs the hooks, now goes around ours.
        self._patch_step_function()

    def _watch(self) -> None:
        """Put hooks on all parameters, also on new and unfrozen parameters."""
        if self._gradients is not None:
            self._gradients.watch()
        if self._in_backward is not None:
            self._in_backward.watch()

    @property
    @of_itself
    def param_groups(self) -> Any:
        """The groups of parameters, with the options of the next step."""
        return vars(self)["param_groups"]

    @param_groups.setter
    @of_itself
    def param_groups(self, groups: Any) -> None:
        vars(self)["param_groups"] = groups

    def step(self, *given: Any, **named: Any) -> Any:
        """Run the optimizer's own step, part by part, and return what the closure returned."""
        self._is_stepping = True
        try:
            return self._step(given, named)
        finally:
            self._is_stepping = False

    # A scheduler puts nothing around a step that has this mark.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _step(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        began_s = perf_counter()
        closure, options = arguments_of(self._own_kind, given, named)
        if self._undo is not None and self._undo.is_kept:
            self._undo.restore(self._states, self.param_groups)
            raise StorageError(UNDONE_LATE)
        self._lost.refuse(self._states, self.param_groups)
        self._opt_called = True  # for schedulers, which ask whether a step came before theirs
        loss = None
        if closure is not None:
            self._is_stepping = False
            with torch.enable_grad():
                loss = closure()
            self._is_stepping = True
        if self._in_backward is not None:
            self._step_after(self._in_backward, options)
        else:
            self._step_now(options)
        self._step_count_done += 1
        self._step_s += perf_counter() - began_s
        self._lost.refuse(self._states, self.param_groups)
        return loss

    def _step_now(self, options: dict[str, Any]) -> None:
        if self._gradients is not None:
            self._gradients.watch()
        chunks = [Chunk(group, group["params"]) for group in self.param_groups]
        parts = parts_in_order(chunks, self._bytes_with_gradient, self._part_bytes)
        rebound = Rebound(self._ours)
        room = self._buffers.reserve(map(self._size_of, parts))
        groups = self.param_groups
        try:
            with (
                self._buffers.filled(room),
                undone_if_it_fails(self._undo, self._states, groups),
            ):
                self._update_all(parts, room, partial(self._update, self, rebound, options))
        except BaseException:
            (rebound.apply if self._undo is None else rebound.begin)(self)
            self._lost.forget_gradients()
            raise
        finally:
            # An interrupt may have come before an update has put them back.
            self.param_groups = groups
        rebound.apply(self)

    def _step_after(self, updates: InBackward, options: dict[str, Any]) -> None:
        """Make the updates that backward has left, and put all updates in place."""
        if self._gradients is not None:
            self._gradients.watch()
        rebound, chunks, stand_in = updates.finish(self, options)
        parts = parts_in_order(chunks, self._bytes_with_gradient, self._part_bytes)
        room = self._buffers.reserve(map(self._size_of, parts))
        with (
            self._buffers.filled(room),
            undone_if_it_fails(self._undo, self._states, self.param_groups),
        ):
            self._update_all(parts, room, partial(self._update, stand_in, rebound, options))
            interrupt = updates.publish(self)
        updates.watch()
        if interrupt is not None:
            raise interrupt

    def set_is_last_backward(self, is_last: bool) -> None:
        """Say whether the next backward is the last before ``step``, which is the default.

        With ``overlap="backward"`` the last backward takes each gradient as soon as it is complete.
        So call this with ``False`` before the other micro-batches of a step, and with ``True``
        before the last. It holds until the next call. With ``"step"`` it has no effect. The name
        is that of torch's ``FSDPModule``.
        """
        if not isinstance(is_last, bool):
            raise ConfigError(f"set_is_last_backward takes True or False, not {is_last!r}")
        if self._in_backward is not None:
            self._in_backward.is_last = is_last

    @of_itself
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as ever, and discard updates of a backward."""
        if self._in_backward is not None:
            self._in_backward.discard(set_to_none=set_to_none)
        super().zero_grad(set_to_none=set_to_none)

    @of_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ever."""
        super().add_param_group(param_group)
        try:
            if self._undo is not None or self._masters is not None:
                refuse_shared_memory(params_of(self), "these options")
            refuse_shards(
                self,
                self._own_kind,
                is_trusted=self._is_trusted,
                overlap=self._in_backward is not None,
                master_dtype=self._masters is not None,
                max_gradient_bytes=self._gradients is not None,
            )
        except BaseException:
            self.param_groups.pop()
            raise
        self._watch()

    def _update_all(
        self, parts: list[Part], room: Room, update_part: Callable[[Part], None]
    ) -> None:
        """Update one part after the other, and read the state of the next part meanwhile."""
        buffers = self._buffers
        size_of = self._size_of if room.is_bounded else lambda _: 0
        is_ahead = False
        for part, following in zip_longest(parts, parts[1:]):
            size, ahead_bytes = size_of(part), 0
            buffers.begin(room, size)
            if not is_ahead:
                self._prefetch(part)
            is_ahead = following is not None and buffers.fits(room, size, size_of(following))
            if following is not None and is_ahead:
                ahead_bytes = size_of(following)
                self._prefetch(following)
            update_part(part)
            buffers.note(room, size_of(part), ahead_bytes)
            self._send(part)

    def _update(self, on: Optimizer, rebound: Rebound, options: dict[str, Any], part: Part) -> None:
        """Run the step of an optimizer over a part, in place."""
        own, user = own_step(self._own_kind), User()
        for chunk in self._bring(part, user).chunks:
            if self._masters is None:
                update(on, own, chunk, rebound, options)
            else:
                self._masters.update(on, own, chunk, rebound, options, states=self._states)
        del user  # gradients may leave

    def _states_of(self, part: Part) -> list[ParameterState]:
        """Return the states that an update of this part reads."""
        found = (self._states.get(param) for param in part.params if param.grad is not None)
        return [state for state in found if isinstance(state, ParameterState)]

    def _bytes_of(self, param: Tensor) -> int:
        has_masters = self._masters is not None
        return bytes_of(param, self._states.get(param), self._state_share, has_masters=has_masters)

    def _bytes_with_gradient(self, param: Tensor) -> int:
        """Return ``_bytes_of``, or more, so that the gradients of a part keep their bound."""
        nbytes = self._bytes_of(param)
        if self._gradients is None:
            return nbytes
        return max(nbytes, param.nbytes * self._part_bytes // self._gradients.part_bytes)

    def _size_of(self, part: Part) -> int:
        """Return the memory that the update of a part takes, in bytes."""
        return sum(self._bytes_of(param) for param in part.params if param.grad is not None)

    def _prefetch(self, part: Part) -> None:
        for state in self._states_of(part):
            # The update reads again after a failure, and raises.
            with suppress(SsdtrainError):
                state.prefetch()
        if self._undo is not None:
            self._undo.expect(part)

    def _bring(self, part: Part, user: User) -> Part:
        """Bring state and gradients of a part; return the parameters that have both.

        The gradients stay in memory as long as the user lives.
        """
        if self._undo is not None:
            self._undo.remember(part, self._states)
        chunks = []
        for chunk in part.chunks:
            readable = [param for param in chunk.params if self._is_brought(param, user)]
            # The step runs over a group without parameters, but not if all of it is lost.
            if readable or not chunk.params:
                chunks.append(Chunk(chunk.group, readable))
        if self._undo is not None:
            self._undo.note_begun(part)
        return Part(chunks)

    def _is_brought(self, param: Tensor, user: User) -> bool:
        if param.grad is None:
            return True
        note, state = self._lost.note_gradient, self._states.get(param)
        try:
            if self._gradients is not None:
                self._gradients.bring_for(user, param.grad)
            note = self._lost.note
            if isinstance(state, ParameterState):
                state.bring()
        except SsdtrainError as error:
            if self._undo is not None and self._undo.is_kept:
                raise
            note(param, error)
            return False
        return True

    def _send(self, part: Part) -> None:
        for param in part.params:
            state = self._states.get(param)
            if not isinstance(state, ParameterState):
                continue
            if is_sparse(param.grad):
                self._disk.notices.say(
                    "sparse gradients",
                    "the optimizer state of parameters with sparse gradients stays in memory: a "
                    "step changes a few rows, and would read and write all of them",
                    level=logging.INFO,
                )
            else:
                state.send(self._disk)
        self._disk.make_room()


def own_kind(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of an optimizer from before it was offloaded."""
    return optimizer._own_kind if isinstance(optimizer, Offloaded) else type(optimizer)


def has_masters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has float32 masters of 16-bit parameters."""
    return isinstance(optimizer, Offloaded) and optimizer._masters is not None


def give_state(
    optimizer: Optimizer, param: Tensor, values: Iterable[tuple[Any, Any]] | None
) -> None:
    """Give one parameter another state, or none."""
    if values is None:
        optimizer.state.pop(param, None)
    elif isinstance(optimizer, Offloaded):
        optimizer._give_state(param, values)
    else:
        optimizer.state[param] = dict(values)


def note_loaded(optimizer: Optimizer) -> None:
    """Let an offloaded optimizer forget failures: its whole state was replaced."""
    if isinstance(optimizer, Offloaded):
        optimizer._note_loaded()


def refuse_half_done(optimizer: Optimizer) -> None:
    """Raise if a step is under way, or if the last step failed, and was made in part."""
    if isinstance(optimizer, Offloaded):
        optimizer._refuse_half_done("ssdtrain.save()")
