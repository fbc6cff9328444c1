"""A table of weak references by number, which forgets dead ones now and then."""

from __future__ import annotations

import weakref
from typing import TypeVar

__all__ = ["WeakTable"]

T = TypeVar("T")


class WeakTable(dict[int, "weakref.ref[T]"]):
    """Weak references by number; some are dead.

    Dead references are removed whenever the table has doubled. So an entry costs the same however
    many there are, and no object needs a callback for its death.
    """

    __slots__ = ("_forget_at", "_forget_at_min")

    def __init__(self, *, forget_at_min: int = 1024) -> None:
        super().__init__()
        self._forget_at = self._forget_at_min = forget_at_min

    def remember(self, number: int, reference: weakref.ref[T]) -> None:
        """Enter ``reference`` under ``number``, in the place of what is there."""
        if len(self) >= self._forget_at:
            for dead in [key for key, known in list(self.items()) if known() is None]:
                self.pop(dead, None)
            self._forget_at = max(self._forget_at_min, 2 * len(self))
        self[number] = reference

    def alive(self) -> list[T]:
        """Return the objects that are alive, in the order in which they were entered."""
        return [alive for reference in list(self.values()) if (alive := reference()) is not None]
