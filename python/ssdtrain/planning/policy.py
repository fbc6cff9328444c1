"""Which saved tensors are worth a write: decided from what the last round measured.

SSDTrain (arXiv 2408.10013, section 3.3) solves once for the amount of activations that hides behind
compute and offloads that much from the front of the forward pass. Here the same cut is found from
measured times of need and measured rates, and again whenever they move: the longest prefix whose
writes end in time and whose reads, chained backwards from their deadlines, begin after them.

What is on a GPU takes two links one after the other, the copies of that GPU and the disk, which all
share: the slower one decides. As all reads begin after the last write, no plan has a GPU's link
copy both ways at once; where other work does, the measured times of the copies tell it.

Where memory of the CPU is allowed for tensors of GPUs, the last of the prefix stay there: they need
the link alone, so the prefix can be longer, and the disk is written less.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ssdtrain._core import hidden

__all__ = ["PAGE_BYTES", "RATE_GUESS", "Copies", "Item", "Plan", "Policy", "Rates", "plan"]

PAGE_BYTES = 4096
"""Pinned memory is given out in whole pages of this size."""
RATE_GUESS = 1e9
"""Bytes per second of a disk that has not moved enough to tell: that of a slow NVMe drive, so that
the first plan is a careful one."""
MARGIN_S = 0.005
"""Latency of a request and of the hooks that begin it; a read that waits behind pieces which are in
flight takes some milliseconds more than it would alone."""
ROUND_TRIP_FACTOR = 2.0
"""A tensor must lie idle for this many times its own write and read: others use the disk as well,
and one that just comes back in time frees its memory for hardly a moment."""
CAUTION_START = 0.8
CAUTION_FALL = 0.7
CAUTION_RISE = 1.05
CAUTION_MIN = 0.05
CAUTION_MAX = 0.95
"""Plans count with this share of the measured rates. It falls fast after a stall, because a stall
costs step time, and rises slowly without one, because a little memory is all that is gained: seven
quiet rounds make up for one stall. It never comes to 1: a disk that is planned full has no room for
a step that is faster than the last."""
STALL_SHARE_MAX = 0.01
"""A round that stalls for more than this share of its time is planned again, more cautiously."""
SETTLED_COUNT = 3
"""After so many plans a signature is planned again only if it stalls, or rates or caution moved: a
plan that changes makes writes whose tensors the next plan keeps."""
RATE_CHANGE = 1.25
"""A rate, or the caution, has moved if it changed by this factor: shared disks differ by a tenth
from step to step."""
PLANS_MAX = 64
"""Plans remembered, more than any training has kinds of steps; keys are remembered for longer."""
KNOWLEDGE_MAX = 100_000
"""Keys remembered before everything is learned anew: bounds memory when shapes never repeat."""


class Item(NamedTuple):
    """One storage of a round: bytes, and when it was packed and first needed, in seconds."""

    key: int
    nbytes: int
    packed_s: float
    needed_s: float
    gpu: int | None = None
    """The GPU that it is on; ``None``: the CPU."""


@dataclass(frozen=True)
class Copies:
    """What the copies of a GPU did, in bytes per second of the time that they took.

    A direction of which nothing is known yet bounds nothing: the disk's rate does.
    """

    down: float = math.inf
    """From the GPU."""
    up: float = math.inf
    """To it."""


NO_COPIES = Copies()
"""Of what is in the CPU's memory."""


@dataclass(frozen=True)
class Rates:
    """What the disk did, in bytes per second of busy time, and the copies of each GPU."""

    write: float
    read: float
    copies: Mapping[int, Copies] = field(default_factory=dict)

    def are_bound_by_copies(self) -> bool:
        """Whether what is on some GPU is copied, in either direction, slower than the disk goes."""
        return any(one.down < self.write or one.up < self.read for one in self.copies.values())

    def known_before(self, before: Rates | None) -> Rates:
        """Return these, with the disk's rates of ``before`` for those that are a guess.

        A session that has moved nothing yet does not know what the one before it measured.
        """
        if before is None:
            return self
        write = before.write if self.write == RATE_GUESS else self.write
        read = before.read if self.read == RATE_GUESS else self.read
        return Rates(write, read, self.copies)

    def times(self, share: float) -> Rates:
        """Return this share of all rates."""
        copies = {gpu: Copies(one.down * share, one.up * share) for gpu, one in self.copies.items()}
        return Rates(self.write * share, self.read * share, copies)


