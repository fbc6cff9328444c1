"""Lists the threads and the code beside which a tensor may leave memory."""

from __future__ import annotations

import queue
import selectors
import threading
from collections.abc import Callable
from concurrent.futures import thread as futures_thread
from types import CodeType
from typing import TypeVar

from ssdtrain.errors import UnsupportedError

__all__ = [
    "WAITING",
    "is_held_here",
    "refuse_handlers",
    "uses_no_tensor",
]

F = TypeVar("F", bound=Callable[..., object])

WAITING = set[CodeType]()
"""Code in which threads wait, begin and end, and which calls no function of torch. A thread in any
other code may be inside a function of torch that has such a tensor as an argument."""


def uses_no_tensor(function: F) -> F:
    """Let tensors leave beside a thread in this function, but not in a function it calls."""
    WAITING.add(function.__code__)
    return function


def is_held_here(lock: threading.RLock) -> bool:
    """Return whether this thread holds a lock, so that a signal handler interrupts our code."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001 - as threading.Condition asks


def refuse_handlers(lock: threading.RLock) -> None:
    """Raise ``UnsupportedError`` if a signal handler runs between two lines that hold a lock.

    A look at a tensor there gets a copy, but a model cannot be given a copy.
    """
    if is_held_here(lock):
        raise UnsupportedError(
            "a signal handler, a __del__ or a callback of a weak reference runs a forward or a "
            "backward, or enters parameters_in_memory, while ssdtrain is moving a weight or "
            "gradient: set a flag there, and do it between two steps"
        )


for _waits in (
    *(threading.Condition.wait, threading.Event.wait, threading.Thread.join),
    *(queue.Queue.get, queue.Queue.put),
    *(selectors.EpollSelector.select, selectors.PollSelector.select),
    futures_thread._worker,  # noqa: SLF001 - it has no public name
):
    uses_no_tensor(_waits)

# Code in which threads begin and end; not `run`, which calls a function of the user.
for _begins in (
    *(threading.Thread.start, threading.Event.set),
    *(threading.Condition.notify_all, threading.Condition.notify),
    *(threading.Condition.__enter__, threading.Condition.__exit__),
):
    uses_no_tensor(_begins)

# The same in private functions, which differ between versions of Python.
for _name in (
    *("_bootstrap", "_bootstrap_inner", "_set_ident", "_set_tstate_lock", "_set_native_id"),
    *("_delete", "_stop", "_wait_for_tstate_lock"),
):
    if _private := getattr(threading.Thread, _name, None):
        uses_no_tensor(_private)
