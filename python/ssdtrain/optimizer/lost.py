"""Parameters whose state or gradient could not be read back, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ssdtrain.errors import SsdtrainError, StorageError
from ssdtrain.optimizer.chunks import name_of

__all__ = ["Lost", "names_of"]

NAMES_MAX = 8
LOST = (
    "the state of some parameters could not be read back in a step; all others were updated, these "
    "have the weights from before it:"
)
LOST_GRADIENTS = (
    "the gradients of some parameters could not be read back in a step; all others were updated, "
    "these have weights and state from before it:"
)
WHAT_NEXT_WITHOUT = (
    "The gradients are on the disk still. Load the last checkpoint, or go on: then these "
    "parameters miss one update. offload_optimizer(undo=True) undoes such a step"
)
WHAT_NEXT = (
    "Load the last checkpoint into model and optimizer (ssdtrain.load, load_state_dict), or give "
    "the state of each of optimizer.lost_parameters up with optimizer.state.pop(parameter)"
)


class Lost:
    """What steps have left out. Used by one thread at a time: the one that makes the step."""

    def __init__(self) -> None:
        self._errors: dict[Tensor, SsdtrainError] = {}
        self._without: dict[Tensor, SsdtrainError] = {}
        """Of parameters without their gradient, what is to be raised at the end of the step."""

    def note(self, param: Tensor, error: SsdtrainError) -> None:
        """Note that the state of a parameter could not be read, and why."""
        self._errors[param] = error

    def note_gradient(self, param: Tensor, error: SsdtrainError) -> None:
        """Note that the gradient of a parameter could not be read, and why."""
        self._without[param] = error

    def forget_gradients(self) -> None:
        """Say nothing of gradients: the step has failed in another way."""
        self._without.clear()

    def forget(self) -> None:
        """Note that all have a state again."""
        self._errors.clear()
        self._without.clear()

    def params(self, states: Mapping[Tensor, Any]) -> list[Tensor]:
        """Return the parameters whose state is lost and was not given up."""
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
    """Name some parameters as their optimizer knows them."""
    names = [name_of(groups, param) for param in params[:NAMES_MAX]]
    more = f" and {len(params) - NAMES_MAX} more" if len(params) > NAMES_MAX else ""
    return "; ".join(names) + more
