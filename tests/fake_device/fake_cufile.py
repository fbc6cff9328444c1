"""The fake cuFile of this process: which of its functions fail, and what was asked of it."""

from __future__ import annotations

import ctypes

MOVES_HALF, MOVES_NOTHING = 1, 2
"""Codes with which a transfer does not fail, but moves fewer bytes."""
VARIABLE = "SSDTRAIN_FAKE_CUFILE"
"""Makes a function fail in processes that begin from now on: ``NAME:CODE`` or ``NAME:hang``."""


class FakeCufile:
    """What a process that was started with ``cufile="fake"`` has in the place of NVIDIA's."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("calls", "registered"):
            getattr(self._library, f"fake_cufile_{name}").restype = ctypes.c_long

    def fail(self, symbol: str, code: int, *, nth: int | None = 1) -> None:
        """Make the `nth` call of a function from now on end with a code, or every one."""
        after = ctypes.c_long(0 if nth is None else nth - 1)
        self._library.fake_cufile_fail(symbol.encode(), code, after, int(nth is None))

    def recover(self) -> None:
        """Forget all failures."""
        self._library.fake_cufile_recover()

    def calls(self, symbol: str) -> int:
        """How often a function was called."""
        return int(self._library.fake_cufile_calls(symbol.encode()))

    def registered(self) -> int:
        """How many files and buffers are registered."""
        return int(self._library.fake_cufile_registered())
