"""Decides which saved tensors are worth a write, from the times and rates of the last round.

SSDTrain (arXiv 2408.10013, section 3.3) solves once for the amount of activations that hides behind
compute and offloads that much from the front of the forward pass. Here the same cut is found from
measured times of need and measured rates, and again whenever they move: the longest prefix whose
writes end in time and whose reads, chained backwards from their deadlines, begin after them.

A tensor of a GPU takes two links one after the other: the link of that GPU, and the disk, which all
share. The slower link decides. All reads begin after the last write, so no plan copies in both
directions of a GPU's link at once; if other work does, the measured rates of the copies show it.
What has not been copied from a GPU when the last tensor is packed would lower no peak, and stays.

If memory of the CPU is allowed for tensors of GPUs, the last tensors of the prefix stay there. They
need only the GPU's link, so the prefix can be longer, and less is written to the disk.

Tensors that are made again (`rematerialize.py`) are chosen first, and the prefix from the others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ssdtrain._core import hidden
from ssdtrain.planning.rematerialize import (
    NO_PRESSURE,
    PRESSURE_SHARE_MIN,
    Pressure,
    Proofs,
    choose_rematerialized,
    largest_chain,
    needed_for,
)

__all__ = ["PAGE_BYTES", "RATE_GUESS", "Copies", "Item", "Plan", "Policy", "Rates", "plan"]

PAGE_BYTES = 4096
"""Pinned memory is given out in whole pages of this size."""
RATE_GUESS = 1e9
"""Bytes per second of a disk that has moved too little to be measured: the rate of a slow NVMe
drive, so that the first plan is careful."""
MARGIN_S = 0.005
"""Latency of a request and of the hooks that begin it; a read behind pieces in flight takes some
milliseconds more."""
ROUND_TRIP_FACTOR = 2.0
"""A tensor must lie idle for so many times its write and read: others use the disk as well, and a
tensor that comes back just in time frees its memory for hardly a moment."""
CAUTION_START = 0.8
CAUTION_FALL = 0.7
CAUTION_RISE = 1.05
CAUTION_MIN = 0.05
CAUTION_MAX = 0.95
"""Plans count with this share of the measured rates, the *caution*. It falls fast after a stall,
which costs step time, and rises slowly in rounds without a stall, which gains only a little memory:
seven quiet rounds make up for a stall. It stays below 1: a plan that fills the disk has no reserve
for a step that is faster than the last."""
STALL_SHARE_MAX = 0.01
"""A round that stalls for a larger share of its time is planned again, more cautiously."""
SETTLED_COUNT = 3
"""After so many plans a signature is planned again only if it stalls, or rates or caution moved: a
plan that changes makes writes whose tensors the next plan keeps."""
RATE_CHANGE = 1.25
"""A rate or the caution has moved if it changed by this factor; shared disks differ by a tenth."""
BOLDNESS_MAX = 1e4
"""To make room on a GPU, a plan counts on so many times the measured rates, or at last on any."""
PLANS_MAX = 64
"""Plans that are remembered: more than any training has kinds of steps."""
KNOWLEDGE_MAX = 100_000
"""Keys that are remembered: bounds memory if shapes never repeat."""


class Item(NamedTuple):
    """A storage of a round, with the seconds at which it was packed and first needed."""

    key: int
    nbytes: int
    packed_s: float
    needed_s: float
    gpu: int | None = None
    """The number of its GPU; ``None`` stands for the CPU."""


@dataclass(frozen=True)
class Copies:
    """The way of a GPU's copies; rates are in bytes per second, infinite if they are unknown."""

    down: float = math.inf
    """From the GPU."""
    up: float = math.inf
    """To the GPU."""
    longest_bytes: float = math.inf
    """Of the longest tensor that can go to the disk."""


NO_COPIES = Copies()
"""The copies of a GPU that has not been measured."""


