"""The entry of a parameter among the tensors that may be away."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ssdtrain.away.classes import AwayParameter
from ssdtrain.away.tensor import OffloadedTensor
from ssdtrain.machine.torch_internals import is_given, trains_with_others

if TYPE_CHECKING:
    from ssdtrain.parameters.weights import Weights

__all__ = ["Weight"]


class Weight(OffloadedTensor):
    """A parameter whose bytes may be in memory, on the disk, or on their way."""

    kind = AwayParameter
    noun = "weight"
    owner: Weights

    def __init__(self, owner: Weights, param: Tensor, name: str) -> None:
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
