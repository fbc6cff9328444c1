"""Extends `ssdtrain run` to the threads and the child processes that its program starts.

torch keeps a stack of hooks for each thread, so the block of the main thread does not act in other
threads. A thread gets the hooks of the same session when it starts. A child process gets hooks that
open a session of its own when autograd saves the first tensor there: most children (data loaders)
never save a tensor, and cost nothing. Not reached are processes that run another program, as
launchers start them, and threads that are started below `threading`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.activations.failed_backward import prepare_to_drop
from ssdtrain.activations.installed import install, uninstall
from ssdtrain.activations.watch import note_reached_child
from ssdtrain.machine.torch_internals import untraced
from ssdtrain.session import Session

__all__ = ["Open", "reach_from"]

Context = Callable[[], AbstractContextManager[object]]
"""Makes a context that installs hooks in the thread that enters it."""

Open = Callable[[], tuple[Session, Callable[[], None]]]
"""Opens a session in this process; returns it with a function to call when the process ends. Can
be pickled."""


def reach_from(context: Context, open_in_child: Open) -> None:
    """Reach new threads and processes; the calling thread has the hooks already."""
    reach = Reach(context, open_in_child)
    reach.follow_threads()
    reach.follow_processes()
    os.register_at_fork(
        after_in_child=reach.enter_forked_child, after_in_parent=reach.note_forked_child
    )


class Reach:
    """Brings the hooks to threads and to child processes; there is one in a process."""

    def __init__(self, context: Context, open_in_child: Open) -> None:
        self._context = context
        self._open_in_child = open_in_child
        self._thread = threading.local()
        self._thread.is_reached = True

    def follow_threads(self) -> None:
        """Have each thread that starts enter the block."""
        start = threading.Thread.start

        def start_reached(thread: threading.Thread) -> None:
            self._reach_thread(thread)
            start(thread)

        threading.Thread.start = start_reached  # type: ignore[method-assign, assignment]
        _show_without_our_frames()

    def _reach_thread(self, thread: threading.Thread) -> None:
        run = thread.run

        def run_reached() -> None:
            # Else the thread and this function would keep each other alive.
            thread.__dict__.pop("run", None)
            self._thread.is_reached = True
            with self._context():
                run()

        # On the object, so that it is called for every class of threads.
        thread.run = run_reached  # type: ignore[method-assign]

    def follow_processes(self) -> None:
        """Have each process that starts as a fresh interpreter enter a block."""
        start = BaseProcess.start
        entrance = EntersWhenUnpickled(self._open_in_child)

        def start_reached(process: BaseProcess) -> None:
            # Unpickled in the child with the process; never in a forked child.
            process.__dict__["_ssdtrain_entrance"] = entrance
            note_reached_child()
            start(process)

        BaseProcess.start = start_reached  # type: ignore[method-assign, assignment]

    def note_forked_child(self) -> None:
        """In the parent of a forked child: note that the child is reached."""
        if getattr(self._thread, "is_reached", False):
            note_reached_child()

    def enter_forked_child(self) -> None:
        """Give a forked child new hooks: the inherited ones keep all tensors in memory."""
        if getattr(self._thread, "is_reached", False):
            self._context = _enter(self._open_in_child)


def _show_without_our_frames() -> None:
    """Have tracebacks of errors that end a thread leave out the frames of this file."""
    former = threading.excepthook

    def show(arguments: threading.ExceptHookArgs) -> None:
        trace = arguments.exc_traceback
        while trace is not None and trace.tb_next is not None:
            if trace.tb_next.tb_frame.f_code.co_filename == __file__:
                trace.tb_next = trace.tb_next.tb_next
            else:
                trace = trace.tb_next
        former(arguments)

    threading.excepthook = show


class EntersWhenUnpickled:
    """Enters a block in the process that unpickles it."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session

    def __reduce__(self) -> tuple[Callable[[Open], EntersWhenUnpickled], tuple[Open]]:
        """Have pickle enter the block."""
        return _enter_fresh_child, (self._open,)


def _enter_fresh_child(open_session: Open) -> EntersWhenUnpickled:
    # Before threads are reached, as this starts a thread.
    prepare_to_drop()
    reach_from(_enter(open_session), open_session)
    return EntersWhenUnpickled(open_session)


def _enter(open_session: Open) -> Context:
    """Install the hooks of a child process in this thread; return a context for others."""
    hooks = HooksAtFirstUse(open_session)
    # Uninstalled when the interpreter ends: torch would drop them later, and the process would die.
    # Code that leaves a block that was entered before the fork leaves this one instead: that
    # changes how much is offloaded, and no tensor.
    pair = hooks.context()
    atexit.register(uninstall, pair)
    install(pair)
    return hooks.context


class HooksAtFirstUse:
    """The hooks of a child process."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session
        self._opening = threading.RLock()
        self._hooks: Any = None

    def context(self) -> saved_tensors_hooks:
        """Return a context that installs them."""
        return saved_tensors_hooks(self.pack, self.unpack)

    @untraced
    def pack(self, tensor: Tensor) -> object:
        """Pass a tensor to the session, which is opened for the first tensor."""
        with self._opening:
            if self._hooks is None:
                session, end = self._open()
                # A child of multiprocessing ends without `atexit`, other children only with it.
                Finalize(None, end, exitpriority=0)
                atexit.register(end)
                self._hooks = session.context()
        return self._hooks.pack_hook(tensor)

    @untraced
    def unpack(self, packed: object) -> Any:
        """Pass a packed object to the session."""
        assert self._hooks is not None
        return self._hooks.unpack_hook(packed)
