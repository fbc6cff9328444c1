"""How much of a plan is worth its price: learned from steps that differ in what they offload.

Bytes that move cost time although nothing waits for them: hooks, copies and the disk's threads take
processors and memory from the computing. A step takes ``base + hooks + price * bytes``: what the
hooks take that follow all tensors, whatever goes, a clock tells. In the first steps the amount is
varied, and steps that followed each other are compared, so that a machine that drifts meets both.
From then on the amount is the largest one that keeps a step within ``slowdown_max`` of its base,
and now and then a step offloads more, to go on learning: that never raises the peak. Where nothing
is worth its price, most steps are not even followed.

Pure: numbers go in, numbers come out; there is no clock, and no chance.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ssdtrain.planning.price import Pair, Price, fit
from ssdtrain.planning.steps import STEPS_MAX, WATCH_COUNT, Kind, Step

__all__ = ["Controller", "Verdict"]

SETTLED_COUNT = 3
"""Steps of a kind that pass before it is varied: its plan is made anew after each of them."""
CAMPAIGN_COUNT = 16
"""Steps that are varied at first, half of them references that offload nothing."""
CAMPAIGN_COUNT_MAX = 48
CAMPAIGN_EXTENSION = 8
"""By so many it goes on while the error is too large to leave much of the plan alone: later there
is hardly anything more that could be offloaded, to learn from."""
ERROR_SHARE_MAX = 0.25
"""Of ``slowdown_max``: the error of what the whole plan costs, at which it is known well enough."""
TARGET_SHARE = 0.8
"""Of ``slowdown_max``, what the amount is chosen for: the rest pays for what is learned."""
PROBE_INTERVAL = 7
"""After the campaign, every so many steps one offloads more. Like the next one, it has no factor in
common with usual numbers of micro-batches: else probes would always fall on the same of them, which
may be quicker or slower than the others, and that would be taken for a part of the price."""
PROBE_INTERVAL_OFF = 61
"""While nothing is offloaded, because nothing would be worth its price."""
PROBE_FACTOR = 2.0
"""So much more is offloaded in a probe: what it costs is known within this factor."""
PROBE_SHARE_MIN = 1 / 16
"""Of the plan. Less would not be told from nothing; an amount below this is none at all."""
CAMPAIGN_SHARE_MIN = 1 / 8
"""The same for the first steps, where little is known of the price."""
PAIRS_MAX = 48
"""Pairs that are remembered. A price changes with what else the machine does."""
NEIGHBOUR_COUNT = 4
"""A step is compared with so many of its kind before it: then some of them stand at the same place
of whatever rhythm the training has (micro-batches, of which one makes the gradients)."""
SIMILAR_BYTES = 1.25
"""Steps of different kinds may be compared, by time per saved byte, if they save about as much."""
CALM_COUNT = 64
"""Steps between two campaigns at least; twice as many after each that has changed nothing."""
CALM_COUNT_MAX = 1024
CALM_COUNT_OFF = 256
"""The same where nothing is offloaded: all that another campaign can change for the better is the
peak, and until it ends steps are longer than plain ones."""
UNSURE_SHARE = 0.25
"""A price with an error of more than this share of it is tried again where it keeps everything."""
SAVED_BYTES_MUCH = 64 << 20
"""Steps that save less need not ask how much memory is left, which takes time itself."""
KINDS_MAX = 64
"""Kinds of steps that are remembered, more than any training has."""
QUIET_COUNT_MIN = 8
"""So many steps of which nothing is offered follow each other before one goes by unseen: of steps
that take turns (two optimizers, a long micro-batch in every fourth step) all are seen then."""
UNSEEN_MAX = 10
"""So many steps go by unseen at most before one is looked at again. One more has no factor in
common with the rhythms that trainings have, as of an evaluation in every second or eighth step."""
UNSEEN_SPARE_FACTOR = 4
"""So many times what a step saves must be spare then: one that saves more is not seen either."""
HYSTERESIS = 1.15
"""An amount changes if by more than this factor: each change moves tensors to and fro."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known and done at the moment."""

    price: Price | None
    """``None``: too few steps were compared."""
    slowdown: float
    """Expected of the kind of step seen last, as a share of what it takes without offloading."""
    slowdown_error: float
    amount_bytes: int
    planned_bytes: int
    allowed_s: float
    """What ``slowdown_max`` allows of the time of such a step."""
    hooks_s: float
    """What the hooks take of a step that offloads nothing, where its tensors are followed."""
    is_adapting: bool
    """Whether steps are varied at the moment, so that the peak may be that of keeping all."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is offloaded, because nothing is worth its price."""
        return self.price is not None and self.amount_bytes == 0 and self.planned_bytes > 0

    def shown_cost(self) -> str:
        """Say what a step costs that offloads, where that is known."""
        price, error = 0.0, 0.0
        if self.price is not None:
            price, error = max(self.price.s_per_byte, 0.0), self.price.error
        return (
            f"a step may become {self.allowed_s * 1e3:.1f} ms longer; to follow what it saves "
            f"takes {self.hooks_s * 1e3:.1f} ms, and each GiB that moves "
            f"{price * (1 << 30):.3f} ± {error * (1 << 30):.3f} s"
            + (", which noise hides" if error > price else "")
        )


