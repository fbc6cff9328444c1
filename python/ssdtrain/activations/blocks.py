"""Calls the blocks of `ssdtrain.checkpoint`, plainly or so that backward computes them again.

The key of a call is its place in the round and the shapes of its arguments. The choice is made for
the outermost of nested blocks. A block may run its forward twice, as under
`torch.utils.checkpoint`: `fingerprints.py` compares the tensors that the two runs save.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as computed_again

from ssdtrain._core import Round, Rounds, Tally
from ssdtrain.activations.fingerprints import Fingerprints
from ssdtrain.machine.torch_internals import (
    current_backward,
    memory_bytes,
    pop_hooks,
    top_hooks,
    trains_with_others,
)
from ssdtrain.notices import PROCESS
from ssdtrain.planning.recompute import Block, BlockCounts, Choices, Measured, disk_of
from ssdtrain.residency import Residency
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Blocks"]

CALLS_MAX = 4096
"""Calls of one round. A round with more calls is many forwards that offloaded nothing."""
CODE_OF_TORCH = torch.utils.checkpoint.__file__


@dataclass
class _CallsOfRound:
    """The calls between two backwards."""

    stalls_s: float
    """The waits of the session when the round began."""
    key: int = 0
    """The key of the last call, a hash of all calls until then."""
    calls: list[Block] = field(default_factory=list)
    saved: Round | None = None
    """The round of saved tensors that these calls belong to."""
    has_recomputed: bool = False
    is_mixed: bool = False
    """True if another thread called blocks at the same time, so that nothing can be measured."""


@dataclass
class _Call:
    """A call under way."""

    key: int
    thread: int
    input_bytes: int
    """Bytes of the tensors among the arguments."""
    is_recomputed: bool
    began_s: float
    eligible_bytes: int
    """Eligible bytes of the session before the call."""


class Blocks:
    """The blocks of one session that has a bound; their choices outlive it.

    Args:
        rounds: Tells the times of saved tensors.
        transfer: Tells the rates of the disk.
        choices: The blocks that are computed again.
        stalls: The waits of the session.
        eligible: Counts the saved tensors that may leave memory.
        residency: Has the bound. Without a bound nothing waits for the disk: all calls are plain.

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
        self._round: _CallsOfRound | None = None
        self._call: _Call | None = None
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
        if (
            not self._residency.is_bounded
            or not torch.is_grad_enabled()
            or current_backward() != -1
            or self._is_in_call()
            or _trains_in_several_processes()  # defence: blocks in several processes
        ):
            return function(*arguments, **keywords)
        leaves = tree_leaves((arguments, keywords))
        if _has_cache(leaves):
            return function(*arguments, **keywords)
        try:
            call = self._begin([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            if call is None:
                return function(*arguments, **keywords)
            if call.is_recomputed:
                name = getattr(block, "__qualname__", type(block).__name__)
                result = _RecomputedCall(self, function, name, arguments, keywords).call()
            else:
                result = function(*arguments, **keywords)
            self._end(call)
        except BaseException:
            # Ctrl-C may come anywhere; at the beginning no call of this thread was under way.
            with self._lock:
                if self._call is not None and self._call.thread == threading.get_ident():
                    self._call = None
            raise
        return result

    def _is_in_call(self) -> bool:
        """Return whether a call is under way; note it if it is that of another thread."""
        with self._lock:
            call = self._call
            if call is None:
                return False
            if self._round is not None and call.thread != threading.get_ident():
                self._round.is_mixed = True
            return True

    def _begin(self, given: list[Tensor]) -> _Call | None:
        """Note a call that gets these tensors; return ``None`` if the call must be plain."""
        # The clock of calls does not tell how long a GPU computes; nested tensors have no shapes.
        if any(tensor.device.type != "cpu" or tensor.is_nested for tensor in given):
            return None
        with self._lock:
            if self._is_in_call():
                return None
            here = self._open()
            here.key = hash((here.key, *((tuple(tensor.shape), tensor.dtype) for tensor in given)))
            self._call = _Call(
                here.key,
                threading.get_ident(),
                _bytes_of(given),
                here.key in self._choices.chosen,
                self._rounds.now_s,
                self._eligible.nbytes,
            )
            return self._call

    def _open(self) -> _CallsOfRound:
        """Return the round of this call; learn from the last one if its backward has begun."""
        before = self._round
        has_turned = before is not None and before.saved is not None and before.saved.is_asked_for
        if before is None or has_turned or len(before.calls) >= CALLS_MAX:
            if before is not None and before.saved is not None:
                self._learn(before, before.saved)
            self._round = _CallsOfRound(self._stalls.total_s)
        assert self._round is not None
        return self._round

    def _end(self, call: _Call) -> None:
        with self._lock:
            self._call = None
            here, saved = self._round, self._rounds.current
            assert here is not None, "a call is in a round"
            if saved is not None and not saved.is_asked_for:
                here.saved = saved
            here.calls.append(
                Block(
                    call.key,
                    self._rounds.now_s - call.began_s,
                    self._eligible.nbytes - call.eligible_bytes,
                    call.input_bytes,
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

    @property
    def now_s(self) -> float:
        """The time."""
        return self._rounds.now_s

    def note_again(self, seconds: float) -> None:
        """Note the time of a second run."""
        with self._lock:
            self.counts = replace(self.counts, recomputed_s=self.counts.recomputed_s + seconds)

    def _learn(self, ended: _CallsOfRound, saved: Round) -> None:
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


def _trains_in_several_processes() -> bool:
    """Return whether several processes train together; log once that blocks run once then.

    A block that runs again may communicate again. Each process chooses for itself, so the others
    would wait for ever, or receive the wrong tensors.
    """
    if not trains_with_others() or torch.distributed.get_world_size() == 1:
        return False
    PROCESS.say(
        "blocks in several processes",
        "blocks marked by ssdtrain.checkpoint are offloaded, and none is computed again, because "
        "each of several processes would choose for itself, and blocks may communicate; to have "
        "them computed again everywhere, use torch.utils.checkpoint",
        level=logging.INFO,
    )
    return True


def _has_cache(leaves: Sequence[Any]) -> bool:
    """Return whether an argument is a cache of Transformers, to which each run appends.

    Transformers passes one by default. A warning is logged once.
    """
    caches: Any = sys.modules.get("transformers.cache_utils")
    if caches is None or not any(isinstance(leaf, caches.Cache) for leaf in leaves):
        return False
    PROCESS.say(
        "blocks with a cache",
        "blocks marked by ssdtrain.checkpoint that are given a cache of keys and values are "
        "offloaded, and none is computed again, because a second run would append to the cache; "
        "train with use_cache=False",
    )
    return True


class _RecomputedCall:
    """A call that torch's checkpoint runs: it saves the arguments; backward runs it again.

    All tensors among the arguments, also those in containers, are given to torch as positional
    arguments: keyword arguments would stay in memory, and a name could be one of torch's own.
    """

    def __init__(
        self,
        blocks: Blocks,
        function: Callable[..., Any],
        name: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._blocks = blocks
        self._function = function
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (arguments, keywords)
        """The caller's own containers, for the first run only: the block may change them."""
        self._form: Any = None
        self._indices: list[int] = []
        """Index of each leaf of the arguments in the list without duplicates."""
        self._fingerprints = Fingerprints(name)

    def call(self) -> Any:
        """Run the block for the first time."""
        leaves, self._form = tree_flatten(self._given)
        # An object that is given twice stays one object: blocks ask whether `query is key`.
        unique = {id(leaf): leaf for leaf in leaves}
        indices = {identity: index for index, identity in enumerate(unique)}
        self._indices = [indices[id(leaf)] for leaf in leaves]
        ours = top_hooks(True)
        try:
            return computed_again(
                self._run, *unique.values(), use_reentrant=False, preserve_rng_state=True
            )
        except BaseException as error:
            _take_off_hooks_of_torch(error, ours)
            raise

    def _run(self, *unique: Any) -> Any:
        if self._given is not None:
            (arguments, keywords), self._given = self._given, None
            with self._fingerprints.noting(unique):
                return self._function(*arguments, **keywords)
        comparison = self._fingerprints.compare(unique)
        leaves = [unique[index] for index in self._indices]
        arguments, keywords = tree_unflatten(leaves, self._form)
        began_s = self._blocks.now_s
        try:
            with comparison.hooks():
                self._function(*arguments, **keywords)
        except Exception:
            # torch raises an error of its own once it has all tensors that it needs.
            comparison.refuse_other()
            raise
        finally:
            self._blocks.note_again(self._blocks.now_s - began_s)
        comparison.check_count()
        return None


def _take_off_hooks_of_torch(error: BaseException, ours: Any) -> None:
    """Take off the hooks that torch's checkpoint has left on because Ctrl-C interrupted it.

    Else all tensors that are saved afterwards would go to the call that has failed.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == CODE_OF_TORCH:
            # This ends the generator of torch that takes its hooks off.
            trace.tb_frame.clear()
        trace = trace.tb_next
    while (top := top_hooks(True)) is not None and top != ours:
        pop_hooks()


def _bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of some tensors; each storage counts once."""
    return sum({_memory_of(tensor): memory_bytes(tensor) for tensor in tensors}.values())


def _memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else id(tensor)
