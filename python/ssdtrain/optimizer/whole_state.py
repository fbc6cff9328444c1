"""The state of an offloaded optimizer as a whole: its copies, and what takes its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.optimizer.deferred import Deferred
from ssdtrain.optimizer.disk import Disk
from ssdtrain.optimizer.in_backward import InBackward
from ssdtrain.optimizer.lost import Lost
from ssdtrain.optimizer.masters import Masters, load_as_masters
from ssdtrain.optimizer.state import ParameterState, States
from ssdtrain.optimizer.undo import Undo

__all__ = ["WholeState"]

NO_COPY = (
    "an optimizer whose state is on the disk cannot be copied or pickled; save it with "
    "ssdtrain.save(path, model, optimizer), or save optimizer.state_dict()"
)


class WholeState(Optimizer):
    """An optimizer whose state can be asked for, loaded and saved in whole, wherever it lies."""

    _disk: Disk
    _masters: Masters | None
    _undo: Undo | None
    _lost: Lost
    _updates: Deferred | None
    _in_backward: InBackward | None
    _waited_s: float

    @property
    def _states(self) -> Any:
        """The state, for those who update it, or have waited."""
        states = vars(self)["state"]
        if type(states) is not States:
            # Whoever loads a state puts one of torch's own there. An interrupt may come before the
            # next line of his, so it is taken over by whoever looks first.
            states = States(states)
            vars(self)["state"] = states
        return states

    @property
    def state(self) -> Any:
        """The state of each parameter, after the last step and all its updates."""
        self.synchronize()
        self._give_up()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self.synchronize()
        self._give_up()
        vars(self)["state"] = States(states)

    def synchronize(self) -> None:
        """Wait until all updates are made; raise what went wrong with them.

        With ``overlap="forward"`` every use of a weight or of its gradient through torch waits for
        them by itself. This is for what torch does not see: code in C++ that gets a weight of a
        module other than the one called, ``torch.func``, ``torch.tensor(weight)`` and the like.
        With ``overlap="backward"`` it waits for those that have begun; ``step`` puts them in place.

        Raises:
            StorageError: State could not be read back; see ``step``.

        """
        if self._in_backward is not None:
            self._in_backward.join()
        updates = self._updates
        if updates is None:
            return
        try:
            updates.settle()
        finally:
            if updates.has_ended():
                self._waited_s += updates.waited_s
                self._updates = None

    def _give_up(self) -> None:
        """Have weights and state of the last step, whatever has begun since in backward."""
        if self._in_backward is not None:
            self._in_backward.give_up()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of now: its tensors are copies, in memory, wherever they lie."""
        found: dict[str, Any] = super().state_dict()
        # A hook may have made a step, or something else of what is returned.
        self.synchronize()
        states = found.get("state") if isinstance(found, dict) else None
        if isinstance(states, dict):
            found["state"] = {key: _copied(state) for key, state in states.items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as ever, and let it go to the disk."""
        self.synchronize()
        self._give_up()
        if self._masters is None:
            super().load_state_dict(state_dict)
        else:
            load_as_masters(self, super().load_state_dict, state_dict)
        self._note_loaded()
        self._send_all()

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
