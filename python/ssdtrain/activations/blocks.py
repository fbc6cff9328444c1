"""Calls the blocks of `ssdtrain.checkpoint`, plainly or so that backward computes them again.

A block is known by its place in the round and the shapes that it gets, as saved tensors are by
theirs. Of nested blocks the outermost is chosen for. What may be computed again, see `reach.py`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as computed_again

from ssdtrain._core import Round, Rounds, Tally
from ssdtrain.activations.fingerprints import Comparison, Fingerprints, saves_unwritten
from ssdtrain.activations.reach import Reach, Snapshot, Versions, are_same
from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import (
    current_backward,
    memory_bytes,
    pop_hooks,
    sequence_number,
    top_hooks,
    trains_with_others,
)
from ssdtrain.notices import PROCESS
from ssdtrain.planning.recompute import Block, BlockCounts, Choices, Measured, disk_of
from ssdtrain.residency import Residency
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Blocks"]

Seen = TypeVar("Seen")

CALLS_MAX = 4096
"""Calls of one round; more are many forwards of which nothing was offloaded."""
CODE_OF_TORCH = torch.utils.checkpoint.__file__
MODES_MAX = 64
"""Ways of calling one block that are remembered: a function made anew for each call is as many."""
CHANGES_MAX = 4
"""Calls that changed something, after which a block is given up."""
CHANGES_LATE = (
    "a block that was computed again in backward (ssdtrain.checkpoint) changed something that it "
    "has or reads (a tensor, a buffer, an attribute) then, which its forward did not. Take the "
    "mark off with ssdtrain.remove_checkpoint"
)


@dataclass
class _Tried:
    """What is known of a block in one mode."""

    is_steady: bool = True
    """Whether nothing else has changed, between two of its calls, what it reads."""
    unchanged_count: int = 0
    """Calls without a change, since the last one that changed something itself."""
    changes_count: int = 0
    """Calls that changed something, as one does that fills a cache."""
    buffers: Versions = field(default_factory=list)
    """As its last call left them."""
    arguments: Versions = field(default_factory=list)
    """Counters of the tensors that its last plain call was given, as it left them."""
    standing: list[object] | None = None
    """What else it reads, as its last call left it; ``None`` before there was one."""

    @property
    def is_repeatable(self) -> bool:
        """Whether its next call may be computed again, as far as its last ones tell."""
        return not self.is_given_up and self.unchanged_count >= max(1, self.changes_count)

    @property
    def is_given_up(self) -> bool:
        """Whether it is plain for good."""
        return not self.is_steady or self.changes_count >= CHANGES_MAX

    def note(self, *, is_unchanged: bool) -> None:
        """Note whether a call left all that it can reach as it was."""
        self.unchanged_count = self.unchanged_count + 1 if is_unchanged else 0
        self.changes_count += not is_unchanged


Modes = dict[tuple[object, ...], _Tried]


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

    before: Snapshot
    key: int
    thread: int
    have_bytes_stayed: Callable[[], bool] | None
    """In a plain call that shows whether the next one may be computed again."""
    is_recomputed: bool
    began_s: float
    eligible_bytes: int
    """What the session had been given before."""
    sequence: int
    """The number of the first node that it makes."""

    def may_be_repeated(self, now: Snapshot, result: Any) -> bool:
        """Whether it has left all that it can reach as it was, and saves only what it wrote."""
        if not now.is_as(self.before):
            return False
        if self.have_bytes_stayed is None and not self.is_recomputed:
            return True
        have_stayed = self.have_bytes_stayed is None or self.have_bytes_stayed()
        return have_stayed and not saves_unwritten(result, self.sequence)


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
        self._tried: weakref.WeakKeyDictionary[Any, Modes] = weakref.WeakKeyDictionary()
        """By object and mode."""
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
            or _is_one_of_several()  # defence: blocks in several processes
        ):
            return function(*arguments, **keywords)
        # A container that contains itself has no leaves, and torch's checkpoint takes none.
        reach = _looked(
            type(block).__name__, lambda: Reach(block, tree_leaves((arguments, keywords)))
        )
        if reach is None:
            return function(*arguments, **keywords)
        try:
            call = self._begin(reach)
            if call is None:
                return function(*arguments, **keywords)
            again = None
            if call.is_recomputed:
                again = _Again(self, function, reach, arguments, keywords)
                result = again.call()
            else:
                result = function(*arguments, **keywords)
            now = _looked(reach.name, reach.snapshot)
            is_unchanged = now is not None and bool(
                _looked(reach.name, lambda: call.may_be_repeated(now, result))
            )
            if again is not None:
                again.fingerprints.decide(is_repeatable=is_unchanged)
            self._end(call, reach, now or call.before, is_unchanged=is_unchanged)
        except BaseException:
            # Ctrl-C may come anywhere; at the beginning no call of this thread was under way.
            with self._lock:
                if self._call is not None and self._call.thread == threading.get_ident():
                    self._call = None
            raise
        return result

    def _is_in_call(self) -> bool:
        """Whether a call is under way; one of another thread is noted."""
        with self._lock:
            call = self._call
            if call is None:
                return False
            if self._round is not None and call.thread != threading.get_ident():
                self._round.is_mixed = True
            return True

    def _begin(self, reach: Reach) -> _Call | None:
        """Return what is noted of this call, or ``None`` if nothing is: then it is plain."""
        # How long a GPU computes, the moments of calls do not tell.
        # Nested tensors do not tell their shapes.
        if any(one.device.type != "cpu" or one.is_nested for one in reach.given):
            return None
        with self._lock:
            if self._is_in_call():
                return None
            before = _looked(reach.name, reach.snapshot)
            if before is None:
                return None
            tried, have_bytes_stayed = self._modes_of(reach).get(reach.mode, _Tried()), None
            if tried.standing is not None:
                tried.is_steady &= are_same(tried.buffers, before.buffers)
                tried.is_steady &= tried.standing == before.standing()
                # A caller that changes its arguments afterwards would do so with the next ones.
                tried.is_steady &= all(one._version == was for one, was in tried.arguments)  # noqa: SLF001
            if not (tried.is_repeatable or tried.is_given_up):
                have_bytes_stayed = _looked(reach.name, lambda: reach.closely(before))
                if have_bytes_stayed is None:
                    return None
            here = self._open()
            here.key = hash((here.key, *((tuple(one.shape), one.dtype) for one in reach.given)))
            is_chosen = here.key in self._choices.chosen
            self._call = _Call(
                before,
                here.key,
                threading.get_ident(),
                have_bytes_stayed,
                is_chosen and tried.is_repeatable,
                self._rounds.now_s,
                self._eligible.nbytes,
                sequence_number(),
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

    def _end(self, call: _Call, reach: Reach, now: Snapshot, *, is_unchanged: bool) -> None:
        with self._lock:
            self._call = None
            here, saved = self._round, self._rounds.current
            assert here is not None, "a call is in a round"
            if saved is not None and not saved.is_asked_for:
                here.saved = saved
            modes = self._modes_of(reach)
            if len(modes) >= MODES_MAX:
                modes.clear()
            tried = modes.setdefault(reach.mode, _Tried())
            tried.note(is_unchanged=is_unchanged)
            tried.buffers = now.buffers
            tried.standing = now.standing()
            is_told = call.is_recomputed or tried.is_given_up
            tried.arguments = [] if is_told else reach.counters()
            here.calls.append(
                Block(
                    call.key,
                    self._rounds.now_s - call.began_s,
                    self._eligible.nbytes - call.eligible_bytes,
                    _bytes_of(reach.given),
                    tried.is_repeatable,
                )
            )
            here.has_recomputed |= call.is_recomputed
            is_recomputed = call.is_recomputed and is_unchanged
            freed_bytes = self._choices.freed_bytes.get(call.key, 0) if is_recomputed else 0
            self.counts = replace(
                self.counts,
                blocks_called=self.counts.blocks_called + 1,
                blocks_recomputed=self.counts.blocks_recomputed + is_recomputed,
                bytes_not_written=self.counts.bytes_not_written + freed_bytes,
            )

    def _modes_of(self, reach: Reach) -> Modes:
        """Return what is known of a block; of one without weak references nothing stays known."""
        try:
            return self._tried.setdefault(reach.owner, {})
        except TypeError:
            return {}

    @property
    def now_s(self) -> float:
        """The time."""
        return self._rounds.now_s

    def note_again(self, seconds: float) -> None:
        """Note how long something was computed again."""
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


def _looked(name: str, look: Callable[[], Seen]) -> Seen | None:
    """Return what a look at a block shows; of one that cannot be looked at that is said once."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - what belongs to the user may raise anything
        PROCESS.say(
            f"no look at {name}",
            "the block %s is offloaded and not computed again (ssdtrain.checkpoint), as something "
            "that it has or is given cannot be looked at: %s: %s",
            name,
            type(error).__name__,
            error,
            level=logging.INFO,
        )
        return None


