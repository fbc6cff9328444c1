"""The entry of a parameter among the tensors that may be away."""

from __future__ import annotations

from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from ssdtrain.away.classes import AwayParameter
from ssdtrain.away.tensor import OffloadedTensor, Owner
from ssdtrain.machine.torch_internals import is_given, trains_with_others
from ssdtrain.parameters.parked_update import ParkedUpdate

__all__ = ["Weight"]


class WeightOwner(Owner, Protocol):
    """The object that keeps the weights of a model; see `Weights`."""

    def park_update(self, updated: Tensor) -> ParkedUpdate:
        """Begin to write the updated bytes of a weight beside its old bytes."""
        ...

    def commit_update(self, weight: Weight, parked: ParkedUpdate) -> None:
        """Put updated bytes in the place of the old bytes of a weight."""

    def times_replaced(self, weight: Weight) -> int:
        """Return how often the program gave a weight other memory."""
        ...

    def sum_of(self, weight: Weight) -> int | None:
        """Return the checksum of the bytes of a weight, if it is known."""
        ...

    def pair(self) -> Any:
        """Return hooks on saved tensors that pack weights by name."""

    def look_pair(self, frame: FrameType) -> Any:
        """Return hooks on saved tensors for a function that looks at weights, or ``None``."""


class Weight(OffloadedTensor):
    """A parameter whose bytes may be in memory, on the disk, or on their way."""

    kind = AwayParameter
    noun = "weight"
    owner: WeightOwner

    def __init__(self, owner: WeightOwner, param: Tensor, name: str) -> None:
        super().__init__(owner, param, name, id(self))

    def pair(self, frame: FrameType) -> Any:
        """Return hooks that pack weights by name, for a function outside of a module's forward."""
        return self.owner.look_pair(frame)

    def leave(self, *, shared: bool = False) -> bool:
        """Take the bytes out of the weight, unless others use or have them."""
        # defence: weights stay that a graph or another library has
        return not self._is_given() and super().leave(shared=shared)

    def is_held(self) -> bool:
        """Return whether others have the memory of this weight, which has its bytes."""
        return self._is_given() or super().is_held()

    def _is_given(self) -> bool:
        """Return whether a graph or another library (DLPack) has the weight in C++.

        A graph has a weight that was saved outside of the forward of its module while it was in
        memory. The node that accumulates the gradient has each weight that trains. If several
        processes train together, torch has the weights for the exchange of gradients.
        """
        tensor = self.tensor
        assert tensor is not None
        if tensor.requires_grad and trains_with_others():
            return False
        return is_given(tensor, expected_count=tensor.requires_grad)
