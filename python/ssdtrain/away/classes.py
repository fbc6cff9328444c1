"""The classes that tensors have while their bytes are not in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import as_plain_tensors, plainly, refuse_access
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
"""What a tensor can answer without its bytes."""

ONE_BY_ONE = {
    getattr(torch, name)
    for name in (
        *("_foreach_norm", "_foreach_mul_", "_foreach_zero_"),
        "_amp_foreach_non_finite_check_and_unscale_",
    )
}
"""Functions of a list of tensors that do the same to each of them, also in the CPU's kernels."""

CALLS_MAX = 8
"""More functions of torch that ask within each other are one that asks for ever."""


class AwayTensor(Watched):
    """A tensor whose bytes are on the disk."""

    plain: ClassVar[type[Tensor]]
    """The class that it has with its bytes."""
    not_in_python: ClassVar[str]
    """What is said to who asks for the bytes past Python."""

    @classmethod
    def _is_let_through(cls, func: object, types: Iterable[type]) -> bool:  # noqa: ARG003
        return func in WITHOUT_BYTES

    @classmethod
    def _look_everywhere(cls) -> None:
        # Mostly another thread has brought it since torch looked at the class. If it has not, the
        # function of torch comes here again and again, with it in a container of its own.
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
        "the bytes of this weight are on the disk (ssdtrain.offload_parameters), and what asked "
        "for them is not one of torch's functions that look for it, or asked past Python: use "
        "weight.detach() first, or keep the model's weights in memory meanwhile with "
        "`with ssdtrain.parameters_in_memory(model):`"
    )


class AwayGradient(AwayTensor):
    """A gradient whose bytes are on the disk."""

    plain = Tensor
    not_in_python = (
        "the bytes of this gradient are on the disk (max_gradient_bytes of "
        "ssdtrain.offload_optimizer), and what asked for them is not one of torch's functions that "
        "look for it, or asked past Python: give it gradient.clone(), or leave max_gradient_bytes "
        "out"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at gradients as at all that may be away; at those of a long list one by one."""
        others = (*args[1:], *(kwargs or {}).values())
        # Of several lists each tensor of one belongs to one of the other.
        is_one_list = args and not any(isinstance(one, list | tuple) for one in others)
        if func not in ONE_BY_ONE or not is_one_list or len(args[0]) == 1:
            return super().__torch_function__(func, types, args, kwargs)
        # What unscales and clips has all gradients in a list: together they exceed the bound.
        results = [func([one], *args[1:], **(kwargs or {})) for one in args[0]]
        return tuple(one for found in results for one in found or ()) or None


def is_away(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are not in memory, or not where it lies."""
    return isinstance(tensor, AwayTensor)


def plain_storage(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor that is away, which mostly has no bytes."""
    storage: UntypedStorage = as_plain_tensors(Tensor.untyped_storage, (), (tensor,), {})
    return storage


def husk_of(tensor: Tensor, kind: type[AwayTensor]) -> Tensor:
    """Return a tensor of the same form that has no bytes, and says so to whoever asks for them."""
    with plainly():
        husk = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        storage = husk.untyped_storage()
        storage.resize_(0)
    refuse_access(storage._cdata, kind.not_in_python)  # noqa: SLF001 - its address in C++
    return husk


def attach(tensor: Tensor, memory: Tensor, kind: type[AwayTensor]) -> None:
    """Give a tensor that is away its bytes, and let everybody use it again."""
    # The bytes first: another thread that sees the plain class uses them without asking.
    as_plain_tensors(Tensor.data.__set__, (), (tensor, memory), {})  # type: ignore[attr-defined]
    tensor.__class__ = kind.plain
