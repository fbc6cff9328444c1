"""A weight among the tensors whose bytes may be on the disk."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ssdtrain.away.classes import AwayParameter
from ssdtrain.away.tensor import OffloadedTensor, Owner
from ssdtrain.machine.torch_internals import holders_of
from ssdtrain.parameters.successor import Successor

__all__ = ["Weight"]

HOLDERS_ALONE = holders_of(torch.zeros(1))
"""Of a tensor that nobody has but Python."""


class WeightOwner(Owner, Protocol):
    """What a weight asks of all those of its model."""

    def precede(self, updated: Tensor) -> Successor:
        """Begin to write the bytes that a weight is to have."""
        ...

    def succeed(self, weight: Weight, successor: Successor) -> None:
        """Put such bytes in the place of those that a weight has."""

    def times_replaced(self, weight: Weight) -> int:
        """Return how often others gave a weight other memory so far."""
        ...

    def sum_of(self, weight: Weight) -> int | None:
        """Return the checksum of the bytes that a weight has, if it is known."""
        ...

    def keeping_pair(self) -> tuple[Any, Any]:
        """Return hooks on saved tensors that keep all."""
        ...


class Weight(OffloadedTensor):
    """A parameter whose bytes may be in memory, on the disk, or on their way."""

    kind = AwayParameter
    noun = "weight"
    owner: WeightOwner

    def __init__(self, owner: WeightOwner, param: Tensor, name: str) -> None:
        super().__init__(owner, param, name, id(self))

    def leave(self) -> bool:
        """Take the bytes out of the weight, unless others have or may be using them."""
        tensor = self.tensor
        assert tensor is not None
        # A weight that trains is given to other libraries (DLPack) as a view only.
        # defence: frozen weights stay that another library has
        if not tensor.requires_grad and holders_of(tensor) > HOLDERS_ALONE:
            return False
        return super().leave()

    def is_held(self) -> bool:
        """Whether others have the memory of this weight, which has its bytes."""
        tensor = self.tensor
        assert tensor is not None
        is_given = not tensor.requires_grad and holders_of(tensor) > HOLDERS_ALONE
        return is_given or super().is_held()
