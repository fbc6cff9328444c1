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

from ssdtrain.activations.saved_tensor import Loading, SavedTensor
from ssdtrain.planning.policy import Item, Policy

__all__ = ["Prefetcher", "Round"]

WINDOW_BYTES = 32 << 20
"""Bytes read ahead in any case. A slow disk reads ahead as far as its plan says, and into the
memory that its backward has freed: that never raises the peak."""
DEAD_ROUND_COUNT = 4096
FORWARD_SEED, BACKWARD_SEED = 1, 2
"""First keys of rounds; small negative numbers would not do, hash(-1) is hash(-2)."""
WINDOW_COUNT = 64
"""Records read ahead at most: bounds the work of an unpack where tensors are small."""
REFILL_SHARE = 0.25
"""So much of the window is refilled at a time: to wake the disk's thread is dear."""
ORDERS_MAX = 64
"""Learned orders that are remembered."""
UNFINISHED_MAX = 32
"""Rounds without an end that are watched; older ones teach nothing any more."""


class Round:
    """What was packed between two backwards, and when each tensor was asked for first."""

    def __init__(self, phase: int) -> None:
        self.phase = phase
        """The backward in which this was packed, or -1 for a forward."""
        self.signature = FORWARD_SEED if phase == -1 else BACKWARD_SEED
        self.entries: list[weakref.ref[SavedTensor]] = []
        self.sequences: list[int] = []
        self.items: list[tuple[int, int, float] | None] = []
        """Key, bytes and time of packing for each entry that brought a new record."""
        self.needed_s: dict[int, float] = {}
        """Ordinal to the time of its first unpack, in the order of unpacking."""
        self.record_needed_s: dict[int, float] = {}
        """Key of a record to the time when the first of its tensors was asked for."""
        self.order: list[int] | None = None
        self.position: dict[int, int] = {}
        self.on_disk: list[int] = []
        """Indices into ``order`` of what was given to the disk: all that can be read ahead."""
        self.progress_s = float("-inf")
        """How far this round has come, on the clock of its plan."""
        self.resident_bytes = 0
        """Saved bytes in memory when this round was first asked for a tensor."""
        self.stall_s = 0.0
        self.look_at = DEAD_ROUND_COUNT
        """At this many entries, look whether the older are dead."""
        self.began_s = perf_counter()

    def add(self, saved: SavedTensor, nbytes: int, is_new: bool, now_s: float) -> None:
        """Enter a packed tensor."""
        key = next_key(self.signature, nbytes)
        entry = weakref.ref(saved)
        saved.ordinal = len(self.entries)
        saved.round = self
        # No call from here on, see ``stats``, [Note: no calls]: the lists stay of one length.
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

    def finished(self) -> bool:
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


def next_key(key: int, nbytes: int) -> int:
    """Return the key of the tensor of ``nbytes`` that is packed after the one with ``key``.

    Rounds that begin alike have equal keys, so a decision is found before the round is complete.
    """
    return hash((key, nbytes))