def is_reference(turn: int) -> bool:
    """Whether this step of a campaign offloads nothing: the sequence of Thue and Morse.

    Neither a drift nor a rhythm of the training (micro-batches, of which every second or fourth
    comes with the optimizer) falls together with it.
    """
    return turn.bit_count() % 2 == 1


class Controller:
    """Chooses for each step how many bytes of its plan are offloaded.

    ``slowdown_max`` is a share of the time of a step: 0.02 allows 2 % more.
    """

    def __init__(self, slowdown_max: float) -> None:
        self.slowdown_max = slowdown_max
        self._lock = threading.RLock()
        """Sessions of several threads may learn together; a handler of a signal may train."""
        self._kinds: dict[int, Kind] = {}
        self._opened: dict[int, int] = {}
        """By opening, the kind of the last step that began so."""
        self._steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self._pairs: deque[Pair] = deque(maxlen=PAIRS_MAX)
        self._price: Price | None = None
        self._turn = 0
        """Steps since the last campaign began."""
        self._campaign_count = CAMPAIGN_COUNT
        self._calm_count = CALM_COUNT
        self._share_before = 1.0
        """Of the plan, what was offloaded when the last campaign began."""
        self._last: Kind | None = None
        self._count = 0
        """Steps that were learned from."""
        self._is_quiet = False
        """Whether nothing is offered of any round, as far as it was seen, of the step of now."""
        self._quiet_count = 0
        """Steps before it of which nothing was, without one of another kind between them."""
        self._unseen_count = 0
        """Those of them since one was seen in whole."""
        self.is_news = True
        """Whether nobody was told yet that nothing is offloaded."""
        self.verdict = self._verdict()
        """What is known and done at the moment."""

    def allowance(self, opening: int, spare_bytes: Callable[[], int]) -> int | None:
        """Return how many bytes the step that begins now may offload; ``None`` for no bound.

        ``spare_bytes`` tells how much memory there is for what a step saves: memory that runs out
        wins over the price, and is asked about only by steps that save much.
        """
        with self._lock:
            kind = self._kinds.get(self._opened.get(opening, 0))
            if kind is not None and kind.count >= SETTLED_COUNT:
                return self._allowed(kind, spare_bytes)
            # Of a kind that was never seen, or hardly ever: as of the last one.
            if self._last is None or self._count < SETTLED_COUNT:
                return None
            allowed_bytes = self._allowed(self._last, spare_bytes)
            return None if allowed_bytes >= self._last.planned_bytes else allowed_bytes

    def _allowed(self, kind: Kind, spare_bytes: Callable[[], int]) -> int:
        wanted_bytes = self._wanted_bytes(kind)
        saved_bytes = kind.steps[-1].saved_bytes
        if saved_bytes < SAVED_BYTES_MUCH:
            return wanted_bytes
        return max(wanted_bytes, min(saved_bytes - spare_bytes(), kind.planned_bytes))

    def skims(self, opening: int) -> Literal["plan", "price"] | None:
        """Return why the step that begins now need not be followed; ``None``: it is.

        Nothing of it would be offloaded, by the plan or by the price. The steps before a probe are
        followed, because it is compared with them.
        """
        with self._lock:
            kind = self._kinds.get(self._opened.get(opening, 0))
            if kind is None or kind.count <= SETTLED_COUNT or kind.usual_bytes:
                return None
            if self._is_in_campaign():
                return None
            if self._is_due(kind, PROBE_INTERVAL_OFF - NEIGHBOUR_COUNT):
                return None
            return "price" if kind.planned_bytes else "plan"

    def lets_go(
        self, opening: int, *, is_skimmed: bool, is_first: bool, spare_bytes: Callable[[], int]
    ) -> bool:
        """Return whether the step that begins now may go by unseen, with all of its rounds.

        It may if it begins as one of which nothing is offered, as nothing was of those before. To
        be asked of each round when it begins, with whether a step begins with it, and whether it
        is one that need not be followed. A step is what lies between two ends of an optimizer's:
        one round, or several micro-batches.
        """
        with self._lock:
            kind = self._kinds.get(self._opened.get(opening, 0))
            # That it is followed to learn the price makes it no other step.
            is_quiet = is_skimmed or (
                kind is not None and not kind.usual_bytes and not self._is_in_campaign()
            )
            if not is_first:
                self._is_quiet &= is_quiet
                return False
            self._quiet_count = self._quiet_count + 1 if self._is_quiet else 0
            self._is_quiet = is_quiet
            lets_go = (
                is_skimmed
                and self._quiet_count >= QUIET_COUNT_MIN
                and self._unseen_count < UNSEEN_MAX
            )
            if lets_go:
                most_bytes = max((one.saved_bytes for one in self._steps), default=0)
                is_much = most_bytes >= SAVED_BYTES_MUCH
                lets_go = not is_much or spare_bytes() >= UNSEEN_SPARE_FACTOR * most_bytes
            self._unseen_count = self._unseen_count + 1 if lets_go else 0
            return lets_go

    def pass_by(self, opening: int, saved_bytes: int) -> None:
        """Count a step that was not followed; if it saved much more, the next one is.

        What such a step counts may differ from what one counts that is followed, so it is compared
        with the first of its like.
        """
        with self._lock:
            self._turn += 1
            kind = self._kinds.get(self._opened.get(opening, 0))
            if kind is not None:
                if kind.skimmed_bytes is None:
                    kind.skimmed_bytes = saved_bytes
                elif saved_bytes > SIMILAR_BYTES * kind.skimmed_bytes:
                    del self._opened[opening]
            if self._last is not None:
                self._begin_again_if_changed(self._last)
            self.verdict = self._verdict()

    def note(self, step: Step) -> None:
        """Learn from a step that has ended."""
        with self._lock:
            self._note(step)
            self.verdict = self._verdict()

    def _note(self, step: Step) -> None:
        kind = self._kind_of(step)
        self._compare(step, kind)
        self._count += 1
        kind.count += 1
        kind.skimmed_bytes = None
        if not step.offered_bytes:
            kind.hook_times_s.append(step.hooks_s)
        kind.planned_bytes = step.planned_bytes
        kind.steps.append(step)
        self._steps.append(step)
        self._last = kind
        self._decide(kind)
        # Where no probe can be, to have followed a step told what the hooks take now.
        if kind.is_probing or (
            self._is_due(kind, PROBE_INTERVAL_OFF) and not self._can_probe(kind)
        ):
            kind.is_probing, kind.probed_turn = False, self._turn
        if self._count <= SETTLED_COUNT:
            return
        was_in_campaign = self._is_in_campaign()
        is_usual = not was_in_campaign and step.offered_bytes <= kind.usual_bytes
        self._turn += 1
        if was_in_campaign and not self._is_in_campaign():
            self._end_campaign(kind)
        if kind.count > SETTLED_COUNT:
            self._watch(step, kind, is_usual)

    def _verdict(self) -> Verdict:
        price, kind = self._price, self._last
        slowdown, error, allowed_s = 0.0, 0.0, 0.0
        amount_bytes = 0 if kind is None else kind.usual_bytes
        if price is not None and kind is not None:
            base_s = kind.base_s(price)
            allowed_s = self.slowdown_max * base_s
        if price is not None and kind is not None and amount_bytes:
            slowdown = (kind.hooks_s + price.s_per_byte * amount_bytes) / base_s
            error = price.error * amount_bytes / base_s
        return Verdict(
            price=price,
            slowdown=slowdown,
            slowdown_error=error,
            amount_bytes=amount_bytes,
            planned_bytes=0 if kind is None else kind.planned_bytes,
            allowed_s=allowed_s,
            hooks_s=0.0 if kind is None else kind.hooks_s,
            is_adapting=self._is_in_campaign(),
        )

    def _kind_of(self, step: Step) -> Kind:
        if step.kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            oldest = next(iter(self._kinds))
            del self._kinds[oldest]
        if len(self._opened) >= 2 * KINDS_MAX:
            self._opened.clear()
        self._opened[step.opening] = step.kind
        kind = self._kinds.get(step.kind)
        if kind is None:
            kind = self._kinds[step.kind] = Kind()
            if self._last is not None:
                # Where shapes never come back, one takes the place of the other.
                kind.probed_turn, kind.is_probing = self._last.probed_turn, self._last.is_probing
        return kind

    def _neighbours(self, step: Step, kind: Kind) -> list[Step]:
        """Return the steps that this one is compared with."""
        same = [one for one in self._steps if one.kind == step.kind]
        if same or kind.count or not self._steps or not step.saved_bytes:
            return same[-NEIGHBOUR_COUNT:]
        # Shapes that never come back: the last step, if it computed about as much.
        last = self._steps[-1]
        is_similar = 1 / SIMILAR_BYTES < last.saved_bytes / step.saved_bytes < SIMILAR_BYTES
        return [last] if is_similar else []

    def _compare(self, step: Step, kind: Kind) -> None:
        pairs = []
        for one in self._neighbours(step, kind):
            scale = step.saved_bytes / one.saved_bytes if one.saved_bytes else 1.0
            nbytes = step.offered_bytes - one.offered_bytes * scale
            least = PROBE_SHARE_MIN / 2 * max(step.planned_bytes, one.planned_bytes)
            if abs(nbytes) >= max(least, 1):
                pairs.append(Pair(nbytes, step.seconds - one.seconds * scale))
        if not pairs:
            return
        self._pairs.extend(pairs)
        # After an alarm, the old price is the best guess until there is a new one.
        self._price = fit(self._pairs) or self._price

    def _wanted_bytes(self, kind: Kind) -> int:
        """Return what the step offloads that begins now, if there is memory for the rest."""
        if self._is_in_campaign():
            if is_reference(self._turn):
                return 0
            return self._probe_bytes(kind, CAMPAIGN_SHARE_MIN)
        if self._is_probe(kind):
            # Due until a step of its kind has ended: this one may be no step at all.
            kind.is_probing = True
            return self._probe_bytes(kind, PROBE_SHARE_MIN)
        return kind.usual_bytes

    def _is_in_campaign(self) -> bool:
        return self._turn < self._campaign_count

    def _is_probe(self, kind: Kind) -> bool:
        amount_bytes, price = kind.usual_bytes, self._price
        if price is None or not self._can_probe(kind):
            return False
        if amount_bytes == 0:
            return self._is_due(kind, PROBE_INTERVAL_OFF)
        return self._is_due(kind, PROBE_INTERVAL)

    def _can_probe(self, kind: Kind) -> bool:
        """Whether a step of this kind may offload more than usual ones do."""
        price = self._price
        if price is None or kind.usual_bytes >= kind.planned_bytes:
            return False
        return self._left_s(kind, price) > 0

    def _is_due(self, kind: Kind, interval: int) -> bool:
        """Whether no step of this kind was a probe in so many steps of whatever kind.

        To ask for every seventh step instead would ask the same kind each time where kinds take
        turns, and the other ones never.
        """
        return self._turn - kind.probed_turn >= interval

    def _worth_bytes(self, kind: Kind, s_per_byte: float) -> float:
        """Return what may be offloaded at this price."""
        if self._price is None:
            return math.inf
        left_s = self._left_s(kind, self._price)
        if left_s <= 0:
            return 0.0
        return math.inf if s_per_byte <= 0 else left_s / s_per_byte

    def _left_s(self, kind: Kind, price: Price) -> float:
        """Return what a step may take for bytes, after what its hooks take."""
        return TARGET_SHARE * self.slowdown_max * kind.base_s(price) - kind.hooks_s

    def _decide(self, kind: Kind) -> None:
        """Choose what usual steps of a kind offload; changes only if it differs by much."""
        planned_bytes, price = kind.planned_bytes, self._price
        if price is None:
            return
        worth_bytes = min(self._worth_bytes(kind, price.upper), planned_bytes / PROBE_FACTOR)
        # From here on no probe can offload much more, so an error would stay: be surer before.
        surer_bytes = self._worth_bytes(kind, price.upper + price.error)
        worth_bytes = max(worth_bytes, surer_bytes)
        if worth_bytes >= planned_bytes:
            kind.amount_bytes = None
            return
        if worth_bytes < PROBE_SHARE_MIN * planned_bytes:
            worth_bytes = 0
        before = kind.amount_bytes
        if before is None or not before / HYSTERESIS <= worth_bytes <= before * HYSTERESIS:
            kind.amount_bytes = int(worth_bytes)

    def _probe_bytes(self, kind: Kind, share_min: float) -> int:
        planned_bytes, price = kind.planned_bytes, self._price
        if price is None:
            return planned_bytes
        worth_bytes = PROBE_FACTOR * self._worth_bytes(kind, price.s_per_byte)
        least = max(share_min * planned_bytes, kind.usual_bytes)
        return int(min(planned_bytes, max(worth_bytes, least)))

    def _end_campaign(self, kind: Kind) -> None:
        if self._campaign_count < CAMPAIGN_COUNT_MAX and self._is_undecided(kind):
            self._campaign_count += CAMPAIGN_EXTENSION
            return
        share = self._share()
        is_changed = not self._share_before / HYSTERESIS <= share <= self._share_before * HYSTERESIS
        calmer = min(2 * self._calm_count, CALM_COUNT_MAX)
        self._calm_count = CALM_COUNT if is_changed else calmer
        for one in self._kinds.values():
            one.forget_times()

    def _is_undecided(self, kind: Kind) -> bool:
        price = self._price
        if price is None or 2 * kind.usual_bytes <= kind.planned_bytes:
            return False
        error = price.error * kind.planned_bytes / kind.base_s(price)
        return error > ERROR_SHARE_MAX * self.slowdown_max

    def _is_off_unsurely(self, kind: Kind) -> bool:
        """Whether nothing is offloaded by a price that a noisy time may have told.

        Then to try again raises no peak. It is not tried where it would tell nothing that matters:
        where the price is dear by more than its error.
        """
        price = self._price
        if price is None or kind.usual_bytes or not kind.planned_bytes:
            return False
        if price.error <= UNSURE_SHARE * price.s_per_byte:
            return False
        worth_bytes = self._worth_bytes(kind, price.lower)
        return worth_bytes >= PROBE_SHARE_MIN * kind.planned_bytes

    def _share(self) -> float:
        kind = self._last
        if kind is None or kind.planned_bytes == 0:
            return 1.0
        return kind.usual_bytes / kind.planned_bytes

    def _watch(self, step: Step, kind: Kind, is_usual: bool) -> None:
        """Begin a new campaign if usual steps have become longer: the price may be another."""
        if not is_usual:
            return
        kind.watch(step.seconds)
        self._begin_again_if_changed(kind)

    def _begin_again_if_changed(self, kind: Kind) -> None:
        calm_count = self._turn - self._campaign_count
        if calm_count < self._calm_count:
            return
        if self._price is not None and self._left_s(kind, self._price) <= 0:
            return  # Whatever the price is now.
        is_slower = kind.is_slower(self.slowdown_max)
        is_due = calm_count >= CALM_COUNT_OFF
        if is_slower or (is_due and self._is_off_unsurely(kind)):
            self._share_before = self._share()
            self._turn, self._campaign_count = 0, CAMPAIGN_COUNT
            if is_slower:
                # Else the price is the same: more pairs make it surer, and until then the old ones
                # tell how little to try.
                self._pairs.clear()
            for one in self._kinds.values():
                one.forget_times()
                one.probed_turn = 0
                # What was before the alarm tells no longer what a step takes.
                one.steps = deque(list(one.steps)[-WATCH_COUNT:], maxlen=one.steps.maxlen)
