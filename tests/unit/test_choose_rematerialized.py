"""The choice of the saved tensors that are made again from others, without a session."""

from __future__ import annotations

import pytest

from ssdtrain.planning.policy import CAUTION_FALL, CAUTION_START, Item, Policy, Rates
from ssdtrain.planning.rematerialize import (
    CHAIN_MAX,
    HOOKS_S,
    IDLE_FACTOR_MIN,
    LEAD_SHARE_MAX,
    PROOF_COUNT,
    SLOWDOWN_SHARE_MAX,
    Pressure,
    Proof,
    Proofs,
    choose_rematerialized,
    needed_for,
)

MIB = 1 << 20
FAST = Rates(100e9, 100e9)
SLOW = Rates(1e6, 1e6)


def proved(*recipes: tuple[int, float, tuple[int, ...]]) -> Proofs:
    """Return proofs of recipes: key, seconds and the keys of the sources."""
    proofs = Proofs()
    for key, seconds, sources in recipes:
        for _ in range(PROOF_COUNT):
            proofs.note(key, Proof(("silu", key), seconds, sources))
    return proofs


def forward_and_back(count: int, nbytes: int = MIB, every_s: float = 1.0) -> list[Item]:
    """Return storages that are saved one after the other and needed in the opposite order."""
    last_s = 2 * count * every_s
    return [Item(key, nbytes, key * every_s, last_s - key * every_s) for key in range(1, count + 1)]


def test_a_recipe_counts_once_it_was_proved_in_each_round() -> None:
    proofs = Proofs()
    assert proofs.use(1) == "prove"
    for count in range(1, PROOF_COUNT + 1):
        assert proofs.get(1) is None
        proofs.note(1, Proof(("silu",), 1.0 / count, ()))
    found = proofs.get(1)
    assert found is not None
    assert (found.seconds, proofs.use(1)) == (1.0 / PROOF_COUNT, "use")


def test_all_measurements_of_a_form_tell_its_time() -> None:
    proofs = Proofs()
    for key in range(4):
        for number in range(PROOF_COUNT):
            proofs.note(key, Proof(("silu",), 1.0 + (key - 2) ** 2 + number, ()))
    assert {found.seconds for key in range(4) if (found := proofs.get(key))} == {1.0}


def test_other_operations_begin_the_proof_again() -> None:
    proofs = Proofs()
    for operations in [("silu",), ("silu", "mul")] * PROOF_COUNT:
        proofs.note(1, Proof(operations, 1.0, ()))
        assert proofs.get(1) is None


def test_a_recipe_that_made_other_bits_is_never_used_again() -> None:
    proofs = proved((1, 1e-6, ()))
    proofs.bar(1, differs=True)
    assert (proofs.use(1), proofs.get(1), proofs.differing_count) == ("none", None, 1)
    assert choose_rematerialized(forward_and_back(4), proofs) == frozenset()


def test_the_operations_of_all_recipes_take_a_fiftieth_of_the_round_at_most() -> None:
    items = forward_and_back(20)
    whole_s = max(item.needed_s for item in items) - items[0].packed_s
    each_s = whole_s * SLOWDOWN_SHARE_MAX / 5.5 - HOOKS_S
    proofs = proved(*[(item.key, each_s, ()) for item in items])
    assert len(choose_rematerialized(items, proofs)) == 5


def test_what_frees_most_for_a_second_is_made_again_first() -> None:
    items = [Item(1, MIB, 0.0, 9.0), Item(2, 8 * MIB, 1.0, 8.0), Item(3, MIB, 2.0, 7.0)]
    left_s = 9.0 * SLOWDOWN_SHARE_MAX
    proofs = proved((1, 0.6 * left_s, ()), (2, 0.6 * left_s, ()), (3, 0.1 * left_s, ()))
    assert choose_rematerialized(items, proofs) == {2, 3}


