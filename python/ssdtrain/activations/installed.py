"""Puts pairs of hooks into torch's stack of this thread, and takes them out in whatever order.

torch itself only pushes and pops: a block that is left while one that was entered later is still on
would take the other's pair off, and leave its own on for all that follows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import HookPair
from ssdtrain.machine.torch_internals import hooks_allowed, pop_hooks, push_hooks, top_hooks

__all__ = ["Pair", "install", "is_ours", "pop_for_another", "uninstall", "uninstall_all"]

Pair = saved_tensors_hooks
Pack = Callable[[Tensor], object]


def install(pair: Pair) -> None:
    """Put a pair on top of what is on in this thread."""
    push_hooks(pair.pack_hook, pair.unpack_hook)


def uninstall(pair: Pair) -> bool:
    """Take a pair out, wherever it lies in this thread; return whether it was there."""
    return _take_out(lambda pack: pack is pair.pack_hook)


def pop_for_another() -> None:
    """Take out the uppermost pair that is not ours.

    Somebody left a block of their own in the wrong order, and so popped a pair of ours: theirs is
    the one that nobody else would take out.
    """
    _take_out(lambda pack: not is_ours(pack))


def uninstall_all() -> None:
    """Take all pairs of ours out of this thread; those of others stay."""
    while _take_out(is_ours):
        pass


def is_ours(pack: Pack) -> bool:
    """Return whether hooks are those of a session."""
    return isinstance(getattr(pack, "__self__", None), HookPair)


def _take_out(is_wanted: Callable[[Pack], bool]) -> bool:
    """Take the uppermost wanted pair out from under the others; return whether there was one."""
    others: list[tuple[Pack, Callable[..., Tensor]]] = []
    found = False
    try:
        # Not `top_hooks(False)`: a compiler that traces meanwhile hides the pairs from it.
        while not found and (top := top_hooks(True)) is not None:
            found = is_wanted(top[0])
            if not found:
                others.append(top)
            pop_hooks()
    finally:
        if others:
            with hooks_allowed():
                for pack, unpack in reversed(others):
                    push_hooks(pack, unpack)
    return found
