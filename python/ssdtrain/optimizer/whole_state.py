"""Looks at the whole state of an offloaded optimizer, copies of it, figures, and loads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.away.threads import is_held_here
from ssdtrain.errors import StorageError, UnsupportedError
from ssdtrain.optimizer.disk import Disk
from ssdtrain.optimizer.gradients import Gradients
from ssdtrain.optimizer.in_backward import InBackward
from ssdtrain.optimizer.masters import Masters, load_as_masters
from ssdtrain.optimizer.state import ParameterState, States
from ssdtrain.optimizer.undo import NOT_UNDONE, Lost, Undo
from ssdtrain.sharing import Figures
from ssdtrain.sizes import shown_bytes, shown_count

__all__ = ["OptimizerStats", "WholeState", "of_itself"]

NO_COPY = (
    "an optimizer whose state is on the disk cannot be copied or pickled; save it with "
    "ssdtrain.save(path, model, optimizer), or save optimizer.state_dict()"
)
STAYING = (
    "in memory stay tensors of less than 64 KiB, of other kinds than plain dense tensors of the "
    "CPU, or in a dict or list of the state; state that fits in a quarter of buffer_bytes (a "
    "smaller buffer_bytes frees memory); tensors that code holds or has looked at since the last "
    "step; and tensors whose write has failed, for which the log has the cause"
)
IN_A_STEP = (
    "{} was called while step() of this {} runs: some of its parameters are updated, others are "
    "not. If a signal handler calls it, set a flag there and call it after step(); if the "
    "optimizer's own step calls it, use self"
)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="WholeState")


@dataclass(frozen=True)
class OptimizerStats:
    """The figures of an offloaded optimizer so far, in bytes and seconds."""

    on_disk_bytes: int
    """State that is on the disk only."""
    resident_bytes: int
    """State in memory now: small tensors, tensors that code has looked at or holds, and tensors
    whose writes are under way or have failed."""
    written_bytes: int
    read_bytes: int
    step_count: int
    step_s: float
    """Time in ``step``, all steps together."""
    stall_s: float
    """Time in which updates waited for the disk."""
    write_failed_count: int
    """Failed writes; the tensors stayed in memory."""
    gradient_on_disk_bytes: int = 0
    """Gradients that are on the disk only; all of these are 0 without ``max_gradient_bytes``."""
    gradient_peak_bytes: int = 0
    """The most bytes of gradients in memory at once, of gradients of 64 KiB and more."""
    gradient_written_bytes: int = 0
    """Gradients written to the disk, each time."""
    gradient_read_bytes: int = 0
    """Gradients read back."""
    gradient_stall_s: float = 0.0
    """Time in which backwards and updates waited for gradients."""

    @property
    def reason(self) -> str | None:
        """Why no state is on the disk only; ``None`` if some is, or before the first step."""
        if self.on_disk_bytes or not self.step_count:
            return None
        return STAYING if self.resident_bytes else "the optimizer keeps none"

    def __str__(self) -> str:
        """Tell the figures to a person, in one line."""
        text = (
            f"state: {shown_bytes(self.resident_bytes)} in memory and "
            f"{shown_bytes(self.on_disk_bytes)} on disk, {shown_bytes(self.written_bytes)} "
            f"written, {shown_bytes(self.read_bytes)} read; "
            f"{shown_count(self.step_count, 'step')} in {self.step_s:.3f} s; "
            f"updates waited {self.stall_s:.3f} s for the disk"
        )
        if self.gradient_written_bytes or self.gradient_peak_bytes:
            text += (
                f"; gradients: {shown_bytes(self.gradient_on_disk_bytes)} on disk, at most "
                f"{shown_bytes(self.gradient_peak_bytes)} in memory, "
                f"{shown_bytes(self.gradient_written_bytes)} written, "
                f"{shown_bytes(self.gradient_read_bytes)} read, "
                f"{self.gradient_stall_s:.3f} s stalled"
            )
        if self.write_failed_count:
            failed = shown_count(
                self.write_failed_count,
                "write failed or was refused",
                "writes failed or were refused",
            )
            text += f"; {failed}"
        if self.reason is not None:
            text += f"; no state is on disk only: {self.reason}"
        return text


def of_itself(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method work on the optimizer itself when it is called on an object in front of it.

    Lightning and Fabric put an object in front of each optimizer, of a class that derives from the
    optimizer's. The object takes its attributes from the optimizer.
    """

    @wraps(method)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> R:
        optimizer: Any = self._itself()
        return method(optimizer, *given, **named)

    return call


