"""Puts pairs of hooks onto torch's stack of this thread, and takes them off in any order.

torch itself only pushes and pops. If blocks are left in another order than they were entered, the
first to be left would pop the pair of the other, and leave its own on the stack.
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
    """Put a pair on top of the stack of this thread."""
    push_hooks(pair.pack_hook, pair.unpack_hook)


def uninstall(pair: Pair) -> bool:
    """Take a pair out of the stack of this thread; return whether it was there."""
    return _take_out(lambda pack: pack is pair.pack_hook)


def pop_for_another() -> None:
    """Take out the uppermost pair that is not ssdtrain's.

    A block of other hooks that was left in the wrong order has popped a pair of ssdtrain, and left
    its own on the stack. No other code would take that out.
    """
    _take_out(lambda pack: not is_ours(pack))


def uninstall_all() -> None:
    """Take all pairs of ssdtrain out of the stack of this thread; other pairs stay."""
    while _take_out(is_ours):
        pass


def is_ours(pack: Pack) -> bool:
    """Return whether ``pack`` is the hook of a session."""
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
