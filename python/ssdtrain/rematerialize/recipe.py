"""`Recipe`: a short program that makes a saved tensor again, with equal bits.

Values are numbered: first the sources, then the result of each step. A recipe holds packed objects
and constants, never a node and never a tensor that has one: autograd holds the packed object that
holds the recipe, and a node in it would close a cycle through C++ that no collector sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssdtrain.machine.torch_internals import plainly, without_functions_of_user

__all__ = ["ABSENT", "Choice", "Layout", "Recipe", "Step"]

ABSENT = -1
"""The number of an argument that the operation was not given, such as no bias."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A constant that the node does not tell, and the values that it may have."""

    candidates: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: ``function(*values, *constants)``."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[int, ...]
    """Numbers of values, or ``ABSENT``."""
    constants: tuple[object, ...]
    dtype: torch.dtype
    """The dtype of the result; an operation in place may have rounded to it."""
    dropped: tuple[int, ...]
    """Numbers of the values that no later step needs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Dtype, size, strides and bytes of a tensor that covers its storage from offset 0."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a tensor."""
        nbytes = tensor.untyped_storage().nbytes()
        return cls(tensor.dtype, tensor.device, tensor.shape, tensor.stride(), nbytes)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this layout."""
        return (
            tensor.stride() == self.stride
            and tensor.dtype is self.dtype
            and not tensor.storage_offset()
            and tensor.untyped_storage().nbytes() == self.storage_bytes
        )

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of this size, in this layout."""
        empty = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return empty.copy_(tensor)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a saved tensor is made again from packed objects.

    Its bits are those of the saved tensor if the kernels of torch do the same as before: settings
    such as ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.set_num_threads`` must not change
    between forward and backward, as for ``torch.utils.checkpoint``.
    """

    sources: tuple[object, ...]
    """The packed objects that it needs, each once, in the order in which steps need them."""
    steps: tuple[Step, ...]
    layout: Layout
    """The layout of the saved tensor."""
    choices: int
    """How many values a constant may have that no node tells; 1 if all constants are known."""
    is_dear: bool
    """True if a step is a matrix product, an attention or a convolution."""
    is_borrowed: bool
    """True if the last step returns a view of a source."""

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the steps, in order."""
        return tuple(step.name for step in self.steps)

    def make(self, bring: Callable[[object], Tensor], choice: int = 0) -> Tensor:
        """Return the tensor, on a storage of its own, of exactly its bytes.

        ``bring`` is called once for each source, in order, and returns its tensor; if it raises,
        nothing is computed. ``choice`` is below ``choices``. No random number is drawn.
        """
        values: list[Tensor | None] = [bring(source) for source in self.sources]
        with _as_in_forward(self.layout.device.type):
            for step in self.steps:
                constants = step.constants
                if self.choices > 1:
                    constants = tuple(_chosen(constant, choice) for constant in constants)
                values.append(_run(step, values, constants))
                for number in step.dropped:
                    values[number] = None
            made = values[-1]
            assert made is not None
            if made.shape != self.layout.size:
                raise RuntimeError(
                    f"the recipe {self.operations} made a tensor of {tuple(made.shape)} instead of "
                    f"{tuple(self.layout.size)}; please report this as a bug of ssdtrain"
                )
            if self.is_borrowed or not self.layout.fits(made):
                made = self.layout.copy(made)
            return made


def _run(step: Step, values: list[Tensor | None], constants: tuple[object, ...]) -> Tensor:
    # A function of its own, so that no argument lives on in `make` after its last use.
    arguments = [None if number == ABSENT else values[number] for number in step.arguments]
    made = step.function(*arguments, *constants)
    return made if made.dtype is step.dtype else made.to(step.dtype)


def _chosen(constant: object, choice: int) -> Any:
    return constant.candidates[choice] if isinstance(constant, Choice) else constant


@contextmanager
def _as_in_forward(device: str) -> Iterator[None]:
    """Run operations as autograd ran them: past modes, casts of autocast, and autograd itself."""
    with plainly(), without_functions_of_user(), torch.no_grad():
        on = [
            kind
            for kind in {"cpu", device}
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        for kind in on:
            torch.set_autocast_enabled(kind, False)
        try:
            yield
        finally:
            for kind in on:
                torch.set_autocast_enabled(kind, True)
