"""A session of ``ssdtrain.offload``: its parts, its counts, and its traces for planners."""

from __future__ import annotations

import os
import threading

import torch

from ssdtrain._core import Timeline
from ssdtrain.activations.failed_backward import prepare_to_drop
from ssdtrain.activations.hooks import Hooks
from ssdtrain.activations.installed import Pair
from ssdtrain.activations.watch import Watch
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError, SsdtrainError
from ssdtrain.machine.process_memory import keep_freed_memory, let_freed_memory_go
from ssdtrain.notices import Notices, log, say_begin
from ssdtrain.open_store import open_store
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recompute import Choices
from ssdtrain.planning.timeline import save_timeline
from ssdtrain.planning.trace import Trace, save
from ssdtrain.sharing import Share, Tenants
from ssdtrain.stats import Stats, with_tenants
from ssdtrain.transfer.device_bound import tell_of_memory
from ssdtrain.transfer.direct import DirectWay
from ssdtrain.transfer.host import HostTransfer
from ssdtrain.transfer.staged import gpus_of

__all__ = ["Session"]


class Session:
    """The counts of a block: ``with ssdtrain.offload(dir) as session``.

    They stay readable after the block. The store lives until the last graph that was built in the
    block is gone, so a backward after the block works.
    """

    def __init__(
        self,
        config: OffloadConfig,
        policy: Policy,
        choices: Choices | None = None,
        notices: Notices | None = None,
    ) -> None:
        prepare_to_drop()
        bound = config.max_resident_bytes
        # The memory of ended reads stays for the next reads; under a bound at most an eighth of it.
        store = open_store(config.store, retain_bytes=None if bound is None else bound // 8)
        try:
            lock = threading.RLock()
            direct = DirectWay(config)
            # Without a directory no tensor passes through pinned memory; some may stay there.
            pinned_bytes = config.pinned_bytes if config.store.dirs else 0
            gpus = gpus_of(store, pinned_bytes, config.max_host_bytes or 0, lock, direct)
            transfer = HostTransfer(store, gpus, direct)
            self._hooks: Hooks | None = Hooks(
                transfer,
                policy,
                lock,
                choices=Choices() if choices is None else choices,
                min_bytes=config.min_bytes,
                max_resident_bytes=bound,
                rematerialize=config.rematerialize,
                max_device_bytes=config.max_device_bytes,
            )
            self._config = config
            self._notices = Notices() if notices is None else notices
            """Shared by the sessions of an ``offload`` object, so that reasons are logged once."""
            self._tenants = Tenants()
            self._final: Stats | None = None
            self._final_traces: tuple[Trace, ...] = ()
            self._timeline: Timeline | None = None
            self._watch: Watch | None = None
            if bound is None:
                keep_freed_memory()
            say_begin(config.min_bytes, bound, self._hooks.stats().engines)
        except BaseException:
            # Ctrl-C: its traceback, which a notebook keeps, would hold the store open.
            store.close()
            raise

    def watch(self) -> None:
        """Begin to watch this thread, in which the hooks are on; see ``Watch``."""
        self._watch = watch = Watch()
        watch.begin()

    def note_inner_block(self) -> None:
        """Note that another block was entered inside the one of this session, in its thread."""
        if self._watch is not None:
            self._watch.note_inner_block()

    @property
    def stats(self) -> Stats:
        """A snapshot of the counts; after the block, as they were when it ended."""
        # Another thread may end the block meanwhile.
        hooks = self._hooks
        if hooks is not None:
            return with_tenants(hooks.stats(), self._tenants.figures(), hooks.activations)
        assert self._final is not None
        return self._final

    def share(self, name: str) -> Share:
        """Return the share of a tenant in the store and the bound; see ``sharing``.

        Raises ``ConfigError`` if the block has ended or has no directory, or in a process that was
        forked since.
        """
        hooks = self._hooks
        if hooks is None:
            raise ConfigError(
                f"this session has ended, and {name} would need its store: call this inside of the "
                "block, `with ssdtrain.offload(dir) as session:`"
            )
        if hooks.is_forked:
            raise ConfigError(
                f"this session belongs to the process that was forked, and {name} would need its "
                "store: enter a block of its own in this process"
            )
        if not self._config.store.dirs:
            raise ConfigError(
                f"this session has no directory, and {name} would need its store: pass a directory "
                "here, or give the session one, ssdtrain.offload(dir)"
            )
        bound = self._config.max_resident_bytes
        store = hooks.store.beside(retain_bytes=None if bound is None else bound // 8)
        return Share(store, hooks.budget(name), self._tenants.add)

    def __str__(self) -> str:
        """Return the report for a person."""
        return str(self.stats)

    __repr__ = __str__

    def context(self) -> Pair:
        """Return this session's hooks: a context manager that installs them in this thread."""
        assert self._hooks is not None, "a session that was closed installs no hooks"
        return self._hooks.context()

    def flush(self, *, wait: bool = True) -> None:
        """Write the saved tensors of this thread's graphs that may be written; free their memory.

        Otherwise writes begin in batches, and later operations free memory. Call it if you need
        memory before more is saved, and outside of operations of autograd. Without ``wait`` the
        writes only begin. It does nothing after the block.
        """
        hooks = self._hooks
        if hooks is not None:
            hooks.flush(wait=wait)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The last step of each kind (each sequence length is a kind), the newest last.

        A step ends with its backward.
        """
        hooks = self._hooks
        if hooks is None:
            return self._final_traces
        hooks.learn_from_last()
        return hooks.traces()

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the newest trace as JSON; raises ``ConfigError`` if no step has ended yet."""
        traces = self.traces
        if not traces:
            raise ConfigError(
                "no step was recorded yet: a trace can be saved once a backward has ended"
            )
        save(traces[-1], path)

    def start_timeline(self) -> None:
        """Begin to record the moves of each tensor; see ``save_timeline``."""
        if self._hooks is None:
            raise ConfigError("the block has ended: start the timeline while it is on")
        self._timeline = self._hooks.timeline
        self._timeline.start()

    def save_timeline(
        self,
        path: str | os.PathLike[str],
        *,
        beside: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a Chrome trace for Perfetto: a bar for each tensor that was dropped meanwhile.

        ``beside`` is a trace of ``torch.profiler`` whose events are added.

        Raises ``ConfigError`` if ``start_timeline`` was not called or ``beside`` is no Chrome
        trace, ``OSError`` if a file cannot be read or written.
        """
        if self._timeline is None:
            raise ConfigError("nothing was noted: call start_timeline() before the steps to draw")
        save_timeline(path, self._timeline.lives(), beside)

    def tell_of_memory(self, error: BaseException | None) -> None:
        """Add a note to an error of torch that says that a GPU has no memory left."""
        if isinstance(error, torch.OutOfMemoryError):
            stats, bound = self.stats, self._config.max_device_bytes
            tell_of_memory(
                error,
                stats.resident_bytes,
                stats.resident_bytes_peak,
                is_bounded=bound is not None,
            )

    def close(self) -> None:
        """Let the store go; graphs that still need it keep it. Idempotent."""
        hooks = self._hooks
        if hooks is not None:
            hooks.settle()
            try:
                hooks.learn_from_last()
            except SsdtrainError as error:
                # A GPU that has failed fails all calls, and the store has to be closed anyway.
                log.debug("nothing was learned from the last step: %s", error)
            final = hooks.stats(None if self._watch is None else self._watch.end())
            self._final = with_tenants(final, self._tenants.figures(), hooks.activations)
            # Without traces that a GPU has not reached: it may have failed, and the store has to be
            # closed anyway.
            self._final_traces = hooks.traces()
            self._hooks = None
            if self._config.max_resident_bytes is None:
                let_freed_memory_go()
            self._notices.say_end(self._final.reason, is_surprising=self._final.is_surprising)
