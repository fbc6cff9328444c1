"""How far `ssdtrain run` reaches: the threads and the child processes that its program starts.

torch keeps hooks on saved tensors for each thread apart, so the block that the main thread is in
says nothing to others. A thread gets the hooks of the same session when it starts. A child process
gets hooks that open a session of its own when autograd saves the first tensor there: most children
(data loaders) never save one, and cost nothing. Processes that run another program, as launchers
start them, are not reached, nor are threads that are started below `threading`.
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
"""Makes what installs hooks in the thread that enters it."""

Open = Callable[[], tuple[Session, Callable[[], None]]]
"""Opens a session in this process; returns it with what is to be done when the process ends. Can
be pickled."""


def reach_from(context: Context, open_in_child: Open) -> None:
    """Reach what this process starts from now on; the calling thread has the hooks already."""
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
            # It would keep the thread, and the thread it.
            thread.__dict__.pop("run", None)
            self._thread.is_reached = True
            with self._context():
                run()

        # On this object, so that it is called whichever class it is of.
        thread.run = run_reached  # type: ignore[method-assign]

    def follow_processes(self) -> None:
        """Have each process that starts as a fresh interpreter enter a block."""
        start = BaseProcess.start
        entrance = EntersWhenUnpickled(self._open_in_child)

        def start_reached(process: BaseProcess) -> None:
            # Unpickled in the child, as all that belongs to it; of one that is forked, never.
            process.__dict__["_ssdtrain_entrance"] = entrance
            note_reached_child()
            start(process)

        BaseProcess.start = start_reached  # type: ignore[method-assign, assignment]

    def note_forked_child(self) -> None:
        """In the parent of a forked child: note that it is reached."""
        if getattr(self._thread, "is_reached", False):
            note_reached_child()

    def enter_forked_child(self) -> None:
        """In a forked child: the hooks that it inherited keep all in memory, so give it others."""
        if getattr(self._thread, "is_reached", False):
            self._context = _enter(self._open_in_child)


def _show_without_our_frames() -> None:
    """Have the traceback of an error that ends a thread show the frames that it has without us."""
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
    """Enters a block where it is unpickled."""

    def __init__(self, open_session: Open) -> None:
        self._open = open_session

    def __reduce__(self) -> tuple[Callable[[Open], EntersWhenUnpickled], tuple[Open]]:
        """Tell pickle to enter."""
        return _enter_fresh_child, (self._open,)


def _enter_fresh_child(open_session: Open) -> EntersWhenUnpickled:
    # Before threads are reached, as it starts one.
    prepare_to_drop()
    reach_from(_enter(open_session), open_session)
    return EntersWhenUnpickled(open_session)


def _enter(open_session: Open) -> Context:
    """Install the hooks of a child process in this thread; return what installs them in others."""
    hooks = HooksAtFirstUse(open_session)
    # Left when the interpreter ends: torch would drop them after that, and the process would die.
    # Whoever leaves a block that was entered before the fork leaves this one in its stead, which
    # changes what is offloaded and no tensor.
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
        """Return what installs them."""
        return saved_tensors_hooks(self.pack, self.unpack)

    @untraced
    def pack(self, tensor: Tensor) -> object:
        """Hand a tensor to the session, which is opened for the first one."""
        with self._opening:
            if self._hooks is None:
                session, end = self._open()
                # A child of multiprocessing ends without `atexit`; another one ends with it only.
                Finalize(None, end, exitpriority=0)
                atexit.register(end)
                self._hooks = session.context()
        return self._hooks.pack_hook(tensor)

    @untraced
    def unpack(self, packed: object) -> Any:
        """Hand what the session packed back to it."""
        assert self._hooks is not None
        return self._hooks.unpack_hook(packed)
