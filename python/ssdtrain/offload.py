"""``with ssdtrain.offload(dir):`` makes a session, installs its hooks, and closes in order.

START HERE. A tensor's way: ``hooks.pack`` → ``writeback`` → ``transfer`` → ``_core`` → the disk,
and back through ``hooks.unpack``; ``docs/internals/architecture.md`` tells it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from ssdtrain.activations.failed_backward import drop_failed_backwards
from ssdtrain.activations.installed import install, pop_for_another, uninstall, uninstall_all
from ssdtrain.config import (
    MIN_BYTES_DEFAULT,
    PINNED_BYTES_DEFAULT,
    Backend,
    DirectIo,
    Directories,
    Gds,
    OffloadConfig,
    Size,
    StoreConfig,
    directories,
    optional_bytes,
)
from ssdtrain.errors import ConfigError
from ssdtrain.machine.huge_pages import note_small_pages
from ssdtrain.machine.torch_internals import outside_compiler
from ssdtrain.notices import PROCESS, Notices
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recompute import Choices
from ssdtrain.session import Session
from ssdtrain.sizes import in_bytes

__all__ = ["active", "leave_all", "offload"]

RUNS_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)

ENTERED_INSIDE = (
    "an ssdtrain.offload block was entered in a thread in which another one is on: until the inner "
    "one is left it takes all that is saved, and the outer one nothing. In a notebook a cell may "
    "have run twice: ssdtrain.leave_all() leaves both"
)
OTHER_ORDER = (
    "an ssdtrain.offload block was left before another one that was entered after it in the same "
    "thread (asyncio tasks that take turns do that): while both were on, the one that was entered "
    "last took all that was saved, and counted it. Give each task a thread of its own"
)
TAKEN_OFF = (
    "other code left its hooks on saved tensors while an ssdtrain.offload block that was entered "
    "after them was on, and so took ssdtrain's hooks off: what was saved since then was not "
    "offloaded. Leave blocks in the opposite order of entering them"
)

P = ParamSpec("P")
R = TypeVar("R")


class offload:  # noqa: N801 - used like torch.no_grad
    """Keep what autograd saves on SSDs instead of in memory: a context manager and a decorator.

    Wrap the training loop, or one forward and its backward. Gradients are bit-identical to those
    without it, or an error is raised. Implements SSDTrain (arXiv 2408.10013). Sizes are numbers of
    bytes, or text such as ``"8GiB"``, ``"256 KiB"`` or ``"500MB"``.

    Args:
        dir: A directory on a local NVMe file system, or a list of them; ``~`` is the home, and a
            relative path is resolved in this call. Its files have no names and vanish with the
            process.
        min_bytes: Saved tensors of fewer bytes stay in memory.
        max_resident_bytes: Upper bound on the saved bytes in memory. Without it nothing ever waits
            for a slow disk: what cannot be hidden is kept. With it forward waits as it must, and
            raises ``BudgetError`` if the disk refuses what must leave memory.
        max_disk_bytes: Upper bound on the bytes reserved on disk; beyond it tensors are kept.
        backend: ``"auto"``, ``"io_uring"`` or ``"psync"``.
        direct_io: ``"required"``, ``"optional"`` or ``"disabled"``: whether to bypass the page
            cache.
        verify: Checksum each tensor before its write and after its read.
        pinned_bytes: Memory of the CPU through which tensors of a GPU go, for each GPU; it is
            pinned at the first such tensor. By GPUDirect Storage half as much of the GPU's.
        max_host_bytes: More memory of the CPU, for all GPUs together, in which their tensors may
            stay by plan instead of going to the disk. None by default; without effect by GPUDirect
            Storage.
        gds: ``"optional"``, ``"required"`` or ``"disabled"``: whether tensors of a GPU go to the
            drive past the CPU's memory (GPUDirect Storage).

    Raises:
        ConfigError: An option or the directory cannot be used; the message says what next.
        NoSpaceError: The directory has hardly any free space.
        UnsupportedError: io_uring was asked for and the kernel refuses it; or GPUDirect Storage,
            also at the first tensor of a GPU.
        BudgetError: In forward or backward: ``max_resident_bytes`` cannot be kept.
        StorageError: In backward: a tensor could not be read back (``CorruptError``: it came back
            with other bytes). No gradient was computed from it.
        ClosedError: In backward: the tensor is on the disk of another process, which was forked.

    """

    def __init__(
        self,
        dir: Directories,  # noqa: A002 - the word users expect
        *,
        min_bytes: Size = MIN_BYTES_DEFAULT,
        max_resident_bytes: Size | None = None,
        max_disk_bytes: Size | None = None,
        backend: Backend = "auto",
        direct_io: DirectIo = "required",
        verify: bool = False,
        pinned_bytes: Size = PINNED_BYTES_DEFAULT,
        max_host_bytes: Size | None = None,
        gds: Gds = "optional",
    ) -> None:
        store = StoreConfig(
            dirs=directories(dir),
            max_disk_bytes=optional_bytes("max_disk_bytes", max_disk_bytes),
            backend=backend,
            direct_io=direct_io,
            verify=verify,
        )
        self._config = OffloadConfig(
            store=store,
            min_bytes=in_bytes("min_bytes", min_bytes),
            max_resident_bytes=optional_bytes("max_resident_bytes", max_resident_bytes),
            pinned_bytes=in_bytes("pinned_bytes", pinned_bytes),
            max_host_bytes=optional_bytes("max_host_bytes", max_host_bytes),
            gds=gds,
        )
        self._prepare()

    def _prepare(self) -> None:
        self._policy = Policy(self._config.max_host_bytes or 0)
        self._choices = Choices()
        """What was learned outlives a session: the same object may be entered again."""
        self._said = Notices()
        self._uses = _Uses()
        self.session: Session | None = None
        """The session opened last: how to reach that of a decorated function."""

    @property
    def is_on(self) -> bool:
        """Whether this thread has entered this object and not left it."""
        return self._uses.block_in(threading.current_thread()) is not None

    def __repr__(self) -> str:
        """Return how it was made: the directories, and what differs from the defaults."""
        return f"ssdtrain.offload({self._config.as_given()})"

    def __getstate__(self) -> OffloadConfig:
        """Return the options, which is all that a copy gets: what is on belongs to a thread."""
        return self._config

    def __setstate__(self, config: OffloadConfig) -> None:
        """Begin anew with the options of the original."""
        self._config = config
        self._prepare()

    def __enter__(self) -> Session:
        """Open a store and install the hooks in this thread."""
        return outside_compiler(self._enter)

    def _enter(self) -> Session:
        outer = active()
        if outer is not None:
            PROCESS.say("blocks in blocks", ENTERED_INSIDE)
            outer.note_inner_block()
        note_small_pages()
        self.session = session = self._open()
        try:
            # Last, so that Ctrl-C cannot come between it and the body of `with`.
            _Block(session, self._uses).put_on()
        except BaseException:
            session.close()
            raise
        return session

    def _open(self) -> Session:
        return Session(self._config, self._policy, self._choices, self._said)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hooks; the store goes with the last graph that needs it."""
        try:
            outside_compiler(self._leave)
        except BaseException:
            # Ctrl-C, perhaps before anything was left.
            outside_compiler(self._leave_this_thread)
            raise

    def _leave(self) -> None:
        if self._leave_this_thread():
            return
        here, left_early = threading.current_thread(), self._uses.left_early
        if here in left_early:
            left_early.remove(here)
        else:
            self._leave_other_threads()

    def _leave_this_thread(self) -> bool:
        block = self._uses.block_in(threading.current_thread())
        if block is not None:
            block.take_off()
        return block is not None

    def _leave_other_threads(self) -> None:
        """Close what threads entered that are no more; their hooks ended with them."""
        blocks = list(self._uses.blocks)
        elsewhere = [one.thread.name for one in blocks if one.thread.is_alive()]
        if elsewhere:
            raise ConfigError(
                f"this block was entered in thread {elsewhere[0]!r} and stays on there: leave it "
                f"there, not in thread {threading.current_thread().name!r}"
            )
        if not blocks:
            raise ConfigError(
                "this thread has not entered the block that it leaves, or has left it already"
            )
        for block in blocks:
            block.end()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function``: one session serves all its calls, as long as it exists."""
        if isinstance(function, type):
            raise ConfigError(
                f"{function.__name__!r} is a class, of which only the making would be covered; "
                "decorate the function that runs forward and backward"
            )
        if any(is_kind(function) for is_kind in RUNS_LATER):
            raise ConfigError(
                f"{getattr(function, '__name__', function)!r} runs after the call that makes it "
                "has returned, without the hooks; put `with ssdtrain.offload(...)` inside it"
            )
        opened: list[Session] = []
        opening = threading.Lock()

        def begin() -> _Block:
            with opening:
                if not opened:
                    note_small_pages()
                    opened.append(self._open())
                    self.session = opened[0]
            block = _Block(opened[0], None)
            block.put_on()
            return block

        @functools.wraps(function)
        def offloaded(*args: P.args, **kwargs: P.kwargs) -> R:
            block = outside_compiler(begin)
            try:
                return function(*args, **kwargs)
            finally:
                try:
                    outside_compiler(block.take_off)
                except BaseException:
                    # Ctrl-C, perhaps before anything was taken off.
                    outside_compiler(block.take_off)
                    raise

        return offloaded


class _Block:
    """Where the hooks of a session are on: a ``with``, or one call of a decorated function."""

    def __init__(self, session: Session, uses: _Uses | None) -> None:
        self.session = session
        self.uses = uses
        """Those of the ``with``; ``None``: a decorated function, which keeps its session."""
        self.thread = threading.current_thread()
        self._pair = session.context()
        self._here = _blocks_here()
        self._is_on = False

    def put_on(self) -> None:
        """Install the hooks, in the last of its calls; or leave no trace."""
        try:
            self._is_on = True
            self._here.append(self)
            if self.uses is not None:
                self.uses.blocks.append(self)
            install(self._pair)
            if self.uses is not None:
                self.session.watch()
        except BaseException:
            uninstall(self._pair)
            self.end()
            raise

    def take_off(self) -> None:
        """Remove the hooks, in whatever order; of a ``with``, close the session too. Idempotent."""
        if sys.is_finalizing():
            # A generator that Python closes at its end: torch counts no references any more, so to
            # ask it for its hooks would free them twice. All ends with the process.
            return
        here = self._here
        if self not in here:
            self.end()
            return
        inner = here[here.index(self) + 1 :]
        try:
            found = not self._is_on or uninstall(self._pair)
            self._is_on = False
            if not found:
                pop_for_another()
                PROCESS.say("hooks taken off by others", TAKEN_OFF)
            if self.uses is not None:
                drop_failed_backwards()
        finally:
            if self._is_on:
                # Ctrl-C, perhaps before they were removed.
                uninstall(self._pair)
                self._is_on = False
            self.end()
        if any(one.session is not self.session for one in inner):
            PROCESS.say("left in another order", OTHER_ORDER)

    def end(self) -> None:
        """Close the session of a ``with``, and then forget that it is on.

        Who is interrupted meanwhile finds it still, and ends it again.
        """
        if self.uses is not None:
            self.session.close()
        if self in self._here:
            self._here.remove(self)
        if self.uses is not None and self in self.uses.blocks:
            self.uses.blocks.remove(self)


class _Uses:
    """Where one ``offload`` object is on, in all threads."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.left_early: list[threading.Thread] = []
        """A thread for each block that ``leave_all`` left there and whose end is still to come."""

    def block_in(self, thread: threading.Thread) -> _Block | None:
        """Return what is on in a thread; of several, the one that was entered last."""
        for block in reversed(self.blocks):
            if block.thread is thread:
                return block
        return None


_thread = threading.local()


def _blocks_here() -> list[_Block]:
    """Return what is on in this thread, the innermost last."""
    blocks: list[_Block] = _thread.__dict__.setdefault("blocks", [])
    return blocks


def active() -> Session | None:
    """Return the session that takes what autograd saves in this thread; of several, the inner one.

    ``None`` if there is none.
    """
    blocks = _blocks_here()
    return blocks[-1].session if blocks else None


def leave_all() -> list[Session]:
    """Leave every block that is on in this thread, whoever entered it, the inner ones first.

    For a notebook in which a cell entered a block and did not leave it. Returns the sessions that
    were on. The end of a ``with`` that is left this way then does nothing.
    """
    sessions = []
    blocks = _blocks_here()
    while blocks:
        block = blocks[-1]
        if block.uses is not None:
            block.uses.left_early.append(block.thread)
        block.take_off()
        sessions.append(block.session)
    # An interrupt in the middle of entering or leaving may have left hooks that no block knows.
    uninstall_all()
    return sessions
