"""In which order things are used, learned from how they were used before."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

__all__ = ["UseOrder"]

LOG_MIN = 4096


class UseOrder:
    """Expects that what follows a use is what followed it the last time.

    A training step uses its weights in the order of the forward and then in that of the backward,
    so a use alone does not tell what comes next; together with the one before it mostly does. The
    place that was found is followed for as long as it holds.
    """

    def __init__(self) -> None:
        self._log: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._after: dict[tuple[int, int], int] = {}
        """Where two uses came one after the other last: the place of the second."""
        self._at: int | None = None
        """The place in the log that this moment repeats; ``None`` if there is none."""

    def note(self, key: int) -> None:
        """Note a use; several of the same in a row are one."""
        log = self._log
        if log and log[-1] == key:
            return
        at = self._at
        follows = at is not None and at + 1 < len(log) and log[at + 1] == key
        pair = (log[-1] if log else -1, key)
        self._at = at + 1 if follows and at is not None else self._after.get(pair)
        self._after[pair] = len(log)
        self._places.setdefault(key, []).append(len(log))
        log.append(key)
        if len(log) > LOG_MIN and len(log) > 8 * len(self._places):
            self._forget_half()

    def coming(self, count: int) -> Iterator[int]:
        """Give what is expected next, at most so many."""
        if self._at is None:
            return iter(())
        return islice(self._log, self._at + 1, self._at + 1 + count)

    def distance(self, key: int) -> float:
        """Return after how many other uses this is expected.

        What is not expected is farther away than all that is, and the farther the longer it was
        not used; what never was used is infinitely far away.
        """
        places = self._places.get(key)
        if not places:
            return math.inf
        if self._at is not None:
            following = bisect_right(places, self._at)
            # The end of the log is this moment: what stands there has just been used.
            if following < len(places) and places[following] < len(self._log) - 1:
                return places[following] - self._at
        return 2 * len(self._log) - places[-1]

    def forget(self, key: int) -> None:
        """Expect a key no more: there is nothing of this name any longer."""
        self._places.pop(key, None)

    def _forget_half(self) -> None:
        half = len(self._log) // 2
        log = self._log[half:]
        at = None if self._at is None or self._at < half else self._at - half
        self._log, self._places, self._after, self._at = [], {}, {}, None
        for place, key in enumerate(log):
            self._after[(log[place - 1] if place else -1, key)] = place
            self._places.setdefault(key, []).append(place)
        self._log, self._at = log, at
