"""Runs a handler at any of the moments at which Python would run that of a signal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import ssdtrain

PACKAGE = str(Path(ssdtrain.__file__).parent)


class Signal:
    """Runs a handler at one of the moments at which Python would, within the package."""

    def __init__(self, number: int, handler: Callable[[], object]) -> None:
        self._left = number
        self._handler = handler
        self.came = False

    def moment(self) -> None:
        """Count a moment; run the handler if this is the one."""
        self._left -= 1
        if self._left < 0 and not self.came:
            self.came = True
            self._handler()


class AtCall(Signal):
    """When a function begins, and after a call of a function in C."""

    def __enter__(self) -> Self:
        # Python calls a function that it holds no more, if that raises in a callback of a weak
        # reference, which may run before the call of it; so this holds it.
        self._held = self._look
        sys.setprofile(self._held)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.moment()


class AtLoop(Signal):
    """When a loop begins anew, which is after the condition of a ``while`` was asked again."""

    def __enter__(self) -> Self:
        self._held = self._enter
        # Python 3.12 tells of operations only if some frame asks for them when this is called.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._held)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        before = -1

        def look(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                jumped_back = frame.f_lasti < before
                before = frame.f_lasti
                if jumped_back:
                    self.moment()
            return look

        return look


def interrupt() -> None:
    raise KeyboardInterrupt


class BetweenLines:
    """Calls a handler between two lines of the package, as Python calls those of signals."""

    def __init__(self, handler: Callable[[], object], *, every: int) -> None:
        self._handler = handler
        self._every = every
        self._line_count = 0
        self.call_count = 0

    def __enter__(self) -> Self:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._line_count += 1
            if self._line_count % self._every == 0:
                self.call_count += 1
                sys.settrace(None)
                try:
                    self._handler()
                finally:
                    sys.settrace(self._enter)
        return self._line
