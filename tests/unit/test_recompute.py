"""``choose`` and ``Choices``: swap or recompute, on rounds that can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain.planning.policy import RATE_CHANGE
from ssdtrain.planning.recompute import (
    MEASURED_COUNT,
    RATE_SHARES,
    SURPRISES_MAX,
    Block,
    Choices,
    Disk,
    Measured,
    choose,
    step_s,
)

MIB = 1 << 20
KIND = 7
EPSILON = 1 + 1e-9

DISKS = st.builds(Disk, st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(0, 1e9))


@st.composite
def rounds(draw: st.DrawFn, most: int = 40) -> Measured:
    """Draw any round: blocks of any cost, of which some save no more than they are given."""
    sizes = st.integers(0, 200 * MIB)
    blocks = [
        Block(key, draw(st.floats(0, 2)), draw(sizes), draw(sizes))
        for key in range(draw(st.integers(0, most)))
    ]
    return measured(blocks, other_bytes=draw(sizes), backward_factor=draw(st.floats(1, 3)))


def measured(
    blocks: Sequence[Block], *, other_bytes: int = 0, backward_factor: float = 2.0
) -> Measured:
    forward_s = sum(block.forward_s for block in blocks)
    return Measured(tuple(blocks), other_bytes, forward_s, backward_factor * forward_s)


def equal_blocks(count: int, forward_s: float = 0.1) -> Measured:
    return measured([Block(key, forward_s, 100 * MIB, 10 * MIB) for key in range(count)])


def keys(blocks: Sequence[Block]) -> frozenset[int]:
    return frozenset(block.key for block in blocks)


@given(rounds(), DISKS)
def test_a_choice_is_never_worse_than_all_or_nothing(one: Measured, disk: Disk) -> None:
    ours_s = step_s(one, disk, choose(one, disk))
    useful = [block for block in one.blocks if block.freed_bytes]
    assert ours_s <= step_s(one, disk, frozenset()) * EPSILON
    assert ours_s <= step_s(one, disk, keys(useful)) * EPSILON


@given(rounds(6), DISKS)
def test_no_set_is_better_by_more_than_one_block(one: Measured, disk: Disk) -> None:
    """The best place along the order may lie inside of a block, of which there are no parts."""
    chosen = choose(one, disk)
    counts = range(len(one.blocks) + 1)
    sets = (keys(some) for count in counts for some in combinations(one.blocks, count))
    best_s = min(step_s(one, disk, some) for some in sets)
    longest_s = max((block.forward_s for block in one.blocks), default=0.0)
    assert step_s(one, disk, chosen) <= (best_s + longest_s) * EPSILON


@given(st.integers(0, 8), st.floats(0, 2), DISKS)
def test_of_equal_blocks_the_choice_is_the_best_set(
    count: int, forward_s: float, disk: Disk
) -> None:
    one = equal_blocks(count, forward_s)
    seconds = [step_s(one, disk, frozenset(range(some))) for some in range(count + 1)]
    chosen = choose(one, disk)
    assert step_s(one, disk, chosen) <= min(seconds) * EPSILON
    fewer = seconds[: len(chosen)]
    assert all(few_s > step_s(one, disk, chosen) for few_s in fewer), "fewer would have done"


@given(rounds())
def test_nothing_is_computed_again_that_a_disk_hides_or_that_fits(one: Measured) -> None:
    assert not choose(one, Disk(math.inf, math.inf, 0))
    assert not choose(one, Disk(1e6, 1e6))
    assert not choose(one, Disk(1e6, 1e6, one.saved_bytes))


def test_on_a_slow_disk_blocks_are_computed_again_until_nothing_waits() -> None:
    one = equal_blocks(10)
    # 1000 MiB are saved, 190 may stay; forward writes 360 in its second, backward reads more.
    disk = Disk(360 * MIB, 1e12, 190 * MIB)
    chosen = choose(one, disk)
    assert len(chosen) == 5
    assert step_s(one, disk, chosen) == pytest.approx(one.compute_s + 5 * 0.1)


def test_cheap_bytes_come_first() -> None:
    cheap, dear = Block(1, 0.1, 100 * MIB, 0), Block(2, 0.3, 100 * MIB, 0)
    one = measured([dear, cheap])
    assert choose(one, Disk(1e3, 1e12, 100 * MIB)) == {1}


def learned(choices: Choices, one: Measured | None, disk: Disk, stall_s: float = 0.0) -> set[int]:
    choices.learn(KIND, one, disk, stall_s)
    return set(choices.chosen)


def chosen_on(disk: Disk, one: Measured) -> Choices:
    choices = Choices()
    for _ in range(MEASURED_COUNT):
        assert not choices.chosen
        choices.learn(KIND, one, disk, 0.0)
    return choices


ONE = equal_blocks(10)
SLOW, FAST = Disk(360 * MIB, 1e12, 190 * MIB), Disk(1e12, 1e12, 190 * MIB)


def test_first_rounds_are_measured() -> None:
    choices = chosen_on(SLOW, ONE)
    assert choices.chosen == choose(ONE, SLOW.times(RATE_SHARES[0]))
    assert choices.freed_bytes == dict.fromkeys(range(10), 90 * MIB)
    assert not chosen_on(FAST, ONE).chosen


def test_a_choice_stays_while_rates_stay() -> None:
    choices = chosen_on(SLOW, ONE)
    before = set(choices.chosen)
    for factor in (1 / RATE_CHANGE + 0.01, RATE_CHANGE - 0.01, 1.0) * 10:
        assert learned(choices, None, replace(SLOW, write=SLOW.write * factor)) == before


def test_a_choice_follows_rates_that_move() -> None:
    choices = chosen_on(SLOW, ONE)
    assert not learned(choices, None, FAST)
    slower = replace(SLOW, write=SLOW.write / 2)
    assert learned(choices, None, slower) == choose(ONE, slower.times(RATE_SHARES[0]))


def test_a_choice_stays_unless_the_step_gets_shorter_by_enough() -> None:
    # Writing takes 0.11 s longer than forward, and one block less costs 0.1 s.
    one = measured([Block(key, 0.1, 100 * MIB, 0) for key in range(10)], backward_factor=1.0)
    near = Disk(900 * MIB / RATE_SHARES[0], 1e12, 0)
    assert choose(one, near.times(RATE_SHARES[0]))
    assert not chosen_on(near, one).chosen


def test_waits_that_nobody_expected_are_answered_twice_at_most() -> None:
    choices = chosen_on(SLOW, ONE)
    sets = [set(choices.chosen)]
    for _ in range(20):
        # Once by chance is no reason.
        assert learned(choices, None, SLOW, stall_s=0.0) == sets[-1]
        for _ in range(SURPRISES_MAX):
            assert set(choices.chosen) == sets[-1]
            choices.learn(KIND, None, SLOW, 1.0)
        if choices.chosen != sets[-1]:
            sets.append(set(choices.chosen))
    assert sets == [set(choose(ONE, SLOW.times(share))) for share in RATE_SHARES]
    assert len(sets[0]) < len(sets[1]) < len(sets[2])


def test_single_waits_change_nothing_however_many() -> None:
    choices = chosen_on(SLOW, ONE)
    before = set(choices.chosen)
    for _ in range(10 * SURPRISES_MAX):
        assert learned(choices, None, SLOW, stall_s=1.0) == before
        assert learned(choices, None, SLOW, stall_s=0.0) == before


def test_waits_that_were_expected_change_nothing() -> None:
    # To compute its one block again costs a second, the wait less; with the next share, more.
    one = measured([Block(0, 1.0, 1000 * MIB, 0)])
    disk = Disk(700 * MIB, 1e12, 0)
    choices = chosen_on(disk, one)
    stall_s = step_s(one, disk, frozenset()) - one.compute_s
    assert stall_s > 0.4
    for _ in range(3 * SURPRISES_MAX):
        assert not learned(choices, one, disk, stall_s)
    for _ in range(SURPRISES_MAX):
        choices.learn(KIND, one, disk, stall_s + 0.1)
    assert choices.chosen == {0}


def test_kinds_are_forgotten_before_they_are_too_many() -> None:
    choices = chosen_on(SLOW, ONE)
    for kind in range(1000):
        choices.learn(1000 + kind, None, SLOW, 0.0)
    assert not choices.chosen
    assert not choices.freed_bytes
