"""`Operation`: a row of the tables of operations that a recipe can repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Constant",
    "Operation",
    "Table",
    "dtype_of",
    "number_of",
    "only_first",
    "shape_of",
    "signed",
]

Constant = str | Callable[[Any, int], object]
"""The name under which a node saves a constant, or a function of a node and an output's number."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How the outputs of one kind of node are computed: ``function(*inputs, *constants)``."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...] = ("self",)
    """The names under which the node may save its inputs. Those that have an edge come first, in
    the order of ``next_functions``."""
    constants: tuple[Constant, ...] = ()
    optional: tuple[str, ...] = ()
    """Inputs that the operation was surely not given if the node has neither tensor nor edge."""
    takes_edges: bool = False
    """True if the inputs are the tensors at the edges of the node, which saves none of them."""
    results: tuple[str, ...] = ()
    """The names under which the node may save its outputs, in order."""
    is_known: Callable[[Any, int], bool] | None = None
    """Returns False for a node, and an output's number, that a recipe cannot repeat."""
    is_view: bool = False
    """True if the result may lie on the storage of the first input."""
    is_dear: bool = False
    """True if it takes much longer than to read its inputs and to write its result."""


Table = dict[str, Operation]
"""Operations by the names of their nodes."""


def signed(value: Any) -> Any:
    """Return a constant of a node; torch shows negative dims as unsigned numbers of 64 bits."""
    if type(value) is int:
        return value - 2**64 if value >= 2**63 else value
    if type(value) is tuple:
        return tuple(signed(item) for item in value)
    return value


def dtype_of(node: Any, number: int) -> object:
    """Return the dtype of an output."""
    return node._input_metadata[number].dtype  # noqa: SLF001 - it has no public name


def shape_of(node: Any, number: int) -> tuple[int, ...]:
    """Return the shape of an output."""
    return tuple(node._input_metadata[number].shape)  # noqa: SLF001 - it has no public name


def number_of(_node: Any, number: int) -> object:
    """Return the number of the output."""
    return number


def only_first(_node: Any, number: int) -> bool:
    """Return whether this is the first output."""
    return number == 0
