"""How long steps take on a GPU, by its own clock.

Python runs ahead of a GPU, so the moments of the hooks tell nothing of it. An event is recorded
where a round begins; a step goes from there to the event of the next round. So the optimizer is a
part of it, as is all that the GPU waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ssdtrain._core import GpuClock, GpuMoment, Gpus
from ssdtrain.planning.controller import Step

__all__ = ["GpuSteps"]

WAITING_MAX = 8
"""Steps whose end a GPU has not come to; older ones are forgotten."""


@dataclass
class _Waiting:
    step: Step
    begun: GpuMoment
    ended: GpuMoment | None = None


class GpuSteps:
    """The steps of one session; under its lock."""

    def __init__(self, gpus: Gpus | None) -> None:
        self._clock = None if gpus is None else GpuClock(gpus)
        self._begun: tuple[float, GpuMoment] | None = None
        """The round that is packed now: when it began, on the clock of the rounds and its GPU's."""
        self._waiting: deque[_Waiting] = deque(maxlen=WAITING_MAX)

    def begin(self, began_s: float, gpu: int | None) -> None:
        """Mark the beginning of a round whose first tensor is on this GPU, if it is on one."""
        if self._clock is None:
            return
        moment = None if gpu is None else self._clock.mark(gpu)
        self._begun = None if moment is None else (began_s, moment)
        for one in list(self._waiting):
            if one.ended is not None:
                continue
            if moment is not None and moment.gpu == one.begun.gpu:
                one.ended = moment
            else:
                # Of two GPUs the clocks differ.
                self._waiting.remove(one)

    def note(self, step: Step, began_s: float) -> None:
        """Take a step whose round has ended, until its time is known; nothing if it never will."""
        if self._begun is not None and self._begun[0] == began_s:
            self._waiting.append(_Waiting(step, self._begun[1]))

    def take(self) -> Iterator[Step]:
        """Yield the steps, in order, whose ends their GPU has come to."""
        while self._waiting:
            first = self._waiting[0]
            if first.ended is None or not first.ended.is_reached():
                return
            self._waiting.popleft()
            seconds = first.ended.seconds_since(first.begun)
            if seconds is not None:
                yield replace(first.step, seconds=seconds)
