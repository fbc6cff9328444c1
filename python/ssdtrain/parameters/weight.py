"""A weight among the tensors whose bytes may be on the disk."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ssdtrain.away.classes import AwayParameter
from ssdtrain.away.tensor import OffloadedTensor, Owner
from ssdtrain.parameters.successor import Successor

__all__ = ["Weight"]


class WeightOwner(Owner, Protocol):
    """What a weight asks of all those of its model."""

    def precede(self, updated: Tensor) -> Successor:
        """Begin to write the bytes that a weight is to have."""
        ...

    def succeed(self, weight: Weight, successor: Successor) -> None:
        """Put such bytes in the place of those that a weight has."""

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
