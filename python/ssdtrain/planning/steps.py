"""Steps that have ended, and what is known of those of one kind. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from ssdtrain.planning.price import DEVIATION, Price

__all__ = ["STEPS_MAX", "WATCH_COUNT", "Kind", "Step"]

MEDIAN = 1.2533
"""The standard error of a median is larger than that of a mean by this factor."""
STEPS_MAX = 16
"""Steps that are remembered; those of one kind are no neighbours if more lie between them."""
WATCH_COUNT = 8
"""An alarm looks at the median of so many last steps."""
WATCH_REFERENCE_COUNT = 16
"""It compares them with so many of the first ones of the same amount."""
ALARM_ERRORS = 5.0
"""Steps are longer than they were if by more than so many standard errors, and by more than
``slowdown_max``."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One round that has ended: forward and backward of one batch or micro-batch."""

    kind: int
    """Rounds of one kind compute the same."""
    opening: int
    """All that is known of a round when it begins."""
    seconds: float
    """From the first pack to the last unpack, with all waits."""
    saved_bytes: int
    offered_bytes: int
    """Given to the disk."""
    planned_bytes: int
    """What the plan for the next round of this kind would give to it."""
    hooks_s: float = 0.0
    """What the calls of the hooks took, waits for the disk aside."""


class Kind:
    """What is known of one kind of step."""

    def __init__(self) -> None:
        self.count = 0
        self.planned_bytes = 0
        self.steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self.amount_bytes: int | None = None
        """``None``: the whole plan."""
        self.hook_times_s: deque[float] = deque(maxlen=STEPS_MAX)
        """Of steps that offloaded nothing."""
        self.first_s: list[float] = []
        self.last_s: deque[float] = deque(maxlen=WATCH_COUNT)
        self.probed_turn = 0
        """When one of its steps was a probe last."""
        self.is_probing = False
        """Whether a step that began so was to be one."""
        self.skimmed_bytes: int | None = None
        """What the first step saved that was not followed, since one was."""

    @property
    def usual_bytes(self) -> int:
        """What a usual step offloads."""
        amount_bytes, planned_bytes = self.amount_bytes, self.planned_bytes
        return planned_bytes if amount_bytes is None else min(amount_bytes, planned_bytes)

    @property
    def hooks_s(self) -> float:
        """What a step takes to follow its tensors, also if nothing is offloaded."""
        return statistics.median(self.hook_times_s) if self.hook_times_s else 0.0

    def base_s(self, price: Price) -> float:
        """Return what a step takes without offloading."""
        followed_s = statistics.median(
            step.seconds - price.s_per_byte * step.offered_bytes for step in self.steps
        )
        return max(followed_s - self.hooks_s, 1e-9)

    def forget_times(self) -> None:
        """Compare the next steps with themselves alone."""
        self.first_s.clear()
        self.last_s.clear()

    def watch(self, seconds: float) -> None:
        """Remember what a usual step took, to notice when they become longer."""
        if len(self.first_s) < WATCH_REFERENCE_COUNT:
            self.first_s.append(seconds)
        else:
            self.last_s.append(seconds)

    def is_slower(self, slowdown_max: float) -> bool:
        """Whether the last steps took longer than those of the same amount before them."""
        if len(self.first_s) < WATCH_REFERENCE_COUNT or len(self.last_s) < WATCH_COUNT:
            return False
        usual_s = statistics.median(self.first_s)
        deviation = statistics.median(abs(one - usual_s) for one in self.first_s)
        share = math.sqrt(1 / WATCH_COUNT + 1 / WATCH_REFERENCE_COUNT)
        error = MEDIAN * DEVIATION * deviation * share
        return statistics.median(self.last_s) > usual_s + max(
            slowdown_max * usual_s, ALARM_ERRORS * error
        )
