"""`find_recipe`: walks the graph of autograd from a tensor to what it can be made from.

A node tells how its outputs were computed. Its inputs are what the node saved (the objects that
``pack`` returned), or they are reached along its edges: a parameter, a tensor that another node
saved (`Outputs` knows its packed object), or a tensor for which the walk goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ssdtrain._core import Kept
from ssdtrain.rematerialize.operation import Operation, signed
from ssdtrain.rematerialize.operations import OPERATIONS
from ssdtrain.rematerialize.recipe import ABSENT, Layout, Recipe, Step

__all__ = ["HELD_ELSEWHERE", "Outputs", "find_recipe"]

STEPS_MAX = 16
"""The most steps of a recipe."""

ACCUMULATES = "torch::autograd::AccumulateGrad"

HELD_ELSEWHERE: list[Callable[[Tensor], bool]] = []
"""Functions that return whether a weight is managed by others, so that no recipe may hold it."""


class Outputs:
    """The packed objects of tensors that nodes made, by node and number of the output.

    A node keeps the entry itself, among its metadata, and takes it along when it dies. The entry
    refers weakly to the packed object.
    """

    __slots__ = ()

    def note(self, tensor: Tensor, packed: object) -> None:
        """Remember the packed object of a tensor, unless that allows no weak references.

        A tensor that was changed in place is not noted.
        """
        if tensor._version:  # noqa: SLF001 - it has no public name
            return
        node: Any = tensor.grad_fn
        if node is not None and type(packed).__weakrefoffset__:
            node.metadata[self, tensor.output_nr] = weakref.ref(packed)

    def find(self, node: Any, output_nr: int) -> object | None:
        """Return the packed object of an output, or None if there is none or it is dead."""
        reference: weakref.ref[object] | None = node.metadata.get((self, output_nr))
        return None if reference is None else reference()


class _Unknown(Exception):  # noqa: N818 - it is no error
    """A value cannot be made again."""


def find_recipe(
    root: Tensor, outputs: Outputs, is_source: Callable[[object], bool]
) -> Recipe | None:
    """Return how ``root`` can be made again, or None.

    ``root`` covers its storage. It has no recipe if it is a view, or was changed in place, or if a
    node on the way does not tell how its outputs were made. ``is_source`` tells whether a recipe
    may hold an object that a node keeps in the place of a saved tensor.
    """
    node = root.grad_fn
    if node is None or root._version or root._is_view():  # noqa: SLF001
        return None
    search = _Search(outputs, is_source)
    try:
        search.add_step(node, root.output_nr)
    except _Unknown:
        return None
    return search.recipe(root)


class _Search:
    """One walk; values have the numbers that `Recipe` gives them."""

    def __init__(self, outputs: Outputs, is_source: Callable[[object], bool]) -> None:
        self.outputs = outputs
        self.is_source = is_source
        self.sources: list[object] = []
        self.source_numbers: dict[int, int] = {}
        """The numbers of sources by their identity."""
        self.known: dict[tuple[Any, int], int] = {}
        """The numbers of values by node and output."""
        self.steps: list[Step] = []
        self.nodes_left = STEPS_MAX

    def add_step(self, node: Any, output_nr: int) -> int:
        """Add the steps that end with an output of a node; return its number."""
        operation = OPERATIONS.get(node.name())
        self.nodes_left -= 1
        if (
            operation is None
            or self.nodes_left < 0
            or isinstance(node, FunctionCtx)
            or not (operation.is_known is None or operation.is_known(node, output_nr))
        ):
            raise _Unknown
        arguments, constants = self.inputs(operation, node)
        for constant in operation.constants:
            if isinstance(constant, str):
                constants.append(_constant(node, constant))
            else:
                constants.append(constant(node, output_nr))
        dtype = node._input_metadata[output_nr].dtype  # noqa: SLF001 - it has no public name
        if dtype.is_complex:
            raise _Unknown  # A CPU's bits of complex numbers depend on where they lie in memory.
        self.steps.append(Step(operation, arguments, constants, dtype))
        return len(self.steps) - 1

    def inputs(self, operation: Operation, node: Any) -> tuple[list[int], list[object]]:
        """Return the numbers of the tensors that a node was given, and a number after them."""
        edges = node.next_functions
        if operation.takes_edges:
            return [self.value(*edge) for edge in edges if edge[0] is not None], []
        arguments: list[int] = []
        constants: list[object] = []
        for at, name in enumerate(operation.inputs):
            saved = getattr(node, f"_raw_saved_{name}", None)
            if isinstance(saved, tuple | list):
                arguments += self.several(saved)
                continue
            packed = None if saved is None else saved.data
            if constants:
                raise _Unknown  # A number stands before a tensor.
            number = _number(packed)
            if number is not None:
                constants.append(number)
            elif packed is not None and self.is_source(packed):
                arguments.append(self.source(packed))
            elif at < len(edges) and edges[at][0] is not None:
                arguments.append(self.value(*edges[at]))
            elif packed is None and name in operation.optional:
                arguments.append(ABSENT)
            else:
                raise _Unknown
        return arguments, constants

    def several(self, saved: Any) -> Iterator[int]:
        """Give the numbers of the tensors of a list, some of them absent."""
        packed = [each.data for each in saved]
        if not any(each is not None for each in packed):
            raise _Unknown
        for each in packed:
            if each is not None and not self.is_source(each):
                raise _Unknown
            yield ABSENT if each is None else self.source(each)

    def value(self, node: Any, output_nr: int) -> int:
        """Return the number of an output of a node."""
        if node is None:
            raise _Unknown
        key = node, output_nr
        number = self.known.get(key)
        if number is None:
            if node.name() == ACCUMULATES:
                number = self.parameter(node.variable)
            else:
                packed = self.packed_output(node, output_nr)
                number = self.add_step(*key) if packed is None else self.source(packed)
            self.known[key] = number
        return number

    def packed_output(self, node: Any, output_nr: int) -> object | None:
        """Return the packed object of an output, if a node has saved it."""
        packed = self.outputs.find(node, output_nr)
        if packed is not None and self.is_source(packed):
            return packed
        operation = OPERATIONS.get(node.name())
        if operation is not None and output_nr < len(operation.results):
            saved = getattr(node, f"_raw_saved_{operation.results[output_nr]}", None)
            packed = None if saved is None else saved.data
        return packed if packed is not None and self.is_source(packed) else None

    def parameter(self, leaf: Tensor) -> int:
        """Return the number of a weight."""
        if type(leaf) is not nn.Parameter or any(is_held(leaf) for is_held in HELD_ELSEWHERE):
            raise _Unknown
        return self.source(Kept(leaf.detach(), leaf._version))  # noqa: SLF001

    def source(self, packed: object) -> int:
        """Return the number of a source."""
        number = self.source_numbers.get(id(packed))
        if number is None:
            self.sources.append(packed)
            number = self.source_numbers[id(packed)] = ABSENT - len(self.sources)
        return number

    def recipe(self, root: Tensor) -> Recipe:
        """Return the recipe of all steps."""
        last_uses: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            for number in step.arguments:
                last_uses[number] = at
        return Recipe(tuple(self.sources), tuple(self.steps), last_uses, Layout.of(root))


def _constant(node: Any, name: str) -> object:
    try:
        return signed(getattr(node, f"_saved_{name}"))
    except AttributeError:
        # The node of another version of torch.
        raise _Unknown from None


def _number(saved: object) -> float | None:
    """Return the number that a node saved as a tensor, past all hooks, as for ``x * 2``.

    A tensor of the user that was saved outside of hooks is no number: it may change.
    """
    if not isinstance(saved, Tensor) or saved.dim() or not saved.is_cpu:
        return None
    probe = _PROBES.get(saved.dtype)
    # A number leaves the dtype of a tensor of its kind as it is; another tensor may not.
    if probe is None or torch.result_type(probe, saved) is not probe.dtype:
        return None
    number: float = saved.item()
    return number


_PROBES = {
    torch.float64: torch.zeros((), dtype=torch.float16, device="cpu"),
    torch.int64: torch.zeros((), dtype=torch.int8, device="cpu"),
}
"""Tensors with the smallest dtypes of the kinds of Python's numbers."""