def test_the_time_of_operations_that_the_round_had_does_not_count_as_its_own() -> None:
    items = forward_and_back(20)
    whole_s = max(item.needed_s for item in items) - items[0].packed_s
    proofs = proved(*[(item.key, 0.02 * whole_s, ()) for item in items])
    assert len(choose_rematerialized(items, proofs)) == 0
    each_s = whole_s * SLOWDOWN_SHARE_MAX / 2 - HOOKS_S
    proofs = proved(*[(item.key, each_s, ()) for item in items])
    assert len(choose_rematerialized(items, proofs)) == 2
    assert len(choose_rematerialized(items, proofs, before={1, 2})) == 1


def test_a_tensor_that_is_needed_at_once_is_not_made_again() -> None:
    seconds = 0.1
    idle_s = IDLE_FACTOR_MIN * (seconds + HOOKS_S)
    items = [
        Item(1, MIB, 0.0, 100.0),
        Item(2, MIB, 49.0, 49.0 + 1.01 * idle_s),
        Item(3, MIB, 49.0, 49.0 + 0.99 * idle_s),
    ]
    proofs = proved(*[(item.key, seconds, ()) for item in items])
    assert choose_rematerialized(items, proofs) == {1, 2}


def test_a_tensor_that_the_program_holds_is_not_made_again() -> None:
    items = forward_and_back(4)
    proofs = proved((1, 1e-6, ()), (2, 1e-6, ()))
    assert choose_rematerialized(items, proofs, excluded={1}) == {2}


@pytest.mark.parametrize("lead_share", [0.5, 2.0])
def test_a_chain_is_taken_if_its_first_tensor_is_needed_soon_after(lead_share: float) -> None:
    whole_s = 100.0
    lead_s = lead_share * LEAD_SHARE_MAX * whole_s
    items = [Item(1, MIB, 0.0, whole_s), Item(2, 2 * MIB, 1.0, whole_s - lead_s)]
    proofs = proved((1, 1e-6, ()), (2, 1e-6, (1,)))
    assert choose_rematerialized(items, proofs) == ({1, 2} if lead_share < 1 else {2})


def test_a_chain_has_a_length_at_most() -> None:
    items = [Item(key, MIB, 0.01 * key, 100.0 - 0.01 * key) for key in range(3 * CHAIN_MAX)]
    proofs = proved(*[(item.key, 1e-6, (item.key - 1,)) for item in items[1:]])
    chosen = choose_rematerialized(items, proofs)
    lengths = [0]
    for item in items:
        lengths.append(lengths[-1] + 1 if item.key in chosen else 0)
    assert max(lengths) == CHAIN_MAX


def test_a_source_is_needed_when_the_first_of_a_chain_is_made() -> None:
    items = [
        Item(1, MIB, 0.0, 10.0),
        Item(2, MIB, 1.0, 9.0),
        Item(3, MIB, 2.0, 8.0),
    ]
    proofs = proved((2, 1e-6, (1,)), (3, 1e-6, (2,)))
    assert needed_for(items, frozenset({2, 3}), proofs) == {1: 8.0, 2: 8.0}
    assert needed_for(items, frozenset({2}), proofs) == {1: 9.0}


DISK_S = 1e-8
"""Seconds of a disk for a byte: 10 ms for a MiB."""


def test_waits_are_spent_on_recipes_as_long_as_these_are_faster_than_the_disk() -> None:
    # So short a round that its own 2 % are less than a recipe takes.
    items = forward_and_back(20, every_s=DISK_S * MIB / 2)
    each_s = DISK_S * MIB / 2 - HOOKS_S
    # Those of odd keys take longer than the disk.
    proofs = proved(*[(item.key, each_s if item.key % 2 else 3 * each_s, ()) for item in items])

    def chosen(stall_s: float, before: set[int]) -> frozenset[int]:
        pressure = Pressure(1 << 40, stall_s)
        return choose_rematerialized(items, proofs, before=before, pressure=pressure, disk_s=DISK_S)

    assert not chosen(0.0, set())
    first = chosen(2.2 * DISK_S * MIB, set())
    assert len(first) == 2, "the rest of the wait is shorter than a recipe"
    # In the next round these have spared their part of the waits.
    assert chosen(0.0, set(first)) == first
    assert len(chosen(2.2 * DISK_S * MIB, set(first))) == 4
    assert chosen(1e3, set()) == set(range(1, 19, 2)), "the last lies idle for a moment"