@dataclass(frozen=True)
class Rates:
    """The rates of the disk in bytes per second of busy time, and of the copies of each GPU.

    Without a disk its rates are 0, and no plan writes.
    """

    write: float
    read: float
    copies: Mapping[int, Copies] = field(default_factory=dict)

    def are_bound_by_copies(self) -> bool:
        """Return whether the copies of a GPU are slower than the disk, in either direction."""
        return any(gpu.down < self.write or gpu.up < self.read for gpu in self.copies.values())

    def known_before(self, before: Rates | None) -> Rates:
        """Return these rates, with guesses replaced by the rates that another session measured."""
        if before is None:
            return self
        write = before.write if self.write == RATE_GUESS else self.write
        read = before.read if self.read == RATE_GUESS else self.read
        return Rates(write, read, self.copies)

    def times(self, share: float) -> Rates:
        """Return this share of all rates."""
        copies = {
            gpu: replace(of, down=of.down * share, up=of.up * share)
            for gpu, of in self.copies.items()
        }
        return Rates(self.write and self.write * share, self.read and self.read * share, copies)


@dataclass(frozen=True)
class Plan:
    """The plan of a kind of rounds; times are on the clock of its items."""

    keep: frozenset[int] = frozenset()
    """Keys of the tensors that stay in memory. All others leave, or are made again."""
    start_by_s: dict[int, float] = field(default_factory=dict)
    """By key of a tensor that leaves, the latest begin of its read."""
    needed_s: dict[int, float] = field(default_factory=dict)
    """By key of any tensor, the time of its need, which tells how far a later round has come."""
    written_bytes: int = 0
    """Bytes that go to the disk."""
    longest_gap_s: float = 0.0
    """The longest time between two needs. Needs begin reads, so a read may begin so late."""
    pinned: frozenset[int] = frozenset()
    """Keys of the tensors that leave their GPU and stay in pinned memory."""
    pinned_bytes: int = 0
    """Pinned memory that these need."""
    rematerialized: frozenset[int] = frozenset()
    """Keys of the tensors that are made again."""
    rematerialized_bytes: int = 0
    """Bytes of these."""

    @property
    def leaving_bytes(self) -> int:
        """Bytes that do not stay where they are; in pinned memory they count with whole pages."""
        return self.written_bytes + self.pinned_bytes + self.rematerialized_bytes


def plan(items: Sequence[Item], rates: Rates, host_bytes: int = 0) -> Plan:
    """Choose the longest prefix of the items, in the order of packing, that hides.

    The last items of it, up to ``host_bytes`` in whole pages, stay in pinned memory if they are on
    a GPU whose copies go there. Items that are needed too soon to be moved and brought back do not
    count.
    """
    leaving = hidden(
        items,
        write=rates.write,
        read=rates.read,
        copies=[(gpu, of.down, of.up, of.longest_bytes) for gpu, of in rates.copies.items()],
        host_bytes=host_bytes,
        page_bytes=PAGE_BYTES,
        margin_s=MARGIN_S,
        round_trip_factor=ROUND_TRIP_FACTOR,
    )
    keep = frozenset(item.key for item in items if item.key not in leaving)
    starts = {key: start_by_s for key, (start_by_s, _) in leaving.items()}
    pinned = {key: nbytes for key, (_, nbytes) in leaving.items() if nbytes is not None}
    needed_s = {item.key: item.needed_s for item in items}
    gaps = [after - before for before, after in pairwise(sorted(needed_s.values()))]
    written_bytes = sum(
        item.nbytes for item in items if item.key in starts and item.key not in pinned
    )
    longest_gap_s = max(gaps, default=0.0)
    return Plan(
        keep,
        starts,
        needed_s,
        written_bytes,
        longest_gap_s,
        frozenset(pinned),
        sum(pinned.values()),
    )


class _Basis(NamedTuple):
    """The last plan of a kind of rounds."""

    plan_count: int
    """How many plans of this kind were made."""
    rates: Rates
    caution: float
    made_count: int
    """How many plans of all kinds were made until this one."""
    has_new_order: bool
    """True until a round, which learns by stalls, went by it: it makes other tensors again."""


