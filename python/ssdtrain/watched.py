"""Lets an object be asked before the bytes of a tensor are used.

While a tensor is watched it has a class of ours that is derived from its own, so torch calls
``__torch_function__`` before each function that gets the tensor from Python. The tensor stays the
same object. Afterwards it has its own class again, and costs nothing more.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.activations.installed import install, uninstall
from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import as_plain_tensors

__all__ = ["HOLDER", "METADATA", "User", "Watched", "Watcher", "look_at"]

CHANGED_A_COPY = (
    "a signal handler, a __del__ or a callback of a weak reference came while ssdtrain was moving "
    "the {}, and changed it. The change was not made: set a flag there, and change it between two "
    "steps"
)

HOLDER = "_ssdtrain_holder"
"""The attribute of a watched tensor that has its `Watcher`."""

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
"""Functions that read no bytes, and so need no wait."""


GIVES_ADDRESS = frozenset(
    getattr(Tensor, name) for name in ("data_ptr", "untyped_storage", "storage", "_typed_storage")
)
"""Functions that return the address of a tensor, or the storage that has it."""


class User:
    """An object that needs bytes of tensors in memory; its death ends the use."""

    __slots__ = ("__weakref__",)


class Watcher(ABC):
    """Is asked before the bytes of a tensor are used."""

    noun: ClassVar[str] = "tensor"
    """The noun for such a tensor in messages."""

    @abstractmethod
    def look(self, tensor: Tensor) -> None:
        """Wait until the bytes may be used."""

    @abstractmethod
    def begin_look(self, tensor: Tensor, user: object, *, in_training: bool) -> Tensor | None:
        """Wait like ``look``, for a function that has the bytes until ``end_look``.

        ``in_training`` is true for a function that changes tensors in place, as optimizers use
        them. If the tensor cannot have its bytes now, return a copy for the function.
        """

    @abstractmethod
    def end_look(self, user: object, *, stays: bool) -> None:
        """Note that the function of this user has ended, or failed before it began.

        With ``stays`` the function gave the address of the bytes out.
        """

    def pair(self, frame: FrameType) -> Any:  # noqa: ARG002 - most tensors need none
        """Return hooks on saved tensors for the function, or ``None``.

        ``Look.__enter__`` puts them on, and ``Look`` takes them out when the function has ended;
        after an interrupt they are taken out once ``frame`` has ended.
        """
        return None


def look_at(tensor: Tensor) -> None:
    """Wait until a tensor may be used, if it is watched."""
    watcher: Watcher | None = vars(tensor).get(HOLDER)
    if watcher is not None:
        watcher.look(tensor)


def _found(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the watched tensors among arguments, also those in lists and dicts."""
    for value in values:
        if isinstance(value, Watched):
            yield value
        elif isinstance(value, list | tuple | set | frozenset):
            yield from _found(value)
        elif isinstance(value, dict):
            yield from _found(value.values())


def _with_copies(value: Any, copies: dict[int, Tensor]) -> Any:
    """Return arguments with copies in the place of the tensors with these ids."""
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    if isinstance(value, list | tuple):
        made = [_with_copies(item, copies) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, set | frozenset):
        return type(value)(_with_copies(item, copies) for item in value)
    if isinstance(value, dict):
        return {key: _with_copies(item, copies) for key, item in value.items()}
    return value


class Look:
    """Brings watched tensors for a function, and lets them leave when it has ended."""

    def __init__(
        self, tensors: Iterable[Tensor], function: Any = None, *, stays: bool = False
    ) -> None:
        self._tensors = tensors
        self._stays = stays or function in GIVES_ADDRESS
        name = getattr(function, "__name__", "")
        self._is_training = name.endswith("_") and not name.endswith("__")
        self._watchers: list[Watcher] = []
        self._user = User()
        self._copies: dict[int, tuple[Tensor, int, str]] = {}
        self._pair: Any = None

    def __enter__(self) -> Self:
        """Bring the tensors."""
        try:
            for tensor in self._tensors:
                watcher: Watcher | None = vars(tensor).get(HOLDER)
                if watcher is None:
                    continue
                self._watchers.append(watcher)
                copied = watcher.begin_look(tensor, self._user, in_training=self._is_training)
                if copied is not None:
                    self._copies[id(tensor)] = copied, copied._version, watcher.noun  # noqa: SLF001
                elif self._pair is None:
                    self._pair = watcher.pair(sys._getframe(1))  # noqa: SLF001 - the frame that looks
                    if self._pair is not None:
                        install(self._pair)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let the tensors leave again, unless the function gave an address out."""
        self._end()
        if kind is None:
            for copied, version, noun in self._copies.values():
                if copied._version != version:  # noqa: SLF001 - it has no public name
                    raise UnsupportedError(CHANGED_A_COPY.format(noun))

    def _end(self) -> None:
        if self._pair is not None:
            uninstall(self._pair)
            self._pair.let_go()
        for watcher in self._watchers:
            watcher.end_look(self._user, stays=self._stays)

    def given(self, arguments: Any) -> Any:
        """Return the arguments of the function, with copies of tensors that cannot be brought."""
        if not self._copies:
            return arguments
        return _with_copies(
            arguments, {key: copied for key, (copied, _, _) in self._copies.items()}
        )


class Watched(Tensor):
    """The base of the classes of watched tensors; no tensor is constructed with it."""

    # Each subclass has its own function; the metaclass of tensors knows no abstract methods.
    _look_everywhere: ClassVar[Callable[[], None]]
    """Looks at all tensors that a function of torch may have in a container of its own."""

    @classmethod
    def _is_let_through(cls, func: Any, types: Iterable[type]) -> bool:  # noqa: ARG003
        """Return whether a function that gets watched tensors of these classes needs no look."""
        return func in METADATA

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the tensors that a function of torch gets, then call it."""
        kwargs = kwargs or {}
        if cls._is_let_through(func, types):
            return as_plain_tensors(func, types, args, kwargs)
        found = list(_found((args, kwargs)))
        # `nn.Parameter(weight)` has seen our class, and needs the own class of the weight.
        makes_parameter = (
            func is Tensor.detach and sys._getframe(1).f_code is NEW_PARAMETER  # noqa: SLF001
        )
        with Look(found, func, stays=makes_parameter) as look:
            if not found:
                # The tensor is in a container of the function's own, or was just brought.
                cls._look_everywhere()
            given, named = look.given((args, kwargs))
            result = func(*given, **named)
            if makes_parameter:
                return result.as_subclass(type(given[0]))
        return result

    # Functions that look at the class before they ask it, or do not ask it.

    def as_subclass(self, cls: Any) -> Any:
        """Return the tensor as another class."""
        with Look([self]) as look:
            return Tensor.as_subclass(look.given(self), cls)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Give the tensor other memory."""
        with Look([self]) as look:
            return Tensor.set_(look.given(self), *arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with Look([self]) as look:
            return copy.deepcopy(look.given(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with Look([self]) as look:
            return look.given(self).__reduce_ex__(protocol)
