"""Finds the best of some settings with few and noisy measurements. Pure: it is given a measure.

Disks are noisy, and drift: every pass visits all settings that are still in the race, and medians
decide. Many settings are about equally good, so the default stays in the race to its end and wins
unless another is clearly better: noise shall not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ssdtrain.machine.tuning import Tuning

__all__ = ["CLEAR_GAIN", "ROUNDS", "Measure", "Outcome", "Rates", "Round", "find_best", "sweep"]

CLEAR_GAIN = 0.03
"""A setting that is better by less than this part is not told from its equals."""
PASSES_MAX = 50


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second in each direction."""

    write: float
    read: float

    @property
    def both(self) -> float:
        """The rate of bytes that are written and then read: what each tensor has to go through."""
        return 1 / (1 / self.write + 1 / self.read)


Measure = Callable[[Tuning, float], Rates]
"""Measures a setting, for about so many seconds in each direction."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of the race."""

    entrant_count: int | None
    """So many of the best so far take part, and the default; ``None`` is all."""
    pass_count: int
    """At least; the last round goes on while there is time."""
    sample_share: float
    """Part of the time there is that one sample takes in each direction."""


ROUNDS = (
    Round(entrant_count=None, pass_count=1, sample_share=0.004),
    Round(entrant_count=8, pass_count=2, sample_share=0.006),
    Round(entrant_count=3, pass_count=3, sample_share=0.008),
)
"""For 20 settings: 20 * 2 * 0.004 + 9 * 2 * 2 * 0.006 + 4 * 3 * 2 * 0.008 = 0.57 of the time; the
last round has the rest, or the first are shortened by it where a disk needs longer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found."""

    choice: Tuning
    rates: dict[Tuning, Rates]
    """The medians of the last round that each setting took part in; who came far comes first."""
    sample_counts: dict[Tuning, int]
    """How many samples each median is of."""
    complete: bool
    """Whether all settings were compared at least once; if not, the choice is the default."""


class OutOfTimeError(Exception):
    """The time is over before a pass was."""


def find_best(
    settings: Sequence[Tuning],
    default: Tuning,
    measure: Measure,
    *,
    seconds: float,
    clock: Callable[[], float],
    rounds: Sequence[Round] = ROUNDS,
) -> Outcome:
    """Race the settings for about so many seconds."""
    assert default in settings, "the default is what all others are held against"
    end = clock() + seconds
    rates: dict[Tuning, Rates] = {}
    counts: dict[Tuning, int] = {}
    complete = False
    finalists = [default]
    for number, one in enumerate(rounds, 1):
        entrants = list(settings)
        if one.entrant_count is not None:
            entrants.sort(key=lambda setting: -rates[setting].both)
            entrants = entrants[: one.entrant_count]
            entrants += [] if default in entrants else [default]
        samples: dict[Tuning, list[Rates]] = {setting: [] for setting in entrants}
        is_last = number == len(rounds)
        for pass_number in range(PASSES_MAX if is_last else one.pass_count):
            if is_last and pass_number >= one.pass_count and clock() >= end:
                break
            # There and back, so that a drift within passes meets all alike.
            order = entrants if pass_number % 2 == 0 else entrants[::-1]
            try:
                found = _pass(order, measure, one.sample_share * seconds, end, clock)
            except OutOfTimeError:
                break
            for setting, sample in found:
                samples[setting].append(sample)
        if not samples[default]:
            break
        complete = True
        for setting in entrants:
            rates[setting] = _median(samples[setting])
            counts[setting] = len(samples[setting])
        finalists = entrants
        # Finalists first, best first; behind them those who left before, in the order they left.
        order = sorted(entrants, key=lambda setting: -rates[setting].both)
        rates = {setting: rates[setting] for setting in dict.fromkeys([*order, *rates])}
    choice = _choose(finalists, default, rates) if complete else default
    return Outcome(choice=choice, rates=rates, sample_counts=counts, complete=complete)


def sweep(
    settings: Sequence[Tuning], measure: Measure, *, pass_count: int, sample_s: float
) -> dict[Tuning, Rates]:
    """Measure every setting equally often, and return the medians."""
    samples: dict[Tuning, list[Rates]] = {setting: [] for setting in settings}
    for pass_number in range(pass_count):
        for setting in settings if pass_number % 2 == 0 else settings[::-1]:
            samples[setting].append(measure(setting, sample_s))
    return {setting: _median(found) for setting, found in samples.items()}


def _pass(
    order: Iterable[Tuning],
    measure: Measure,
    sample_s: float,
    end: float,
    clock: Callable[[], float],
) -> list[tuple[Tuning, Rates]]:
    """Measure each once. A pass that is not over in time counts for none: it would be unfair."""
    found = []
    for setting in order:
        if clock() >= end:
            raise OutOfTimeError
        found.append((setting, measure(setting, sample_s)))
    return found


def _median(samples: Sequence[Rates]) -> Rates:
    return Rates(
        write=median(one.write for one in samples), read=median(one.read for one in samples)
    )


def _choose(finalists: Sequence[Tuning], default: Tuning, rates: dict[Tuning, Rates]) -> Tuning:
    best = max(finalists, key=lambda setting: rates[setting].both)
    is_clear = rates[default].both < rates[best].both * (1 - CLEAR_GAIN)
    return best if is_clear else default
