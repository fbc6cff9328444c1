"""Calls the blocks of `ssdtrain.checkpoint`, plainly or so that backward computes them again.

A block is known by its place in the round and the shapes that it gets, as saved tensors are by
theirs. Of nested blocks the outermost is chosen for.

[Note: what may be computed again] A block that changes its arguments, its parameters or its buffers
(the running statistics of a batch normalisation) would change them twice. So each object is called
plainly first, in training and in evaluation, and is never computed again if a version counter moved
meanwhile, or, as kernels change statistics without one, a byte of a buffer.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as computed_again

from ssdtrain._core import Round, Rounds, Tally
from ssdtrain.machine.torch_internals import current_backward
from ssdtrain.planning.recompute import Block, BlockCounts, Choices, Measured, disk_of
from ssdtrain.residency import Residency
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Blocks"]

Tried = weakref.WeakKeyDictionary[Any, dict[bool, bool]]
CALLS_MAX = 4096
"""Calls of one round; more are many forwards of which nothing was offloaded."""


@dataclass
class _Round:
    """The calls between two backwards."""

    stalls_s: float
    """The waits of the session when it began."""
    key: int = 0
    """That of the last call: it stands for all until then."""
    calls: list[Block] = field(default_factory=list)
    saved: Round | None = None
    """What was saved meanwhile."""
    has_recomputed: bool = False
    is_mixed: bool = False
    """Whether another thread called blocks at the same time, so that nothing can be measured."""


@dataclass
class _Call:
    """A call under way."""

    key: int
    thread: int
    is_tried: bool
    """Whether the object was called plainly before."""
    is_recomputed: bool
    began_s: float
    eligible_bytes: int
    """What the session had been given before."""


class Blocks:
    """The blocks of one session that has a bound; their choices outlive it.

    Args:
        rounds: Tells the times of what was saved.
        transfer: Tells the rates of the disk.
        choices: Which blocks are computed again.
        stalls: The waits of the session.
        eligible: What was saved so far and may leave memory.
        residency: Has the bound; without one nothing waits for the disk, and all calls are plain.

    """

    def __init__(
        self,
        rounds: Rounds,
        transfer: HostTransfer,
        choices: Choices,
        *,
        stalls: Stalls,
        eligible: Tally,
        residency: Residency,
    ) -> None:
        self._rounds = rounds
        self._stalls = stalls
        self._eligible = eligible
        self._transfer = transfer
        self._choices = choices
        self._residency = residency
        self._round: _Round | None = None
        self._call: _Call | None = None
        self._tried: Tried = weakref.WeakKeyDictionary()
        """By object and whether it is training: whether it may be computed again."""
        self._lock = threading.RLock()
        self.counts = BlockCounts()

    def call(
        self,
        function: Callable[..., Any],
        block: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Call ``function`` for ``block``, in the way that was chosen."""
        tensors = [one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor)]
        owner = block.__self__ if inspect.ismethod(block) else block
        call = self._begin(owner, tensors)
        if call is None:
            return function(*arguments, **keywords)
        try:
            before = _versions(owner, tensors)
            buffers = [] if call.is_tried else _buffers(owner)
            copies = [one.clone() for one in buffers]
            if call.is_recomputed:
                result = self._checkpointed(function, arguments, keywords)
            else:
                result = function(*arguments, **keywords)
            is_unchanged = _versions(owner, tensors) == before
            is_unchanged &= all(map(torch.equal, buffers, copies))
        except BaseException:
            self._call = None
            raise
        self._end(call, owner, tensors, is_unchanged=is_unchanged)
        return result

    def _begin(self, owner: Any, tensors: list[Tensor]) -> _Call | None:
        """Return what is noted of this call, or ``None`` if nothing is: then it is plain."""
        if (
            not self._residency.is_bounded
            or not torch.is_grad_enabled()
            or current_backward() != -1
            # How long a GPU computes, the moments of calls do not tell.
            or any(one.device.type != "cpu" for one in tensors)
        ):
            return None
        with self._lock:
            if self._call is not None:
                # It may be inside of that one.
                if self._round is not None and self._call.thread != threading.get_ident():
                    self._round.is_mixed = True
                return None
            here = self._open()
            here.key = hash((here.key, *((tuple(one.shape), one.dtype) for one in tensors)))
            known = _tried(self._tried, owner)
            is_training = _is_training(owner)
            is_chosen = here.key in self._choices.chosen
            self._call = _Call(
                here.key,
                threading.get_ident(),
                is_training in known,
                is_chosen and known.get(is_training, False),
                self._rounds.now_s,
                self._eligible.nbytes,
            )
            return self._call

    def _open(self) -> _Round:
        """Return the round that is called now; one whose backward has begun is learned from."""
        before = self._round
        has_turned = before is not None and before.saved is not None and before.saved.is_asked_for
        if before is None or has_turned or len(before.calls) >= CALLS_MAX:
            if before is not None and before.saved is not None:
                self._learn(before, before.saved)
            self._round = _Round(self._stalls.total_s)
        assert self._round is not None
        return self._round

    def _end(self, call: _Call, owner: Any, tensors: list[Tensor], *, is_unchanged: bool) -> None:
        with self._lock:
            self._call = None
            here, saved = self._round, self._rounds.current
            assert here is not None, "a call is in a round"
            if saved is not None and not saved.is_asked_for:
                here.saved = saved
            found = _tried(self._tried, owner)
            is_training = _is_training(owner)
            found[is_training] = found.get(is_training, True) and is_unchanged
            here.calls.append(
                Block(
                    call.key,
                    self._rounds.now_s - call.began_s,
                    self._eligible.nbytes - call.eligible_bytes,
                    _bytes_of(tensors),
                    found[is_training],
                )
            )
            here.has_recomputed |= call.is_recomputed
            freed_bytes = self._choices.freed_bytes.get(call.key, 0) if call.is_recomputed else 0
            self.counts = replace(
                self.counts,
                blocks_called=self.counts.blocks_called + 1,
                blocks_recomputed=self.counts.blocks_recomputed + call.is_recomputed,
                bytes_not_written=self.counts.bytes_not_written + freed_bytes,
            )

    def _checkpointed(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Call it so that its inputs are saved, and the rest is computed again."""
        names = tuple(keywords)
        has_run = False

        # All are given by place: what is given by name would stay in memory, and a name could be
        # one of torch's own.
        def run(*values: Any) -> Any:
            nonlocal has_run
            by_place = len(values) - len(names)
            given = dict(zip(names, values[by_place:], strict=True))
            if not has_run:
                has_run = True
                return function(*values[:by_place], **given)
            began_s = self._rounds.now_s
            try:
                # torch raises an exception where nothing more is needed.
                return function(*values[:by_place], **given)
            finally:
                self._note_again(self._rounds.now_s - began_s)

        values = (*arguments, *keywords.values())
        return computed_again(run, *values, use_reentrant=False, preserve_rng_state=True)

    def _note_again(self, seconds: float) -> None:
        with self._lock:
            self.counts = replace(self.counts, recomputed_s=self.counts.recomputed_s + seconds)

    def _learn(self, ended: _Round, saved: Round) -> None:
        """Let the choices learn from a round, if its backward has come to its end."""
        items = saved.learned_items()
        if ended.is_mixed or not items or not saved.is_finished:
            return
        began_s, ended_s = saved.span_s
        turned_s = min(needed_s for _, _, _, needed_s, _ in items)
        measured = None
        if not ended.has_recomputed:
            in_blocks = sum(block.saved_bytes for block in ended.calls)
            other_bytes = max(0, sum(nbytes for _, nbytes, _, _, _ in items) - in_blocks)
            blocks = tuple(ended.calls)
            measured = Measured(blocks, other_bytes, turned_s - began_s, ended_s - turned_s)
        left_bytes = self._residency.left_bytes()
        assert left_bytes is not None, "without a bound nothing is noted"
        stall_s = self._stalls.total_s - ended.stalls_s
        disk = disk_of(self._transfer.rates(), left_bytes)
        expected_s = self._choices.learn(ended.key, measured, disk, stall_s)
        self.counts = replace(
            self.counts,
            recompute_expected_s=expected_s,
            recompute_measured_s=ended_s - began_s + stall_s,
        )


def _tried(table: Tried, owner: Any) -> dict[bool, bool]:
    """Return what is known of an object; of one without weak references nothing stays known."""
    try:
        return table.setdefault(owner, {})
    except TypeError:
        return {}


def _is_training(owner: Any) -> bool:
    return isinstance(owner, nn.Module) and owner.training


def _versions(owner: Any, tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was changed that a call could change in place."""
    own: Iterator[Tensor] = iter(())
    if isinstance(owner, nn.Module):
        own = chain(owner.parameters(), owner.buffers())
    return [one._version for one in chain(tensors, own) if not one.is_inference()]  # noqa: SLF001


def _buffers(owner: Any) -> list[Tensor]:
    return list(owner.buffers()) if isinstance(owner, nn.Module) else []


def _bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of what a call was given, each storage once."""
    storages = {one.untyped_storage().data_ptr(): one.nbytes for one in tensors}
    return sum(storages.values())
