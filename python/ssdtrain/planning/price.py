"""What a byte costs that moves: the slope of seconds over bytes of steps that followed each other.

Pure: numbers go in, numbers come out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement

__all__ = ["DEVIATION", "Pair", "Price", "fit"]

PAIRS_MIN = 3
"""Fewer pairs say nothing of their own error."""
DEVIATION = 1.4826
"""From the median deviation to the standard deviation, of normal noise."""
BELOW_ZERO_ERRORS = 1.5
"""A price is below zero by more than noise if by so many errors."""
SURE_ERRORS = 2.0
"""So many errors off, a price hardly ever is."""
SHARED = 1.7
"""The error is so much larger than that of as many pairs that share no step."""


@dataclass(frozen=True)
class Pair:
    """Two steps that followed each other: by how much they differ."""

    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Price:
    """What a byte costs, in seconds, with its standard error."""

    s_per_byte: float
    error: float
    pair_count: int

    @property
    def upper(self) -> float:
        """The price that decides: where little is known, little is risked."""
        return self.s_per_byte + self.error

    @property
    def lower(self) -> float:
        """A price that it is hardly below."""
        return max(self.s_per_byte - SURE_ERRORS * self.error, 0.0)


def fit(pairs: Iterable[Pair]) -> Price | None:
    """Fit the slope of seconds over bytes, so that no few steps decide it.

    It is the median of the slopes of all pairs of pairs, weighted by their bytes (Hodges and
    Lehmann, 1963): a step that took twice as long moves it hardly, and steps that take long and
    short by turns do not pull it to either. ``None`` without enough pairs.
    """
    used = [pair if pair.nbytes > 0 else Pair(-pair.nbytes, -pair.seconds) for pair in pairs]
    used = [pair for pair in used if pair.nbytes > 0]
    if len(used) < PAIRS_MIN:
        return None
    joined = (
        (one.nbytes + other.nbytes, one.seconds + other.seconds)
        for one, other in combinations_with_replacement(used, 2)
    )
    slopes = sorted((seconds / nbytes, nbytes) for nbytes, seconds in joined)
    half = sum(weight for _, weight in slopes) / 2
    passed, slope = 0.0, slopes[-1][0]
    for one_slope, weight in slopes:
        passed += weight
        if passed >= half:
            slope = one_slope
            break
    deviation = statistics.median(abs(pair.seconds - slope * pair.nbytes) for pair in used)
    # A fitted slope comes close to few pairs by itself.
    few = len(used) / (len(used) - 2)
    spread = math.sqrt(sum(pair.nbytes**2 for pair in used))
    error = SHARED * DEVIATION * few * deviation / spread
    if slope < -BELOW_ZERO_ERRORS * error:
        # No step is the shorter for what it moves: something else made them so, and may do again.
        slope, error = 0.0, -slope
    return Price(slope, error, len(used))
