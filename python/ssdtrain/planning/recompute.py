"""Chooses the blocks to compute again in backward instead of writing them: swap or recompute.

Fuyou (arXiv 2403.06504, section 4) chooses how much of the activations to swap by the length of a
step, max(compute, writes) + max(compute + recomputation, reads). Here a bound on memory gives the
bytes that have to leave: bytes that fit under it cost no write. Blocks are taken in the order of
the seconds of recomputation for each byte that is not saved. Along that order both maxima are
convex, so the step is shortest at the first block that does not make it shorter.

[Note: a choice that stays] Blocks are chosen for a kind of rounds once it was measured. They are
chosen again only if a rate moved by more than ``RATE_CHANGE``, or if two rounds in a row waited
longer than expected: then, twice at most, the plan counts with a smaller share of the rates. A new
choice replaces the old choice only if it makes the step shorter by ``GAIN_MIN``, both judged by the
same figures.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate

from ssdtrain.planning.policy import RATE_CHANGE, STALL_SHARE_MAX, Rates

__all__ = ["Block", "BlockCounts", "Choices", "Disk", "Measured", "choose", "step_s"]

MEASURED_COUNT = 2
"""Rounds of a kind before the first choice: the first finds memory and caches cold."""
RATE_SHARES = (0.8, 0.56, 0.4)
"""Shares of the measured rates that a plan counts with, at first and after unexpected waits."""
SURPRISES_MAX = 2
"""Rounds in a row with such waits before the next share is taken."""
GAIN_MIN = 0.02
KINDS_MAX = 64
"""Kinds of rounds remembered, more than any training has."""


@dataclass(frozen=True)
class Block:
    """A call of a block in a round, as measured while no block was computed again."""

    key: int
    forward_s: float
    saved_bytes: int
    """Bytes that its forward saved and that may leave memory."""
    input_bytes: int
    """Bytes that are saved even if it is computed again."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that are not saved if it is computed again."""
        return max(0, self.saved_bytes - self.input_bytes)


@dataclass(frozen=True)
class Measured:
    """A round without recomputation; times without waits for the disk."""

    blocks: tuple[Block, ...]
    other_bytes: int
    """Bytes that were saved outside of the blocks."""
    forward_s: float
    backward_s: float

    @property
    def saved_bytes(self) -> int:
        """Bytes that were saved in all."""
        return self.other_bytes + sum(block.saved_bytes for block in self.blocks)

    @property
    def compute_s(self) -> float:
        """The time of the round if no tensor has to leave memory."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Disk:
    """Bytes per second of each direction, and the saved bytes that may stay in memory."""

    write: float
    read: float
    bound_bytes: float = math.inf

    def times(self, share: float) -> Disk:
        """Return this share of the rates, under the same bound."""
        return replace(self, write=self.write * share, read=self.read * share)

    def step_s(self, measured: Measured, freed_bytes: int, again_s: float) -> float:
        """Return the time of a round with so many bytes fewer and so much computing more."""
        leaving_bytes = max(0.0, measured.saved_bytes - freed_bytes - self.bound_bytes)
        forward_s = max(measured.forward_s, leaving_bytes / self.write)
        return forward_s + max(measured.backward_s + again_s, leaving_bytes / self.read)


def step_s(measured: Measured, disk: Disk, recomputed: AbstractSet[int]) -> float:
    """Return the time of a round if the blocks with these keys are computed again."""
    chosen = [block for block in measured.blocks if block.key in recomputed]
    again_s = sum(block.forward_s for block in chosen)
    return disk.step_s(measured, sum(block.freed_bytes for block in chosen), again_s)


def choose(measured: Measured, disk: Disk) -> frozenset[int]:
    """Return the keys of the blocks to compute again: the fewest that make the round shortest."""
    useful = [block for block in measured.blocks if block.freed_bytes]
    useful.sort(key=lambda block: block.forward_s / block.freed_bytes)
    freed_bytes = [0, *accumulate(block.freed_bytes for block in useful)]
    again_s = [0.0, *accumulate(block.forward_s for block in useful)]

    def seconds(count: int) -> float:
        return disk.step_s(measured, freed_bytes[count], again_s[count])

    low, high = 0, len(useful)
    while low < high:
        middle = (low + high) // 2
        if seconds(middle + 1) < seconds(middle):
            low = middle + 1
        else:
            high = middle
    return frozenset(block.key for block in useful[:low])


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Counts of the blocks of a session, for its report."""

    blocks_called: int = 0
    blocks_recomputed: int = 0
    bytes_not_written: int = 0
    recomputed_s: float = 0.0
    recompute_expected_s: float = 0.0
    recompute_measured_s: float = 0.0


