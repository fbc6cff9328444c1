"""The price of a byte, learned from step times that are made up: noise, outliers, drift, a change.

Each figure that is asserted is one of the made-up machine, never of the clock.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product

import pytest

from ssdtrain.planning.controller import (
    CALM_COUNT_OFF,
    CAMPAIGN_COUNT,
    CAMPAIGN_COUNT_MAX,
    NEIGHBOUR_COUNT,
    PROBE_INTERVAL_OFF,
    SETTLED_COUNT,
    Controller,
    is_reference,
)
from ssdtrain.planning.price import Pair, fit
from ssdtrain.planning.steps import Step
from support import shared_out

PLAN = 1 << 30
LIMIT = 0.02
ADAPTED = SETTLED_COUNT + CAMPAIGN_COUNT


@dataclass
class Machine:
    """Runs steps that take a base and a price, as the controller asks for them."""

    full: float
    """By what share the whole plan makes a step longer."""
    noise: float = 0.0
    outlier_share: float = 0.0
    seed: int = 0
    base_s: float = 1.0
    limit: float = LIMIT
    spare_bytes: int = 1 << 50
    hooks: float = 0.0
    """By what share the hooks make a step longer whose tensors are followed."""
    controller: Controller = field(init=False)
    costs: list[float] = field(default_factory=list)
    """By what share each step was longer than without offloading, noise apart."""
    amounts: list[int] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(self.limit)
        self._random = random.Random(self.seed)

    def run(
        self, count: int, *, kind: int = 1, size: float = 1.0, opening: int | None = None
    ) -> None:
        opening = kind if opening is None else opening
        for _ in range(count):
            planned = int(PLAN * size)
            allowed = self.controller.allowance(opening, lambda: self.spare_bytes)
            amount = planned if allowed is None else min(allowed, planned)
            if amount == 0 and self.controller.skims(opening):
                self.costs.append(0.0)
                self.amounts.append(0)
                self.followed.append(False)
                self.controller.pass_by(opening, planned)
                continue
            cost = self.hooks + self.full * amount / planned
            seconds = self.base_s * size * (1 + self._random.gauss(0, self.noise) + cost)
            if self._random.random() < self.outlier_share:
                seconds *= 2
            self.costs.append(cost)
            self.amounts.append(amount)
            self.followed.append(True)
            self.controller.note(
                Step(
                    kind=kind,
                    opening=opening,
                    seconds=seconds,
                    saved_bytes=planned,
                    offered_bytes=amount,
                    planned_bytes=planned,
                    hooks_s=self.hooks * self.base_s * size,
                )
            )

    def mean_cost(self, since: int = 0) -> float:
        return sum(self.costs[since:]) / len(self.costs[since:])


def test_a_price_without_noise_is_found_exactly() -> None:
    machine = Machine(full=0.12)
    machine.run(ADAPTED)
    price = machine.controller.verdict.price
    assert price is not None
    assert price.s_per_byte * PLAN == pytest.approx(0.12)
    assert price.error * PLAN == pytest.approx(0, abs=1e-9)


NOISES = list(product([0.0, 0.01, 0.03, 0.12, 1.0], [0.005, 0.02, 0.05]))


@pytest.mark.parametrize(
    ("full", "noise"),
    shared_out(NOISES, quick=[(0.0, 0.005), (0.01, 0.02), (0.03, 0.02), (0.12, 0.05), (1.0, 0.02)]),
)
def test_steps_are_within_the_limit_after_adapting(full: float, noise: float) -> None:
    costs = []
    for seed in range(6):
        machine = Machine(full=full, noise=noise, outlier_share=0.02, seed=seed)
        machine.run(200)
        costs.append(machine.mean_cost(since=ADAPTED))
    # Where steps vary by five times as much as they cost, the error is hardly less than the limit.
    assert sum(costs) / len(costs) <= LIMIT * (1.25 if noise == 0.05 else 1)
    assert max(costs) <= 2 * LIMIT


@pytest.mark.parametrize("full", [0.03, 0.12, 0.5])
def test_what_adapting_costs_is_paid_back(full: float) -> None:
    costs = []
    for seed in range(5):
        machine = Machine(full=full, noise=0.01, seed=seed)
        machine.run(300)
        costs.append(machine.mean_cost())
    assert sum(costs) / len(costs) <= LIMIT
    assert max(costs) <= 1.25 * LIMIT


def test_what_costs_little_is_offloaded_whole() -> None:
    machine = Machine(full=0.005, noise=0.01)
    machine.run(120)
    assert machine.amounts[-40:] == [PLAN] * 40


def test_a_dear_plan_is_used_as_far_as_the_limit_allows() -> None:
    machine = Machine(full=0.12, noise=0.005)
    machine.run(200)
    usual = sorted(machine.amounts[-80:])[40]
    assert 0.08 * PLAN < usual <= LIMIT / 0.12 * PLAN


def test_a_larger_limit_offloads_more() -> None:
    amounts = []
    for limit in (0.02, 0.05, 0.1, 0.2):
        machine = Machine(full=0.12, noise=0.005, limit=limit)
        machine.run(120)
        amounts.append(sorted(machine.amounts[-40:])[20])
    assert amounts == sorted(amounts)
    assert amounts[0] < amounts[1] < amounts[2] < amounts[3] == PLAN


def test_after_adapting_no_step_keeps_more_than_usual() -> None:
    # To go on learning, a step may offload more: a step that kept more would raise the peak.
    machine = Machine(full=0.05, noise=0.003)
    machine.run(ADAPTED)
    for _ in range(100):
        usual = machine.controller.verdict.amount_bytes
        machine.run(1)
        assert machine.amounts[-1] >= usual
    assert max(machine.amounts[ADAPTED:]) > min(machine.amounts[ADAPTED:])


def test_outliers_move_the_price_hardly() -> None:
    clean, spoiled = [], []
    for seed in range(5):
        for share, prices in ((0.0, clean), (0.08, spoiled)):
            machine = Machine(full=0.1, noise=0.005, outlier_share=share, seed=seed)
            machine.run(100)
            price = machine.controller.verdict.price
            assert price is not None
            prices.append(price.s_per_byte * PLAN)
    assert sum(clean) / 5 == pytest.approx(0.1, rel=0.1)
    assert sorted(spoiled)[2] == pytest.approx(0.1, rel=0.5)
    assert min(spoiled) > 0.05, "what is thought to be cheaper than it is makes steps longer"


def test_a_machine_that_drifts_does_not_change_the_price() -> None:
    machine = Machine(full=0.03, noise=0.002)
    for _ in range(100):
        machine.run(1)
        machine.base_s *= 1.002
    price = machine.controller.verdict.price
    assert price is not None
    assert price.s_per_byte * PLAN / machine.base_s == pytest.approx(0.03, rel=0.35)
    assert machine.mean_cost(since=ADAPTED) <= LIMIT


def test_a_price_that_rises_is_noticed() -> None:
    machine = Machine(full=0.005, noise=0.005)
    machine.run(120)
    assert machine.amounts[-1] == PLAN
    machine.full = 0.2
    machine.run(60)
    assert machine.mean_cost(since=160) <= 1.5 * LIMIT
    assert sorted(machine.amounts[-20:])[10] < PLAN / 4


def test_a_price_that_falls_is_noticed() -> None:
    machine = Machine(full=0.3, noise=0.003)
    machine.run(80)
    machine.full = 0.001
    machine.run(600)
    assert machine.amounts[-1] == PLAN


def test_an_unchanged_price_raises_no_second_campaign() -> None:
    machine = Machine(full=0.01, noise=0.01)
    machine.run(400)
    assert not machine.controller.verdict.is_adapting
    assert 0 not in machine.amounts[SETTLED_COUNT + CAMPAIGN_COUNT_MAX :]


def offloaded_later(full: float, noise: float) -> list[float]:
    """Return what each step offloads, as shares of the plan, of many machines once they adapted."""
    shares = []
    for seed in range(20):
        machine = Machine(full=full, noise=noise, hooks=0.004, seed=seed)
        machine.run(CAMPAIGN_COUNT_MAX + CALM_COUNT_OFF + 64)
        shares += [amount / PLAN for amount in machine.amounts[60:]]
    return shares


def test_to_be_surer_of_a_price_hardly_more_is_offloaded_than_it_tells() -> None:
    shares = offloaded_later(full=0.12, noise=0.08)
    count = len(shares)
    assert shares.count(1.0) <= 5 / 1280 * count, "a price of three pairs may be anything"
    assert sum(shares) < 0.02 * count
    assert sum(share > 0 for share in shares) > 300, "it is tried again, as noise may have told it"


def test_a_price_that_is_dear_by_more_than_its_error_is_not_learned_again() -> None:
    shares = offloaded_later(full=0.6, noise=0.15)
    assert sum(shares) < 6 / 1280 * len(shares)


def test_what_can_never_help_is_off_and_hardly_tried() -> None:
    machine = Machine(full=3.0, noise=0.01)
    machine.run(300)
    assert machine.controller.verdict.is_off
    assert sum(amount > 0 for amount in machine.amounts[ADAPTED:]) <= 6
    assert machine.mean_cost(since=ADAPTED) <= LIMIT


def test_steps_of_which_nothing_goes_are_followed_only_around_a_probe() -> None:
    machine = Machine(full=3.0)
    machine.run(ADAPTED)
    assert all(machine.followed), "they tell the price"
    machine.run(4 * PROBE_INTERVAL_OFF)
    later = machine.followed[ADAPTED:]
    assert sum(later) <= 4 * (NEIGHBOUR_COUNT + 1) + 1
    for number in range(ADAPTED, len(machine.amounts)):
        if machine.amounts[number]:
            assert all(machine.followed[number - NEIGHBOUR_COUNT : number + 1])
    assert sum(amount > 0 for amount in machine.amounts[ADAPTED:]) >= 3
    # A price that falls is noticed all the same.
    machine.full = 0.001
    machine.run(12 * PROBE_INTERVAL_OFF)
    assert machine.amounts[-1] == PLAN
    assert all(machine.followed[-20:])


def test_hooks_that_take_what_is_allowed_leave_nothing_for_bytes() -> None:
    machine = Machine(full=0.0, hooks=LIMIT, noise=0.01)
    machine.run(400)
    verdict = machine.controller.verdict
    assert verdict.is_off
    assert verdict.slowdown == 0
    assert verdict.hooks_s == pytest.approx(LIMIT)
    assert verdict.allowed_s == pytest.approx(LIMIT, rel=0.02)
    assert "ms longer; to follow what it saves takes 20.0 ms," in verdict.shown_cost()
    adapted = SETTLED_COUNT + CAMPAIGN_COUNT_MAX
    assert max(machine.amounts[adapted:]) == 0
    assert machine.mean_cost(since=adapted) <= LIMIT / 8
    # They take less once something else on the machine has ended.
    machine.hooks = LIMIT / 20
    machine.run(7 * PROBE_INTERVAL_OFF)
    assert machine.amounts[-1] == PLAN


def test_hooks_leave_so_much_less_for_bytes() -> None:
    machine = Machine(full=0.05, hooks=LIMIT / 2)
    machine.run(ADAPTED + 40)
    assert LIMIT * 0.75 <= machine.costs[-1] <= LIMIT
    assert machine.controller.verdict.slowdown == pytest.approx(machine.costs[-1], rel=0.05)


def test_a_step_that_grew_unseen_is_followed_the_next_time() -> None:
    machine = Machine(full=3.0)
    machine.run(ADAPTED + 10)
    assert not machine.followed[-1]
    machine.spare_bytes = 2 * PLAN
    machine.run(2, size=4.0)
    assert machine.followed[-2:] == [False, True]
    machine.run(1, size=4.0)
    assert machine.amounts[-1] >= PLAN, "memory that runs short wins"


def test_a_step_whose_plan_keeps_all_is_not_followed_either() -> None:
    controller = Controller(LIMIT)
    step = Step(kind=1, opening=7, seconds=1.0, saved_bytes=PLAN, offered_bytes=0, planned_bytes=0)
    for _ in range(ADAPTED):
        assert controller.skims(7) is None
        controller.note(step)
    assert controller.skims(7) == "plan"
    assert controller.skims(8) is None, "nothing is known of such a step"


def test_no_step_keeps_more_than_there_is_room_for() -> None:
    machine = Machine(full=0.5, spare_bytes=PLAN // 4)
    machine.run(ADAPTED + 40)
    assert min(machine.amounts) == PLAN - PLAN // 4
    machine = Machine(full=0.5, spare_bytes=0)
    machine.run(ADAPTED)
    assert machine.amounts == [PLAN] * ADAPTED
    assert machine.controller.verdict.price is None


@pytest.mark.parametrize("period", [2, 4])
def test_a_rhythm_of_the_training_is_not_taken_for_a_price(period: int) -> None:
    # Of several micro-batches, one takes longer: it makes the gradients, or starts the all-reduce.
    machine = Machine(full=0.0, noise=0.002)
    for number in range(ADAPTED + 40):
        machine.base_s = 1.1 if number % period == 0 else 1.0
        machine.run(1)
    price = machine.controller.verdict.price
    assert price is not None
    assert abs(price.s_per_byte * PLAN) < 0.05


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_probes_fall_on_all_micro_batches(period: int) -> None:
    """With an interval of 8 a training of two offloaded half as much again as it was allowed."""
    for phase in range(period):
        machine = Machine(full=0.5, noise=0.02, limit=0.1, seed=phase)
        for number in range(600):
            machine.base_s = 1.15 if number % period == phase else 1.0
            machine.run(1)
        assert 0.05 < machine.mean_cost(since=100) < 0.1


@pytest.mark.parametrize(("period", "limit"), [(3, 0.1), (6, 0.02), (6, 0.1), (7, 0.02), (8, 0.02)])
def test_one_long_micro_batch_does_not_send_everything_away(period: int, limit: float) -> None:
    """Such times told a price below zero, at which all was offloaded: five times the limit."""
    costs = []
    for seed in range(6):
        machine = Machine(full=5 * limit, noise=0.05, outlier_share=0.02, limit=limit, seed=seed)
        for number in range(400):
            machine.base_s = 2.0 if number % period == seed % period else 1.0
            machine.run(1)
        costs.append(machine.mean_cost(since=60))
    assert sum(costs) / len(costs) <= limit
    assert max(costs) <= 1.5 * limit


def test_two_kinds_of_steps_share_a_price_and_have_their_own_amounts() -> None:
    machine = Machine(full=0.1, noise=0.003)
    for number in range(160):
        # Steps of half the size take half the time, and half the bytes.
        machine.run(1, kind=number % 2, size=1.0 if number % 2 else 0.5)
    price = machine.controller.verdict.price
    assert price is not None
    assert price.s_per_byte * PLAN == pytest.approx(0.1, rel=0.25)
    large = sorted(machine.amounts[101::2])[15]
    small = sorted(machine.amounts[100::2])[15]
    assert small == pytest.approx(large / 2, rel=0.3)


def test_shapes_that_never_come_back_are_bounded_as_the_last_ones() -> None:
    machine = Machine(full=0.12, noise=0.003)
    machine.run(60)
    before = len(machine.amounts)
    for number in range(40):
        machine.run(1, kind=100 + number, size=1.0 + number / 400)
    later = sorted(machine.amounts[before:])
    assert later[20] < PLAN / 5
    assert later[-1] < PLAN / 2, "as a probe at most"


@pytest.mark.parametrize("is_begun_alike", [False, True])
def test_a_price_is_learned_from_shapes_that_never_come_back(is_begun_alike: bool) -> None:
    machine = Machine(full=0.5, noise=0.003)
    for number in range(200):
        opening = 7 if is_begun_alike else None
        machine.run(1, kind=100 + number, size=1.0 + number / 4000, opening=opening)
    price = machine.controller.verdict.price
    assert price is not None
    assert price.s_per_byte * PLAN == pytest.approx(0.5, rel=0.25)
    assert machine.mean_cost(since=ADAPTED + CAMPAIGN_COUNT_MAX) <= LIMIT


@pytest.mark.parametrize("rhythm", ["ds", "sd", "dsss", "sssd", "dds", "sdsdds"])
def test_a_dear_kind_in_turns_with_others_does_not_keep_them_off_for_ever(rhythm: str) -> None:
    """As in the training of two models: steps so short that their hooks are too much already."""
    machine = Machine(full=3.0, noise=0.003)
    turns = [(1, 0.01, 1.0) if one == "d" else (2, 1.0, 0.001) for one in rhythm]

    def run(count: int) -> None:
        for number in range(count):
            kind, size, machine.hooks = turns[number % len(turns)]
            machine.run(1, kind=kind, size=size)

    run(20 * len(turns) + ADAPTED)
    assert sum(map(bool, machine.amounts[-20:])) <= 1, "a probe at most"
    machine.full = 0.001
    run(16 * PROBE_INTERVAL_OFF)
    later = machine.amounts[-len(turns) :]
    assert max(later) == PLAN
    assert min(later) == 0


def test_threads_may_learn_together() -> None:
    machines = [Machine(full=0.1, noise=0.02, seed=seed, hooks=0.001) for seed in range(4)]
    for machine in machines:
        machine.controller = machines[0].controller
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(machines)) as pool:
            learned = [
                pool.submit(machine.run, 400, kind=kind) for kind, machine in enumerate(machines)
            ]
            for one in learned:
                one.result()
    finally:
        sys.setswitchinterval(interval_s)
    assert machines[0].controller.verdict.price is not None


def test_the_same_times_give_the_same_decisions() -> None:
    first, second = (Machine(full=0.07, noise=0.02, outlier_share=0.05, seed=3) for _ in range(2))
    first.run(200)
    for _ in range(200):
        second.run(1)
        # To look changes nothing.
        assert second.controller.verdict == second.controller.verdict
    assert first.amounts == second.amounts


def test_references_are_spread_evenly() -> None:
    turns = [is_reference(turn) for turn in range(CAMPAIGN_COUNT)]
    for period in (1, 2, 4):
        for phase in range(period):
            chosen = turns[phase::period]
            assert sum(chosen) * 2 == len(chosen)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], None),
        ([Pair(1, 1), Pair(1, 1)], None),
        ([Pair(1, 2), Pair(-1, -2), Pair(2, 4)], 2),
        ([Pair(1, 2), Pair(1, 2), Pair(1, 100)], 2),
        ([Pair(1, 100), Pair(10, 20), Pair(10, 20)], 2),
        ([Pair(0, 7), Pair(1, 3), Pair(1, 3), Pair(1, 3)], 3),
    ],
    ids=["none", "too few", "exact", "outlier", "heavy pairs count more", "no difference"],
)
def test_the_slope_of_pairs(pairs: list[Pair], expected: float | None) -> None:
    price = fit(pairs)
    assert (None if price is None else price.s_per_byte) == expected


def test_a_price_below_zero_is_none_with_an_error_as_large() -> None:
    price = fit([Pair(1, -2), Pair(1, -2), Pair(2, -4)])
    assert price is not None
    assert (price.s_per_byte, price.upper) == (0, 2)


def test_the_error_is_that_of_the_noise() -> None:
    draw: Callable[[float, float], float] = random.Random(0).gauss
    inside = 0
    for _ in range(200):
        price = fit(Pair(1.0, 0.1 + draw(0, 0.02)) for _ in range(20))
        assert price is not None
        inside += abs(price.s_per_byte - 0.1) < price.error
    assert 0.6 < inside / 200 < 0.95
