"""Tensors that somebody has to be asked about before their bytes are used.

Meanwhile the class of such a tensor is one of ours, derived from its own, so torch asks us before
each function that gets it from Python. The tensor stays the same object, and has its own class
again afterwards: from then on nothing stands between it and its users.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.machine.torch_internals import as_plain_tensors

__all__ = ["HOLDER", "METADATA", "User", "Watched", "Watcher", "look_at"]

HOLDER = "_ssdtrain_holder"
"""The attribute of a watched tensor that has what is asked."""

NEW_PARAMETER = Parameter.__new__.__code__

METADATA = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize"),
                *("requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_sparse", "is_meta"),
                *("is_quantized", "is_nested", "is_mkldnn"),
            )
        ),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset"),
                *("is_contiguous", "is_floating_point", "is_complex", "is_inference"),
                *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
                *("_is_view", "is_conj", "is_neg"),
            )
        ),
        *(
            getattr(torch, name)
            for name in (
                *("is_complex", "is_floating_point", "is_inference", "numel"),
                *("empty_like", "zeros_like", "ones_like", "full_like"),
            )
        ),
    ]
)
"""What tells nothing of the bytes, and so needs no wait."""


class User:
    """One use of the bytes of tensors; it has ended at the latest when nobody has this object."""

    __slots__ = ("__weakref__",)


class Watcher(ABC):
    """Who is asked before a tensor is used."""

    @abstractmethod
    def look(self, tensor: Tensor) -> None:
        """Wait until the bytes may be used; raise what went wrong."""

    @abstractmethod
    def begin_use(self, tensor: Tensor, user: object) -> None:
        """Wait like ``look``, for a user of the bytes that has them until ``end_use``."""

    @abstractmethod
    def end_use(self, user: object) -> None:
        """Note that this user, who may not have begun, has ended."""


def look_at(tensor: Tensor) -> None:
    """Wait until a tensor may be used, if it is watched."""
    watcher: Watcher | None = vars(tensor).get(HOLDER)
    if watcher is not None:
        watcher.look(tensor)


def _found(values: Iterable[Any]) -> Iterator[Tensor]:
    """Give the watched tensors among arguments, also those in lists and dicts."""
    for value in values:
        if isinstance(value, Watched):
            yield value
        elif isinstance(value, list | tuple | set | frozenset):
            yield from _found(value)
        elif isinstance(value, dict):
            yield from _found(value.values())


class Watched(Tensor):
    """What the classes of watched tensors share. No tensor is ever constructed as one."""

    # Each class has its own; the metaclass of tensors knows no abstract methods.
    _look_everywhere: ClassVar[Callable[[], None]]
    """Has all looked at that a function of torch may have found in a container of its own."""

    @classmethod
    def _is_let_through(cls, func: Any, types: Iterable[type]) -> bool:  # noqa: ARG003
        """Whether a function that gets such tensors of these classes needs no look."""
        return func in METADATA

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at what a function of torch gets, then call it."""
        kwargs = kwargs or {}
        if cls._is_let_through(func, types):
            return as_plain_tensors(func, types, args, kwargs)
        found = list(_found((args, kwargs)))
        in_use: list[Watcher] = []
        user = User()
        try:
            for tensor in found:
                watcher: Watcher | None = vars(tensor).get(HOLDER)
                if watcher is not None:
                    in_use.append(watcher)
                    watcher.begin_use(tensor, user)
            if not found:
                # In some container of the function's own, unless all was looked at just now.
                cls._look_everywhere()
            result = func(*args, **kwargs)
        finally:
            for watcher in in_use:
                watcher.end_use(user)
        if func is Tensor.detach and sys._getframe(1).f_code is NEW_PARAMETER:  # noqa: SLF001
            # `nn.Parameter(weight)` has seen our class and wants the weight's own one back.
            return result.as_subclass(type(args[0]))
        return result

    # These look at the class before they look at the bytes, or do not ask it at all.

    def as_subclass(self, cls: Any) -> Any:
        """Return it as a tensor of another class."""
        look_at(self)
        return Tensor.as_subclass(self, cls)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Give it other memory."""
        look_at(self)
        return Tensor.set_(self, *arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        look_at(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        look_at(self)
        return self.__reduce_ex__(protocol)
