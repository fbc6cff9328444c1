"""What gives modules that were built without bytes their first values, and whether it gave any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "as_when_built",
    "built_again",
    "initializer_of",
    "is_pretrained",
    "is_unset",
    "make_unset",
    "reset_of",
    "written_count",
]

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods in which torch's modules, and those of others, give their weights first values."""
INITIALIZER = "_init_weights"
"""The method by which a model gives each module in it first values, when all of them are built."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

UNSET_FLOAT = 0xFF
"""All bytes of a number that nobody has written: of every floating kind this is no number."""
UNSET_OTHER = 0xA5
"""The same for integers, of which -1 is a common one."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes."""
LOOK_COUNT = 1 << 20
"""So many numbers are compared at once, so that looking takes little memory."""


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method by which a module gives its own weights first values."""
    for name in RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            found: Callable[[], object] = reset
            return found
    return None


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module initializes all modules in it as Transformers' ``PreTrainedModel`` does.

    Its class is asked, as wrappers hand questions on to the model that they wrap.
    """
    names = (INITIALIZER, "initialize_weights", "tie_weights")
    missing = [name for name in names if not callable(getattr(type(module), name, None))]
    return not missing and isinstance(vars(module).get("all_tied_weights_keys"), dict)


def initializer_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return what a model gives to ``self.apply`` in its constructor, by the usual name."""
    if is_pretrained(module) or not callable(getattr(type(module), INITIALIZER, None)):
        return None
    found: Callable[[nn.Module], Any] = getattr(module, INITIALIZER)
    # One that takes nothing is called by whoever knows it.
    return found if len(inspect.signature(found).parameters) == 1 else None


def written_count(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; torch counts it without bytes as well."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - there is no other way


@contextmanager
def as_when_built(module: nn.Module) -> Iterator[None]:
    """Have new tensors on the CPU, and of the kind that the model's own were made of."""
    before = torch.get_default_dtype()
    kinds = [one.dtype for one in module.parameters() if one.dtype.is_floating_point]
    kind = kinds[0] if kinds else before
    # Other kinds than these torch does not take for the default one.
    is_usual = kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    torch.set_default_dtype(kind if is_usual else before)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def built_again(module: nn.Module) -> nn.Module | None:
    """Return a module as its constructor makes it, with bytes, if that is known.

    For those that draw their weights there and have no method for it, as GPT-2's ``Conv1D``: what
    the constructor takes has to be found in attributes of the same names, and to make tensors of
    the same forms.
    """
    wanted = inspect.signature(type(module)).parameters.values()
    unknown = [one for one in wanted if one.kind not in NAMED or one.name not in vars(module)]
    if unknown or len(list(module.modules())) > 1:
        return None
    given = {one.name: vars(module)[one.name] for one in wanted}
    with as_when_built(module), torch.device("meta"):
        is_alike = _forms(type(module)(**given)) == _forms(module)
    if not is_alike:
        return None
    with as_when_built(module):
        return type(module)(**given)


def _forms(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor.shape, tensor.dtype) for name, tensor in own]


def make_unset(tensor: Tensor) -> None:
    """Fill a new tensor with what no initialization writes, to be told from values later."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    # Not counted as a change of the tensor, which its storage does not know.
    storage: Any = tensor.untyped_storage()
    storage.fill_(UNSET_FLOAT if is_float else UNSET_OTHER)


def is_unset(tensor: Tensor) -> bool:
    """Whether nobody has written to some number of such a tensor."""
    size = min(tensor.itemsize, 8)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    byte = UNSET_FLOAT if is_float else UNSET_OTHER
    unset = int.from_bytes(bytes([byte] * size), "little", signed=size > 1)
    numbers = tensor.detach().contiguous().view(-1).view(WHOLE[size])
    for part in torch.split(numbers, LOOK_COUNT):
        found = part == unset
        if size > 1 and bool(found.any()):
            return True
        # One byte may have any value: only if all of them have this one, nobody has written.
        if size == 1 and not bool(found.all()):
            return False
    return size == 1 and numbers.numel() > 0
