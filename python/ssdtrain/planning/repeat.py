"""Repeats a recorded layer, to make the operations of a model with many more layers. Pure.

Three layers in a row, below, middle and above, have to do the same, operation by operation. A
storage that the middle layer uses is then shared by all three, its own, made by the layer below, or
made by the layer above in backward. A copy of the middle layer has copies of its own storages, and
takes from the copies beside it the storages that the middle layer takes from its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ssdtrain.errors import ConfigError
from ssdtrain.planning.trace import TensorClass

__all__ = ["BACKWARD", "FORWARD", "NONE", "Operation", "Storage", "repeated"]

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
NONE: Final = ("", 0)
"""The segment of operations that belong to no repeated layer."""


@dataclass(slots=True)
class Storage:
    """The memory of some tensors."""

    nbytes: int
    kind: TensorClass | None = None
    """``None`` for a tensor made on the way; its uses tell whether backward needs it."""
    part: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, with the numbers of the storages that it reads or writes, each once."""

    seconds: float
    uses: tuple[int, ...]
    name: str
    flops: float
    phase: str
    segment: tuple[str, int]
    """Phase and index of the repeated layer that it belongs to."""


Update = tuple[int, int, int]
"""Weight, gradient, and the bytes that the optimizer keeps for them."""


def repeated(
    operations: list[Operation],
    storages: list[Storage],
    updates: list[Update],
    layer_count: int,
    copy_count: int,
) -> tuple[list[Operation], list[Update]]:
    """Return operations and updates of a model with more copies of the middle layer.

    Storages of the copies are added to ``storages``. Raises ``ConfigError`` if layers differ.
    """
    middle = layer_count // 2
    layers = {
        (phase, layer): [
            operation for operation in operations if operation.segment == (phase, layer)
        ]
        for phase in (FORWARD, BACKWARD)
        for layer in (middle - 1, middle, middle + 1)
    }
    copies = _Copies(storages, layers, middle, copy_count)
    made: list[Operation] = []
    for index, operation in enumerate(operations):
        phase, layer = operation.segment
        is_first = index == 0 or operations[index - 1].segment != operation.segment
        if is_first and (phase, layer) == (FORWARD, middle + 1):
            for copy in range(1, copy_count + 1):
                made += copies.of(FORWARD, copy)
        if is_first and (phase, layer) == (BACKWARD, middle):
            for copy in range(copy_count, 0, -1):
                made += copies.of(BACKWARD, copy)
        made.append(copies.beside(operation))
    more = [
        (copies.own(weight, copy), copies.own(gradient, copy), state_bytes)
        for copy in range(1, copy_count + 1)
        for weight, gradient, state_bytes in updates
        if copies.is_own(weight)
    ]
    return made, updates + more


class _Copies:
    """The storages that copies of the middle layer use."""

    def __init__(
        self,
        storages: list[Storage],
        layers: dict[tuple[str, int], list[Operation]],
        middle: int,
        count: int,
    ) -> None:
        self._storages = storages
        self._layers = layers
        self._middle = middle
        self._count = count
        self._made: dict[tuple[int, int], int] = {}
        self._own: set[int] = set()
        self._from_below: dict[int, int] = {}
        """By storage from the layer below, the storage for the layer above in the same role."""
        self._from_above: dict[int, int] = {}
        for phase in (FORWARD, BACKWARD):
            self._compare(phase)

    def _compare(self, phase: str) -> None:
        below, here, above = (self._layers[phase, self._middle + shift] for shift in (-1, 0, 1))
        shapes = [
            [(operation.name, len(operation.uses)) for operation in part]
            for part in (below, here, above)
        ]
        if not here or shapes[0] != shapes[1] or shapes[1] != shapes[2]:
            raise ConfigError(
                f"the layers that look alike do not do the same in {phase}, so one cannot stand "
                "for the others"
            )
        used = [
            {number for operation in self._layers[key] for number in operation.uses}
            for key in ((FORWARD, self._middle - 1), (BACKWARD, self._middle + 1))
        ]
        for low, middle, high in zip(below, here, above, strict=True):
            for first, number, last in zip(low.uses, middle.uses, high.uses, strict=True):
                if first == number == last:
                    continue
                if number in used[0] and number not in self._own:
                    self._from_below[number] = last
                elif phase == BACKWARD and number in used[1] and number not in self._own:
                    self._from_above[number] = first
                else:
                    self._own.add(number)

    def is_own(self, number: int) -> bool:
        """Return whether a storage is the middle layer's own."""
        return number in self._own or number in self._from_below.values()

    def own(self, number: int, copy: int) -> int:
        """Return the storage of a copy for a storage of the middle layer's own."""
        if copy == 0:
            return number
        found = self._made.get((number, copy))
        if found is None:
            found = self._made[number, copy] = len(self._storages)
            storage = self._storages[number]
            old, new = f".{self._middle}", f".{self._middle}+{copy}"
            self._storages.append(replace(storage, part=storage.part.replace(old, new, 1)))
        return found

    def of(self, phase: str, copy: int) -> list[Operation]:
        """Return the operations of a copy."""
        return [
            replace(operation, uses=tuple(self._used(number, copy) for number in operation.uses))
            for operation in self._layers[phase, self._middle]
        ]

    def _used(self, number: int, copy: int) -> int:
        if number in self._from_below:
            return self.own(self._from_below[number], copy - 1) if copy else number
        if number in self._from_above:
            above = self._from_above[number]
            return self.own(above, copy + 1) if copy < self._count else number
        return self.own(number, copy) if self.is_own(number) else number

    def beside(self, operation: Operation) -> Operation:
        """Return an operation of the layers that were run, with copies between them."""
        phase, layer = operation.segment
        if layer == self._middle and phase == BACKWARD:
            return replace(
                operation, uses=tuple(self._used(number, 0) for number in operation.uses)
            )
        if layer == self._middle + 1 and phase:
            last = self._count
            uses = (
                self.own(number, last) if self.is_own(number) else number
                for number in operation.uses
            )
            return replace(operation, uses=tuple(uses))
        return operation