def _is_one_of_several() -> bool:
    """Whether this is one of several processes that train together; that is said once.

    What a block computes again it may communicate again, and each process would choose for itself:
    the others would wait for ever, or take its tensors for what they wait for.
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


class _Again:
    """A call whose tensors are saved, also those in containers; backward computes the rest again.

    All are given by place to torch: what is given by name would stay in memory, and a name could be
    one of its own.
    """

    def __init__(
        self,
        blocks: Blocks,
        function: Callable[..., Any],
        reach: Reach,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._blocks = blocks
        self._function = function
        self._block, self._mode = reach.block, reach.mode
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (arguments, keywords)
        """As they are for the first run, which may put something into containers of the caller."""
        self._form: Any = None
        self._places: list[int] = []
        """Of each leaf of the arguments among those that differ."""
        self.fingerprints = Fingerprints(reach.name)

    def call(self) -> Any:
        """Run it for the first time."""
        leaves, self._form = tree_flatten(self._given)
        # What is given twice comes back as one thing, too: blocks ask whether `query is key`.
        each = {id(one): one for one in leaves}
        places = {identity: place for place, identity in enumerate(each)}
        self._places = [places[id(one)] for one in leaves]
        ours = top_hooks(True)
        try:
            return computed_again(
                self._run, *each.values(), use_reentrant=False, preserve_rng_state=True
            )
        except BaseException as error:
            _take_off_torchs(error, ours)
            raise

    def _run(self, *each: Any) -> Any:
        if self._given is not None:
            (arguments, keywords), self._given = self._given, None
            with self.fingerprints.noting(each):
                return self._function(*arguments, **keywords)
        comparison = self.fingerprints.compare(each)
        leaves = [each[place] for place in self._places]
        reach = Reach(self._block, leaves)
        reach.refuse_mode(self._mode)
        before = reach.snapshot()
        arguments, keywords = tree_unflatten(leaves, self._form)
        began_s = self._blocks.now_s
        try:
            with comparison.hooks():
                self._function(*arguments, **keywords)
        except Exception:
            # torch raises one where nothing more is needed.
            self._check_again(comparison, reach, before)
            raise
        finally:
            self._blocks.note_again(self._blocks.now_s - began_s)
        self._check_again(comparison, reach, before)
        comparison.check_count()
        return None

    @staticmethod
    def _check_again(comparison: Comparison, reach: Reach, before: Snapshot) -> None:
        comparison.refuse_other()
        if not reach.snapshot().is_as(before):
            raise UnsupportedError(CHANGES_LATE)


def _take_off_torchs(error: BaseException, ours: Any) -> None:
    """Take hooks off that torch's checkpoint has left on, which Ctrl-C in the midst of it does.

    All that is saved afterwards would go to a call that has failed.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == CODE_OF_TORCH:
            # It has a generator that takes its hooks off when it ends: now, and not at any time.
            trace.tb_frame.clear()
        trace = trace.tb_next
    while (top := top_hooks(True)) is not None and top != ours:
        pop_hooks()


def _bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of what a call was given, each storage once."""
    return sum({_memory_of(one): memory_bytes(one) for one in tensors}.values())


def _memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else id(tensor)
