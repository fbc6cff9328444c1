"""The state of an offloaded optimizer as a whole: its copies, its figures, what takes its place."""

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
    """What an offloaded optimizer did so far. Bytes and seconds."""

    on_disk_bytes: int
    """State that is on the disk only."""
    resident_bytes: int
    """State that is in memory now: small tensors, what somebody looked at or holds, what is still
    on its way to the disk, what the disk refused."""
    written_bytes: int
    read_bytes: int
    step_count: int
    step_s: float
    """Time in ``step``, all steps together."""
    stall_s: float
    """Time in which updates waited for the disk."""
    write_failed_count: int
    """Tensors that stayed in memory for a while because the disk did not take them."""
    gradient_on_disk_bytes: int = 0
    """Gradients that are on the disk only; all of these are 0 without ``max_gradient_bytes``."""
    gradient_peak_bytes: int = 0
    """The most of gradients that was in memory at once, of those of 64 KiB and more."""
    gradient_written_bytes: int = 0
    """Gradients that went to the disk, each time that one did."""
    gradient_read_bytes: int = 0
    """Gradients that came back."""
    gradient_stall_s: float = 0.0
    """Time in which backwards and updates waited for gradients."""
    small_bytes: int = 0
    """State in tensors of less than 64 KiB, which stay in memory."""
    nested_bytes: int = 0
    """State in tensors that are in a dict or list of the state, which stay in memory."""
    being_written_bytes: int = 0
    """State on its way to the disk: in memory as long as the buffer for writes has room for it."""
    write_buffer_bytes: int = 0
    """The size of that buffer: a quarter of ``buffer_bytes``."""

    @property
    def reason(self) -> str | None:
        """Why no state is on the disk only; ``None`` if some is, or nothing tells."""
        if self.on_disk_bytes or not (self.resident_bytes or self.step_count):
            return None
        if not self.resident_bytes:
            return "the optimizer keeps none"
        for nbytes, which in (
            (self.small_bytes, "of less than 64 KiB"),
            (self.nested_bytes, "in a dict or list of the state"),
        ):
            if 2 * nbytes > self.resident_bytes:
                return f"{shown_bytes(nbytes)} of it are tensors {which}, which stay in memory"
        if 2 * self.being_written_bytes > self.resident_bytes:
            return (
                f"the buffer for writes, a quarter of buffer_bytes, is "
                f"{shown_bytes(self.write_buffer_bytes)} and holds "
                f"{shown_bytes(self.being_written_bytes)} of it; a smaller buffer_bytes frees "
                "memory"
            )
        if self.write_failed_count:
            return "the disk did not take it, for which the log has the cause"
        held = (
            "somebody has looked at it since the last step, or holds it or a view of it, or it "
            "is of another kind than plain dense tensors of the CPU"
        )
        return held if self.step_count else None

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
    """Make a method work on the optimizer itself when an object in front of it is asked.

    Lightning and Fabric put such an object in front of each optimizer. Its class derives from the
    optimizer's, and it has no attributes but what it asks the optimizer for.
    """

    @wraps(method)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> R:
        optimizer: Any = self._itself()
        return method(optimizer, *given, **named)

    return call


class WholeState(Optimizer):
    """An optimizer whose state can be asked for, loaded and saved in whole, wherever it lies."""

    _itself: weakref.ref[WholeState]
    _own_kind: type[Optimizer]
    _disk: Disk
    _masters: Masters | None
    _undo: Undo | None
    _lost: Lost
    _in_backward: InBackward | None
    _gradients: Gradients | None
    _is_stepping: bool
    """Whether some parameters may be updated, and others not."""
    _step_count_done: int
    _step_s: float

    @property
    def _states(self) -> Any:
        """The state, for updates and for callers that have waited for these."""
        states = vars(self)["state"]
        if type(states) is not States:
            # Whoever loads a state puts one of torch's own there. An interrupt may come before the
            # next line of his, so it is taken over by whoever looks first.
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
        """The parameters whose state could not be read back; empty if all is well.

        As long as there are some, ``step`` raises. ``load_state_dict`` gives them a state;
        ``optimizer.state.pop(parameter)`` gives one up, so that the next step begins it anew.
        """
        self._join()
        return self._lost.params(self._states)

    @property
    @of_itself
    def offload_stats(self) -> OptimizerStats:
        """What was done so far, and where the state is now."""
        self._join()
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
            small_bytes=sum(state.small_bytes(disk) for state in states),
            nested_bytes=sum(state.nested_bytes() for state in states),
            being_written_bytes=disk.being_written_bytes,
            write_buffer_bytes=disk.in_flight_bytes_max,
        )

    def _join(self) -> None:
        """Wait for the updates that have begun in backward."""
        if self._in_backward is not None:
            self._in_backward.join()

    def _give_up(self) -> None:
        """Have weights and state of the last step, whatever has begun since in backward."""
        if self._in_backward is not None:
            self._refuse_in_step("the getter of optimizer.state")
            self._in_backward.join()
            self._in_backward.give_up()

    def _refuse_in_step(self, caller: str) -> None:
        """Raise ``UnsupportedError`` if an update is under way that this thread makes."""
        updates = self._in_backward
        if self._is_stepping or (updates is not None and is_held_here(updates.lock)):
            # defence: nothing is saved in the middle of a step
            raise UnsupportedError(IN_A_STEP.format(caller, self._own_kind.__name__))

    @of_itself
    def _refuse_half_done(self, caller: str) -> None:
        """Raise ``StorageError`` if the last step failed and left something that is not whole."""
        self._refuse_in_step(caller)
        self._give_up()
        if self._undo is not None and self._undo.is_kept:
            raise StorageError(f"{NOT_UNDONE} all that the step has updated")
        self._lost.refuse(self._states, self.param_groups)

    @of_itself
    def state_dict(self) -> dict[str, Any]:
        """Return the state as of now: its tensors are copies, in memory, wherever they lie.

        Raises:
            UnsupportedError: It is called in the middle of ``step``, by a handler of a signal.

        """
        self._refuse_in_step("state_dict()")
        found: dict[str, Any] = super().state_dict()
        # A hook may have made a step, or something else of what is returned.
        self._join()
        states = found.get("state") if isinstance(found, dict) else None
        if isinstance(states, dict):
            found["state"] = {key: _copied(state) for key, state in states.items()}
        return found

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as ever, and let it go to the disk.

        Raises:
            UnsupportedError: It is called in the middle of ``step``, by a handler of a signal.

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
        """Go on with a state that was replaced in whole."""
        self._lost.forget()
        if self._undo is not None:
            self._undo.forget()

    def _give_state(self, param: Tensor, values: Iterable[tuple[Any, Any]]) -> None:
        """Give one parameter another state, which goes to the disk."""
        self.state[param] = state = ParameterState(values)
        if self._masters is not None:
            self._masters.adopt(state, param)
        state.send(self._disk)
        self._disk.make_room()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: two optimizers cannot share the state on the disk."""
        raise TypeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickle of the optimizer would lack what is on the disk."""
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