class WholeState(Optimizer):
    """An optimizer whose state is looked at, loaded and saved in whole."""

    _itself: weakref.ref[WholeState]
    _own_kind: type[Optimizer]
    _disk: Disk
    _masters: Masters | None
    _undo: Undo | None
    _lost: Lost
    _in_backward: InBackward | None
    _gradients: Gradients | None
    _is_stepping: bool
    """True while some parameters may be updated, and others not."""
    _step_count_done: int
    _step_s: float

    @property
    def _states(self) -> Any:
        """The state, without giving up updates of a backward."""
        states = vars(self)["state"]
        if type(states) is not States:
            # torch's load_state_dict() puts a dict of its own there.
            states = States(states)
            vars(self)["state"] = states
        return states

    @property
    @of_itself
    def state(self) -> Any:
        """The state of each parameter, after the last step."""
        self._give_up()
        return self._states

    @state.setter
    @of_itself
    def state(self, states: Any) -> None:
        self._give_up()
        vars(self)["state"] = States(states)

    @property
    @of_itself
    def lost_parameters(self) -> list[Tensor]:
        """The parameters whose state could not be read back, or an empty list.

        With lost parameters ``step`` raises. ``load_state_dict`` gives them a state, and
        ``optimizer.state.pop(parameter)`` gives one up: the next step makes a new one.
        """
        return self._lost.params(self._states)

    @property
    @of_itself
    def offload_stats(self) -> OptimizerStats:
        """The figures so far."""
        states = self._parameter_states()
        sizes = [state.nbytes() for state in states]
        disk, gradients = self._disk, self._gradients
        of_gradients = Figures() if gradients is None else gradients.figures()
        return OptimizerStats(
            on_disk_bytes=sum(on_disk for _, on_disk in sizes),
            resident_bytes=sum(resident for resident, _ in sizes),
            written_bytes=disk.written_bytes,
            read_bytes=disk.read_bytes,
            step_count=self._step_count_done,
            step_s=self._step_s,
            stall_s=disk.stall_s,
            write_failed_count=disk.failed_count + (gradients.failed_count if gradients else 0),
            gradient_on_disk_bytes=of_gradients.on_disk_bytes,
            gradient_peak_bytes=gradients.peak_bytes if gradients else 0,
            gradient_written_bytes=of_gradients.bytes_written,
            gradient_read_bytes=of_gradients.bytes_read,
            gradient_stall_s=of_gradients.stall_s,
        )

    def _give_up(self) -> None:
        """Give up updates of a backward, so that weights and state are those of the last step."""
        if self._in_backward is not None:
            self._refuse_in_step("the getter of optimizer.state")
            self._in_backward.give_up()

    def _refuse_in_step(self, caller: str) -> None:
        """Raise ``UnsupportedError`` if this thread is in the middle of an update."""
        updates = self._in_backward
        if self._is_stepping or (updates is not None and is_held_here(updates.lock)):
            # defence: nothing is saved in the middle of a step
            raise UnsupportedError(IN_A_STEP.format(caller, self._own_kind.__name__))

    @of_itself
    def _refuse_half_done(self, caller: str) -> None:
        """Raise ``StorageError`` if the last step failed, and was made in part."""
        self._refuse_in_step(caller)
        self._give_up()
        if self._undo is not None and self._undo.is_kept:
            raise StorageError(f"{NOT_UNDONE} all that the step has updated")
        self._lost.refuse(self._states, self.param_groups)

    @of_itself
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of now, with all tensors in memory.

        Raises:
            UnsupportedError: A signal handler calls this in the middle of an update.

        """
        self._refuse_in_step("state_dict()")
        found: dict[str, Any] = super().state_dict()
        # A hook may have returned something else.
        states = found.get("state") if isinstance(found, dict) else None
        if isinstance(states, dict):
            found["state"] = {key: _copied(state) for key, state in states.items()}
        return found

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as ever, and write it to the disk.

        Raises:
            UnsupportedError: A signal handler calls this in the middle of an update.

        """
        self._refuse_in_step("load_state_dict()")
        self._give_up()
        if self._masters is None:
            super().load_state_dict(state_dict)
        else:
            load_as_masters(self, super().load_state_dict, state_dict)
        self._note_loaded()
        self._send_all()

    @of_itself
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set attributes as ever."""
        super().__setstate__(state)

    def _note_loaded(self) -> None:
        """Forget failures: the whole state was replaced."""
        self._lost.forget()
        if self._undo is not None:
            self._undo.forget()

    def _give_state(self, param: Tensor, values: Iterable[tuple[Any, Any]]) -> None:
        """Give one parameter another state, and write it to the disk."""
        self.state[param] = state = ParameterState(values)
        if self._masters is not None:
            self._masters.adopt(state, param)
        state.send(self._disk)
        self._disk.make_room()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: two optimizers cannot share state on the disk."""
        raise TypeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickle would lack the state on the disk."""
        raise TypeError(NO_COPY)

    def _send_all(self) -> None:
        for param, state in self._states.items():
            if isinstance(state, ParameterState):
                if self._masters is not None:
                    self._masters.adopt(state, param)
                state.send(self._disk)
                self._disk.make_room()

    def _parameter_states(self) -> list[ParameterState]:
        return [state for state in self._states.values() if isinstance(state, ParameterState)]


def _copied(state: Any) -> Any:
    return state.copied() if isinstance(state, ParameterState) else state
