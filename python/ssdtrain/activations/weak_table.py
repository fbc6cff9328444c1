"""A table that holds nothing: weak references by number, without those that are dead."""

from __future__ import annotations

import weakref
from typing import TypeVar

__all__ = ["WeakTable"]

T = TypeVar("T")


class WeakTable(dict[int, "weakref.ref[T]"]):
    """Weak references by number; some are dead.

    The dead go each time as many have come as were alive: so an entry costs the same however many
    there are, and no object does anything when it dies.
    """

    __slots__ = ("_forget_at", "_forget_at_min")

    def __init__(self, *, forget_at_min: int = 1024) -> None:
        super().__init__()
        self._forget_at = self._forget_at_min = forget_at_min

    def remember(self, number: int, reference: weakref.ref[T]) -> None:
        """Enter ``reference`` under ``number``, in the place of what is there."""
        if len(self) >= self._forget_at:
            for dead in [one for one, known in self.items() if known() is None]:
                del self[dead]
            self._forget_at = max(self._forget_at_min, 2 * len(self))
        self[number] = reference

    def alive(self) -> list[T]:
        """Return what is not dead, in the order in which it came."""
        return [one for reference in self.values() if (one := reference()) is not None]
