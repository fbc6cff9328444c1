"""`find_recipe`: walks the graph of autograd from a tensor to what it can be made from.

A node tells how its outputs were computed. Its inputs are what the node saved (the objects that
``pack`` returned), or they are reached along its edges: a parameter, a tensor that another node
saved (`Outputs` knows its packed object), or a tensor for which the walk goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ssdtrain._core import Kept
from ssdtrain.rematerialize.operation import Operation, signed
from ssdtrain.rematerialize.operations import OPERATIONS
from ssdtrain.rematerialize.recipe import ABSENT, Choice, Layout, Recipe, Step

__all__ = ["Outputs", "find_recipe"]

STEPS_MAX = 16
"""The most steps of a recipe."""

ACCUMULATES = "torch::autograd::AccumulateGrad"


class Outputs:
    """The packed objects of tensors that nodes made, by node and number of the output.

    A node keeps the entry itself, among its metadata, and takes it along when it dies. The entry
    refers weakly to the packed object.
    """

    __slots__ = ()

    def note(self, tensor: Tensor, packed: object) -> None:
        """Remember the packed object of a tensor; a view or a changed tensor is not noted."""
        if tensor._version or tensor._is_view():  # noqa: SLF001 - they have no public names
            return
        node: Any = tensor.grad_fn
        if node is not None:
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
    return search.recipe(Layout.of(root))


class _Found(NamedTuple):
    """A step, with the numbers of `_Search`."""

    operation: Operation
    arguments: list[int]
    constants: list[object]
    dtype: torch.dtype


class _Search:
    """One walk. A value is numbered from 0 if it is a step, from -2 downwards if it is a source."""

    def __init__(self, outputs: Outputs, is_source: Callable[[object], bool]) -> None:
        self.outputs = outputs
        self.is_source = is_source
        self.sources: list[object] = []
        self.numbers: dict[int, int] = {}
        """The numbers of sources by their identity."""
        self.known: dict[tuple[Any, int], int] = {}
        """The numbers of values by node and output."""
        self.steps: list[_Found] = []
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
        self.steps.append(_Found(operation, arguments, constants, dtype))
        return len(self.steps) - 1

    def inputs(self, operation: Operation, node: Any) -> tuple[list[int], list[object]]:
        """Return the numbers of the tensors that a node was given, and a number after them."""
        edges = node.next_functions
        if operation.takes_all_edges:
            return [self.value(*edge) for edge in edges], []
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
        if type(leaf) is not nn.Parameter:
            raise _Unknown
        return self.source(Kept(leaf.detach(), leaf._version))  # noqa: SLF001

    def source(self, packed: object) -> int:
        """Return the number of a source."""
        number = self.numbers.get(id(packed))
        if number is None:
            self.sources.append(packed)
            number = self.numbers[id(packed)] = -1 - len(self.sources)
        return number

    def recipe(self, layout: Layout) -> Recipe:
        """Return the recipe of all steps."""
        used = dict.fromkeys(n for found in self.steps for n in found.arguments if n < ABSENT)
        places = {number: at for at, number in enumerate(used)}
        first = len(used)
        needed = {ABSENT, first + len(self.steps) - 1}
        steps: list[Step] = []
        for operation, arguments, constants, dtype in reversed(self.steps):
            numbers = tuple(
                n if n == ABSENT else places[n] if n < 0 else first + n for n in arguments
            )
            dropped = set(numbers) - needed
            needed |= dropped
            steps.append(
                Step(
                    operation.name,
                    operation.function,
                    numbers,
                    tuple(constants),
                    dtype,
                    tuple(dropped),
                )
            )
        choices = (
            len(constant.candidates)
            for found in self.steps
            for constant in found.constants
            if isinstance(constant, Choice)
        )
        return Recipe(
            sources=tuple(self.sources[-2 - number] for number in used),
            steps=tuple(reversed(steps)),
            layout=layout,
            choices=max(choices, default=1),
            is_dear=any(found.operation.is_dear for found in self.steps),
            is_borrowed=self.is_borrowed(),
        )

    def is_borrowed(self) -> bool:
        """Return whether the last step returns a view of a source."""
        at = len(self.steps) - 1
        while at >= 0 and self.steps[at].operation.is_view:
            at = self.steps[at].arguments[0]
        return at < 0


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