def test_a_chain_takes_an_eighth_of_the_bound_at_most() -> None:
    items = [Item(key, MIB, 0.01 * key, 100.0 - 0.01 * key) for key in range(10)]
    proofs = proved(*[(item.key, 1e-6, (item.key - 1,)) for item in items[1:]])
    for bound, most in ((8, 1), (16, 2), (24, 3), (32, 4)):
        chosen = choose_rematerialized(items, proofs, pressure=Pressure(bound * MIB))
        lengths = [1]
        for item in items[1:]:
            lengths.append(lengths[-1] + 1 if item.key in chosen else 1)
        assert max(lengths) == most


def test_dear_recipes_are_proved_once_a_round_has_waited() -> None:
    items = forward_and_back(10, nbytes=8 * MIB, every_s=0.1)
    policy = Policy()
    policy.proofs.put_off(3)
    for stall_s, use in ((0.0, "none"), (0.005, "none"), (0.05, "prove"), (0.0, "prove")):
        policy.learn(7, items, SLOW, 0.0, Pressure(1 << 40, stall_s))
        assert policy.proofs.use(3) == use


def test_a_round_that_waits_for_room_is_planned_again() -> None:
    items = forward_and_back(10, nbytes=8 * MIB, every_s=0.1)
    policy = Policy()
    for stall_s in (0.0, 0.0, 0.0, 0.0, 0.0):
        policy.learn(7, items, SLOW, None, Pressure(1 << 40, stall_s))
    assert policy.plan_count(7) == 3
    policy.learn(7, items, SLOW, None, Pressure(1 << 40, 0.1))
    assert policy.plan_count(7) == 4


def test_the_plan_keeps_and_moves_only_what_is_not_made_again() -> None:
    items = forward_and_back(10, nbytes=8 * MIB, every_s=0.1)
    for rates in (FAST, SLOW):
        policy = Policy()
        policy.proofs = proved((1, 1e-6, ()), (5, 1e-6, (3,)))
        policy.learn(7, items, rates, 0.0)
        plan = policy.plans[7]
        assert plan.rematerialized == {1, 5} == policy.rematerialized
        assert plan.rematerialized_bytes == 16 * MIB
        assert plan.leaving_bytes == plan.written_bytes + 16 * MIB
        assert not plan.keep & {1, 5}
        assert not plan.start_by_s.keys() & {1, 5}
        assert policy.sources == {3}
        assert plan.needed_s[3] == items[4].needed_s


def test_a_later_plan_can_keep_what_was_made_again() -> None:
    items = forward_and_back(10, nbytes=8 * MIB, every_s=0.1)
    policy = Policy()
    policy.proofs = proved((1, 1e-6, (3,)), (2, 1e-6, (4,)))
    policy.learn(7, items, SLOW, 0.0)
    assert policy.sources == {3, 4}
    policy.proofs.bar(1)
    policy.learn(7, items, SLOW, 0.0)
    assert policy.rematerialized == {2}
    assert policy.sources == {4}
    assert 1 in policy.keep


def test_stalls_of_the_first_round_with_a_recipe_are_no_reason_for_caution() -> None:
    """That round reads sources in the order of a round that did not need them early."""
    items = forward_and_back(10, nbytes=8 * MIB, every_s=0.1)
    policy = Policy()
    policy.proofs = proved((5, 1e-6, (3,)))
    policy.learn(7, items, FAST, None)
    cautions = []
    for _ in range(2):
        policy.learn(7, items, FAST, 0.5)
        assert policy.rematerialized == {5}
        cautions.append(policy.basis(7))
    assert cautions == [(FAST, CAUTION_START), (FAST, CAUTION_START * CAUTION_FALL)]