@dataclass
class _Kind:
    """Measurements of the rounds that call blocks with the same shapes in the same order."""

    measured: Measured | None = None
    measured_count: int = 0
    basis: Disk | None = None
    """The disk of the last choice."""
    chosen: frozenset[int] = frozenset()
    shares_tried: int = 0
    surprises: int = 0


class Choices:
    """Learns from rounds that have ended which blocks to compute again."""

    def __init__(self) -> None:
        self.chosen: set[int] = set()
        """Keys of the blocks that are computed again. Each call of a block looks at them."""
        self.freed_bytes: dict[int, int] = {}
        """The bytes that each of them does not save."""
        self._learning = threading.Lock()
        """Sessions of the same `offload` object learn together, each under its own lock."""
        self._kinds: dict[int, _Kind] = {}

    def learn(self, kind: int, measured: Measured | None, disk: Disk, stall_s: float) -> float:
        """Choose for the next round of this kind; return the expected time of this round.

        ``measured`` is ``None`` if a block was computed again in this round: then the last
        measurement still holds. The expected time is 0 without an expectation.
        """
        with self._learning:
            if len(self._kinds) >= KINDS_MAX and kind not in self._kinds:
                self._kinds.clear()
                self.chosen.clear()
                self.freed_bytes.clear()
            known = self._kinds.setdefault(kind, _Kind())
            before, expected_s = known.measured, 0.0
            if before is not None and known.basis is not None:
                expected_s = step_s(before, disk, known.chosen)
                self._note_stall(known, before, expected_s, stall_s)
            if measured is not None:
                known.measured = measured
                known.measured_count += 1
            if known.measured is None or known.measured_count < MEASURED_COUNT:
                return 0.0
            may_fall = known.shares_tried + 1 < len(RATE_SHARES)
            falls = may_fall and known.surprises >= SURPRISES_MAX
            if falls:
                known.shares_tried += 1
            if falls or known.basis is None or _moved(known.basis, disk):
                self._choose(known, known.measured, disk)
            return expected_s

    @staticmethod
    def _note_stall(known: _Kind, measured: Measured, expected_s: float, stall_s: float) -> None:
        again_s = sum(block.forward_s for block in measured.blocks if block.key in known.chosen)
        stall_max_s = expected_s * (1 + STALL_SHARE_MAX) - measured.compute_s - again_s
        known.surprises = known.surprises + 1 if stall_s > stall_max_s else 0

    def _choose(self, known: _Kind, measured: Measured, disk: Disk) -> None:
        """Choose again. See [Note: a choice that stays]."""
        known.basis, known.surprises = disk, 0
        counted = disk.times(RATE_SHARES[known.shares_tried])
        found = choose(measured, counted)
        before_s = step_s(measured, counted, known.chosen)
        if step_s(measured, counted, found) >= before_s * (1 - GAIN_MIN):
            return
        known.chosen = found
        for block in measured.blocks:
            self.freed_bytes[block.key] = block.freed_bytes
            if block.key in found:
                self.chosen.add(block.key)
            else:
                self.chosen.discard(block.key)


def disk_of(rates: Rates, bound_bytes: int) -> Disk:
    """Return the disk with these rates and this bound."""
    return Disk(rates.write, rates.read, bound_bytes)


def _moved(before: Disk, after: Disk) -> bool:
    pairs = ((before.write, after.write), (before.read, after.read))
    return any(not 1 / RATE_CHANGE < new / old < RATE_CHANGE for old, new in pairs)
