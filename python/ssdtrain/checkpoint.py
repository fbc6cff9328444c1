"""The public ``checkpoint``: marks a block whose activations are offloaded or computed again.

A marked module stays the same object, under a derived class whose ``__call__`` goes through the
session that is on. So names, ``state_dict`` and references to it do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.compiler import is_compiling
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ssdtrain.activations.hooks import blocks_here
from ssdtrain.errors import ConfigError, UnsupportedError

__all__ = ["checkpoint", "remove_checkpoint"]

C = TypeVar("C", bound=Callable[..., Any])

PARTLY_WRITING = (nn.LSTM, nn.CTCLoss, nn.RReLU)
"""Modules whose kernels for CPUs save memory that they write only in part."""
SAVES_UNWRITTEN = (
    "saves memory that its kernel writes only in part, so the two runs cannot be compared. Mark "
    "blocks without it"
)
MOVES_STATISTICS = (
    "changes its running statistics in each forward. Mark blocks without it, take a norm without "
    "them (LayerNorm, GroupNorm, track_running_stats=False), or call eval() on it before the mark "
    "if its statistics are frozen"
)
MOVES_VECTORS = (
    "changes the vectors of spectral_norm in each forward of training. Mark blocks without it"
)


def checkpoint(block: C) -> C:
    """Let the plan choose whether a block's saved tensors are offloaded or computed again.

    Mark only blocks that may run twice: from the same arguments such a block computes the same
    result, and it changes nothing else. That is the rule of ``torch.utils.checkpoint``, which
    computes it again, without reentrance: dropout draws the same numbers, autocast is as it was.

    ``self.blocks = nn.ModuleList(ssdtrain.checkpoint(Block()) for _ in range(12))``, or around a
    call, ``x = ssdtrain.checkpoint(block)(x)``. A module is marked in place and returned, a
    function is wrapped. Without a session of ``ssdtrain.offload`` with ``max_resident_bytes`` in
    this thread calls are plain. Under such a session calls are plain in the first steps, which are
    measured; then those blocks are computed again that make the step shorter by it. Either way the
    bits are the same.

    In several processes (``torch.distributed``) all blocks are offloaded: each process would choose
    for itself, and blocks would communicate in different orders.

    Raises:
        ConfigError: ``block`` cannot be called, or is a class.
        UnsupportedError: A module in ``block`` is of a class of torch that may not run twice: a
            norm that moves running statistics, spectral norm, an LSTM. In backward: the second run
            of a block saved other bytes than its forward, or an argument of it was changed in
            place.

    """
    if isinstance(block, nn.Module):
        if not isinstance(block, _Checkpointed):
            _refuse_once_only(block)
            _mark(block)
        return block
    if isinstance(block, type):
        raise ConfigError(
            f"a block is a module or a function, not a class; mark an object of it, as in "
            f"ssdtrain.checkpoint({block.__name__}(...))"
        )
    if not callable(block):
        raise ConfigError(f"a block is a module or a function, not {block!r}")
    wrapped: Any = _CheckpointedFunction(block)
    return wrapped  # type: ignore[no-any-return]


def remove_checkpoint(module: nn.Module) -> None:
    """Undo ``checkpoint`` for a module and all modules in it.

    Raises:
        ConfigError: Other code has changed the class of a module since.

    """
    for block in module.modules():
        if isinstance(block, _Checkpointed):
            plain = block._plain_class  # noqa: SLF001 - of the class below
            if type(block) is not _checkpointed_class(plain):  # type: ignore[arg-type]
                raise ConfigError(
                    f"{plain.__name__} got another class after ssdtrain.checkpoint, "
                    f"{type(block).__mro__[0].__name__}; undo that first"
                )
            _put_under(block, plain)


def _refuse_once_only(block: nn.Module) -> None:
    """Raise if a module of the block is of a class of torch that may not run twice."""
    for name, module in block.named_modules():
        why = _why_once_only(module)
        if why is not None:
            inner = f"its module {name!r} ({type(module).__name__})" if name else "it"
            raise UnsupportedError(
                f"ssdtrain.checkpoint cannot mark this {type(block).__name__}, whose forward may "
                f"run twice: {inner} {why}"
            )


def _why_once_only(module: nn.Module) -> str | None:
    if isinstance(module, PARTLY_WRITING):
        return SAVES_UNWRITTEN
    if not module.training:
        return None
    if getattr(module, "track_running_stats", False):
        return MOVES_STATISTICS
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - no public way
    if any(isinstance(part, SpectralNorm | _SpectralNorm) for part in (module, *hooks)):
        return MOVES_VECTORS
    return None


def _mark(module: nn.Module) -> nn.Module:
    if not isinstance(module, _Checkpointed):
        _put_under(module, _checkpointed_class(type(module)))  # type: ignore[arg-type]
    return module


def _put_under(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


class _Checkpointed:
    """The first base of a marked module's class."""

    _plain_class: type[nn.Module]

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing: the user's class may have been derived with keywords."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the module, or have the session call it."""
        plain = super().__call__  # type: ignore[misc]
        return _call(plain, self, arguments, keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how a copy is made: as an object of the plain class, which is marked then."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        make, *plain = (
            self._plain_class if part is type(self) else part for part in (make, *arguments)
        )
        return (_marked, (make, tuple(plain)), *rest)


def _marked(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    # The copy gets its modules later; those of the original were checked.
    return _mark(make(*arguments))


@functools.cache
def _checkpointed_class(plain: type[nn.Module]) -> type[nn.Module]:
    names = {"_plain_class": plain, "__doc__": plain.__doc__, "__module__": plain.__module__}
    # The name of the plain class, by which libraries know a block and by which it is printed.
    return type(plain.__name__, (_Checkpointed, plain), names)


class _CheckpointedFunction:
    """A marked function, or other object that can be called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function, or have the session call it."""
        return _call(self._function, self._function, arguments, keywords)

    def __get__(self, instance: object, _: type | None = None) -> Any:
        """Return the method of an object, if a method was decorated."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Return how a copy is made."""
        return (checkpoint, (self._function,))


def _call(
    function: Callable[..., Any], block: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    # A compiler that traces a whole model decides by itself what backward needs.
    blocks = None if is_compiling() else blocks_here()
    if blocks is None:
        return function(*arguments, **keywords)
    return blocks.call(function, block, arguments, keywords)
