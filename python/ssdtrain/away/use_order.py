"""Learns the order in which tensors are used."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

__all__ = ["UseOrder"]

LOG_MIN = 4096


class UseOrder:
    """Expects after two uses the use that followed them the last time.

    A training step uses its weights in the order of the forward and then in the order of the
    backward. So a single use does not tell the next one, but two uses in a row mostly do. The
    position found in the log is followed as long as the uses match.
    """

    def __init__(self) -> None:
        self._log: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._after: dict[tuple[int, int], int] = {}
        """By two uses in a row, the last position in the log of the second."""
        self._at: int | None = None
        """The position in the log that the last use repeats, or ``None``."""

    def note(self, key: int) -> None:
        """Note a use; the same key again is no new use."""
        log = self._log
        if log and log[-1] == key:
            return
        at = self._at
        follows = at is not None and at + 1 < len(log) and log[at + 1] == key
        pair = (log[-1] if log else -1, key)
        self._at = at + 1 if follows and at is not None else self._after.get(pair)
        self._after[pair] = len(log)
        self._positions.setdefault(key, []).append(len(log))
        log.append(key)
        if len(log) > LOG_MIN and len(log) > 8 * len(self._positions):
            self._forget_half()

    def coming(self, count: int) -> Iterator[int]:
        """Return the keys that are expected next, at most ``count``."""
        if self._at is None:
            return iter(())
        return islice(self._log, self._at + 1, self._at + 1 + count)

    def distance(self, key: int) -> float:
        """Return after how many other uses a key is expected.

        A key that is not expected is farther away than all that are, and the farther the longer it
        was not used. A key that was never used is infinitely far away.
        """
        positions = self._positions.get(key)
        if not positions:
            return math.inf
        if self._at is not None:
            following = bisect_right(positions, self._at)
            # The key at the end of the log has just been used.
            if following < len(positions) and positions[following] < len(self._log) - 1:
                return positions[following] - self._at
        return 2 * len(self._log) - positions[-1]

    def forget(self, key: int) -> None:
        """Forget a key whose tensor is gone."""
        self._positions.pop(key, None)

    def _forget_half(self) -> None:
        half = len(self._log) // 2
        log = self._log[half:]
        at = None if self._at is None or self._at < half else self._at - half
        self._log, self._positions, self._after, self._at = [], {}, {}, None
        for position, key in enumerate(log):
            self._after[(log[position - 1] if position else -1, key)] = position
            self._positions.setdefault(key, []).append(position)
        self._log, self._at = log, at
