"""``with ssdtrain.offload(dir):`` builds the parts, installs the hooks, and closes in order.

START HERE. A tensor's way: ``hooks.pack`` → ``writeback`` → ``transfer`` → ``_core`` → the disk,
and back through ``hooks.unpack``; ``docs/architecture.md`` tells it step by step.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar

from ssdtrain.activations.failed_backward import drop_failed_backwards, prepare_to_drop
from ssdtrain.activations.hooks import Hooks
from ssdtrain.config import (
    MIN_BYTES_DEFAULT,
    Backend,
    DirectIo,
    Directories,
    OffloadConfig,
    Size,
    StoreConfig,
    directories,
    optional_bytes,
)
from ssdtrain.errors import ConfigError
from ssdtrain.machine.huge_pages import note_small_pages
from ssdtrain.machine.torch_internals import is_traced, untraced
from ssdtrain.open_store import open_store
from ssdtrain.planning.policy import Policy
from ssdtrain.sizes import in_bytes
from ssdtrain.stats import Stats
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Session", "offload"]

RUNS_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)

P = ParamSpec("P")
R = TypeVar("R")


class Session:
    """What ``with ssdtrain.offload(dir) as session`` gives: the running counts of this use.

    It stays readable after the block. The store behind it lives until the last graph that was
    built in the block is gone, so a backward after the block works.
    """

    def __init__(self, config: OffloadConfig, policy: Policy) -> None:
        prepare_to_drop()
        bound = config.max_resident_bytes
        # The memory of ended reads stays for the next ones; under a bound, an eighth of it at most.
        store = open_store(config.store, retain_bytes=None if bound is None else bound // 8)
        transfer = HostTransfer(store)
        self._hooks: Hooks | None = Hooks(
            transfer, policy, min_bytes=config.min_bytes, max_resident_bytes=bound
        )
        self._final: Stats | None = None

    @property
    def stats(self) -> Stats:
        """A snapshot of the counts; after the block, as they were when it ended."""
        # Another thread may end the block meanwhile.
        hooks = self._hooks
        if hooks is not None:
            return hooks.stats()
        assert self._final is not None
        return self._final

    def __str__(self) -> str:
        """Return the report for a person."""
        return str(self.stats)

    __repr__ = __str__

    def context(self) -> AbstractContextManager[object]:
        """Return the context manager that installs this session's hooks in the calling thread."""
        assert self._hooks is not None, "a session that was closed installs no hooks"
        return self._hooks.context()

    def flush(self, *, wait: bool = True) -> None:
        """Write all that this thread's graphs saved and that may be written, and free its memory.

        Writes otherwise begin in batches, and memory is freed by later operations. Call it where
        memory is wanted before more is saved, and in no operation of autograd. Without ``wait``
        the writes only begin. Does nothing after the block.
        """
        hooks = self._hooks
        if hooks is not None:
            hooks.flush(wait=wait)

    def close(self) -> None:
        """Let the store go; graphs that still need it keep it. Idempotent."""
        if self._hooks is not None:
            self._final = self._hooks.stats()
            self._hooks = None


class offload:  # noqa: N801 - used like torch.no_grad
    """Keep what autograd saves on SSDs instead of in memory: a context manager and a decorator.

    Wrap the training loop, or one forward and its backward. Gradients are bit-identical to those
    without it, or an error is raised. Implements SSDTrain (arXiv 2408.10013). Sizes are numbers of
    bytes, or text such as ``"8GiB"``, ``"256 KiB"`` or ``"500MB"``.

    Args:
        dir: A directory on a local NVMe file system, or a list of them; ``~`` is the home. Its
            files have no names and vanish with the process.
        min_bytes: Saved tensors of fewer bytes stay in memory.
        max_resident_bytes: Upper bound on the saved bytes in memory. Without it nothing ever waits
            for a slow disk: what cannot be hidden is kept. With it forward waits as it must, and
            raises ``BudgetError`` if the disk refuses what must leave memory.
        max_disk_bytes: Upper bound on the bytes reserved on disk; beyond it tensors are kept.
        backend: ``"auto"``, ``"io_uring"`` or ``"psync"``.
        direct_io: ``"required"``, ``"optional"`` or ``"disabled"``: whether to bypass the page
            cache.
        verify: Checksum each tensor before its write and after its read.

    Raises:
        ConfigError: An option or the directory cannot be used; the message says what next.
        NoSpaceError: The directory has hardly any free space.
        UnsupportedError: io_uring was asked for and the kernel refuses it.
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
        )
        self._policy = Policy()
        """What was learned outlives a session: the same object may be entered again."""
        self._local = threading.local()
        self.session: Session | None = None
        """The session opened last: how to reach that of a decorated function."""

    def __enter__(self) -> Session:
        """Open a store and install the hooks in this thread."""
        if is_traced():
            session: Session = _untraced(self._enter)
            return session
        return self._enter()

    def _enter(self) -> Session:
        note_small_pages()
        session = Session(self._config, self._policy)
        context = session.context()
        context.__enter__()
        self._entered().append((session, context))
        self.session = session
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hooks; the store goes with the last graph that needs it."""
        if is_traced():
            _untraced(self._leave, kind, error, trace)
        else:
            self._leave(kind, error, trace)

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._entered():
            raise ConfigError("this thread has not entered the block that it leaves")
        session, context = self._entered().pop()
        try:
            context.__exit__(kind, error, trace)
            drop_failed_backwards()
        finally:
            session.close()

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

        @functools.wraps(function)
        def offloaded(*args: P.args, **kwargs: P.kwargs) -> R:
            with opening:
                if not opened:
                    note_small_pages()
                    opened.append(Session(self._config, self._policy))
                    self.session = opened[0]
            with opened[0].context():
                return function(*args, **kwargs)

        return offloaded

    def _entered(self) -> list[tuple[Session, AbstractContextManager[object]]]:
        """Return what this thread has entered and not left."""
        stack: list[tuple[Session, AbstractContextManager[object]]]
        stack = self._local.__dict__.setdefault("entered", [])
        return stack


@untraced
def _untraced(function: Callable[..., object], *arguments: object) -> object:
    return function(*arguments)
