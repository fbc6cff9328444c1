"""Chooses the rounds of a GPU that are followed in whole.

To follow a tensor takes Python some ten microseconds in each of its two hooks. While Python runs
ahead of a GPU that costs nothing; where the GPU waits for Python, as with small models, it is time
lost. So once a kind of rounds has a plan, only some of its rounds are followed in whole: they tell
when each tensor is packed and needed. In the other rounds only the tensors that leave memory are
followed, or only the first tensor if hardly any leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Followed", "Scope"]

Scope = Literal["whole", "partial", "skimmed"]

BETWEEN_MAX = 64
"""Rounds between two that are followed in whole."""
KINDS_MAX = 64
"""Kinds of rounds that are remembered: more than any training has."""
LITTLE_SHARE = 1 / 32
"""If less than this share of a round leaves memory, the hooks are not worth their time."""


@dataclass
class _Kind:
    """Rounds that begin with the same tensor."""

    signature: int
    """The signature of the last round that was followed in whole."""
    is_little: bool = False
    """True if hardly any bytes of these rounds leave memory."""
    same_count: int = 0
    """How many whole rounds in a row had this signature."""
    same_count_min: int = 1
    """How many must have it before the next rounds are followed in parts."""
    between: int = 1
    """How many partial rounds come between the next two whole rounds."""
    left: int = 0
    """How many of these partial rounds are still to come."""


class Followed:
    """Decides how much of each round is followed."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        """By the key of the first tensor of a round."""

    def scope(self, opening: int) -> Scope:
        """Return how much of the round that begins now is followed."""
        kind = self._kinds.get(opening)
        if kind is None or not kind.left:
            return "whole"
        kind.left -= 1
        return "skimmed" if kind.is_little else "partial"

    def note_whole(
        self, opening: int, signature: int, *, saved_bytes: int, leaving_bytes: int
    ) -> None:
        """Note a whole round, and the bytes of it that leave memory by its plan."""
        if opening not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        kind = self._kinds.setdefault(opening, _Kind(signature))
        if kind.signature != signature:
            kind.signature, kind.same_count, kind.between = signature, 0, 1
        kind.is_little = leaving_bytes < LITTLE_SHARE * saved_bytes
        kind.same_count += 1
        if kind.same_count >= kind.same_count_min:
            kind.left = kind.between
            kind.between = min(2 * kind.between, BETWEEN_MAX)

    def note_partial(self, opening: int, signature: int) -> None:
        """Note a partial round.

        A round with another signature needs a plan of its own, and may alternate with rounds that
        begin alike. So twice as many rounds as before are followed in whole.
        """
        kind = self._kinds.get(opening)
        if kind is not None and kind.signature != signature:
            kind.same_count_min *= 2
            kind.same_count, kind.between, kind.left = 0, 1, 0
