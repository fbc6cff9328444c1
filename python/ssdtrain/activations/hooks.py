"""Pack and unpack: the two moments at which autograd shows a saved tensor.

[Note: rules of the hooks] 1. The packed object never holds the result of a node itself, which would
hold its own node. 2. Pack never reads a byte. 3. Unpack returns a new tensor object, except for a
leaf that is still in memory: that itself, as autograd does. 4. The hooks draw no random number and
touch no mode. 5. They hold the lock only for bookkeeping, never while they wait for a read or for a
GPU.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Literal

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import (
    HookPair,
    Kept,
    Loading,
    Offloading,
    SavedTensor,
    Store,
    Tally,
    Timeline,
)
from ssdtrain.activations.blocks import Blocks
from ssdtrain.activations.eligibility import RULES
from ssdtrain.activations.names import describe
from ssdtrain.activations.prefetch import Prefetcher
from ssdtrain.activations.rematerializer import Rematerializer
from ssdtrain.activations.saved_tensor import check_version, exclude, give_back
from ssdtrain.activations.writeback import Writeback
from ssdtrain.errors import ClosedError, SsdtrainError
from ssdtrain.geometry import TORCH
from ssdtrain.machine.torch_internals import share_counters, top_hooks, untraced
from ssdtrain.notices import Notices
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recompute import Choices
from ssdtrain.planning.recording import trace_of
from ssdtrain.planning.trace import Trace
from ssdtrain.reasons import Evidence, Observed, reason_of
from ssdtrain.residency import Refused, Residency
from ssdtrain.seen import Seen
from ssdtrain.sharing import Budget, Figures
from ssdtrain.sizes import shown_bytes
from ssdtrain.stalls import Stalls
from ssdtrain.stats import Stats, snapshot
from ssdtrain.transfer.device_bound import DeviceBound
from ssdtrain.transfer.host import HostTransfer
from ssdtrain.transfer.staged import OnGpus

__all__ = ["Hooks", "blocks_here"]

SETTLE_S_MAX = 1.0
"""The end of a block waits at most so long for a disk, which may hang."""

_alive: weakref.WeakSet[Hooks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the disk is the parent's, and missing threads may hold locks."""
    for hooks in _alive:
        hooks.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Hooks:
    """The parts of a session behind the two hooks; autograd keeps them alive with the graph."""

    def __init__(
        self,
        transfer: HostTransfer,
        policy: Policy,
        lock: threading.RLock,
        *,
        choices: Choices,
        min_bytes: int,
        max_resident_bytes: int | None,
        rematerialize: str,
        max_device_bytes: int | Literal["auto"] | None = None,
    ) -> None:
        self._transfer = transfer
        self.policy = policy
        """The plans, which other sessions of the same ``offload`` object use too."""
        self._min_bytes = min_bytes
        self._lock = lock
        self._notices = Notices()
        self._stalls = Stalls()
        self._began_s = perf_counter()
        # Weak: an optimizer that shares the bound may outlive the activations.
        transfer_bytes = weakref.WeakMethod(transfer.resident_bytes)
        self._residency = Residency(
            max_resident_bytes,
            lambda: 0 if (asked := transfer_bytes()) is None else asked(),
            self._stalls,
        )
        self._device: DeviceBound | None = None
        if max_device_bytes is not None:
            residency = self._residency
            self._device = DeviceBound(
                max_device_bytes, residency.account, residency.resident_bytes
            )
            residency.look_at_gpu = self._device.look
            self._residency.recipes_limit_bytes = self._device.limit_bytes
        self._seen = Seen(self._residency.account)
        self.writeback = Writeback(
            transfer, self._residency, policy, self._notices, self._seen, min_bytes=min_bytes
        )
        self.prefetcher = Prefetcher(
            transfer,
            policy,
            self._residency,
            stalls=self._stalls,
            notices=self._notices,
            look=self.writeback.note_failures_on_gpus,
            device=self._device,
        )
        self.rematerializer: Rematerializer | None = None
        """``None`` if no saved tensor is made again."""
        if rematerialize != "never":
            self.rematerializer = Rematerializer(
                policy,
                self.writeback.records,
                self._residency,
                lock,
                always=rematerialize == "always",
            )
        self._blocks = Blocks(
            self.prefetcher.rounds,
            transfer,
            choices,
            stalls=self._stalls,
            eligible=self._seen.eligible,
            residency=self._residency,
        )
        _alive.add(self)

    def leave_to_parent(self) -> None:
        """In a forked child keep all saved tensors, and refuse those that are on the disk."""
        self.writeback.records.leave_to_parent()
        self._lock = threading.RLock()  # defence: a forked child owns nothing
        if self.rematerializer is not None:
            self.rematerializer.leave_to_parent()

    @property
    def is_forked(self) -> bool:
        """True if this process was forked from the one with the disk."""
        return self.writeback.records.is_forked

    @property
    def blocks(self) -> Blocks | None:
        """The session's ``Blocks``; ``None`` in a forked child."""
        return None if self.is_forked else self._blocks

    @property
    def store(self) -> Store:
        """The store of the activations."""
        return self._transfer.store

    def budget(self, name: str) -> Budget:
        """Return a part of the bound for a tenant."""
        return Budget(self._residency, self._lock, name)

    def activations(self) -> Figures:
        """Return the figures of the activations, without those of tenants."""
        account = self._residency.account
        if self.is_forked:
            return Figures(resident_bytes=account.held_bytes - account.reserved_bytes)
        with self._lock:
            store = self._transfer.stats()
            alive = self.writeback.records.alive()
            return Figures(
                resident_bytes=self._residency.resident_bytes() - account.reserved_bytes,
                on_disk_bytes=sum(
                    record.nbytes for record in alive if record.source is None and record.handle
                ),
                bytes_written=max(0, store["bytes_written"] - store["beside_written_bytes"]),
                bytes_read=max(0, store["bytes_read"] - store["beside_read_bytes"]),
                stall_s=self._stalls.total_s,
            )

    def context(self) -> saved_tensors_hooks:
        """Return the context manager that installs the hooks in the calling thread."""
        # Not kept here: they know this object, and a cycle would keep the store open.
        offloading = Offloading(
            TORCH,
            self.writeback.records,
            self.prefetcher.rounds,
            min_bytes=self._min_bytes,
            lock=self._lock,
            hooks=self,
            eligible=self._seen.eligible,
            planned=self._seen.planned,
        )
        pair = HookPair(
            RULES,
            self._residency.account,
            self._transfer.store,
            self._transfer.gpus,
            small_bytes=self._min_bytes,
            is_bounded=self._residency.is_bounded,
            offloading=offloading,
            pack_unusual=self._pack_unusual,
            pack_below=self._pack_below,
            untraced=call_untraced,
        )
        return saved_tensors_hooks(pair.pack, pair.unpack)

    def stats(self, observed: Observed | None = None) -> Stats:
        """Return a snapshot; at the end of a block with the counts of its ``Watch``."""
        residency = self._residency
        with self._lock:
            # A worker of the parent may have held any lock of the core at the fork.
            if self.is_forked:
                resident_bytes, store = residency.account.held_bytes, {}
                gpus = OnGpus()
            else:
                self.writeback.note_failures_on_gpus()
                resident_bytes = residency.resident_bytes()
                store = self._transfer.stats()
                gpus = self._transfer.on_gpus()
            if self._device is not None:
                gpus = replace(
                    gpus,
                    device_bound_bytes=self._device.limit_bytes,
                    device_excess_bytes=self._device.excess_bytes,
                )
            return snapshot(
                residency,
                self._stalls,
                resident_bytes=resident_bytes,
                write_failed_count=self.writeback.failed_count,
                write_refused_count=self.writeback.refused_count,
                store=store,
                on_gpus=gpus,
                gpu_stall_s=self.prefetcher.gpu_stall_s,
                hooks_s=self.prefetcher.hooks_s,
                has_settled=self.prefetcher.has_settled,
                recipes_differing_count=self.policy.proofs.differing_count,
                rematerialize_s=0.0 if (made := self.rematerializer) is None else made.seconds,
                elapsed_s=perf_counter() - self._began_s,
                bytes_eligible=self._seen.eligible.nbytes,
                reason=reason_of(self._evidence(observed)),
                blocks=self._blocks.counts,
            )

    def learn_from_last(self) -> None:
        """Learn from all rounds that have ended and whose ends a GPU has reached."""
        if not self.is_forked:
            with self._lock:
                self.prefetcher.learn_from_last()

    def traces(self) -> tuple[Trace, ...]:
        """Return the last round of each kind that was learned from as a trace, the newest last."""
        with self._lock:
            recorded = list(self.prefetcher.recorded.values())
        return tuple(
            trace_of(
                recording,
                name=f"{len(recording.items)} saved tensors of "
                f"{shown_bytes(sum(item.nbytes for item in recording.items))}",
                origin="recorded by a session of ssdtrain; small tensors and weights are not in it",
            )
            for recording in recorded
        )

    @property
    def timeline(self) -> Timeline:
        """The moments at which each tensor moved between memory and disk."""
        return self.writeback.timeline

    def _evidence(self, observed: Observed | None) -> Evidence:
        account, prefetcher = self._residency.account, self.prefetcher
        ended = account.ended()
        return Evidence(
            seen=self._seen,
            min_bytes=self._min_bytes,
            has_directory=self.store.has_directory(),
            offloaded_bytes=ended["offloaded"][0] + ended["rematerialized"][0],
            saved_bytes=sum(nbytes for nbytes, _ in ended.values()),
            peak_bytes=account.peak_bytes,
            failed_count=self.writeback.failed_count + self.writeback.refused_count,
            failure=self.writeback.failure,
            stayed=self.writeback.stayed,
            budget_error_count=self._residency.refused_count,
            is_one_node=prefetcher.is_one_node,
            usual_round=prefetcher.usual_round,
            observed=observed,
        )

    def settle(self) -> None:
        """Wait a moment for abandoned transfers; only under a bound.

        Reads ahead for a backward that never came may be under way when the block ends, and the
        last counts would have their bytes.
        """
        if self.is_forked or not self._residency.is_bounded:
            return
        until_s = perf_counter() + SETTLE_S_MAX
        while (left_s := until_s - perf_counter()) > 0:
            if not self._transfer.wait_for_abandoned(limit_s=left_s):
                return

    def flush(self, *, wait: bool) -> None:
        """Begin the writes that wait for this thread; with ``wait``, see all under way end."""
        if self.is_forked:
            return
        with self._lock:
            handles = self.writeback.begin_all()
        if not wait:
            return
        for handle in handles:
            # Without the lock, so that other threads go on. `end_all` handles errors.
            with suppress(SsdtrainError):
                handle.wait()
        with self._lock:
            self.writeback.end_all()

    def _pack_below(self, pair: HookPair, tensor: Tensor) -> object:
        """Pack a tensor from inside an operation.

        Selective checkpointing packs the tensors that it caches there, and does not check versions.
        """
        with share_counters():  # defence: shared counters below autograd
            return pair.pack_here(tensor)

    def _pack_unusual(self, tensor: Tensor) -> Kept:
        """Pack a tensor that is no plain CPU tensor."""
        self._seen.unusual.add(0)
        self._note_excluded(tensor)
        return exclude(tensor)

    # Questions of the compiled part; see ``partners.SessionHooks``.

    def exclude(self, tensor: Tensor) -> Kept:
        """Pack a tensor in a forked child, which has no disk."""
        return exclude(tensor)

    def keep(
        self,
        tensor: Tensor,
        kind: Literal["small_here", "apart", "detached", "foreign"],
        nbytes: int,
        storage_bytes: int,
    ) -> Kept | Refused:
        """Pack a tensor that stays in memory; ``kind`` says why (see ``Seen``)."""
        with self._lock:
            tally: Tally = getattr(self._seen, kind)
            tally.add(nbytes)
            return self.writeback.keep(tensor, nbytes, storage_bytes)

    def unpack_kept(self, packed: Kept | Refused) -> Tensor:
        """Return a kept tensor that was changed since, or is needed inside an operation."""
        if isinstance(packed, Refused):
            with self._lock:
                raise packed.refusal.error()
        return give_back(packed.tensor, packed.version)

    def refuse_changed(self, saved: SavedTensor) -> None:
        """Raise because a saved tensor was changed in place."""
        check_version(saved.counter, saved.version, lambda: describe(saved.dtype, saved.size))

    def from_memory(self, saved: SavedTensor) -> Tensor:
        """Return a saved tensor in a forked child, which has its memory but not its disk."""
        source, recipe = saved.record.source, saved.record.recipe
        if source is None and recipe is not None and self.rematerializer is not None:
            source = self.rematerializer.rematerialize(saved, recipe, self._bring_from_memory)
        if source is None:
            raise ClosedError(
                "this saved tensor is on the disk of the process that was forked; run its "
                "backward there, or build the graph in this process"
            )
        return saved.on_memory(TORCH, source.untyped_storage())

    def _bring_from_memory(self, packed: object) -> Tensor:
        if isinstance(packed, SavedTensor):
            self.refuse_changed(packed)
            return self.from_memory(packed)
        assert isinstance(packed, Kept)
        return self.unpack_kept(packed)

    def wait_for(self, saved: SavedTensor, loading: Loading) -> None:
        """Wait for a read whose bytes a node needs now; raises the error of the read."""
        ready = loading.done()
        began_s = perf_counter()
        try:
            loading.wait()
        except Exception as error:
            error.add_note(
                "ssdtrain could not bring back a saved tensor "
                f"({describe(saved.dtype, saved.size)}); no gradient was computed from it"
            )
            raise
        if not ready:
            stall_s = perf_counter() - began_s
            with self._lock:
                self._stalls.note(stall_s)
                saved.note_stall(stall_s)

    def _note_excluded(self, tensor: Tensor) -> None:
        kind = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.device.type)
        if kind not in ("cpu", "Parameter"):
            self._notices.say(
                kind,
                "saved tensors of kind %s stay where they are; ssdtrain offloads plain tensors of "
                "the CPU and of CUDA GPUs",
                kind,
            )


def blocks_here() -> Blocks | None:
    """Return the ``Blocks`` of the session whose hooks are on top in this thread, if any."""
    top = top_hooks(True)
    pair = None if top is None else getattr(top[0], "__self__", None)
    hooks = pair.hooks if isinstance(pair, HookPair) else None
    return hooks.blocks if isinstance(hooks, Hooks) else None


@untraced
def call_untraced(function: Callable[..., object], *arguments: object) -> object:
    """Call ``function`` outside of traces of the compiler.

    In a trace a version counter would be a constant.
    """
    return function(*arguments)
