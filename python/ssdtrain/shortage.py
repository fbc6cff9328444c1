"""What is said when a bound cannot be kept: what needs memory, what holds it, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.sizes import shown_bytes

__all__ = ["Held", "Shortage"]

NAMED_SHARE_MIN = 0.25
"""What holds a smaller share of what is held gets no advice: to change it would not help much."""
KNOWN_BY = "DefaultCPUAllocator: can't allocate memory"
"""What PyTorch's CPU allocator says. Lightning's search for a batch size knows a lack of memory by
these words, Accelerate's (and so that of Transformers' Trainer) by `` out of memory.``."""

PARTIAL = "Gradients are partial now: zero them before you try again. "
"""A backward that ends early has added to some gradients and not to others."""


@dataclass(frozen=True)
class Held:
    """A part of what is in memory and cannot leave it."""

    nbytes: int
    what: str
    """What it is, and why it stays; follows "x MiB"."""
    advice: str
    """What to do about it, if it is most of all; an imperative. Empty: nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Who lacks memory, and what holds it."""

    limit_bytes: int
    needed_bytes: int
    wanted: str
    """Who needs ``needed_bytes`` more, and for what."""
    resident_bytes: int
    """In memory, and unable to leave it."""
    held: Sequence[Held]
    failure: str | None
    """Why writes fail."""

    def of_point(self) -> str:
        """Return the message of a ``BudgetError`` that is raised where memory lacks."""
        least_bytes = self.resident_bytes + self.needed_bytes
        return self._message(_to_pass(least_bytes), least_bytes)

    def of_backward(self, rest_bytes: int) -> str:
        """Return that of one for which a backward lacks memory to read a tensor back.

        Its node needs ``rest_bytes`` more at the same time.
        """
        least_bytes = self.resident_bytes + self.needed_bytes + rest_bytes
        return self._message(_to_pass(least_bytes), least_bytes, PARTIAL)

    def of_pass(self, least_bytes: int) -> str:
        """Return that of one for which memory lacked in forward, and which backward raises.

        All that the pass saved took ``least_bytes``.
        """
        found = (
            "From there on nothing was kept, and what came was counted until this backward: to "
            f"save all of it takes {_bound(least_bytes)}"
        )
        return self._message(found, least_bytes, PARTIAL)

    def _message(self, found: str, least_bytes: int, then: str = "") -> str:
        limit = f"max_resident_bytes={self.limit_bytes} ({shown_bytes(self.limit_bytes)})"
        return (
            f"ssdtrain is out of memory. {limit} cannot be kept: {self.wanted} {self._needs()}. "
            f"{found}. Raise the bound, use a smaller batch{self._hint(least_bytes)}. {then}"
            f"(To programs that look for a batch size this is the same as {KNOWN_BY!r}.)"
        )

    def _needs(self) -> str:
        needed = shown_bytes(self.needed_bytes)
        if self.resident_bytes <= 0:
            return f"needs {needed} at once"
        parts = [one for one in self.held if one.nbytes > 0]
        in_use_bytes = self.resident_bytes - sum(one.nbytes for one in parts)
        told = [f"{shown_bytes(one.nbytes)} {one.what}" for one in parts]
        if in_use_bytes > 0:
            told.append(f"{shown_bytes(in_use_bytes)} was read back and is in use")
        because = f" because writes fail: {self.failure}" if self.failure is not None else ""
        holds = f" ({'; '.join(told)})" if told else ""
        resident = shown_bytes(self.resident_bytes)
        return f"needs {needed} more, and {resident} in memory cannot leave it{because}{holds}"

    def _hint(self, least_bytes: int) -> str:
        if self.failure is not None:
            return ", or mend the writes"
        largest = max(self.held, key=lambda one: one.nbytes, default=None)
        if largest is None or largest.nbytes < NAMED_SHARE_MIN * least_bytes or not largest.advice:
            return ""
        return f", or {largest.advice}"


def _to_pass(least_bytes: int) -> str:
    return f"To come past this point takes {_bound(least_bytes)}"


def _bound(nbytes: int) -> str:
    return f"at least max_resident_bytes={nbytes} ({shown_bytes(nbytes)})"
