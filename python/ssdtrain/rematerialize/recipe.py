"""`Recipe`: a short program that makes a saved tensor again, with equal bits.

A recipe holds packed objects and constants, never a node and never a tensor that has one: autograd
holds the packed object that holds the recipe, and a node in it would close a cycle through C++ that
no collector sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssdtrain.machine.torch_internals import mode_count, plainly, without_functions_of_user
from ssdtrain.rematerialize.operation import Operation

__all__ = ["ABSENT", "Layout", "Recipe", "Step", "as_in_forward"]

ABSENT = -1
"""The number of an argument that the operation was not given, such as no bias.

Results of steps are numbered from 0, and sources from -2 downwards. So a list of all results, of
all sources backwards, and of None has each value at its number: of two steps and two sources, the
first source is at -2.

    [result 0, result 1, source 1, source 0, None]
"""


class Step(NamedTuple):
    """One operation: ``function(*values, *constants)``."""

    operation: Operation
    arguments: Sequence[int]
    """Numbers of values."""
    constants: Sequence[object]
    dtype: torch.dtype
    """The dtype of the result; an operation in place may have rounded to it."""


class Layout(NamedTuple):
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
        """Return whether a tensor of this size and dtype has this layout."""
        return (
            tensor.stride() == self.stride
            and not tensor.storage_offset()
            and tensor.untyped_storage().nbytes() == self.storage_bytes
        )

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of this size and dtype, in this layout."""
        empty = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return empty.copy_(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How a saved tensor is made again from packed objects.

    Its bits are those of the saved tensor if the kernels of torch do the same as before: settings
    such as ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.set_num_threads`` must not change
    between forward and backward, as for ``torch.utils.checkpoint``.
    """

    sources: tuple[object, ...]
    """The packed objects that it needs, each once."""
    steps: tuple[Step, ...]
    last_uses: dict[int, int]
    """The last step that needs a value, by the number of the value."""
    layout: Layout
    """The layout of the saved tensor."""

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the steps, in order."""
        return tuple(step.operation.name for step in self.steps)

    @property
    def is_dear(self) -> bool:
        """True if a step is a matrix product, an attention or a convolution."""
        return any(step.operation.is_dear for step in self.steps)

    def make(self, bring: Callable[[object], Tensor]) -> Tensor:
        """Return the tensor, on a storage of its own, of exactly its bytes.

        ``bring`` is called once for each source, in order, and returns its tensor; if it raises,
        nothing is computed. No random number is drawn.
        """
        brought = [bring(source) for source in self.sources]
        values: list[Tensor | None] = [*[None] * len(self.steps), *reversed(brought), None]
        del brought
        with as_in_forward(self.layout.device.type):
            for at, step in enumerate(self.steps):
                values[at] = _run(step, values)
                for number in step.arguments:
                    if self.last_uses[number] == at:
                        values[number] = None
            return self._own(values[len(self.steps) - 1])

    def _own(self, made: Tensor | None) -> Tensor:
        """Return the result of the last step on a storage of its own."""
        assert made is not None
        if made.shape != self.layout.size:
            raise RuntimeError(
                f"the recipe {self.operations} made a tensor of {tuple(made.shape)} instead of "
                f"{tuple(self.layout.size)}; please report this as a bug of ssdtrain"
            )
        number = len(self.steps) - 1
        while number >= 0 and self.steps[number].operation.is_view:
            number = self.steps[number].arguments[0]
        is_of_source = number < 0
        return self.layout.copy(made) if is_of_source or not self.layout.fits(made) else made


def _run(step: Step, values: list[Tensor | None]) -> Tensor:
    # A function of its own, so that no argument lives on in `make` after its last use.
    arguments = [values[number] for number in step.arguments]
    made: Tensor = step.operation.function(*arguments, *step.constants)
    return made if made.dtype is step.dtype else made.to(step.dtype)


@contextmanager
def as_in_forward(device: str) -> Iterator[None]:
    """Run operations as autograd ran them: past modes, casts of autocast, and autograd itself."""
    is_plain = not (mode_count() or torch.is_inference_mode_enabled())
    with nullcontext() if is_plain else plainly(), without_functions_of_user(), torch.no_grad():
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
