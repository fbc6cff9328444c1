"""Which rounds of a GPU are followed in whole.

To follow a tensor takes Python some ten microseconds in each of its two hooks. While Python runs
ahead of a GPU that costs nothing; where the GPU waits for Python, as with small models, it is time
lost. So once the plan of a kind of rounds is known, only some of its rounds are followed in whole,
which tell when each tensor is packed and needed. Of the others only what leaves memory is followed,
and nothing but the first tensor where hardly anything leaves.
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
"""Of what a round saves: to have less leave memory is not worth the time of the hooks."""


@dataclass
class _Kind:
    """Rounds that begin with the same tensor."""

    signature: int
    """What the last one packed that was followed in whole."""
    is_little: bool = False
    """Whether hardly anything of it leaves."""
    same_count: int = 0
    """How many in a row have packed that."""
    same_count_min: int = 1
    """So many have to before the next ones are followed in parts."""
    between: int = 1
    """How many rounds come between the next two that are followed in whole."""
    left: int = 0
    """How many of those that come now have not begun."""


class Followed:
    """Says of each round that begins how much of it is followed."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        """By the key of the first tensor."""

    def scope(self, opening: int) -> Scope:
        """Say how much is followed of the round that begins now."""
        kind = self._kinds.get(opening)
        if kind is None or not kind.left:
            return "whole"
        kind.left -= 1
        return "skimmed" if kind.is_little else "partial"

    def note_whole(
        self, opening: int, signature: int, *, saved_bytes: int, leaving_bytes: int
    ) -> None:
        """Note a round that was followed in whole, and what of it leaves memory by its plan."""
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
        """Note a partial round. One that has packed something else has no plan of its own yet.

        So that it gets one though it may come in turns with others that begin alike, twice as many
        rounds as before are followed in whole.
        """
        kind = self._kinds.get(opening)
        if kind is not None and kind.signature != signature:
            kind.same_count_min *= 2
            kind.same_count, kind.between, kind.left = 0, 1, 0
