"""Finds the best of some settings with few and noisy measurements. Pure.

Disks are noisy, and drift: every pass visits all settings that are still in the race, and medians
decide. Many settings are about equally good, so the default stays in the race to its end and wins
unless another is clearly better: noise must not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ssdtrain.machine.tuning import Tuning

__all__ = ["CLEAR_GAIN", "HEATS", "Heat", "Measure", "Outcome", "Rates", "find_best", "sweep"]

CLEAR_GAIN = 0.03
"""A setting that is better by a smaller share counts as equal."""
PASSES_MAX = 50


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second in each direction."""

    write: float
    read: float

    @property
    def both(self) -> float:
        """The rate of bytes that are written and then read, as those of each tensor."""
        return 1 / (1 / self.write + 1 / self.read)


Measure = Callable[[Tuning, float], Rates]
"""Measures a setting, for about so many seconds in each direction."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A part of the race."""

    entrant_count: int | None
    """Count of the best settings so far that take part, besides the default; ``None``: all."""
    pass_count: int
    """The least count of passes; the last heat goes on while there is time."""
    sample_share: float
    """Share of the time that a sample takes in each direction."""


HEATS = (
    Heat(entrant_count=None, pass_count=1, sample_share=0.004),
    Heat(entrant_count=8, pass_count=2, sample_share=0.006),
    Heat(entrant_count=3, pass_count=3, sample_share=0.008),
)
"""For 20 settings: 20 * 2 * 0.004 + 9 * 2 * 2 * 0.006 + 4 * 3 * 2 * 0.008 = 0.57 of the time. The
last heat has the rest of the time, and ends early where a disk needs longer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a race."""

    choice: Tuning
    rates: dict[Tuning, Rates]
    """The medians of the last heat of each setting; settings of late heats come first."""
    sample_counts: dict[Tuning, int]
    """The count of samples of each median."""
    complete: bool
    """True if all settings were compared at least once; if not, the choice is the default."""


class OutOfTimeError(Exception):
    """The time was over before a pass had ended."""


def find_best(
    settings: Sequence[Tuning],
    default: Tuning,
    measure: Measure,
    *,
    seconds: float,
    clock: Callable[[], float],
    heats: Sequence[Heat] = HEATS,
) -> Outcome:
    """Race the settings for about so many seconds."""
    assert default in settings, "all others are compared with the default"
    end = clock() + seconds
    rates: dict[Tuning, Rates] = {}
    counts: dict[Tuning, int] = {}
    complete = False
    finalists = [default]
    for number, heat in enumerate(heats, 1):
        entrants = list(settings)
        if heat.entrant_count is not None:
            entrants.sort(key=lambda setting: -rates[setting].both)
            entrants = entrants[: heat.entrant_count]
            entrants += [] if default in entrants else [default]
        samples: dict[Tuning, list[Rates]] = {setting: [] for setting in entrants}
        is_last = number == len(heats)
        for pass_number in range(PASSES_MAX if is_last else heat.pass_count):
            if is_last and pass_number >= heat.pass_count and clock() >= end:
                break
            # There and back, so that a drift within passes affects all alike.
            order = entrants if pass_number % 2 == 0 else entrants[::-1]
            try:
                found = _pass(order, measure, heat.sample_share * seconds, end, clock)
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
        # Finalists first, best first; behind them those of earlier heats.
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
    """Measure each setting once; a pass that does not end in time counts for no setting."""
    found = []
    for setting in order:
        if clock() >= end:
            raise OutOfTimeError
        found.append((setting, measure(setting, sample_s)))
    return found


def _median(samples: Sequence[Rates]) -> Rates:
    return Rates(
        write=median(rates.write for rates in samples), read=median(rates.read for rates in samples)
    )


def _choose(finalists: Sequence[Tuning], default: Tuning, rates: dict[Tuning, Rates]) -> Tuning:
    best = max(finalists, key=lambda setting: rates[setting].both)
    is_clear = rates[default].both < rates[best].both * (1 - CLEAR_GAIN)
    return best if is_clear else default
