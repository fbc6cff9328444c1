"""Watches the process while a block is open, to say why no tensor reached its hooks.

The hooks are called only in the thread that entered, and only while no others are on top of them.
Torch and the kernel count what the hooks do not see: nodes that this thread made, backwards of the
whole process, and the computing time of child processes.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ssdtrain._core import HookPair
from ssdtrain.activations.failed_backward import Probe, probe_backward
from ssdtrain.machine.torch_internals import sequence_number, top_hooks
from ssdtrain.reasons import INNER_BLOCK, Observed

__all__ = ["Watch", "note_reached_child"]

OUR_OTHERS = ("ssdtrain.parameters.", "ssdtrain.activations.fingerprints.")
"""Names of hooks of ssdtrain that pass tensors on to the hooks below."""


class ReachedChildren:
    """Counts child processes to which `ssdtrain run` has given a block of their own."""

    count = 0


def note_reached_child() -> None:
    """Note that a child process is started whose training has a block of its own."""
    ReachedChildren.count += 1


class Watch:
    """Watches the thread in which it is made, from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self._ours: Callable[..., object] | None = None
        self._others: str | None = None
        self._thread = threading.get_ident()
        self._probe = probe_backward()
        self._sequence = sequence_number()
        self._reached_count = ReachedChildren.count
        self._child_s, self._process_s = _child_seconds(), time.process_time()

    def begin(self) -> None:
        """Look also for hooks on top of those that were installed last.

        The constructor does not do it: after an interrupt there nobody would call ``end``.
        """
        top = top_hooks(True)
        self._ours = None if top is None else top[0]
        # Between two collections other hooks may come and go unseen. To see all would take a patch
        # of torch, or a call for each operation.
        gc.callbacks.append(self._look)

    def note_inner_block(self) -> None:
        """Note that another block of ssdtrain was entered on top of this one's hooks."""
        self._others = INNER_BLOCK

    def end(self) -> Observed | None:
        """Return the counts; ``None`` in another thread, which has counts of its own."""
        if self._look in gc.callbacks:
            gc.callbacks.remove(self._look)
        # The hooks know the store, and an object that holds the session would keep it open.
        self._ours = None
        if threading.get_ident() != self._thread:
            return None
        node_count = sequence_number() - self._sequence
        before, after = self._probe, probe_backward()
        return Observed(
            # Each probe of this thread made one node, and was one backward.
            node_count=node_count - (after.here_count - before.here_count - 1),
            backward_count=_backwards_between(before, after),
            has_reached_children=ReachedChildren.count > self._reached_count,
            child_s=_child_seconds() - self._child_s,
            process_s=time.process_time() - self._process_s,
            others=self._others,
        )

    def _look(self, phase: str, _: Mapping[str, Any]) -> None:
        """Look which hooks are on top, whenever the garbage collector begins in this thread."""
        if phase != "start" or threading.get_ident() != self._thread:
            return
        top = top_hooks(True)
        if top is not None and top[0] is not self._ours:
            name = _name(top[0])
            if isinstance(getattr(top[0], "__self__", None), HookPair):
                name = INNER_BLOCK
            # The hooks around a module with offloaded weights, and around a block that is computed
            # again, pass tensors on.
            if not name.startswith(OUR_OTHERS):
                self._others = name


def _end_all() -> None:
    """Stop all watches before Python ends: then torch hands out hooks without counting references.

    The hooks of a block that was never left would be freed while torch still has them.
    """
    for look in list(gc.callbacks):
        if isinstance(getattr(look, "__self__", None), Watch):
            gc.callbacks.remove(look)


atexit.register(_end_all)


def _backwards_between(before: Probe, after: Probe) -> int:
    if before.number == -1 or after.number == -1:
        return 0
    probes_count = after.all_count - before.all_count
    return max(0, after.number - before.number - probes_count)


def _child_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _name(function: Callable[..., object]) -> str:
    """Return module and name of a function, without the function that defines it."""
    kind = type(function)
    module = getattr(function, "__module__", None) or kind.__module__
    name: str = getattr(function, "__qualname__", kind.__qualname__)
    return f"{module}.{name.replace('.__init__.<locals>', '').replace('.<locals>', '')}"