class Policy:
    """Learns from finished rounds which tensors to keep.

    Tensors of GPUs may stay in ``host_bytes`` of pinned memory.
    """

    def __init__(self, host_bytes: int = 0) -> None:
        self.plans: dict[int, Plan] = {}
        """The plan of each signature. Other classes only read it."""
        self.keep: set[int] = set()
        """Keys of the tensors that stay in memory. Every pack looks here."""
        self.pinned: set[int] = set()
        """Keys of tensors of GPUs that stay in pinned memory. Every pack of such a tensor looks."""
        self.proofs = Proofs()
        """The recipes by which saved tensors can be made again."""
        self.rematerialized: set[int] = set()
        """Keys of the tensors that are made again. Every pack looks here."""
        self.sources: set[int] = set()
        """Keys of the tensors that others are made from now. Every pack looks."""
        self.moments: dict[int, tuple[float, float, float | None]] = {}
        """By the key of a tensor on a GPU, seconds since its round first packed a tensor there: its
        pack and its need by the last plan, and, if it leaves, the end of its copy, as it was
        measured last or else by the rate of the copies."""
        self.made_count = 0
        """The number of plans that were made. Each round notes it when it begins."""
        self._copied_s: dict[int, float] = {}
        """By key, the end of the last copy, in seconds since the first pack on that GPU."""
        self._host_bytes = host_bytes
        self._learning = threading.RLock()
        """Sessions of the same `offload` object learn together, each under its own lock; a handler
        of a signal may train."""
        self._planned: set[int] = set()
        self._futile: set[int] = set()
        self._caution = CAUTION_START
        self._basis: dict[int, _Basis] = {}
        self._planned_caution = self._caution
        """That of the plan of the last kind of rounds."""
        self._rates: Rates | None = None

    def would_plan_anew(self) -> bool:
        """Return whether the caution has moved since the last plan; call it once for a round.

        It is asked for a round of which no tensor leaves, which is followed only for a new plan.
        Such a round cannot stall, so the caution rises as after a round without a stall.
        """
        with self._learning:
            self._caution = min(self._caution * CAUTION_RISE, CAUTION_MAX)
            return _differs(self._planned_caution, self._caution)

    def is_settled(self, signature: int) -> bool:
        """Return whether this kind of rounds has had so many plans that new plans are rare."""
        return self.plan_count(signature) >= SETTLED_COUNT

    def plan_count(self, signature: int) -> int:
        """Return how many plans of this kind of rounds were made."""
        return self._basis[signature].plan_count if signature in self._basis else 0

    def basis(self, signature: int) -> tuple[Rates, float] | None:
        """Return the rates and the caution of the plan of this kind."""
        with self._learning:
            known = self._basis.get(signature)
        return None if known is None else (known.rates, known.caution)

    def pinned_bytes_max(self, signature: int) -> int:
        """Return the pinned memory that the boldest plan of this kind needs.

        Bytes that hide grow with the rates. To pin takes long, so it is not done again and again.
        """
        with self._learning:
            made, basis = self.plans.get(signature), self._basis.get(signature)
            if made is None or basis is None:
                return 0
            return math.ceil(made.pinned_bytes * CAUTION_MAX / basis.caution)

    def knows(self, key: int) -> bool:
        """Return whether a plan was made with this key in it."""
        return key in self._planned

    def forgo_host_memory(self) -> None:
        """Let no more tensors stay in pinned memory, because it cannot be allocated.

        All plans are made anew, as they may count on such tensors.
        """
        with self._learning:
            self._host_bytes = 0
            self.pinned.clear()
            self.plans.clear()
            self._basis.clear()

    def note_copied(self, copied: Sequence[tuple[int, float]]) -> None:
        """Note when tensors had been copied, in seconds since the first pack on their GPU."""
        with self._learning:
            self._copied_s.update(copied)
            for key, copied_s in copied:
                packed_s, needed_s, known_s = self.moments.get(key, (0.0, 0.0, None))
                if known_s is not None:
                    self.moments[key] = packed_s, needed_s, copied_s

    def note_futile(self, key: int) -> None:
        """Remember that the program holds this tensor's storage, so that a write frees nothing."""
        if len(self._futile) > KNOWLEDGE_MAX:
            self.keep -= self._futile
            self._futile.clear()
        self._futile.add(key)
        self.keep.add(key)

    def is_futile(self, key: int) -> bool:
        """Return whether the program held this tensor when it was offloaded."""
        return key in self._futile

    def is_by_last_plan(self, signature: int, plan_count: int) -> bool:
        """Return whether a round went by the last plan of its kind.

        ``plan_count`` is the `made_count` with which it began. Rounds of a GPU that Python runs
        ahead of are learned from many rounds later.
        """
        return signature not in self._basis or self._basis[signature].made_count <= plan_count

    def learn(
        self,
        signature: int,
        items: Sequence[Item],
        rates: Rates,
        stall_share: float | None,
        pressure: Pressure = NO_PRESSURE,
    ) -> None:
        """Plan the next round of this kind, unless its plan has settled.

        ``stall_share`` is stall time over the round's time; ``None`` for a round that went by an
        older plan, which tells nothing of the caution of the last. ``pressure`` tells what a bound
        cost the round.
        """
        with self._learning:
            self._learn(signature, items, rates, stall_share, pressure)

    def _learn(
        self,
        signature: int,
        items: Sequence[Item],
        rates: Rates,
        stall_share: float | None,
        pressure: Pressure,
    ) -> None:
        if len(self._planned) > KNOWLEDGE_MAX:
            for keys in (self.keep, self.pinned, self.rematerialized, self.sources):
                keys.clear()
            for known in (self.plans, self.moments, self._copied_s, self._basis):
                known.clear()
            self._futile.clear()
            self._planned.clear()
        rates = self._rates = rates.known_before(self._rates)
        count, basis, caution, _, has_new_order = self._basis.get(
            signature, (0, rates, self._caution, 0, False)
        )
        if has_new_order and stall_share is not None:
            self._basis[signature] = self._basis[signature]._replace(has_new_order=False)
            stall_share = None
        stalled = count > 0 and stall_share is not None and stall_share > STALL_SHARE_MAX
        if stall_share is not None:
            change = CAUTION_FALL if stalled else CAUTION_RISE
            self._caution = min(max(self._caution * change, CAUTION_MIN), CAUTION_MAX)
        moved = _moved(basis, rates) or _differs(caution, self._caution)
        is_pressed = bool(items) and pressure.stall_s > PRESSURE_SHARE_MIN * _whole_s(items)
        before = self.plans.get(signature)
        if before is not None and not pressure.has_settled and pressure.room_bytes < math.inf:
            is_pressed |= self._taken(items, before) > pressure.room_bytes
        self.proofs.takes_dear |= is_pressed
        if count >= SETTLED_COUNT and not (stalled or moved or is_pressed):
            self._planned_caution = caution
            return
        self._planned_caution = self._caution
        self.made_count += 1
        made = self._plan(items, rates, pressure)
        is_new = made.rematerialized != (before or Plan()).rematerialized
        self._basis[signature] = _Basis(count + 1, rates, self._caution, self.made_count, is_new)
        self.plans[signature] = made
        if len(self.plans) > PLANS_MAX:
            oldest = next(iter(self.plans))
            del self.plans[oldest], self._basis[oldest]
        self._set_moments(items, made, rates)
        self._set_ways(items, made)

    def _set_ways(self, items: Sequence[Item], made: Plan) -> None:
        """Have each pack find the plan for its tensor."""
        for item in items:
            self._planned.add(item.key)
            if item.key in made.keep:
                self.keep.add(item.key)
            elif item.key not in self._futile:
                self.keep.discard(item.key)
            if item.key in made.pinned:
                self.pinned.add(item.key)
            else:
                self.pinned.discard(item.key)
            if item.key in made.rematerialized:
                self.rematerialized.add(item.key)
            else:
                self.rematerialized.discard(item.key)
        known = (self.proofs.get(key) for key in self.rematerialized)
        self.sources = {source for proof in known if proof is not None for source in proof.sources}

    def _plan(self, items: Sequence[Item], rates: Rates, pressure: Pressure) -> Plan:
        """Plan a round; for the room on a GPU also with recipes and moves that make it longer."""
        wanted_bytes, boldness, step_bytes = 0, 1.0, sum(item.nbytes for item in items) / 16
        while True:
            made = self._plan_with(items, rates, pressure, wanted_bytes, boldness)
            if pressure.room_bytes == math.inf:
                return made
            short_bytes = self._taken(items, made) - pressure.room_bytes
            if short_bytes <= 0 or boldness == math.inf:
                return made
            self.proofs.takes_dear = True
            if wanted_bytes <= made.rematerialized_bytes:
                more_bytes = math.ceil(max(short_bytes, step_bytes))
                wanted_bytes = made.rematerialized_bytes + more_bytes
            else:
                # No more can be made again.
                boldness = 8 * boldness if boldness < BOLDNESS_MAX else math.inf

    def _taken(self, items: Sequence[Item], made: Plan) -> int:
        """Return the bytes that saved tensors take at the peak, with the first that come back."""
        first_bytes = max((item.nbytes for item in items), default=0)
        chain_bytes = largest_chain(items, made.rematerialized, self.proofs)
        staying = (item.nbytes for item in items if item.key in made.keep)
        return sum(staying, max(first_bytes, chain_bytes))

    def _plan_with(
        self,
        items: Sequence[Item],
        rates: Rates,
        pressure: Pressure,
        wanted_bytes: int,
        boldness: float,
    ) -> Plan:
        chosen = choose_rematerialized(
            items,
            self.proofs,
            before=self.rematerialized,
            excluded=self._futile,
            pressure=pressure,
            disk_s=1 / rates.write + 1 / rates.read if rates.write and rates.read else 0.0,
            wanted_bytes=wanted_bytes,
        )
        sources_s = needed_for(items, chosen, self.proofs)
        others = [
            item._replace(needed_s=min(item.needed_s, sources_s.get(item.key, item.needed_s)))
            for item in items
            if item.key not in chosen
        ]
        chosen_bytes = sum(item.nbytes for item in items if item.key in chosen)
        made = plan(others, rates.times(self._caution * boldness), self._host_bytes)
        return replace(made, rematerialized=chosen, rematerialized_bytes=chosen_bytes)

    def _set_moments(self, items: Sequence[Item], made: Plan, rates: Rates) -> None:
        """Tell when each tensor of a GPU is packed and needed, and when its copy has ended."""
        first_s: dict[int, float] = {}
        ended_s: dict[int, float] = {}
        uncopied = made.keep | made.rematerialized
        for item in items:
            if item.gpu is None:
                continue
            began_s = first_s.setdefault(item.gpu, item.packed_s)
            packed_s, copied_s = item.packed_s - began_s, None
            if item.key not in uncopied:
                # A tensor that was never copied follows the tensor before it, at the copies' rate.
                down = rates.copies.get(item.gpu, NO_COPIES).down
                after_s = max(ended_s.get(item.gpu, 0.0), packed_s) + item.nbytes / down
                ended_s[item.gpu] = self._copied_s.get(item.key, after_s)
                is_known = item.key in self._copied_s or down < math.inf
                copied_s = ended_s[item.gpu] if is_known else None
            self.moments[item.key] = packed_s, item.needed_s - began_s, copied_s


def _whole_s(items: Sequence[Item]) -> float:
    return max(item.needed_s for item in items) - items[0].packed_s


def _moved(before: Rates, after: Rates) -> bool:
    if _differs(before.write, after.write) or _differs(before.read, after.read):
        return True
    copies = ((before.copies.get(gpu, NO_COPIES), now) for gpu, now in after.copies.items())
    return any(_differs(was.down, now.down) or _differs(was.up, now.up) for was, now in copies)


def _differs(before: float, after: float) -> bool:
    # The quotient of two infinities is no number.
    return before != after and not 1 / RATE_CHANGE < after / before < RATE_CHANGE
