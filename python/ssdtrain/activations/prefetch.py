"""In which order saved tensors come back, and which reads to begin before they are asked for.

A *round* is what is packed between two backwards: one micro-batch, or several. Within a backward
PyTorch runs nodes in the reverse order of their creation and unpacks each node's tensors in the
order of packing, so that is the first guess; what a round really did is the guess for the next of
the same signature (gradient penalties and partial backwards differ). The order is a hint: a wrong
guess costs a stall, never a wrong byte.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from ssdtrain.activations.names import needing
from ssdtrain.activations.saved_tensor import Record, SavedTensor
from ssdtrain.errors import SsdtrainError
from ssdtrain.geometry import Geometry
from ssdtrain.notices import Notices, log
from ssdtrain.planning.policy import Item, Policy, Rates
from ssdtrain.residency import Residency
from ssdtrain.shortage import Held
from ssdtrain.sizes import shown_bytes
from ssdtrain.stalls import Stalls
from ssdtrain.transfer.base import Handle, Loading

__all__ = ["OrderedTensor", "Prefetcher", "Round"]

WINDOW_BYTES = 32 << 20
"""Bytes read ahead in any case: 32 MiB in flight is what one drive needs for its full rate (see
`docs/storage.md`). A slow disk reads ahead as far as its plan says, and into the memory that its
backward has freed: that never raises the peak."""
WINDOW_COUNT = 64
"""Records read ahead at most: bounds the work of an unpack where tensors are small."""
REFILL_SHARE = 0.25
"""So much of the window is refilled at a time: to wake the disk's thread costs more than all else
that an unpack does (`benches/training/hook_overhead.py`)."""
DEAD_ROUND_COUNT = 4096
"""A round of so many tensors may be many forwards whose graphs were dropped: look whether it is."""
FORWARD_SEED, BACKWARD_SEED = 1, 2
"""First keys of rounds; small negative numbers would not do, hash(-1) is hash(-2)."""
ORDERS_MAX = 64
"""Learned orders that are remembered: more than any training has kinds of steps."""
UNFINISHED_MAX = 32
"""Rounds without an end that are watched; older ones teach nothing any more."""

ONE_NODE_SHARE_MIN = 0.9
ONE_NODE_TENSORS_MIN = 4
"""A node that saves so much of a round, and so many tensors, is a graph compiled as a whole."""


class OrderedTensor(SavedTensor):
    """A saved tensor with its place in the order of return; these fields are the prefetcher's."""

    __slots__ = ("ahead", "ordinal", "round")

    ahead: Loading | None
    """A read begun before it was asked for."""
    ordinal: int
    """Its place among the tensors of its round, in the order of packing."""
    round: Round

    def __init__(self, tensor: Tensor, geometry: Geometry, record: Record, sequence: int) -> None:
        super().__init__(tensor, geometry, record, sequence)
        self.ahead = None


