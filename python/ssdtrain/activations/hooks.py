"""Pack and unpack: the two moments at which autograd lets us see a saved tensor.

[Note: rules of the hooks] 1. Never hold the result of a node itself in what pack returns: it would
hold its own node. 2. Never read a byte in pack. 3. Return a new tensor object from every unpack of
what may have been written, except a leaf that is still in memory: that one itself, as autograd
does. 4. Draw no random number and touch no mode. 5. Hold the lock only for bookkeeping, never while
waiting for a read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import HookPair, Kept
from ssdtrain.activations.eligibility import RULES, is_memory_of_others
from ssdtrain.activations.names import describe
from ssdtrain.activations.prefetch import OrderedTensor, Prefetcher
from ssdtrain.activations.saved_tensor import (
    Record,
    check_version,
    exclude,
    shares_no_counter,
)
from ssdtrain.activations.seen import Seen, Tally
from ssdtrain.activations.watch import Observed
from ssdtrain.activations.writeback import Writeback
from ssdtrain.errors import ClosedError, SsdtrainError
from ssdtrain.geometry import Geometry, part_of
from ssdtrain.machine.torch_internals import (
    current_backward,
    current_node,
    sequence_number,
    share_counters,
    untraced,
)
from ssdtrain.notices import Notices
from ssdtrain.planning.policy import Policy
from ssdtrain.reasons import Evidence, reason_of
from ssdtrain.residency import Residency
from ssdtrain.stalls import Stalls
from ssdtrain.stats import Stats, snapshot
from ssdtrain.transfer.base import Loading, Transfer

__all__ = ["Hooks"]

_alive: weakref.WeakSet[Hooks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: locks may be held by threads that are not there, the disk is not ours."""
    for hooks in _alive:
        hooks.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Hooks:
    """The parts of one session behind the two hooks; autograd keeps it alive with the graph."""

    def __init__(
        self,
        transfer: Transfer,
        policy: Policy,
        *,
        min_bytes: int,
        max_resident_bytes: int | None,
    ) -> None:
        self._transfer = transfer
        self._policy = policy
        self._min_bytes = min_bytes
        self._lock = threading.RLock()
        self._notices = Notices()
        self._stalls = Stalls()
        self._residency = Residency(max_resident_bytes, transfer.resident_bytes, self._stalls)
        self._seen = Seen(self._residency.account)
        self._writeback = Writeback(
            transfer, self._residency, policy, self._notices, self._seen, min_bytes=min_bytes
        )
        self._prefetcher = Prefetcher(
            policy,
            self._residency,
            load=transfer.load,
            rates=transfer.rates,
            stalls=self._stalls,
            notices=self._notices,
        )
        self._is_forked = False
        _alive.add(self)

    def leave_to_parent(self) -> None:
        """Take no part in a forked child: what it saves is kept, what is on the disk is refused."""
        self._is_forked = True  # defence: a forked child owns nothing
        self._lock = threading.RLock()  # defence: a forked child owns nothing

    def context(self) -> saved_tensors_hooks:
        """Return the context manager that installs the hooks in the calling thread."""
        # Not kept here: it knows this object, and the store goes when nobody knows it any more.
        pair = HookPair(
            RULES,
            self._residency.account,
            transfer_bytes=self._transfer_bytes,
            # Under a bound also what is small has to ask for room.
            small_bytes=0 if self._residency.is_bounded else self._min_bytes,
            pack_other=self._pack,
            pack_unusual=self._pack_unusual,
            pack_below=self._pack_below,
            unpack_other=self._unpack,
            untraced=call_untraced,
        )
        return saved_tensors_hooks(pair.pack, pair.unpack)

    def _transfer_bytes(self) -> int:
        # A worker of the parent may have held any lock of the core when this was forked.
        return 0 if self._is_forked else self._transfer.resident_bytes()

    def stats(self, observed: Observed | None = None) -> Stats:
        """Return what happened so far; ``observed`` around the hooks, at the end of a block."""
        residency = self._residency
        with self._lock:
            # A worker of the parent may have held any lock of the core when this was forked.
            if self._is_forked:
                resident_bytes, store = residency.account.held_bytes, {}
            else:
                resident_bytes = residency.resident_bytes()
                store = self._transfer.stats()
            return snapshot(
                residency,
                self._stalls,
                resident_bytes=resident_bytes,
                write_failed_count=self._writeback.failed_count,
                write_refused_count=self._writeback.refused_count,
                store=store,
                reason=reason_of(self._evidence(observed)),
            )

    def _evidence(self, observed: Observed | None) -> Evidence:
        account, prefetcher = self._residency.account, self._prefetcher
        ended = account.ended()
        return Evidence(
            seen=self._seen,
            min_bytes=self._min_bytes,
            offloaded_bytes=ended["offloaded"][0],
            saved_bytes=sum(nbytes for nbytes, _ in ended.values()),
            peak_bytes=account.peak_bytes,
            failed_count=self._writeback.failed_count + self._writeback.refused_count,
            failure=self._writeback.failure,
            budget_error_count=self._residency.refused_count,
            is_one_node=prefetcher.is_one_node,
            last_round=prefetcher.last_round,
            rates=None if self._is_forked else self._transfer.rates(),
            observed=observed,
        )

    def flush(self, *, wait: bool) -> None:
        """Begin the writes that wait for this thread; with ``wait``, see all under way end."""
        if self._is_forked:
            return
        with self._lock:
            handles = self._writeback.begin_all()
        if not wait:
            return
        for handle in handles:
            # Without the lock, so that other threads go on. How it ended is judged below.
            with suppress(SsdtrainError):
                handle.wait()
        with self._lock:
            self._writeback.end_all()

    def _pack_below(self, pair: HookPair, tensor: Tensor) -> object:
        """Pack what comes from inside an operation.

        Selective checkpointing hands over what it caches, and no longer checks the version.
        """
        with share_counters():  # defence: shared counters below autograd
            return pair.pack_here(tensor)

    def _pack_unusual(self, tensor: Tensor) -> Kept:
        """Pack what is no plain CPU tensor."""
        self._seen.unusual.add(0)
        self._note_excluded(tensor)
        return exclude(tensor)

    def _pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return what autograd keeps in its place.

        Weights and most small tensors do not come here (``_core.HookPair``).
        """
        if self._is_forked:
            return exclude(tensor)
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        # What is too small mostly has a small storage, and shall cost no more than a look at it.
        start, nbytes = 0, storage_bytes
        kept: Tally | None = self._seen.small_here
        if storage_bytes >= self._min_bytes:
            start, nbytes = part_of(tensor, storage_bytes)
            kept = self._kept_as(tensor, storage, nbytes, storage_bytes)
        with self._lock:
            if kept is not None:
                kept.add(nbytes)
                return self._writeback.keep(tensor, nbytes, storage_bytes)
            return self._offload(tensor, start, nbytes)

    def _kept_as(
        self, tensor: Tensor, storage: UntypedStorage, nbytes: int, storage_bytes: int
    ) -> Tally | None:
        """Return as what a part of a large storage stays in memory; ``None`` if it may leave it."""
        if nbytes < self._min_bytes:
            return self._seen.small_here
        if shares_no_counter(tensor, storage_bytes):
            return self._seen.apart
        if is_memory_of_others(storage, self._transfer.owns):
            return self._seen.foreign
        return None

    def _offload(self, tensor: Tensor, start: int, nbytes: int) -> OrderedTensor:
        """Pack a tensor whose bytes may leave memory."""
        geometry = Geometry(tensor)
        sequence, backward = sequence_number(), current_backward()
        key = self._prefetcher.next_key(nbytes, backward)
        record, is_new = self._writeback.record_for(
            tensor, geometry, start, nbytes, sequence=sequence, key=key
        )
        saved = OrderedTensor(tensor, geometry, record, sequence)
        self._prefetcher.enter(saved, is_new)
        if is_new:
            self._seen.eligible.add(nbytes)
            self._write(record, backward)
        self._residency.note_peak()
        return saved

    def _write(self, record: Record, backward: int) -> None:
        """See to the write of a new record, unless the plan keeps it and no bound is set."""
        is_bounded = self._residency.is_bounded
        if record.key in self._policy.keep and not is_bounded:
            self._seen.planned.add(record.nbytes)
            return
        if backward == -1 or not _is_recompute():  # defence: checkpoint recognition
            self._writeback.write_later(record)  # defence: the gate
        elif is_bounded:
            self._writeback.write_if_short(record)

    def _unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""
        if not isinstance(packed, OrderedTensor):
            # What has changed since comes here, or is asked for from inside an operation
            # (``_core.HookPair``).
            assert isinstance(packed, Kept)
            kept = packed.tensor
            check_version(kept, packed.version, lambda: _describe_kept(kept))
            return kept.detach()
        geometry = packed.geometry
        check_version(
            packed.counter, packed.version, lambda: describe(geometry.dtype, geometry.size)
        )
        if self._is_forked:
            return _from_memory(packed)
        with self._lock:
            found = self._find(packed)
        if isinstance(found, UntypedStorage):
            original = packed.original(found)
            return packed.counted(geometry.build(found, 0)) if original is None else original
        # defence: no lock while waiting for a read
        return packed.counted(self._wait(packed, found))

    def _find(self, saved: OrderedTensor) -> UntypedStorage | Loading:
        """Return the storage if its bytes are in memory, else the read that brings them."""
        writeback, prefetcher = self._writeback, self._prefetcher
        storage = writeback.recall(saved.record)
        if prefetcher.note_unpack(saved):
            writeback.cancel_queued()
        found = prefetcher.demand(saved) if storage is None else storage
        prefetcher.advance(saved)
        self._residency.note_peak()
        return found

    def _wait(self, saved: OrderedTensor, loading: Loading) -> Tensor:
        ready = loading.done()
        began_s = perf_counter()
        try:
            tensor = self._transfer.restore(loading, saved.geometry)
        except Exception as error:
            geometry = saved.geometry
            error.add_note(
                "ssdtrain could not bring back a saved tensor "
                f"({describe(geometry.dtype, geometry.size)}); no gradient was computed from it"
            )
            raise
        if not ready:
            stall_s = perf_counter() - began_s
            with self._lock:
                self._stalls.note(stall_s)
                self._prefetcher.note_stall(saved, stall_s)
        return tensor

    def _note_excluded(self, tensor: Tensor) -> None:
        kind = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.device.type)
        if kind not in ("cpu", "Parameter"):
            self._notices.say(
                kind,
                "saved tensors of kind %s stay where they are; ssdtrain offloads plain CPU tensors",
                kind,
            )


@untraced
def call_untraced(function: Callable[..., object], *arguments: object) -> object:
    """Call ``function`` where the compiler does not look.

    Traced, a version counter would be a constant.
    """
    return function(*arguments)


def _from_memory(saved: OrderedTensor) -> Tensor:
    """Return a saved tensor in a forked child, which has its memory but not its disk."""
    source = saved.record.source
    if source is None:
        raise ClosedError(
            "this saved tensor is on the disk of the process that was forked; run its backward "
            "there, or build the graph in this process"
        )
    return saved.counted(saved.geometry.build(source.untyped_storage(), 0))


def _is_recompute() -> bool:
    """Whether a reentrant checkpoint recomputes: what is saved now is needed in a moment."""
    node = current_node()
    return node is not None and "CheckpointFunctionBackward" in node.name()


def _describe_kept(tensor: Tensor) -> str:
    # A nested tensor raises when it is asked for its shape, which would hide what is wrong.
    return f"[nested {tensor.dtype}]" if tensor.is_nested else describe(tensor.dtype, tensor.shape)
