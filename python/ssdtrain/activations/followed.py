"""Chooses the rounds that are followed in whole.

To follow a tensor takes Python some ten microseconds in each of its two hooks. While Python runs
ahead of a GPU that costs nothing; where the GPU waits for Python, as with small models, it is time
lost. So once a kind of rounds has a plan, only some of its rounds are followed in whole: they tell
when each tensor is packed and needed. In the other rounds only the tensors that leave memory are
followed, or only the first tensor if hardly any leaves, or if to move them costs too much.

To move a tensor of a GPU costs time of Python. While Python runs ahead it is free; where the GPU
waits for Python, the step becomes longer by it. Each partial round tells that price: a share of the
step, for the share of its bytes that leaves.
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
PRICE_MAX = 1 / 4
"""No tensor leaves if a share of the bytes costs more than this part of it of the step: half of the
bytes may cost an eighth of the step, and a thirtieth of them less than a hundredth."""


@dataclass
class _Kind:
    """Rounds that begin with the same tensor."""

    signature: int
    """The signature of the last round that was followed in whole."""
    leaving_share: float = 1.0
    """The share of the saved bytes that leaves memory by the plan."""
    is_dear: bool = False
    """True if these rounds wait for Python, and moving takes too much of their time."""
    is_measured: bool = False
    """True if the price was measured since the last whole round."""
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
        # The first round after a whole round tells the price anew.
        is_dear, kind.is_measured = kind.is_dear and kind.is_measured, True
        return "skimmed" if kind.leaving_share < LITTLE_SHARE or is_dear else "partial"

    def note_whole(
        self, opening: int, signature: int, *, saved_bytes: int, leaving_bytes: int
    ) -> None:
        """Note a whole round, and the bytes of it that leave memory by its plan."""
        if opening not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        kind = self._kinds.setdefault(opening, _Kind(signature))
        if kind.signature != signature:
            kind.signature, kind.same_count, kind.between = signature, 0, 1
            kind.is_dear = False
        kind.leaving_share = leaving_bytes / saved_bytes
        kind.is_measured = False
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

    def note_price(self, opening: int, price_share: float) -> bool:
        """Note the share of a partial round that moving took from it; return if that is too dear.

        It is 0 if Python ran ahead of the GPU.
        """
        kind = self._kinds.get(opening)
        if kind is None:
            return False
        kind.is_dear = price_share > PRICE_MAX * kind.leaving_share
        return kind.is_dear
