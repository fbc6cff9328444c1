"""What is said when a bound cannot be kept: what needs memory, what holds it, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.sizes import shown_bytes

__all__ = ["Held", "shortage"]

NAMED_SHARE_MIN = 0.25
"""What holds a smaller share of what is held gets no advice: to change it would not help much."""
KNOWN_BY = "DefaultCPUAllocator: can't allocate memory"
"""What PyTorch's CPU allocator says. Lightning's search for a batch size knows a lack of memory by
these words, Accelerate's (and so that of Transformers' Trainer) by `` out of memory.``."""


@dataclass(frozen=True)
class Held:
    """A part of what is in memory and cannot leave it."""

    nbytes: int
    what: str
    """What it is, and why it stays; follows "x MiB"."""
    advice: str
    """What to do about it, if it is most of all; an imperative."""


def shortage(
    *,
    limit_bytes: int,
    needed_bytes: int,
    wanted: str,
    resident_bytes: int,
    held: Sequence[Held],
    failure: str | None,
) -> str:
    """Return the message of a ``BudgetError``.

    ``wanted`` says who needs ``needed_bytes`` more, and for what; ``failure`` why writes fail.
    """
    parts = [one for one in held if one.nbytes > 0]
    in_use_bytes = resident_bytes - sum(one.nbytes for one in parts)
    told = [f"{shown_bytes(one.nbytes)} {one.what}" for one in parts]
    if in_use_bytes > 0:
        told.append(f"{shown_bytes(in_use_bytes)} was read back and is in use")
    because = f" because writes fail: {failure}" if failure is not None else ""
    holds = f" ({'; '.join(told)})" if told else ""
    needs = f"needs {shown_bytes(needed_bytes)} at once"
    if resident_bytes > 0:
        needs = (
            f"needs {shown_bytes(needed_bytes)} more, and {shown_bytes(resident_bytes)} in memory "
            f"cannot leave it{because}{holds}"
        )
    least_bytes = resident_bytes + needed_bytes
    largest = max(parts, key=lambda one: one.nbytes, default=None)
    has_advice = (
        largest is not None and largest.nbytes >= NAMED_SHARE_MIN * least_bytes and largest.advice
    )
    hint = f", or {largest.advice}" if largest is not None and has_advice else ""
    if failure is not None:
        hint = ", or mend the writes"
    return (
        f"ssdtrain is out of memory. max_resident_bytes={limit_bytes} ({shown_bytes(limit_bytes)}) "
        f"cannot be kept: {wanted} {needs}. To come past this point takes at least "
        f"max_resident_bytes={least_bytes} ({shown_bytes(least_bytes)}). Raise the bound, use a "
        f"smaller batch{hint}. "
        f"(To programs that look for a batch size this is the same as {KNOWN_BY!r}.)"
    )