class Round:
    """What was packed between two backwards, and when each tensor was asked for first."""

    def __init__(self, phase: int) -> None:
        self.phase = phase
        """The backward in which this was packed, or -1 for a forward."""
        self.signature = FORWARD_SEED if phase == -1 else BACKWARD_SEED
        """The key of the last tensor: it stands for all that were packed until then."""
        self.entries: list[weakref.ref[OrderedTensor]] = []
        self.sequences: list[int] = []
        self.items: list[tuple[int, int, float] | None] = []
        """Key, bytes and time of packing for each entry that brought a new record."""
        self.needed_s: dict[int, float] = {}
        """Ordinal to the time of its first unpack, in the order of unpacking."""
        self.record_needed_s: dict[int, float] = {}
        """Key of a record to the time when the first of its tensors was asked for."""
        self.order: list[int] | None = None
        """Ordinals in the expected order of return, once a first tensor was asked for."""
        self.position: dict[int, int] = {}
        """Ordinal to index into ``order``."""
        self.on_disk: list[int] = []
        """Indices into ``order`` of what was given to the disk: all that can be read ahead."""
        self.progress_s = float("-inf")
        """How far this round has come, on the clock of its plan."""
        self.resident_bytes = 0
        """The most saved bytes in memory since this round was first asked for a tensor."""
        self.stall_s = 0.0
        self.look_at = DEAD_ROUND_COUNT
        """At this many entries, look whether the older are dead."""

    def add(self, saved: OrderedTensor, is_new: bool, now_s: float) -> None:
        """Enter a packed tensor; ``is_new`` says whether it brought a record of its own."""
        nbytes = saved.record.nbytes
        entry = weakref.ref(saved)  # defence: lifetime by handle
        saved.round = self
        while True:
            before = self.signature
            saved.ordinal = len(self.entries)
            key = next_key(before, nbytes)
            # The handler of a signal may have packed tensors in these calls.
            if before == self.signature:
                break
        # No call from here on, see ``residency``, [Note: no calls]: the lists stay of one length.
        self.items += ((key, nbytes, now_s) if is_new else None,)
        self.sequences += (saved.sequence,)
        self.entries += (entry,)
        self.signature = key

    def is_dead(self) -> bool:
        """Whether the older of many entries are dead: forwards whose graphs were dropped."""
        if len(self.entries) < self.look_at:
            return False
        self.look_at = 2 * len(self.entries)
        older = self.entries[: len(self.entries) // 2]
        return all(entry() is None for entry in older)

    def is_finished(self) -> bool:
        """Whether every tensor was asked for, or is dead."""
        return all(
            ordinal in self.needed_s or entry() is None
            for ordinal, entry in enumerate(self.entries)
        )

    def heaviest_node(self) -> tuple[int, int, int]:
        """Return bytes and tensors of the node that saved most, and the bytes of all nodes."""
        tensors: dict[int, list[int]] = {}
        for sequence, item in zip(self.sequences, self.items, strict=True):
            if item is not None:
                tensors.setdefault(sequence, []).append(item[1])
        heaviest = max(tensors.values(), key=sum, default=[])
        return sum(heaviest), len(heaviest), sum(map(sum, tensors.values()))

    def learned_items(self) -> list[Item]:
        """Return what the policy learns from."""
        items = []
        for item in self.items:
            if item is not None and item[0] in self.record_needed_s:
                key, nbytes, packed_s = item
                items.append(Item(key, nbytes, packed_s, self.record_needed_s[key]))
        return items

    def stall_share(self, items: list[Item]) -> float:
        """Return the stalls of the round over its whole time."""
        whole_s = max(item.needed_s for item in items) - items[0].packed_s + self.stall_s
        return self.stall_s / max(whole_s, 1e-9)


def next_key(key: int, nbytes: int) -> int:
    """Return the key of the tensor of ``nbytes`` that is packed after the one with ``key``.

    Rounds that begin alike have equal keys, so a decision is found before the round is complete.
    """
    return hash((key, nbytes))


class Prefetcher:
    """Follows the rounds, learns from them, and begins reads; under the session's lock.

    Args:
        policy: Told of each round that has ended; its plans say how early a slow disk must begin.
        residency: How much more may be read ahead.
        load: Begins a read (``Transfer.load``).
        rates: Tells what the disk did of late.
        stalls: The waits of the session, which are no part of a step's time.
        notices: Where a finding about the user's model is said.
        clock: Seconds since some moment.

    """

    def __init__(
        self,
        policy: Policy,
        residency: Residency,
        *,
        load: Callable[[Handle], Loading],
        rates: Callable[[], Rates],
        stalls: Stalls,
        notices: Notices,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._policy = policy
        self._residency = residency
        self._load = load
        self._rates = rates
        self._stalls = stalls
        self._notices = notices
        self._clock = clock
        self.failure: str | None = None
        """Always ``None``: what is read ahead can be dropped; see ``residency.User``."""
        self.is_one_node = False
        """Whether one node saves nearly all of a round."""
        self.last_round: tuple[int, float] | None = None
        """Bytes of the last forward that was learned from, and seconds until it was used up."""
        self._current: Round | None = None
        self._unfinished: list[Round] = []
        self._orders: dict[int, list[int]] = {}
        self._window: dict[int, tuple[weakref.ref[OrderedTensor], int]] = {}
        """What was read ahead, by ordinal, with the bytes that it adds to memory."""
        self._window_bytes = 0
        self._window_round: Round | None = None
        self._index = 0
        """How far the backward of that round has come, in its order."""
        self._next_on_disk = 0
        """Where reading ahead goes on, in the round's list of what is on the disk."""
        residency.add_user(self)

    # Forward: what is packed.

    def next_key(self, nbytes: int, phase: int) -> int:
        """Return the key that a new record of ``nbytes`` gets in ``phase`` (see ``Round``).

        Begins a new round if this pack is the first of one, and learns from those that have ended.
        """
        return next_key(self._round_for(phase).signature, nbytes)

    def enter(self, saved: OrderedTensor, is_new: bool) -> None:
        """Give a packed tensor its place in the round that ``next_key`` was asked about."""
        assert self._current is not None
        self._current.add(saved, is_new, self._clock() - self._stalls.total_s)

    def _round_for(self, phase: int) -> Round:
        current = self._current
        # Under a bound, what one region of reentrant checkpoints computes again may have to be
        # read, so it is a round of its own, with an order. Else all regions are one round.
        may_be_asked_for = phase != -1 and not self._residency.is_bounded
        if (
            current is not None
            and current.phase == phase
            and (may_be_asked_for or not current.needed_s)
            and not current.is_dead()
        ):
            return current
        if current is not None:
            self._unfinished.append(current)
            del self._unfinished[:-UNFINISHED_MAX]
        self._current = current = Round(phase)
        self._learn()
        return current

    def take_finished(self) -> list[Round]:
        """Return the rounds that have ended since the last call; remember their orders."""
        finished = [one for one in self._unfinished if one.is_finished()]
        if finished:
            self._unfinished = [one for one in self._unfinished if one not in finished]
        for one in finished:
            if len(self._orders) >= ORDERS_MAX:
                self._orders.clear()
            if one.needed_s:
                self._orders[one.signature] = list(one.needed_s)
        return finished

    def _learn(self) -> None:
        """Let the policy plan with what has ended."""
        finished = self.take_finished()
        if not finished:
            return
        rates = self._rates()
        for one in finished:
            items = one.learned_items()
            if items and one.phase == -1:
                whole_s = max(item.needed_s for item in items) - items[0].packed_s
                self.last_round = sum(item.nbytes for item in items), whole_s
                if one.signature not in self._policy.plans:
                    self._warn_of_one_node(one)
                self._policy.learn(one.signature, items, rates, one.stall_share(items))

    def _warn_of_one_node(self, finished: Round) -> None:
        """Say if offloading cannot lower the peak: one node saves nearly all, at its end."""
        heaviest_bytes, tensors_count, all_bytes = finished.heaviest_node()
        is_one = heaviest_bytes >= ONE_NODE_SHARE_MIN * all_bytes
        if is_one and tensors_count >= ONE_NODE_TENSORS_MIN:
            self.is_one_node = True
            self._notices.say(
                "one node",
                "one node of the graph saves %s of the %s that are saved in forward, at "
                "once and at its end, so offloading cannot lower the peak; if torch.compile made "
                "it of the whole model, compile block by block instead (block.compile())",
                shown_bytes(heaviest_bytes),
                shown_bytes(all_bytes),
            )

    # Backward: what is asked for.

    def note_unpack(self, saved: OrderedTensor) -> bool:
        """Take note that a tensor is asked for; ``True`` if it is the first of an unknown round."""
        now_s = self._clock() - self._stalls.total_s
        current = saved.round
        is_first = not current.needed_s
        if is_first or current.order is None:
            self._predict(current)
        is_again = saved.ordinal in current.needed_s
        current.needed_s.setdefault(saved.ordinal, now_s)
        current.record_needed_s.setdefault(saved.record.key, now_s)
        learned = self._policy.plans.get(current.signature)
        if learned is not None:
            planned_s = learned.needed_s.get(saved.record.key, current.progress_s)
            # A second backward over the same graph asks for everything once more.
            current.progress_s = planned_s if is_again else max(current.progress_s, planned_s)
        return is_first and not self._policy.knows(saved.record.key)

    def demand(self, saved: OrderedTensor) -> Loading:
        """Return the read of a tensor that is needed now: the one begun ahead, or a new one."""
        if saved.ahead is not None:
            loading, saved.ahead = saved.ahead, None
            return loading
        handle = saved.record.handle
        assert handle is not None, "a record has its bytes in memory, or a handle"
        if self._residency.is_bounded and not handle.is_here():
            if self._residency.room_bytes() < handle.slot_bytes:
                self.give_way()
            geometry = saved.geometry
            self._residency.admit(handle.slot_bytes, lambda: needing(geometry.dtype, geometry.size))
        return self._load(handle)

    def advance(self, saved: OrderedTensor) -> None:
        """Begin the reads that should be under way while ``saved`` is used."""
        current = saved.round
        index = current.position.get(saved.ordinal)
        if index is None:
            # Packed after this backward had begun: nothing is known of its place.
            return
        if current.phase != -1 and not current.on_disk:
            # What the forward saved goes on being read ahead.
            return
        if current is not self._window_round:
            self.give_way()
            self._window_round = current
            self._next_on_disk = bisect_right(current.on_disk, index)
        elif index < self._index:
            self._next_on_disk = bisect_right(current.on_disk, index)
        self._index = index
        self._leave_behind(current, saved.ordinal)
        resident_bytes = self._residency.resident_bytes()
        current.resident_bytes = max(current.resident_bytes, resident_bytes)
        self._read_ahead(current, current.resident_bytes - resident_bytes)

    def note_stall(self, saved: OrderedTensor, stall_s: float) -> None:
        """Count a wait for this tensor to its round."""
        saved.round.stall_s += stall_s

    def wait_for_room(self) -> bool:
        """Return ``False``: when a read ends, no memory is freed; see ``residency.User``."""
        return False

    def held(self) -> list[Held]:
        """Return nothing: what was read ahead is given up for room; see ``residency.User``."""
        return []

    def give_way(self) -> None:
        """Give up what was read ahead."""
        for entry, _ in self._window.values():
            _give_up(entry)
        self._window = {}
        self._window_bytes = 0
        self._window_round = None

    def _leave_behind(self, current: Round, ordinal: int) -> None:
        """Take out of the window what is used now, and give up what was passed over."""
        window = self._window
        used = window.pop(ordinal, None)
        if used is not None:
            self._window_bytes -= used[1]
        while window:
            first = next(iter(window))
            if current.position[first] > self._index:
                break
            entry, nbytes = window.pop(first)
            self._window_bytes -= nbytes
            _give_up(entry)

    def _read_ahead(self, current: Round, spare_bytes: int) -> None:
        """Begin reads in the expected order, until the next one should wait.

        ``spare_bytes`` of what this backward has freed may be read into beyond the window.
        """
        assert current.order is not None
        order, on_disk, entries = current.order, current.on_disk, current.entries
        following_place = bisect_right(on_disk, self._index)
        room_bytes = self._residency.room_bytes()
        # What is leaving memory is looked at again: it may have to be read when its turn comes.
        unsettled_count = 0
        rests = self._is_filled(spare_bytes)
        for place in range(max(self._next_on_disk, following_place), len(on_disk)):
            ordinal = order[on_disk[place]]
            following = entries[ordinal]()
            if following is not None and following.record.is_leaving():
                unsettled_count += 1
                if unsettled_count > WINDOW_COUNT:
                    break
                continue
            if (
                following is not None
                and following.ahead is None
                and (handle := following.record.handle) is not None
            ):
                joins = handle.is_here()
                is_next = place == following_place or not self._window
                if not joins and (
                    handle.slot_bytes > room_bytes
                    or not (is_next or self._is_wanted(current, following, spare_bytes, rests))
                ):
                    break
                following.ahead = self._begin_read(handle)
                if following.ahead is not None:
                    added_bytes = 0 if joins else handle.slot_bytes
                    self._window[ordinal] = entries[ordinal], added_bytes
                    self._window_bytes += added_bytes
                    room_bytes -= added_bytes
                    spare_bytes -= added_bytes
            if not unsettled_count:
                self._next_on_disk = place + 1

    def _begin_read(self, handle: Handle) -> Loading | None:
        """Begin to read ahead; a refusal is not lost: the demand read meets it again and raises."""
        try:
            return self._load(handle)
        except SsdtrainError as error:
            log.debug("did not read ahead: %s", error)
            return None

    def _is_filled(self, spare_bytes: int) -> bool:
        """Whether too little could be read ahead to be worth it now."""
        filled = 1 - REFILL_SHARE
        return len(self._window) > filled * WINDOW_COUNT or (
            self._window_bytes > filled * WINDOW_BYTES and spare_bytes < REFILL_SHARE * WINDOW_BYTES
        )

    def _is_wanted(
        self, current: Round, following: OrderedTensor, spare_bytes: int, rests: bool
    ) -> bool:
        """Whether the read of what is not even next should begin now."""
        assert following.record.handle is not None
        nbytes = following.record.handle.slot_bytes
        has_room = nbytes <= spare_bytes or self._window_bytes + nbytes <= WINDOW_BYTES
        return len(self._window) < WINDOW_COUNT and (
            (has_room and not rests) or self._is_due(current, following)
        )

    def _predict(self, current: Round) -> None:
        count = len(current.entries)
        order = self._orders.get(current.signature)
        if order is None:
            sequences = current.sequences
            order = sorted(range(count), key=lambda ordinal: (-sequences[ordinal], ordinal))
        current.order = order
        current.position = {ordinal: index for index, ordinal in enumerate(order)}
        current.on_disk = [
            index
            for index, ordinal in enumerate(order)
            if (saved := current.entries[ordinal]()) is not None and saved.record.handle is not None
        ]

    def _is_due(self, current: Round, saved: OrderedTensor) -> bool:
        """Whether by the plan the read of ``saved`` should begin before the next unpack."""
        learned = self._policy.plans.get(current.signature)
        start_s = learned.start_by_s.get(saved.record.key) if learned is not None else None
        if learned is None or start_s is None:
            return False
        return start_s <= current.progress_s + learned.longest_gap_s


def _give_up(entry: weakref.ref[OrderedTensor]) -> None:
    saved = entry()
    if saved is not None:
        saved.ahead = None
