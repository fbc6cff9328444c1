"""Pack and unpack: the two moments at which autograd lets us see a saved tensor.

[Note: rules of the hooks] 1. Never return the tensor itself from pack: a saved output would hold
its own node. 2. Never read a byte in pack. 3. Return a new tensor object from every unpack. 4. Draw
no random number and touch no mode. 5. Hold the lock only for bookkeeping, never while waiting for
a read.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.activations.eligibility import is_plain, is_weight
from ssdtrain.activations.prefetch import Prefetcher, Round
from ssdtrain.activations.saved_tensor import (
    ExcludedTensor,
    Geometry,
    KeptTensor,
    Loading,
    SavedTensor,
    check_version,
    counts_apart,
    part_of,
)
from ssdtrain.activations.writeback import Tracker
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ClosedError
from ssdtrain.machine.torch_internals import (
    current_backward,
    current_node,
    is_below_autograd,
    is_traced,
    sequence_number,
    share_counters,
    untraced,
)
from ssdtrain.planning.policy import Policy, Rates
from ssdtrain.stats import Ledger, Stats
from ssdtrain.transfer.host import HostDirect

__all__ = ["Hooks"]

log = logging.getLogger("ssdtrain")

RATES_GUESS = Rates(1e9, 1e9)
"""Before anything was measured."""
RATES_BYTES_MIN = 64 << 20
RATES_BUSY_S_MIN = 0.5
"""Less traffic than this, in less time, says nothing about a rate: bursts deceive."""

ONE_NODE_SHARE_MIN = 0.9
ONE_NODE_TENSORS_MIN = 4
"""A node that saves so much of a round, and so many tensors, is a graph compiled as a whole."""


_alive: weakref.WeakSet[Hooks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: locks may be held by threads that are not there, the disk is not ours."""
    for hooks in _alive:
        hooks.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Hooks:
    """The parts of one session behind the two hooks; autograd keeps it alive with the graph."""

    def __init__(self, config: OffloadConfig, transfer: HostDirect, policy: Policy) -> None:
        self._min_bytes = config.min_bytes
        self._bounded = config.max_resident_bytes is not None
        self._transfer = transfer
        self._policy = policy
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._tracker = Tracker(
            transfer,
            self._ledger,
            policy,
            min_bytes=config.min_bytes,
            max_resident_bytes=config.max_resident_bytes,
        )
        self._prefetcher = Prefetcher(policy, self._tracker.load)
        # Weak, because the prefetcher knows the tracker: a cycle would keep the store open.
        self._tracker.give_way = weakref.WeakMethod(self._prefetcher.drop_window)
        self._rates = RATES_GUESS
        self._measured = transfer.store.stats()
        self._said: set[str] = set()
        self._is_forked = False
        _alive.add(self)

    def leave_to_parent(self) -> None:
        """Take no part in a forked child: what it saves is kept, what is on the disk is refused."""
        self._is_forked = True
        self._lock = threading.RLock()

    def context(self) -> saved_tensors_hooks:
        """Return the context manager that installs the hooks in the calling thread."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def stats(self) -> Stats:
        """Return what happened so far."""
        with self._lock:
            # A worker of the parent may have held any lock of the core when this was forked.
            resident_bytes = 0 if self._is_forked else self._transfer.resident_bytes()
            self._ledger.settle()
            if self._is_forked:
                return self._ledger.snapshot({}, 0)
            return self._ledger.snapshot(self._transfer.store.stats(), resident_bytes)

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return what autograd keeps in its place."""
        if is_traced():
            return _pack_untraced(self, tensor)
        if is_below_autograd():
            # Selective checkpointing hands over what it caches, and no longer checks the version.
            with share_counters():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> object:
        if self._is_forked:
            return ExcludedTensor(tensor)
        if not is_plain(tensor):
            self._note_passed(tensor)
            return ExcludedTensor(tensor)
        if is_weight(tensor):
            return ExcludedTensor(tensor)
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        # What is too small mostly has a small storage, and shall cost no more than a look at it.
        start, nbytes = 0, storage_bytes
        is_kept = storage_bytes < self._min_bytes
        if not is_kept:
            start, nbytes = part_of(tensor, storage_bytes)
            is_kept = (
                nbytes < self._min_bytes
                or counts_apart(tensor, storage_bytes)
                or self._transfer.is_foreign(storage)
            )
        with self._lock:
            if is_kept:
                return self._keep_in_memory(tensor, nbytes, storage_bytes)
            return self._save(tensor, start, nbytes)

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""
        if is_traced():
            # Traced, as compiled autograd does, a version counter would be a constant.
            tensor: Tensor = _unpack_untraced(self, packed)
            return tensor
        return self._unpack(packed)

    def _unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, SavedTensor):
            assert isinstance(packed, ExcludedTensor | KeptTensor)
            kept = packed.tensor
            check_version(kept, packed.version, lambda: _describe_kept(kept))
            return kept.detach()
        geometry = packed.geometry
        check_version(
            packed.counter, packed.version, lambda: _describe(geometry.dtype, geometry.size)
        )
        if self._is_forked:
            return _from_memory(packed)
        with self._lock:
            found = self._find(packed)
        if not isinstance(found, Loading):
            return found
        return self._wait(packed, found)

    def _keep_in_memory(self, tensor: Tensor, nbytes: int, storage_bytes: int) -> KeptTensor:
        self._ledger.settle()
        if self._bounded:
            self._tracker.open_gate(sequence_number())
            self._tracker.admit(nbytes)
        kept = KeptTensor(tensor, nbytes, storage_bytes, self._ledger)
        self._ledger.note_peak(self._transfer.resident_bytes())
        return kept

    def _save(self, tensor: Tensor, start: int, nbytes: int) -> SavedTensor:
        geometry = Geometry(tensor)
        ledger, tracker = self._ledger, self._tracker
        sequence = sequence_number()
        ledger.settle()
        tracker.open_gate(sequence)
        tracker.reap()
        backward = current_backward()
        current, is_new_round = self._prefetcher.round_for(backward)
        if is_new_round:
            self._learn()
        record, is_new = tracker.record_for(tensor, geometry, start, nbytes, sequence)
        saved = SavedTensor(tensor, geometry, record, sequence)
        current.add(saved, record.nbytes, is_new, perf_counter() - ledger.stall_s)
        if is_new:
            record.key = current.signature
            keep = self._policy.keeps(record.key) and not self._bounded
            if not keep and not (backward != -1 and _is_recompute()):
                tracker.write_later(record)
        ledger.note_peak(self._transfer.resident_bytes())
        return saved

    def _find(self, saved: SavedTensor) -> Tensor | Loading:
        """Return the tensor if its bytes are in memory, else the read that brings them."""
        ledger, tracker, record = self._ledger, self._tracker, saved.record
        now_s = perf_counter() - ledger.stall_s
        ledger.settle()
        tracker.open_gate(None)
        is_first = self._prefetcher.note_unpack(saved, now_s)
        if is_first and not self._bounded and not self._policy.knows(record.key):
            tracker.cancel_queued()
        storage = tracker.recall(record)
        tracker.reap()
        found: Tensor | Loading
        if storage is not None:
            found = saved.build(storage, 0)
        elif saved.ahead is not None:
            found, saved.ahead = saved.ahead, None
        else:
            if self._bounded and tracker.room_bytes() < record.slot_bytes():
                self._prefetcher.drop_window()
            found = tracker.demand(saved)
        self._prefetcher.advance(saved, tracker.resident_bytes(), tracker.room_bytes())
        ledger.note_peak(self._transfer.resident_bytes())
        return found

    def _wait(self, saved: SavedTensor, loading: Loading) -> Tensor:
        ready = loading.done()
        began_s = perf_counter()
        try:
            tensor = self._transfer.restore(saved, loading)
        except Exception as error:
            geometry = saved.geometry
            error.add_note(
                "ssdtrain could not bring back a saved tensor "
                f"({_describe(geometry.dtype, geometry.size)}); no gradient was computed from it"
            )
            raise
        if not ready:
            stall_s = perf_counter() - began_s
            with self._lock:
                self._ledger.note_stall(stall_s)
                if isinstance(saved.round, Round):
                    saved.round.stall_s += stall_s
        return tensor

    def _learn(self) -> None:
        finished = self._prefetcher.take_finished()
        if not finished:
            return
        rates = self._measure()
        for one in finished:
            items = one.learned_items()
            if items and one.phase == -1:
                if self._policy.plan_of(one.signature) is None:
                    self._warn_of_one_node(one)
                last_s = max(item.needed_s for item in items)
                whole_s = last_s - items[0].packed_s + one.stall_s
                self._policy.learn(one.signature, items, rates, one.stall_s / max(whole_s, 1e-9))

    def _warn_of_one_node(self, finished: Round) -> None:
        """Say once if offloading cannot lower the peak: one node saves nearly all, at its end."""
        heaviest_bytes, tensors_count, all_bytes = finished.heaviest_node()
        is_one = heaviest_bytes >= ONE_NODE_SHARE_MIN * all_bytes
        if is_one and tensors_count >= ONE_NODE_TENSORS_MIN and "one node" not in self._said:
            self._said.add("one node")
            log.warning(
                "one node of the graph saves %.1f of the %.1f MiB that are saved in forward, at "
                "once and at its end, so offloading cannot lower the peak; if torch.compile made "
                "it of the whole model, compile block by block instead (block.compile())",
                heaviest_bytes / 2**20,
                all_bytes / 2**20,
            )

    def _measure(self) -> Rates:
        """Return the rates of late, or the last known where too little moved to tell."""
        now = self._transfer.store.stats()

        def rate(direction: str, moved: str, last_known: float) -> float:
            busy = f"{direction}_busy_ns"
            nbytes: int = now[moved] - self._measured[moved]
            busy_s: float = (now[busy] - self._measured[busy]) / 1e9
            enough = nbytes >= RATES_BYTES_MIN or busy_s >= RATES_BUSY_S_MIN
            if nbytes == 0 or busy_s <= 0 or not enough:
                return last_known
            self._measured[moved], self._measured[busy] = now[moved], now[busy]
            return nbytes / busy_s

        write = rate("write", "bytes_written", self._rates.write)
        self._rates = Rates(write, rate("read", "bytes_read", self._rates.read))
        return self._rates

    def _note_passed(self, tensor: Tensor) -> None:
        kind = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.device.type)
        if kind not in self._said and kind not in ("cpu", "Parameter"):
            self._said.add(kind)
            log.warning(
                "saved tensors of kind %s stay where they are; ssdtrain offloads plain CPU tensors",
                kind,
            )


@untraced
def _pack_untraced(hooks: Hooks, tensor: Tensor) -> object:
    return hooks.pack(tensor)


@untraced
def _unpack_untraced(hooks: Hooks, packed: object) -> Tensor:
    return hooks.unpack(packed)


def _from_memory(saved: SavedTensor) -> Tensor:
    """Return a saved tensor in a forked child, which has its memory but not its disk."""
    source = saved.record.source
    if source is None:
        raise ClosedError(
            "this saved tensor is on the disk of the process that was forked; run its backward "
            "there, or build the graph in this process"
        )
    return saved.build(source.untyped_storage(), 0)


def _is_recompute() -> bool:
    """Whether a reentrant checkpoint recomputes: what is saved now is needed in a moment."""
    node = current_node()
    return node is not None and "CheckpointFunctionBackward" in node.name()


def _describe_kept(tensor: Tensor) -> str:
    # A nested tensor raises when it is asked for its shape, which would hide what is wrong.
    return f"[nested {tensor.dtype}]" if tensor.is_nested else _describe(tensor.dtype, tensor.shape)


def _describe(dtype: torch.dtype, size: torch.Size) -> str:
    return f"[{str(dtype).removeprefix('torch.')} {list(size)}]"