@dataclass(frozen=True)
class Plan:
    """Which keys to keep, and when the read of each other must begin at the latest."""

    keep: frozenset[int] = frozenset()
    start_by_s: dict[int, float] = field(default_factory=dict)
    """On the clock of the items."""
    needed_s: dict[int, float] = field(default_factory=dict)
    """When each item was needed, on the same clock: how far a later round has come."""
    written_bytes: int = 0
    """The sum of what goes to the disk."""
    longest_gap_s: float = 0.0
    """The longest time between two needs: how late a read may be begun, as needs begin reads."""
    pinned: frozenset[int] = frozenset()
    """Which of the others stay in pinned memory."""
    pinned_bytes: dict[int, int] = field(default_factory=dict)
    """How much of it each GPU needs for that."""
    copied_s: dict[int, float] = field(default_factory=dict)
    """When each of the others that is on a GPU has been copied from it, where its rate is known."""

    @property
    def leaving_bytes(self) -> int:
        """What leaves memory; of what stays in pinned memory, the pages that it takes."""
        return self.written_bytes + sum(self.pinned_bytes.values())


def plan(items: Sequence[Item], rates: Rates, host_bytes: int = 0) -> Plan:
    """Choose the longest prefix of the items, in the order of packing, that hides.

    The last of it, up to ``host_bytes`` in whole pages, stay in pinned memory if they are on a GPU
    whose copies go there. An item that is needed again before it could be copied or written, and
    brought back, is left out beforehand.
    """
    leaving = hidden(
        items,
        write=rates.write,
        read=rates.read,
        copies=[(gpu, one.down, one.up) for gpu, one in rates.copies.items()],
        host_bytes=host_bytes,
        page_bytes=PAGE_BYTES,
        margin_s=MARGIN_S,
        round_trip_factor=ROUND_TRIP_FACTOR,
    )
    keep = frozenset(item.key for item in items if item.key not in leaving)
    starts = {key: start_by_s for key, (start_by_s, _, _) in leaving.items()}
    copied_s = {key: moment_s for key, (_, moment_s, _) in leaving.items() if moment_s is not None}
    pinned = {key: nbytes for key, (_, _, nbytes) in leaving.items() if nbytes is not None}
    needed_s = {item.key: item.needed_s for item in items}
    gaps = [after - before for before, after in pairwise(sorted(needed_s.values()))]
    pinned_bytes: dict[int, int] = {}
    written_bytes = 0
    for item in items:
        if item.key in pinned:
            assert item.gpu is not None
            pinned_bytes[item.gpu] = pinned_bytes.get(item.gpu, 0) + pinned[item.key]
        elif item.key in starts:
            written_bytes += item.nbytes
    longest_gap_s = max(gaps, default=0.0)
    return Plan(
        keep,
        starts,
        needed_s,
        written_bytes,
        longest_gap_s,
        frozenset(pinned),
        pinned_bytes,
        copied_s,
    )


