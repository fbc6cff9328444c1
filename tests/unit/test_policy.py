"""``plan`` and ``Policy``: what is worth a write, on traces that can be computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ssdtrain.planning import policy as policy_module
from ssdtrain.planning.policy import (
    CAUTION_MAX,
    CAUTION_MIN,
    CAUTION_START,
    KNOWLEDGE_MAX,
    MARGIN_S,
    PAGE_BYTES,
    RATE_CHANGE,
    RATE_GUESS,
    ROUND_TRIP_FACTOR,
    SETTLED_COUNT,
    STALL_SHARE_MAX,
    Copies,
    Item,
    Plan,
    Policy,
    Rates,
    plan,
)
from ssdtrain.planning.rematerialize import Pressure

MIB = 1 << 20
EPSILON_S = 1e-9
INSTANT = Rates(1e18, 1e18)

RATE = st.floats(1e6, 1e10)
RATES = st.builds(Rates, RATE, RATE)
COPIES = st.builds(Copies, RATE, RATE)


@st.composite
def traces(draw: st.DrawFn) -> list[Item]:
    """Draw any trace: sizes, times and order of need at random, in the order of packing."""
    now_s = 0.0
    items = []
    for key in range(draw(st.integers(0, 25))):
        now_s += draw(st.floats(0, 0.5))
        needed_s = now_s + draw(st.floats(0, 5))
        items.append(Item(key, draw(st.integers(1, 200 * MIB)), now_s, needed_s))
    return items


def stack(count: int, nbytes: int, forward_s: float, backward_s: float) -> list[Item]:
    """Return the trace of ``count`` equal layers: packed at the end of each, needed in reverse."""
    end_s = count * forward_s
    return [
        Item(index, nbytes, (index + 1) * forward_s, end_s + (count - 1 - index) * backward_s)
        for index in range(count)
    ]


def offloaded(items: Sequence[Item], made: Plan) -> list[Item]:
    return [item for item in items if item.key not in made.keep]


def bytes_offloaded(items: Sequence[Item], rates: Rates) -> int:
    return sum(item.nbytes for item in offloaded(items, plan(items, rates)))


def write_ends_s(items: Sequence[Item], rate: float) -> dict[int, float]:
    """Return when each write ends, one after the other in the order of packing."""
    ends: dict[int, float] = {}
    free_s = 0.0
    for item in items:
        free_s = max(free_s, item.packed_s) + item.nbytes / rate
        ends[item.key] = free_s
    return ends


# --- plan ---------------------------------------------------------------------


@given(traces(), RATES)
def test_every_item_is_kept_or_has_a_start(items: list[Item], rates: Rates) -> None:
    made = plan(items, rates)
    assert made.keep.isdisjoint(made.start_by_s)
    assert made.keep | made.start_by_s.keys() == {item.key for item in items}


@given(traces(), RATES)
def test_nothing_is_written_that_is_needed_too_soon(items: list[Item], rates: Rates) -> None:
    for item in offloaded(items, plan(items, rates)):
        round_trip_s = item.nbytes / rates.write + item.nbytes / rates.read
        assert item.needed_s - item.packed_s > ROUND_TRIP_FACTOR * round_trip_s


@given(traces(), RATES)
def test_reads_meet_their_deadlines_one_after_the_other(items: list[Item], rates: Rates) -> None:
    made = plan(items, rates)
    busy_until_s = float("-inf")
    for item in sorted(offloaded(items, made), key=lambda item: made.start_by_s[item.key]):
        start_s = made.start_by_s[item.key]
        assert start_s >= busy_until_s - EPSILON_S
        busy_until_s = start_s + item.nbytes / rates.read
        assert busy_until_s <= item.needed_s - MARGIN_S + EPSILON_S


@given(traces(), RATES)
def test_reads_begin_when_all_writes_have_ended(items: list[Item], rates: Rates) -> None:
    made = plan(items, rates)
    ends = write_ends_s(offloaded(items, made), rates.write)
    if ends:
        assert min(made.start_by_s.values()) >= max(ends.values()) - EPSILON_S


@given(traces())
def test_an_infinitely_fast_disk_takes_all_that_lies_idle(items: list[Item]) -> None:
    assume(all(abs(item.needed_s - item.packed_s - MARGIN_S) > EPSILON_S for item in items))
    # One that is needed before the last is packed comes between the writes.
    last_s = max((item.packed_s for item in items), default=0.0)
    items = [
        Item(one.key, one.nbytes, one.packed_s, one.needed_s + last_s - one.packed_s + 2 * MARGIN_S)
        if one.needed_s - one.packed_s > MARGIN_S
        else one
        for one in items
    ]
    idle = [item for item in items if item.needed_s - item.packed_s > MARGIN_S]
    assert offloaded(items, plan(items, INSTANT)) == idle


@given(
    st.integers(1, 60),
    st.integers(1, 64 * MIB),
    st.floats(1e-3, 0.2),
    st.floats(1e-3, 0.4),
    RATES,
    st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
)
def test_a_slower_disk_never_takes_more(
    count: int,
    nbytes: int,
    forward_s: float,
    backward_s: float,
    rates: Rates,
    share: tuple[float, float],
) -> None:
    items = stack(count, nbytes, forward_s, backward_s)
    slow = Rates(rates.write * share[0], rates.read * share[1])
    assert bytes_offloaded(items, slow) <= bytes_offloaded(items, rates)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_the_cut_is_the_one_of_the_paper(share: float) -> None:
    """Uniform layers: what the disk moves in the time until the reads must begin, and no more.

    Section 3.3 of the paper offloads bytes = bandwidth x forward time from the front. With layers
    of ``b`` bytes, forward ``f`` and backward ``2 f`` each, k of n layers fit if the last of k
    writes ends before the first of k reads begins. The first write begins at f, so the writes end
    at f + k b / w when the disk is the bottleneck. Layer i is needed at n f + (n - 1 - i) 2 f; the
    reads end by the need of layer k - 1 plus one layer's read before, chained:
    start = n f + (n - k) 2 f - margin - b / r, if a read takes less than 2 f.
    """
    count, nbytes, forward_s = 100, 10 * MIB, 0.01
    backward_s = 2 * forward_s
    write = share * nbytes / forward_s
    read = 4 * nbytes / backward_s
    fits = 0
    for k in range(1, count + 1):
        write_end_s = forward_s + k * nbytes / write
        read_start_s = (count + 2 * (count - k)) * forward_s - MARGIN_S - nbytes / read
        idle_s = (count - k + 2 * (count - k)) * forward_s
        round_trip_s = nbytes / write + nbytes / read
        if write_end_s <= read_start_s and idle_s > ROUND_TRIP_FACTOR * round_trip_s + MARGIN_S:
            fits = k
    items = stack(count, nbytes, forward_s, backward_s)
    taken = offloaded(items, plan(items, Rates(write, read)))
    assert 0 < fits < count
    assert [item.key for item in taken] == list(range(fits))
    # By the paper: bandwidth x (time from the first pack to the first read), to one layer.
    in_closed_form = (3 * count - 1) * forward_s / (nbytes / write + backward_s)
    assert abs(fits - in_closed_form) <= 1 + MARGIN_S / forward_s


def test_a_layer_that_is_kept_does_not_delay_the_others() -> None:
    """The last module of a forward is kept; those before it are not held up by its write."""
    items = [*stack(10, MIB, 0.1, 0.2), Item(10, 1024 * MIB, 1.0, 1.001)]
    made = plan(items, Rates(1e9, 1e9))
    assert 10 in made.keep
    assert not made.keep & set(range(8))


def test_needs_and_gaps_are_told() -> None:
    items = [Item(0, MIB, 0.0, 5.0), Item(1, MIB, 1.0, 4.5), Item(2, MIB, 2.0, 2.0)]
    made = plan(items, INSTANT)
    assert min(made.needed_s.values()) == 2.0
    assert made.longest_gap_s == 2.5
    assert made.keep == {2}
    assert made.start_by_s[0] == pytest.approx(5.0 - MARGIN_S)


def test_sixty_thousand_items_are_planned() -> None:
    items = stack(60_000, MIB, 1e-4, 2e-4)
    assert 0 < len(offloaded(items, plan(items, Rates(1e9, 1e9)))) < len(items)


# --- copies of GPUs -----------------------------------------------------------


def on_gpus(items: Sequence[Item], *gpus: int) -> list[Item]:
    """Return the same items, dealt out to GPUs."""
    return [item._replace(gpu=gpus[place % len(gpus)]) for place, item in enumerate(items)]


@given(traces(), RATES)
def test_copies_of_which_nothing_is_known_bound_nothing(items: list[Item], rates: Rates) -> None:
    assert plan(on_gpus(items, 0, 1), rates) == plan(items, rates)


@given(traces(), RATES, COPIES)
def test_copies_do_not_bound_what_is_on_the_cpu(
    items: list[Item], rates: Rates, copies: Copies
) -> None:
    assert plan(items, replace(rates, copies={0: copies})) == plan(items, rates)


@given(traces(), RATES)
def test_with_an_instant_disk_the_copies_are_the_bound(items: list[Item], rates: Rates) -> None:
    instant = Rates(math.inf, math.inf, {0: Copies(down=rates.write, up=rates.read)})
    taken = offloaded(items, plan(items, rates))
    ends_s = write_ends_s(taken, rates.write)
    last_packed_s = max((item.packed_s for item in items), default=0.0)
    in_time = [item.key for item in taken if ends_s[item.key] <= last_packed_s]
    made = plan(on_gpus(items, 0), instant)
    assert [item.key for item in offloaded(items, made)] == in_time, "the rest lowers no peak"


@given(traces(), RATES, COPIES, COPIES)
def test_copies_and_reads_meet_the_deadlines_of_their_links(
    items: list[Item], rates: Rates, first: Copies, second: Copies
) -> None:
    items, rates = on_gpus(items, 0, 1), replace(rates, copies={0: first, 1: second})
    made = plan(items, rates)
    taken = offloaded(items, made)
    copied_s = dict.fromkeys((0, 1), 0.0)
    disk_s = 0.0
    for item in taken:
        assert item.gpu is not None
        copied_s[item.gpu] = max(copied_s[item.gpu], item.packed_s) + (
            item.nbytes / rates.copies[item.gpu].down
        )
        disk_s = max(disk_s, copied_s[item.gpu]) + item.nbytes / rates.write
    read_s = disk_s
    copied_s = dict.fromkeys((0, 1), 0.0)
    for item in sorted(taken, key=lambda item: made.start_by_s[item.key]):
        assert item.gpu is not None
        assert made.start_by_s[item.key] >= read_s - EPSILON_S, "the disk does one after the other"
        read_s = made.start_by_s[item.key] + item.nbytes / rates.read
        up = rates.copies[item.gpu].up
        copied_s[item.gpu] = max(copied_s[item.gpu], read_s) + item.nbytes / up
        assert copied_s[item.gpu] <= item.needed_s - MARGIN_S + EPSILON_S


def test_each_gpu_has_a_link_of_its_own() -> None:
    items = stack(100, 10 * MIB, 0.002, 0.004)
    rates = Rates(4e9, 16e9, {0: Copies(2e9, 8e9), 1: Copies(2e9, 8e9)})
    alone = len(offloaded(items, plan(on_gpus(items, 0), rates)))
    shared = len(offloaded(items, plan(on_gpus(items, 0, 1), rates)))
    assert alone < shared <= len(offloaded(items, plan(items, Rates(4e9, 16e9))))


def copied_s(policy: Policy, items: Sequence[Item]) -> dict[int, float | None]:
    return {item.key: policy.moments[item.key][2] for item in items}


def test_it_is_told_when_each_has_been_copied_where_the_rate_is_known() -> None:
    items = on_gpus(stack(100, 10 * MIB, 0.002, 0.004), 0, 1, 2)
    copies = {0: Copies(2e9, 8e9), 1: Copies(4e9, 8e9), 2: Copies()}
    policy = Policy()
    policy.learn(7, items, Rates(16e9, 16e9, copies), 0.0)
    taken = offloaded(items, policy.plans[7])
    assert {item.gpu for item in taken} == {0, 1, 2}
    expected: dict[int, float | None] = {}
    ended_s = {0: 0.0, 1: 0.0}
    for item in items:
        if item in taken and item.gpu in ended_s:
            # Caution is for the amount. A copy ends when it ends.
            packed_s = item.packed_s - items[item.gpu].packed_s
            ended_s[item.gpu] = (
                max(ended_s[item.gpu], packed_s) + item.nbytes / copies[item.gpu].down
            )
        known = item in taken and item.gpu in ended_s
        expected[item.key] = pytest.approx(ended_s[item.gpu]) if known else None
    assert copied_s(policy, items) == expected


def test_moments_on_each_gpu_begin_with_its_first_pack() -> None:
    items = on_gpus(stack(20, 10 * MIB, 0.002, 0.004), 0)
    items = [item._replace(gpu=1) if place >= 10 else item for place, item in enumerate(items)]
    policy = Policy()
    policy.learn(7, items, Rates(16e9, 16e9), 0.0)
    for item in items:
        began_s = items[10 * (item.gpu or 0)].packed_s
        assert policy.moments[item.key][:2] == (item.packed_s - began_s, item.needed_s - began_s)


def test_what_is_packed_late_on_another_gpu_lends_no_time() -> None:
    items = stack(20, 100 * MIB, 0.01, 1.0)
    late = items[-1]._replace(key=99, packed_s=items[-1].packed_s + 5, gpu=1)
    rates = Rates(1e12, 1e12, {0: Copies(5e9, 5e9)})
    alone = plan(on_gpus(items, 0), rates)
    beside = plan([*on_gpus(items, 0), late], rates)
    assert offloaded(items, beside) == offloaded(items, alone) != items


def test_what_was_measured_tells_the_end_of_a_copy() -> None:
    items, policy = on_gpus(stack(100, 10 * MIB, 0.002, 0.004), 0), Policy()
    rates = Rates(16e9, 16e9, {0: Copies(4e9, 8e9)})
    policy.learn(7, items, rates, 0.0)
    before = copied_s(policy, items)
    late = next(key for key, moment_s in before.items() if moment_s is not None)
    kept = items[-1].key
    policy.note_copied([(late, 1.5), (kept, 1.5)])
    assert copied_s(policy, items) == before | {late: 1.5}
    # A new plan knows it, and that those of which nothing was measured come after it.
    policy.learn(7, items, rates, 0.0)
    after = copied_s(policy, items)
    assert after[late] == 1.5
    following = [moment_s for moment_s in after.values() if moment_s is not None][1:]
    assert following
    assert min(following) > 1.5
    policy.note_copied([(late, 0.5)])
    assert copied_s(policy, items)[late] == 0.5


def test_a_policy_knows_moments_of_what_is_on_a_gpu() -> None:
    items = [
        item._replace(packed_s=item.packed_s + 50, needed_s=item.needed_s + 50)
        for item in stack(20, 10 * MIB, 0.002, 0.004)
    ]
    items = [*on_gpus(items[:10], 0), *items[10:]]
    policy = Policy()
    policy.learn(7, items, Rates(4e9, 4e9, {0: Copies(8e9, 8e9)}), 0.0)
    made = policy.plans[7]
    assert set(policy.moments) == {item.key for item in items[:10]}
    for item in items[:10]:
        packed_s, needed_s, copied_s = policy.moments[item.key]
        began_s = items[0].packed_s
        assert (packed_s, needed_s) == (item.packed_s - began_s, item.needed_s - began_s)
        assert (copied_s is None) == (item.key in made.keep)
    assert not made.keep.issuperset(policy.moments)


# --- memory of the CPU for tensors of GPUs ------------------------------------


@given(traces(), RATES, COPIES, st.integers(0, 2000 * MIB))
def test_pinned_tensors_fit_and_meet_the_deadlines_of_their_link(
    items: list[Item], rates: Rates, copies: Copies, host_bytes: int
) -> None:
    items = on_gpus(items, 0, 1)
    rates = replace(rates, copies={0: copies})
    made = plan(items, rates, host_bytes)
    pinned = [item for item in items if item.key in made.pinned]
    assert not made.pinned & made.keep
    assert {item.gpu for item in pinned} <= {0}, "the other GPU's copies do not go there"
    pages = sum(math.ceil(item.nbytes / PAGE_BYTES) * PAGE_BYTES for item in pinned)
    assert made.pinned_bytes == pages
    assert pages <= host_bytes
    taken = offloaded(items, made)
    assert made.written_bytes == sum(item.nbytes for item in taken if item.key not in made.pinned)
    copied_s = 0.0
    for item in taken:
        if item.gpu == 0:
            copied_s = max(copied_s, item.packed_s) + item.nbytes / copies.down
            assert made.start_by_s[item.key] >= copied_s - EPSILON_S
    begin_s = -math.inf
    backwards = sorted(taken, key=lambda item: item.needed_s, reverse=True)
    for item in reversed(backwards):
        if item.gpu == 0:
            begin_s = max(begin_s, made.start_by_s[item.key]) + item.nbytes / copies.up
            if item.key in made.pinned:
                assert begin_s <= item.needed_s - MARGIN_S + EPSILON_S


@given(traces(), RATES, st.integers(0, 2000 * MIB))
def test_pinned_memory_is_for_gpus(items: list[Item], rates: Rates, host_bytes: int) -> None:
    assert plan(items, rates, host_bytes) == plan(items, rates)


def test_the_last_that_leave_stay_pinned_and_the_disk_is_written_less() -> None:
    items = on_gpus(stack(100, 10 * MIB, 0.002, 0.004), 0)
    rates = Rates(2e9, 8e9, {0: Copies(20e9, 20e9)})
    alone = plan(items, rates)
    host_bytes = 10 * 10 * MIB
    made = plan(items, rates, host_bytes)
    assert len(offloaded(items, alone)) + 9 <= len(offloaded(items, made))
    last = [item.key for item in offloaded(items, made)][-10:]
    assert made.pinned == set(last)
    assert made.pinned_bytes == host_bytes
    # A disk that could take all is spared what has room.
    fast = Rates(1e12, 1e12, {0: Copies(1e12, 1e12)})
    spared = plan(items, fast, host_bytes)
    assert spared.written_bytes == plan(items, fast).written_bytes - host_bytes
    assert not plan(items, fast, 2000 * MIB).written_bytes


def test_a_disk_that_is_no_use_leaves_pinned_memory_to_be_used() -> None:
    items = on_gpus(stack(100, 10 * MIB, 0.002, 0.004), 0)
    rates = Rates(1e3, 1e3, {0: Copies(20e9, 20e9)})
    assert not offloaded(items, plan(items, rates))
    made = plan(items, rates, 50 * 10 * MIB)
    assert made.written_bytes == 0
    # The last ones are needed too soon for any link.
    assert [item.key for item in offloaded(items, made)] == sorted(made.pinned)
    assert len(made.pinned) == 50


def test_bolder_plans_find_their_memory_pinned() -> None:
    policy = Policy(host_bytes=1000 * MIB)
    items = on_gpus(stack(100, 10 * MIB, 0.002, 0.004), 0)
    rates = Rates(1e9, 1e9, {0: Copies(4e9, 8e9)})
    policy.learn(1, items, rates, 0.0)
    room_bytes = policy.pinned_bytes_max(1)
    assert room_bytes < 2 * policy.plans[1].pinned_bytes
    for _ in range(10):
        policy.learn(1, items, rates, 0.0)
        assert policy.plans[1].pinned_bytes <= room_bytes
    assert policy.pinned_bytes_max(2) == 0


def test_what_is_too_long_for_its_way_to_the_disk_is_not_planned() -> None:
    items = on_gpus(stack(10, 100 * MIB, 0.1, 0.2), 0)
    items[0] = items[0]._replace(nbytes=300 * MIB)
    copies = {0: Copies(20e9, 20e9, longest_bytes=200 * MIB)}
    made = plan(items, Rates(4e9, 4e9, copies))
    assert items[0].key in made.keep
    assert offloaded(items, made)
    assert items[0].key in plan(items, Rates(4e9, 4e9, copies), 200 * MIB).keep
    assert items[0].key in plan(items, Rates(4e9, 4e9, copies), 2000 * MIB).pinned


def test_a_policy_without_pinned_memory_to_have_plans_without() -> None:
    policy = Policy(host_bytes=1000 * MIB)
    items = on_gpus(stack(10, 10 * MIB, 0.002, 0.004), 0)
    rates = Rates(1e9, 1e9, {0: Copies(20e9, 20e9)})
    policy.learn(1, items, rates, 0.0)
    assert policy.pinned == policy.plans[1].pinned != set()
    for _ in range(SETTLED_COUNT):
        policy.learn(1, items, rates, 0.0)
    policy.forgo_host_memory()
    assert not policy.pinned
    # Also one that had settled, which else would go on reckoning with that memory.
    policy.learn(1, items, rates, 0.0)
    assert not policy.pinned
    assert not policy.plans[1].pinned_bytes


# --- Policy -------------------------------------------------------------------

STEADY = Rates(1e9, 1e9)
SIGNATURE = 7
TRACE = stack(40, 8 * MIB, 0.01, 0.02)


def taken_count(policy: Policy) -> int:
    return sum(item.key not in policy.keep for item in TRACE)


def learn(policy: Policy, *stall_shares: float, rates: Rates = STEADY) -> None:
    for share in stall_shares:
        policy.learn(SIGNATURE, TRACE, rates, share)


def test_learned_keys_are_kept() -> None:
    policy = Policy()
    learn(policy, 0.0)
    made = policy.plans.get(SIGNATURE)
    assert made is not None
    assert 0 < len(made.keep) < len(TRACE)
    for item in TRACE:
        assert policy.knows(item.key)
        assert (item.key in policy.keep) == (item.key in made.keep)
    assert 999 not in policy.keep
    assert not policy.knows(999)


def test_the_plan_is_made_with_caution() -> None:
    policy = Policy()
    learn(policy, 0.0)
    share = CAUTION_START * 1.05
    expected = plan(TRACE, Rates(STEADY.write * share, STEADY.read * share))
    assert policy.plans.get(SIGNATURE) == expected


def test_stalls_shrink_the_plan_and_calm_lets_it_recover() -> None:
    policy = Policy()
    learn(policy, 0.0)
    counts, cautions = [taken_count(policy)], [policy._caution]
    for _ in range(4):
        learn(policy, 0.5)
        counts.append(taken_count(policy))
        cautions.append(policy._caution)
    assert cautions == sorted(cautions, reverse=True)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]
    # Whatever made it stall has passed: step by step, not at once, it takes more again.
    low = policy._caution
    learn(policy, 0.0)
    assert taken_count(policy) < counts[0]
    learn(policy, *[0.0] * 1000)
    assert policy._caution > low
    assert taken_count(policy) > counts[-1]


def test_a_stall_in_the_first_round_is_no_reason_for_caution() -> None:
    policy = Policy()
    learn(policy, 1.0)
    assert policy._caution > CAUTION_START


def test_a_round_that_went_by_an_older_plan_tells_nothing_of_the_caution_of_the_last() -> None:
    policy = Policy()
    learn(policy, 0.0)
    began_with = policy.made_count
    assert policy.is_by_last_plan(SIGNATURE, began_with)
    learn(policy, 0.5)
    assert not policy.is_by_last_plan(SIGNATURE, began_with)
    assert policy.is_by_last_plan(SIGNATURE, policy.made_count)
    assert policy.is_by_last_plan(SIGNATURE + 1, 0), "there is no plan"
    low = policy._caution
    policy.learn(SIGNATURE, TRACE, STEADY, None)
    assert policy._caution == low


def test_keys_settle() -> None:
    policy = Policy()
    learn(policy, *[0.0] * SETTLED_COUNT)
    settled = policy.plans.get(SIGNATURE)
    nearly = (RATE_CHANGE + 1) / 2
    for share in (0.0, STALL_SHARE_MAX):
        learn(policy, share)
        learn(policy, share, rates=Rates(STEADY.write * nearly, STEADY.read / nearly))
    assert policy.plans.get(SIGNATURE) is settled


@pytest.mark.parametrize(
    ("share", "rates"),
    [
        (2 * STALL_SHARE_MAX, STEADY),
        (0.0, Rates(STEADY.write * 1.01 * RATE_CHANGE, STEADY.read)),
        (0.0, Rates(STEADY.write / 1.01 / RATE_CHANGE, STEADY.read)),
        (0.0, Rates(STEADY.write, STEADY.read / 1.01 / RATE_CHANGE)),
        (0.0, replace(STEADY, copies={0: Copies(down=1e9)})),
        (0.0, replace(STEADY, copies={0: Copies(up=1e9)})),
    ],
    ids=[
        "stall",
        "faster writes",
        "slower writes",
        "slower reads",
        "known copies to the host",
        "known copies to the GPU",
    ],
)
def test_changes_that_unsettle(share: float, rates: Rates) -> None:
    policy = Policy()
    learn(policy, *[0.0] * SETTLED_COUNT)
    settled = policy.plans.get(SIGNATURE)
    learn(policy, share, rates=rates)
    assert policy.plans.get(SIGNATURE) is not settled


def test_rates_that_creep_away_from_the_last_plan_unsettle() -> None:
    policy = Policy()
    learn(policy, *[0.0] * SETTLED_COUNT)
    settled = policy.plans.get(SIGNATURE)
    factor = 1.0
    while factor < RATE_CHANGE:
        factor *= 1.05
        learn(policy, 0.0, rates=Rates(STEADY.write / factor, STEADY.read))
    assert policy.plans.get(SIGNATURE) is not settled


def test_a_session_that_has_moved_nothing_goes_by_what_the_one_before_measured() -> None:
    items = stack(8, 50 * MIB, 0.1, 0.2)
    slow, unknown = Rates(1e7, 2e7), Rates(RATE_GUESS, RATE_GUESS)
    policies = Policy(), Policy(), Policy()
    for policy, told in zip(policies, (slow, unknown, Rates(1e7, RATE_GUESS)), strict=True):
        policy.learn(1, items, slow, 0.0)
        policy.learn(1, items, told, 0.0)
    assert policies[0].plans == policies[1].plans == policies[2].plans
    fresh = Policy()
    fresh.learn(1, items, unknown, 0.0)
    assert fresh.plans != policies[0].plans


def test_without_a_disk_only_pinned_memory_takes_tensors() -> None:
    on_gpu = [item._replace(gpu=0) for item in stack(8, 50 * MIB, 0.1, 0.2)]
    on_cpu = [item._replace(key=100 + item.key) for item in stack(8, 50 * MIB, 0.1, 0.2)]
    items = sorted([*on_gpu, *on_cpu], key=lambda item: item.packed_s)
    policy = Policy(host_bytes=200 * MIB)
    no_disk = Rates(0.0, 0.0, {0: Copies(1e10, 1e10)})
    for _ in range(SETTLED_COUNT + 1):
        policy.learn(1, items, no_disk, 0.0)
    (made,) = policy.plans.values()
    assert made.pinned == policy.pinned == set(made.start_by_s)
    assert made.pinned_bytes == 200 * MIB
    assert made.written_bytes == 0
    assert {item.key for item in on_cpu} < policy.keep
    assert not policy.keep & policy.pinned


def test_rounds_of_which_nothing_leaves_are_followed_when_caution_has_fallen_by_much() -> None:
    policy = Policy()
    learn(policy, *[0.0] * SETTLED_COUNT, *[1.0] * 20)
    assert policy._caution == CAUTION_MIN
    assert policy.would_plan_anew() is False
    followed, plans = 0, {id(policy.plans.get(SIGNATURE))}
    for _ in range(100):
        if policy.would_plan_anew():
            learn(policy, 0.0)
            followed += 1
            plans.add(id(policy.plans.get(SIGNATURE)))
    assert policy._caution == CAUTION_MAX
    # From one plan to the next the caution rises by a quarter.
    most = math.log(CAUTION_MAX / CAUTION_MIN) / math.log(RATE_CHANGE)
    assert most / 2 < followed <= most + 1
    assert len(plans) > 1
    assert not policy.would_plan_anew()


def test_signatures_are_learned_apart() -> None:
    policy = Policy()
    learn(policy, *[0.0] * SETTLED_COUNT)
    settled = policy.plans.get(SIGNATURE)
    other = [Item(item.key + 1000, item.nbytes, item.packed_s, item.needed_s) for item in TRACE]
    policy.learn(8, other, Rates(1e6, 1e6), 0.0)
    assert policy.plans.get(SIGNATURE) is settled
    assert all(item.key in policy.keep for item in other)
    assert taken_count(policy) > 0


def test_a_futile_key_stays_kept() -> None:
    policy = Policy()
    policy.note_futile(0)
    assert 0 in policy.keep
    learn(policy, 0.0)
    assert 0 in policy.keep
    assert 1 not in policy.keep


def test_knowledge_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KNOWLEDGE_MAX < 1 << 20, "a bound that no process would reach"
    bound = 1000
    monkeypatch.setattr(policy_module, "KNOWLEDGE_MAX", bound)
    policy = Policy()
    idle = [Item(key, 1, 0.0, 10.0) for key in range(bound // 2)]
    for turn in range(4):
        items = [Item(turn * len(idle) + one.key, 1, 0.0, 10.0) for one in idle]
        policy.learn(turn, items, STEADY, 0.0)
        assert len(policy._planned) <= bound + len(idle)
    assert not policy.knows(0)
    assert policy.knows(3 * len(idle))


@pytest.mark.parametrize("write", [1e9, 0.0])
def test_the_room_on_a_gpu_is_made_at_any_price(write: float) -> None:
    """Also by copies that end after the last pack, and in a forward that takes no time."""
    items = [Item(key, 1 << 20, 0.0, 1.0 - key / 100, gpu=0) for key in range(20)]
    rates = Rates(write, write, {0: Copies(down=1e9, up=1e9)})
    room_bytes = 4 << 20
    policy = Policy(host_bytes=0 if write else 32 << 20)
    policy.learn(1, items, rates, 0.0)
    assert policy.plans[1].keep == {item.key for item in items}
    policy.learn(1, items, rates, 0.0, Pressure(1 << 30, room_bytes=room_bytes))
    staying_bytes = sum(item.nbytes for item in items if item.key in policy.plans[1].keep)
    assert staying_bytes <= room_bytes
