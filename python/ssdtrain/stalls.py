"""Counts the time in which computing threads waited for I/O."""

from __future__ import annotations

__all__ = ["Stalls"]


class Stalls:
    """The waits of a session.

    The time of computing is ``time.perf_counter() - total_s``: on that clock a step takes as long
    as it would with an infinitely fast disk, so a plan made from it does not chase its own stalls.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.count = 0

    def note(self, stall_s: float) -> None:
        """Count a wait of a computing thread."""
        self.total_s += stall_s
        self.count += 1
