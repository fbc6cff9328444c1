"""Classes of tensors whose bytes are not in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import (
    address_of,
    as_plain_tensors,
    plainly,
    refuse_access,
)
from ssdtrain.watched import METADATA, Watched

__all__ = [
    "AwayGradient",
    "AwayParameter",
    "AwayTensor",
    "attach",
    "husk_of",
    "is_away",
    "plain_storage",
]

WITHOUT_BYTES = (
    METADATA
    | {
        getattr(Tensor, name).__get__
        for name in ("grad", "grad_fn", "_version", "retains_grad", "_backward_hooks")
    }
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")}
    | {
        getattr(Tensor, name)
        for name in (
            *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
            *("retain_grad", "__len__"),
        )
    }
)
"""Functions of torch that need no bytes of the tensor."""

FOREACH = {
    getattr(torch, name)
    for name in (
        *("_foreach_norm", "_foreach_mul_", "_foreach_zero_"),
        "_amp_foreach_non_finite_check_and_unscale_",
    )
}
"""Functions that treat each tensor of a list alone, also in the CPU's kernels."""

CALLS_MAX = 8
"""Recursion limit of nested looks."""


class AwayTensor(Watched):
    """A tensor whose bytes are on the disk."""

    plain: ClassVar[type[Tensor]]
    """The class of the tensor when it has its bytes."""
    not_in_python: ClassVar[str]
    """The error for code that asks for the bytes past Python."""

    @classmethod
    def _is_let_through(cls, func: object, types: Iterable[type]) -> bool:  # noqa: ARG003
        return func in WITHOUT_BYTES

    @classmethod
    def _look_everywhere(cls) -> None:
        # Mostly another thread has brought the tensor since torch looked at the class. Otherwise
        # the function has the tensor in a container of its own, and torch asks here for ever.
        code = Watched.__torch_function__.__code__
        calls, frame = 0, sys._getframe(1)  # noqa: SLF001 - the public way lists them all
        while (caller := frame.f_back) is not None:
            calls += frame.f_code is code
            frame = caller
        if calls > CALLS_MAX:
            raise UnsupportedError(cls.not_in_python)


class AwayParameter(AwayTensor, Parameter):
    """A parameter whose bytes are on the disk."""

    plain = Parameter
    not_in_python = (
        "the bytes of this weight are on the disk (ssdtrain.offload_parameters), and the code that "
        "reads them does not call torch's functions in Python, so ssdtrain could not bring them: "
        "give it weight.detach(), or keep the model's weights in memory meanwhile with "
        "`with ssdtrain.parameters_in_memory(model):`"
    )


class AwayGradient(AwayTensor):
    """A gradient whose bytes are on the disk."""

    plain = Tensor
    not_in_python = (
        "the bytes of this gradient are on the disk (max_gradient_bytes of "
        "ssdtrain.offload_optimizer), and the code that reads them does not call torch's functions "
        "in Python, so ssdtrain could not bring them: give it gradient.clone(), or leave "
        "max_gradient_bytes out"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at gradients; at the gradients of a long list in turn."""
        others = (*args[1:], *(kwargs or {}).values())
        # The tensors of two lists belong together in pairs.
        is_one_list = args and not any(isinstance(other, list | tuple) for other in others)
        if func not in FOREACH or not is_one_list or len(args[0]) == 1:
            return super().__torch_function__(func, types, args, kwargs)
        # Clipping passes all gradients in a list, which together exceed the bound.
        results = [func([gradient], *args[1:], **(kwargs or {})) for gradient in args[0]]
        return tuple(result for found in results for result in found or ()) or None


def is_away(tensor: Tensor) -> bool:
    """Return whether a tensor has a class of a tensor without its bytes."""
    return isinstance(tensor, AwayTensor)


def plain_storage(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor that is away, without a look."""
    storage: UntypedStorage = as_plain_tensors(Tensor.untyped_storage, (), (tensor,), {})
    return storage


def husk_of(tensor: Tensor, kind: type[AwayTensor]) -> Tensor:
    """Return a tensor of the same form without bytes, which raises in C++ if it is read."""
    with plainly():
        husk = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        storage = husk.untyped_storage()
        storage.resize_(0)
    refuse_access(address_of(storage), kind.not_in_python)
    return husk


def attach(tensor: Tensor, memory: Tensor, kind: type[AwayTensor]) -> None:
    """Give a tensor that is away its bytes and its plain class."""
    # The bytes first: another thread that sees the plain class reads them at once.
    as_plain_tensors(Tensor.data.__set__, (), (tensor, memory), {})  # type: ignore[attr-defined]
    tensor.__class__ = kind.plain