class Prefetcher:
    """Follows the rounds, and begins reads through ``load`` (the transfer's)."""

    def __init__(self, policy: Policy, load: Callable[[SavedTensor], Loading | None]) -> None:
        self._policy = policy
        self._load = load
        self._current: Round | None = None
        self._unfinished: list[Round] = []
        self._orders: dict[int, list[int]] = {}
        self._window: dict[int, tuple[weakref.ref[SavedTensor], int]] = {}
        """What was read ahead, by ordinal, with the bytes that it adds to memory."""
        self._window_bytes = 0
        self._window_round: Round | None = None
        self._index = 0
        """How far the backward of that round has come, in its order."""
        self._place = 0
        """Where reading ahead goes on, in what is on the disk."""

    def round_for(self, phase: int) -> tuple[Round, bool]:
        """Return the round a pack belongs to, and whether it is a new one."""
        current = self._current
        goes_on = (
            current is not None
            and current.phase == phase
            and (phase != -1 or not current.needed_s)
            and not current.is_dead()
        )
        if current is not None and goes_on:
            return current, False
        if current is not None:
            self._unfinished.append(current)
            del self._unfinished[:-UNFINISHED_MAX]
        self._current = Round(phase)
        return self._current, True

    def take_finished(self) -> list[Round]:
        """Return the rounds that ended since the last call; remember their orders."""
        done = [one for one in self._unfinished if one.finished()]
        self._unfinished = [one for one in self._unfinished if one not in done]
        for one in done:
            if len(self._orders) >= ORDERS_MAX:
                self._orders.clear()
            if one.needed_s:
                self._orders[one.signature] = list(one.needed_s)
        return done

    def note_unpack(self, saved: SavedTensor, now_s: float) -> bool:
        """Take note that a tensor is asked for; ``True`` if it is the first of its round."""
        current = saved.round
        assert isinstance(current, Round)
        first = not current.needed_s
        if first or current.order is None:
            self._predict(current)
        is_again = saved.ordinal in current.needed_s
        current.needed_s.setdefault(saved.ordinal, now_s)
        current.record_needed_s.setdefault(saved.record.key, now_s)
        learned = self._policy.plan_of(current.signature)
        if learned is not None:
            planned_s = learned.needed_s.get(saved.record.key, current.progress_s)
            # A second backward begins anew.
            current.progress_s = planned_s if is_again else max(current.progress_s, planned_s)
        return first

    def advance(self, saved: SavedTensor, resident_bytes: int, room_bytes: int) -> None:
        """Begin the reads that should be under way while ``saved`` is used.

        ``resident_bytes`` is what is in memory now; ``room_bytes`` bounds what may be begun.
        """
        current = saved.round
        assert isinstance(current, Round)
        index = current.position.get(saved.ordinal)
        if index is None:
            # Packed after this backward had begun: nothing is known of its place.
            return
        if current is not self._window_round:
            self.drop_window()
            self._window_round = current
            self._place = bisect_right(current.on_disk, index)
        elif index < self._index:
            self._place = bisect_right(current.on_disk, index)
        self._index = index
        self._leave_behind(current, saved.ordinal)
        current.resident_bytes = max(current.resident_bytes, resident_bytes)
        self._read_ahead(current, current.resident_bytes - resident_bytes, room_bytes)

    def drop_window(self) -> None:
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

    def _read_ahead(self, current: Round, spare_bytes: int, room_bytes: int) -> None:
        assert current.order is not None
        order, on_disk, entries = current.order, current.on_disk, current.entries
        following_place = bisect_right(on_disk, self._index)
        # What is leaving memory is looked at again: it may have to be read when its turn comes.
        unsettled_count = 0
        rests = self._is_filled(spare_bytes)
        for place in range(max(self._place, following_place), len(on_disk)):
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
                and following.record.source is None
            ):
                record = following.record
                joins = record.reading() is not None
                is_next = place == following_place or not self._window
                if not joins and (
                    record.slot_bytes() > room_bytes
                    or not (is_next or self._is_wanted(current, following, spare_bytes, rests))
                ):
                    break
                following.ahead = self._load(following)
                if following.ahead is not None:
                    added_bytes = 0 if joins else record.slot_bytes()
                    self._window[ordinal] = entries[ordinal], added_bytes
                    self._window_bytes += added_bytes
                    room_bytes -= added_bytes
                    spare_bytes -= added_bytes
            if not unsettled_count:
                self._place = place + 1

    def _is_filled(self, spare_bytes: int) -> bool:
        """Whether too little could be read ahead to be worth it now."""
        filled = 1 - REFILL_SHARE
        return len(self._window) > filled * WINDOW_COUNT or (
            self._window_bytes > filled * WINDOW_BYTES and spare_bytes < REFILL_SHARE * WINDOW_BYTES
        )

    def _is_wanted(
        self, current: Round, following: SavedTensor, spare_bytes: int, rests: bool
    ) -> bool:
        """Whether the read of what is not even next should begin now."""
        nbytes = following.record.slot_bytes()
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
            if (saved := current.entries[ordinal]()) is not None and saved.record.stored is not None
        ]

    def _is_due(self, current: Round, saved: SavedTensor) -> bool:
        """Whether by the plan the read of ``saved`` should begin before the next unpack."""
        learned = self._policy.plan_of(current.signature)
        start_s = learned.start_by_s.get(saved.record.key) if learned is not None else None
        if learned is None or start_s is None:
            return False
        return start_s <= current.progress_s + learned.longest_gap_s


def _give_up(entry: weakref.ref[SavedTensor]) -> None:
    saved = entry()
    if saved is not None:
        saved.ahead = None
