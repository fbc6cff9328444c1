"""``with ssdtrain.offload(dir):`` makes a session, installs its hooks, and closes in order.

START HERE. The way of a tensor in ``rust/py/src``: ``hook_pair.rs`` → ``offloading.rs`` →
``writeback.rs`` → ``transfer.rs`` → the store; see ``docs/internals/architecture.md``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar

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
    Rematerialize,
    Size,
    StoreConfig,
    device_bytes,
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
from ssdtrain.transfer.device_bound import refuse_without_gpu

__all__ = ["active", "leave_all", "offload"]

RUNS_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)

ENTERED_INSIDE = (
    "an ssdtrain.offload block was entered in a thread in which another block is on: until the "
    "inner block is left it gets all saved tensors, and the outer block none. In a notebook a cell "
    "may have run twice: ssdtrain.leave_all() leaves both"
)
OTHER_ORDER = (
    "an ssdtrain.offload block was left before a block that was entered after it in the same "
    "thread (asyncio tasks that take turns do that): while both were on, the later block got all "
    "saved tensors, and counted them. Give each task a thread of its own"
)
TAKEN_OFF = (
    "other code left its hooks on saved tensors while an ssdtrain.offload block that was entered "
    "after them was on, and so took ssdtrain's hooks off: tensors saved since then were not "
    "offloaded. Leave blocks in the opposite order of entering them"
)

P = ParamSpec("P")
R = TypeVar("R")


class offload:  # noqa: N801 - used like torch.no_grad
    """Keep autograd's saved tensors on SSDs instead of in memory: a context manager and decorator.

    Wrap the training loop, or a forward and its backward. Gradients are bit-identical to those
    without it, or an error is raised. Implements SSDTrain (arXiv 2408.10013). Sizes are numbers of
    bytes, or text such as ``"8GiB"``, ``"256 KiB"`` or ``"500MB"``.

    Args:
        dir: A directory on a local NVMe file system, or a list of them; ``~`` is the home, and a
            relative path is resolved in this call. Its files have no names and vanish with the
            process. With None no file is opened and nothing is written: tensors are made again from
            others (``rematerialize``), and those of a GPU go to pinned memory
            (``max_host_bytes``). Options of disks, and ``max_resident_bytes``, are refused then.
        min_bytes: Saved tensors of fewer bytes stay in memory.
        max_resident_bytes: Upper bound on the saved bytes in memory. Without it forward never waits
            for the disk: tensors stay if their I/O cannot be hidden. With it forward waits as it
            must, and backward raises ``BudgetError`` if the saved tensors do not fit.
        max_disk_bytes: Upper bound on the bytes reserved on disk; beyond it tensors are kept.
        backend: ``"auto"``, ``"io_uring"`` or ``"psync"``.
        direct_io: ``"required"``, ``"optional"`` or ``"disabled"``: whether to bypass the page
            cache.
        verify: Checksum each tensor before its write and after its read.
        pinned_bytes: Memory of the CPU through which tensors of a GPU go to the disk, for each GPU;
            it is pinned at the first such tensor. With GPUDirect Storage half as much of the GPU's
            memory is taken instead.
        max_host_bytes: More memory of the CPU, for all GPUs together, in which their tensors may
            stay by plan instead of going to the disk. None by default; without effect by GPUDirect
            Storage.
        max_device_bytes: What torch should have allocated at most at the peak of a step, on the
            GPU that is current when a block is entered: weights and workspace included. With
            ``"auto"`` what is free then, and what torch has reserved. A goal for a process that
            trains on one GPU: tensors are made again or leave as far as it needs, at whatever time
            that takes, and a step that cannot meet it runs on; the report tells what was missed.
            Not with ``max_resident_bytes``, and not without a GPU.
        gds: ``"optional"``, ``"required"`` or ``"disabled"``: whether tensors of a GPU go to the
            drive past the CPU's memory (GPUDirect Storage).
        rematerialize: ``"auto"``: saved tensors that cheap operations make again from other saved
            tensors, with equal bits, are neither kept nor written, as far as that makes a step
            longer by two hundredths at most; the first steps prove the bits. With
            ``max_resident_bytes`` a step that waits for the disk makes tensors again instead, as
            far as that is faster, and with ``max_device_bytes`` as many as it takes; then matrix
            products, attention and convolutions run again, too. ``"never"``: none. ``"always"``:
            all that can be made, from the first step, unproved and at any cost, for tests.

    Raises:
        ConfigError: An option or the directory cannot be used.
        NoSpaceError: The directory has hardly any free space.
        UnsupportedError: io_uring was asked for and the kernel refuses it; or GPUDirect Storage,
            also at the first tensor of a GPU.
        BudgetError: In backward: ``max_resident_bytes`` cannot be kept.
        StorageError: In backward: a tensor could not be read back (``CorruptError``: it came back
            with other bytes). No gradient was computed from it.
        ClosedError: In backward: the tensor is on the disk of the parent process.

    """

    def __init__(
        self,
        dir: Directories | None = None,  # noqa: A002 - the word users expect
        *,
        min_bytes: Size = MIN_BYTES_DEFAULT,
        max_resident_bytes: Size | None = None,
        max_disk_bytes: Size | None = None,
        backend: Backend = "auto",
        direct_io: DirectIo = "required",
        verify: bool = False,
        pinned_bytes: Size = PINNED_BYTES_DEFAULT,
        max_host_bytes: Size | None = None,
        max_device_bytes: Size | Literal["auto"] | None = None,
        gds: Gds = "optional",
        rematerialize: Rematerialize = "auto",
    ) -> None:
        store = StoreConfig(
            dirs=() if dir is None else directories(dir),
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
            max_device_bytes=device_bytes(max_device_bytes),
            gds=gds,
            rematerialize=rematerialize,
        )
        if max_device_bytes is not None:
            refuse_without_gpu()
        self._prepare()

    def _prepare(self) -> None:
        self._policy = Policy(self._config.max_host_bytes or 0)
        self._choices = Choices()
        """Outlive a session, like the policy: the same object may be entered again."""
        self._notices = Notices()
        self._entries = _Entries()
        self.session: Session | None = None
        """The session that was opened last, also by a decorated function."""

    @property
    def is_on(self) -> bool:
        """True if this thread has entered this object and not left it."""
        return self._entries.block_in(threading.current_thread()) is not None

    def __repr__(self) -> str:
        """Return the directories and the options other than defaults."""
        return f"ssdtrain.offload({self._config.as_given()})"

    def __getstate__(self) -> OffloadConfig:
        """Return the options. A copy gets nothing else: blocks belong to threads."""
        return self._config

    def __setstate__(self, config: OffloadConfig) -> None:
        """Make a new object with the options of the original."""
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
        self.session = session = self._open()
        try:
            # Last, so that Ctrl-C cannot come between it and the body of `with`.
            _Block(session, self._entries).put_on()
        except BaseException:
            session.close()
            raise
        return session

    def _open(self) -> Session:
        note_small_pages()
        return Session(self._config, self._policy, self._choices, self._notices)

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
            # Ctrl-C, perhaps before the block was left.
            outside_compiler(self._leave_this_thread)
            raise
        if self.session is not None:
            self.session.tell_of_memory(error)

    def _leave(self) -> None:
        if self._leave_this_thread():
            return
        here, left_early = threading.current_thread(), self._entries.left_early
        if here in left_early:
            left_early.remove(here)
        else:
            self._leave_other_threads()

    def _leave_this_thread(self) -> bool:
        block = self._entries.block_in(threading.current_thread())
        if block is not None:
            block.take_off()
        return block is not None

    def _leave_other_threads(self) -> None:
        """Close blocks of threads that have ended; their hooks ended with them."""
        blocks = list(self._entries.blocks)
        elsewhere = [block.thread.name for block in blocks if block.thread.is_alive()]
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
        """Decorate ``function``: a single session serves all its calls."""
        if isinstance(function, type):
            raise ConfigError(
                f"{function.__name__!r} is a class, and only its constructor would be covered; "
                "decorate the function that runs forward and backward"
            )
        if any(is_kind(function) for is_kind in RUNS_LATER):
            raise ConfigError(
                f"{getattr(function, '__name__', function)!r} runs after its call has returned, "
                "without the hooks; put `with ssdtrain.offload(...)` inside it"
            )
        opened: list[Session] = []
        opening = threading.Lock()

        def begin() -> _Block:
            with opening:
                if not opened:
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
            except BaseException as error:
                block.session.tell_of_memory(error)
                raise
            finally:
                try:
                    outside_compiler(block.take_off)
                except BaseException:
                    # Ctrl-C, perhaps before the hooks were taken off.
                    outside_compiler(block.take_off)
                    raise

        return offloaded


class _Block:
    """The hooks of a session in a ``with``, or in a call of a decorated function."""

    def __init__(self, session: Session, entries: _Entries | None) -> None:
        self.session = session
        self.entries = entries
        """The entries of the ``offload`` object; ``None`` for a decorated function."""
        self.thread = threading.current_thread()
        self._pair = session.context()
        self._here = _blocks_here()
        self._is_on = False

    def put_on(self) -> None:
        """Install the hooks; after an error leave no trace."""
        try:
            self._is_on = True
            self._here.append(self)
            if self.entries is not None:
                self.entries.blocks.append(self)
            install(self._pair)
            if self.entries is not None:
                self.session.watch()
        except BaseException:
            uninstall(self._pair)
            self.end()
            raise

    def take_off(self) -> None:
        """Remove the hooks; for a ``with``, close the session too. Idempotent."""
        if sys.is_finalizing():
            # Python closes a generator at its end: torch counts no references any more, so reading
            # its hooks would free them twice. The process ends anyway.
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
            if self.entries is not None:
                drop_failed_backwards()
        finally:
            if self._is_on:
                # Ctrl-C, perhaps before they were removed.
                uninstall(self._pair)
                self._is_on = False
            self.end()
        if any(block.session is not self.session for block in inner):
            PROCESS.say("left in another order", OTHER_ORDER)

    def end(self) -> None:
        """Close the session of a ``with``, and then forget the block.

        After an interrupt in between the block is still known, and is ended again.
        """
        if self.entries is not None:
            self.session.close()
        if self in self._here:
            self._here.remove(self)
        if self.entries is not None and self in self.entries.blocks:
            self.entries.blocks.remove(self)


class _Entries:
    """The blocks of an ``offload`` object that are on, in all threads."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.left_early: list[threading.Thread] = []
        """The threads of blocks that ``leave_all`` has left, and that are still to end."""

    def block_in(self, thread: threading.Thread) -> _Block | None:
        """Return the block that was entered last in a thread."""
        for block in reversed(self.blocks):
            if block.thread is thread:
                return block
        return None


_thread = threading.local()


def _blocks_here() -> list[_Block]:
    """Return the blocks that are on in this thread, the innermost last."""
    blocks: list[_Block] = _thread.__dict__.setdefault("blocks", [])
    return blocks


def active() -> Session | None:
    """Return the session of the innermost block in this thread, which gets its saved tensors.

    ``None`` if no block is on.
    """
    blocks = _blocks_here()
    return blocks[-1].session if blocks else None


def leave_all() -> list[Session]:
    """Leave every block that is on in this thread, the inner blocks first; return their sessions.

    This is for notebooks in which a cell entered a block and did not leave it. The end of a
    ``with`` that was left this way does nothing.
    """
    sessions = []
    blocks = _blocks_here()
    while blocks:
        block = blocks[-1]
        if block.entries is not None:
            block.entries.left_early.append(block.thread)
        block.take_off()
        sessions.append(block.session)
    # An interrupt in the middle of entering or leaving may have left hooks that no block knows.
    uninstall_all()
    return sessions
