"""The undo log of a step, and the parameters whose state or gradient a step could not read.

Old state stays on the disk until the step has ended, because new state goes to other places. Old
weights are written, each part while the one before is updated.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ssdtrain.errors import SsdtrainError, StorageError, UnsupportedError
from ssdtrain.machine.torch_internals import clone_of, own_shard
from ssdtrain.optimizer.chunks import Part, is_sparse, name_of
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.store import StoredTensor

__all__ = ["NOT_UNDONE", "UNDONE_LATE", "Lost", "Undo", "undone_if_it_fails"]

NAMES_MAX = 8
LOST = (
    "the state of some parameters could not be read back in a step; all others were updated, and "
    "these have the weights from before it:"
)
LOST_GRADIENTS = (
    "the gradients of some parameters could not be read back in a step; all others were updated, "
    "and these have weights and state from before it:"
)
WHAT_NEXT_WITHOUT = (
    "The gradients are on the disk still. Load the last checkpoint, or go on: then these "
    "parameters miss one update. offload_optimizer(undo=True) undoes such a step"
)
WHAT_NEXT = (
    "Load the last checkpoint into model and optimizer (ssdtrain.load, load_state_dict), or give "
    "the state of each of optimizer.lost_parameters up with optimizer.state.pop(parameter)"
)
WAS_UNDONE = "the step was undone: weights, state and random numbers are those from before it"
UNDONE = (
    f"{WAS_UNDONE}. Make the step again once the cause is gone, with new gradients if the "
    "optimizer changes gradients"
)
NOT_UNDONE = (
    "a step failed, and is not undone yet: the older weights or state of these parameters could "
    "not be read. The next call of step() tries again; or load the last checkpoint into model and "
    "optimizer (ssdtrain.load, load_state_dict):"
)
UNDONE_LATE = (
    "this call has undone the step that failed before: weights, state and random numbers are those "
    "from before it. Compute the gradients again, from these weights, and make the step again"
)


class Lost:
    """The parameters that steps could not update."""

    def __init__(self) -> None:
        self._errors: dict[Tensor, SsdtrainError] = {}
        self._without: dict[Tensor, SsdtrainError] = {}
        """By the parameters whose gradient could not be read in this step."""

    def note(self, param: Tensor, error: SsdtrainError) -> None:
        """Note a parameter whose state could not be read."""
        self._errors[param] = error

    def note_gradient(self, param: Tensor, error: SsdtrainError) -> None:
        """Note a parameter whose gradient could not be read."""
        self._without[param] = error

    def forget_gradients(self) -> None:
        """Forget unread gradients: the step raises another error."""
        self._without.clear()

    def forget(self) -> None:
        """Forget all: each parameter has a state again."""
        self._errors.clear()
        self._without.clear()

    def params(self, states: Mapping[Tensor, Any]) -> list[Tensor]:
        """Return the parameters whose state is lost, and that the user has not given up."""
        return [param for param in self._errors if states.get(param)]

    def refuse(self, states: Mapping[Tensor, Any], groups: list[dict[str, Any]]) -> None:
        """Raise ``StorageError`` if there are some."""
        without, self._without = self._without, {}
        if without:
            cause = next(iter(without.values()))
            names = names_of(groups, list(without))
            raise StorageError(f"{LOST_GRADIENTS} {names}. {WHAT_NEXT_WITHOUT}: {cause}") from cause
        lost = self.params(states)
        if lost:
            cause = self._errors[lost[0]]
            raise StorageError(f"{LOST} {names_of(groups, lost)}. {WHAT_NEXT}: {cause}") from cause
        self.forget()


def names_of(groups: list[dict[str, Any]], params: Sequence[Tensor]) -> str:
    """Name some parameters for a message."""
    names = [name_of(groups, param) for param in params[:NAMES_MAX]]
    more = f" and {len(params) - NAMES_MAX} more" if len(params) > NAMES_MAX else ""
    return "; ".join(names) + more


class Kept:
    """The bytes that a tensor has now: a copy in memory if it is small, else on the disk."""

    def __init__(self, disk: Disk, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copy: Tensor | None = None
        self._stored: StoredTensor[Tensor] | None = None
        self._disk = disk
        self._own = own_shard(tensor)
        if disk.is_large(tensor):
            self._stored = disk.keep(self._own)
        else:
            self._copy = clone_of(self._own)

    @property
    def is_large(self) -> bool:
        """True if the copy is on the disk."""
        return self._stored is not None

    def wait(self) -> None:
        """Wait until the tensor may be changed."""
        if self._stored is not None:
            self._stored.wait()

    def put_back(self) -> Tensor:
        """Give the tensor the bytes that it had, and return it."""
        old = self._copy
        if old is None:
            assert self._stored is not None, "the copy is in memory or on the disk"
            old = self._disk.store.read(self._stored).result()
        with torch.no_grad():
            self._own.copy_(old)
        return self._tensor


@dataclass
class Before:
    """The weight and the state of a parameter before its update."""

    param: Tensor
    weight: Kept
    state: dict[Any, Any] | None = None
    """``None`` if it had no state yet."""
    is_begun: bool = False
    """True once its update has begun."""

    @property
    def holds_state(self) -> bool:
        """True if this holds tensors of the state that were in memory before the update."""
        values = (self.state or {}).values()
        return any(type(value) is Kept and value.is_large for value in values)


class Undo:
    """The undo log of a step."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._before: dict[Tensor, Before] = {}
        self._random: Tensor | None = None
        self.is_kept = False
        """True if a step that goes on, or that failed, can be undone."""
        self._held: list[Tensor] = []
        """Parameters whose state could not leave memory, as this log held tensors of it."""

    def begin(self) -> None:
        """Begin a step."""
        self.forget()
        self._random = torch.get_rng_state()
        self.is_kept = True
        self._disk.give_up_undo = self._give_up

    def forget(self) -> None:
        """End a whole step, and free the space of the log."""
        self.is_kept = False
        self._held += [one.param for one in self._before.values() if one.holds_state]
        self._before.clear()
        self._disk.give_up_undo = None

    def send_held(self, states: dict[Tensor, Any]) -> None:
        """Begin to write the state that this log has held in memory."""
        while self._held:
            param = self._held.pop()
            state = states.get(param)
            if isinstance(state, ParameterState) and not is_sparse(param.grad):
                state.send(self._disk)
                self._disk.make_room()

    def expect(self, part: Part) -> None:
        """Begin to write the weights of the next part."""
        for param in part.params:
            if self.is_kept and param.grad is not None and param not in self._before:
                try:
                    self._before[param] = Before(param, Kept(self._disk, param))
                except SsdtrainError as error:
                    self._give_up(error)

    def remember(self, part: Part, states: dict[Tensor, Any]) -> None:
        """Log a part, before its state is read."""
        began_s = perf_counter()
        for param in part.params:
            before = self._before.get(param)
            if before is None:
                continue
            state = states.get(param)
            try:
                before.weight.wait()
                if isinstance(state, ParameterState):
                    before.state = {
                        key: self._kept(value) for key, value in state.take_entries().items()
                    }
            except SsdtrainError as error:
                self._give_up(error)
        self._disk.stall_s += perf_counter() - began_s

    def note_begun(self, part: Part) -> None:
        """Note that the update of a part begins."""
        for param in part.params:
            if param in self._before:
                self._before[param].is_begun = True

    def restore(self, states: dict[Tensor, Any], groups: list[dict[str, Any]]) -> None:
        """Give all parameters their older weights and states, and torch its random numbers.

        Raises ``StorageError`` if older bytes could not be read. The call may then be repeated, as
        after an interrupt.
        """
        lost: dict[Tensor, SsdtrainError] = {}
        for param, before in self._before.items():
            if not before.is_begun:
                # Its update has not begun: it has the older bytes.
                continue
            try:
                before.weight.put_back()
                self._put_back_state(states, before)
            except SsdtrainError as error:
                lost[param] = error
        if self._random is not None:
            torch.set_rng_state(self._random)
        if lost:
            cause = next(iter(lost.values()))
            raise StorageError(f"{NOT_UNDONE} {names_of(groups, list(lost))}: {cause}") from cause
        self.forget()

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            kept = Kept(self._disk, value)
            kept.wait()
            return kept
        return value if isinstance(value, Away) else copy.deepcopy(value)

    def _put_back_state(self, states: dict[Tensor, Any], before: Before) -> None:
        if before.state is None:
            states.pop(before.param, None)
            return
        entries = {
            key: value.put_back() if type(value) is Kept else value
            for key, value in before.state.items()
        }
        state = states[before.param]
        if not isinstance(state, ParameterState):
            states[before.param] = state = ParameterState()
        state.put_entries(entries)

    def _give_up(self, error: SsdtrainError) -> bool:
        """Free the space of the log, as the disk has no other; return whether there was a log."""
        was_kept = self.is_kept
        if was_kept:
            self.forget()
            self._disk.notices.say(
                "undo",
                "this step cannot be undone, because the disk has no room for its undo log: a "
                "failed read would leave it made in part. Later steps try again; give the disk (or "
                "max_disk_bytes) room for the state twice and the weights once: %s",
                error,
                level=logging.WARNING,
            )
        return was_kept


@contextmanager
def undone_if_it_fails(
    undo: Undo | None, states: dict[Tensor, Any], groups: list[dict[str, Any]]
) -> Iterator[None]:
    """Undo a step that raises, if there is a log."""
    if undo is None:
        yield
        return
    try:
        undo.begin()
        yield
    except BaseException as error:
        if undo.is_kept:
            undo.restore(states, groups)
            if isinstance(error, UnsupportedError):
                raise UnsupportedError(f"{error} ({WAS_UNDONE})") from error
            if isinstance(error, SsdtrainError):
                raise StorageError(f"{UNDONE}: {error}") from error
            error.add_note(UNDONE)
        raise
    undo.forget()
    undo.send_held(states)