class Policy:
    """Learns from finished rounds which tensors to keep.

    Tensors of GPUs may stay in ``host_bytes`` of pinned memory.
    """

    def __init__(self, host_bytes: int = 0) -> None:
        self.plans: dict[int, Plan] = {}
        """The plan of each signature. For others to look at, not to change."""
        self.keep: set[int] = set()
        """Keys of the tensors that stay in memory. Looked at in every pack."""
        self.pinned: set[int] = set()
        """Keys of those that stay in pinned memory. Looked at in every pack of what is on a GPU."""
        self.moments: dict[int, tuple[float, float, float | None]] = {}
        """By the key of a tensor on a GPU, seconds since the first pack of its round by the last
        plan: when it is packed, when it is needed, and, if it leaves, when it has been copied."""
        self._host_bytes = host_bytes
        self._learning = threading.RLock()
        """Several sessions of one `offload` object learn together, each under its own lock; a
        handler of a signal may train."""
        self._planned: set[int] = set()
        self._futile: set[int] = set()
        self._caution = CAUTION_START
        self._basis: dict[int, tuple[int, Rates, float]] = {}
        """How often a signature was planned, and with which rates and caution last."""
        self._planned_caution = self._caution
        """That of the plan of the last kind of rounds."""
        self._rates: Rates | None = None
        """What was planned with last."""

    def would_plan_anew(self) -> bool:
        """Whether the caution has moved since the plan of the last kind of rounds was made.

        To be asked of a round of which nothing leaves by that plan: it need not be followed else.
        As it cannot stall, caution rises as after a round that did not.
        """
        with self._learning:
            self._caution = min(self._caution * CAUTION_RISE, CAUTION_MAX)
            return _differs(self._planned_caution, self._caution)

    def is_settled(self, signature: int) -> bool:
        """Whether this kind of rounds was planned often enough to be planned seldom from now on."""
        return signature in self._basis and self._basis[signature][0] >= SETTLED_COUNT

    def basis(self, signature: int) -> tuple[Rates, float] | None:
        """Return the rates of which the plan of this kind was made, and the caution."""
        with self._learning:
            known = self._basis.get(signature)
        return None if known is None else known[1:]

    def knows(self, key: int) -> bool:
        """Whether a plan was made with this key in it."""
        return key in self._planned

    def forgo_host_memory(self) -> None:
        """Let no more tensors stay in pinned memory: there is none to have.

        Every plan is made anew, as it may reckon with tensors that would have stayed there.
        """
        with self._learning:
            self._host_bytes = 0
            self.pinned.clear()
            self.plans.clear()
            self._basis.clear()

    def note_futile(self, key: int) -> None:
        """Remember that offloading this tensor frees nothing: somebody else holds its storage."""
        if len(self._futile) > KNOWLEDGE_MAX:
            self.keep -= self._futile
            self._futile.clear()
        self._futile.add(key)
        self.keep.add(key)

    def is_futile(self, key: int) -> bool:
        """Whether somebody else held this tensor when it was offloaded."""
        return key in self._futile

    def learn(
        self, signature: int, items: Sequence[Item], rates: Rates, stall_share: float
    ) -> None:
        """Plan the next round of this kind, unless its plan has settled.

        ``stall_share`` is stall time over the round's time.
        """
        with self._learning:
            self._learn(signature, items, rates, stall_share)

    def _learn(
        self, signature: int, items: Sequence[Item], rates: Rates, stall_share: float
    ) -> None:
        if len(self._planned) > KNOWLEDGE_MAX:
            self.plans.clear()
            self.keep.clear()
            self.pinned.clear()
            self.moments.clear()
            self._planned.clear()
            self._futile.clear()
            self._basis.clear()
        rates = self._rates = rates.known_before(self._rates)
        count, basis, caution = self._basis.get(signature, (0, rates, self._caution))
        stalled = count > 0 and stall_share > STALL_SHARE_MAX
        change = CAUTION_FALL if stalled else CAUTION_RISE
        self._caution = min(max(self._caution * change, CAUTION_MIN), CAUTION_MAX)
        moved = _moved(basis, rates) or _differs(caution, self._caution)
        if count >= SETTLED_COUNT and not stalled and not moved:
            self._planned_caution = caution
            return
        self._planned_caution = self._caution
        self._basis[signature] = (count + 1, rates, self._caution)
        made = plan(items, rates.times(self._caution), self._host_bytes)
        self.plans[signature] = made
        if len(self.plans) > PLANS_MAX:
            oldest = next(iter(self.plans))
            del self.plans[oldest], self._basis[oldest]
        began_s = items[0].packed_s
        for item in items:
            self._planned.add(item.key)
            if item.gpu is not None:
                copied_s = made.copied_s.get(item.key)
                since_s = None if copied_s is None else copied_s - began_s
                moments = item.packed_s - began_s, item.needed_s - began_s, since_s
                self.moments[item.key] = moments
            if item.key in made.keep:
                self.keep.add(item.key)
            elif item.key not in self._futile:
                self.keep.discard(item.key)
            if item.key in made.pinned:
                self.pinned.add(item.key)
            else:
                self.pinned.discard(item.key)


def _moved(before: Rates, after: Rates) -> bool:
    if _differs(before.write, after.write) or _differs(before.read, after.read):
        return True
    copies = ((before.copies.get(gpu, NO_COPIES), one) for gpu, one in after.copies.items())
    return any(_differs(was.down, one.down) or _differs(was.up, one.up) for was, one in copies)


def _differs(before: float, after: float) -> bool:
    # Infinity is no number of times itself.
    return before != after and not 1 / RATE_CHANGE < after / before < RATE_CHANGE
