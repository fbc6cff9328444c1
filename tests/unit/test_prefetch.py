"""In which order reads are begun, how far ahead, and what becomes of a wrong guess."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain.activations.prefetch import (
    ORDERS_MAX,
    UNFINISHED_MAX,
    WINDOW_BYTES,
    Prefetcher,
    Round,
    next_key,
)
from ssdtrain.errors import StorageError
from ssdtrain.notices import Notices
from ssdtrain.planning.policy import Plan, Policy, Rates
from ssdtrain.stalls import Stalls
from support import Rig

MIB = 1 << 20
FORWARD = -1
NO_BOUND = 1 << 62


class FakeLoading:
    """A read under way, for as long as somebody holds it."""


class FakeHandle:
    """Bytes in the store."""

    def __init__(self, nbytes: int) -> None:
        self.slot_bytes = nbytes
        self.name = ""
        self.loading: weakref.ref[Any] | None = None

    def is_here(self) -> bool:
        return self.loading is not None and self.loading() is not None


class FakeRecord:
    """The bytes of a storage; they are on the disk unless a test says otherwise."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.key = 0
        self.handle: FakeHandle | None = FakeHandle(nbytes)
        self.source: object | None = None

    def is_leaving(self) -> bool:
        return self.source is not None and self.handle is not None


class FakeSaved:
    """What the prefetcher sees of a saved tensor."""

    def __init__(self, name: str, record: FakeRecord, sequence: int) -> None:
        self.name = name
        self.record = record
        if record.handle is not None:
            record.handle.name = record.handle.name or name
        self.sequence = sequence
        self.ahead: object | None = None
        self.round: Any = None
        self.ordinal = 0


class FakeResidency:
    """What is in memory, and how much more may be: as a test says."""

    is_bounded = False

    def __init__(self) -> None:
        self.room = NO_BOUND
        self.resident = 0

    def add_user(self, user: object) -> None:
        """Nobody is asked for room."""

    def room_bytes(self) -> int:
        return self.room

    def resident_bytes(self) -> int:
        return self.resident


class Recording(Prefetcher):
    """A prefetcher that remembers which rounds have ended."""

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self.finished: list[Round] = []

    def take_finished(self) -> list[Round]:
        found = super().take_finished()
        self.finished += found
        return found


class Desk:
    """Packs and unpacks as the hooks do, and notes which reads are begun and given up."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.residency = FakeResidency()
        self.prefetcher = Recording(
            self.policy,
            self.residency,  # type: ignore[arg-type]
            load=self._load,
            rates=lambda: Rates(1e9, 1e9),
            stalls=Stalls(),
            notices=Notices(),
            clock=lambda: self.now_s,
        )
        self.now_s = 0.0

    @property
    def finished(self) -> list[Round]:
        return self.prefetcher.finished

    def _load(self, handle: Any) -> Any:
        if handle.name in self.refused:
            raise StorageError("refused")
        self.begun.append(handle.name)
        loading = FakeLoading()
        handle.loading = weakref.ref(loading)
        return loading

    def pack(
        self,
        name: str,
        sequence: int,
        nbytes: int = MIB,
        *,
        record: FakeRecord | None = None,
        phase: int = FORWARD,
    ) -> Any:
        key = self.prefetcher.next_key(nbytes, phase)
        is_new = record is None
        saved: Any = FakeSaved(name, record or FakeRecord(nbytes), sequence)
        self.prefetcher.enter(saved, is_new)
        if is_new:
            saved.record.key = key
        self.now_s += 1.0
        return saved

    def unpack(self, saved: Any) -> list[str]:
        """Return the names of the reads that this unpack began."""
        before = len(self.begun)
        self.prefetcher.note_unpack(saved)
        saved.ahead = None
        self.prefetcher.advance(saved)
        self.now_s += 1.0
        return self.begun[before:]


def names(saved: Iterable[Any]) -> str:
    return "".join(one.name for one in saved)


def ahead(saved: Iterable[Any]) -> str:
    return "".join(one.name for one in saved if one.ahead is not None)


def packs(desk: Desk, nodes: Sequence[str], nbytes: int = MIB) -> dict[str, Any]:
    """Pack one tensor per letter, each word by a node of its own."""
    return {
        letter: desk.pack(letter, sequence, nbytes)
        for sequence, word in enumerate(nodes)
        for letter in word
    }


# --- the order ----------------------------------------------------------------


def test_the_first_guess_is_the_reverse_of_the_nodes_and_ascends_in_each() -> None:
    desk = Desk()
    saved = packs(desk, ["ab", "c", "def", "g"])
    assert "".join(desk.unpack(saved["g"])) == "defcab"
    assert ahead(saved.values()) == "abcdef"
    for letter in "defcab":
        assert desk.unpack(saved[letter]) == []
    assert ahead(saved.values()) == ""


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_the_first_guess_for_any_nodes(sizes: list[int]) -> None:
    desk = Desk()
    nodes = [
        [desk.pack(f"{sequence}.{place}", sequence) for place in range(size)]
        for sequence, size in enumerate(sizes)
    ]
    expected = [one for node in reversed(nodes) for one in node]
    assert desk.unpack(expected[0]) == [one.name for one in expected[1:]]


def test_a_learned_order_is_the_next_guess() -> None:
    desk = Desk()
    nodes = ["ab", "c", "de"]
    # A gradient penalty reads parts early, a partial backward leaves some out.
    saved = packs(desk, nodes)
    for letter in "cbad":
        desk.unpack(saved[letter])
    saved.clear()
    again = packs(desk, nodes)
    assert len(desk.finished) == 1
    desk.begun.clear()
    assert "".join(desk.unpack(again["c"])) == "bad"
    # What the last round never asked for is not read ahead.
    assert again["e"].ahead is None


def test_an_order_is_learned_for_rounds_of_the_same_bytes_only() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b", "c"])
    for letter in "abc":
        desk.unpack(saved[letter])
    saved.clear()
    other = packs(desk, ["a", "b", "c"], nbytes=2 * MIB)
    assert "".join(desk.unpack(other["c"])) == "ba"
    other.clear()
    same = packs(desk, ["a", "b", "c"])
    desk.begun.clear()
    assert "".join(desk.unpack(same["a"])) == "bc"


def test_the_newest_order_counts() -> None:
    desk = Desk()
    for order in ("abc", "bca", "cba"):
        saved = packs(desk, ["a", "b", "c"])
        for letter in order:
            desk.unpack(saved[letter])
        saved.clear()
    saved = packs(desk, ["a", "b", "c"])
    assert "".join(desk.unpack(saved["c"])) == "ba"


def test_a_repeated_unpack_does_not_change_what_was_learned() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b", "c"])
    for letter in "cbacba":
        desk.unpack(saved[letter])
    saved.clear()
    again = packs(desk, ["a", "b", "c"])
    assert [list(one.needed_s) for one in desk.finished] == [[2, 1, 0]]
    desk.begun.clear()
    assert "".join(desk.unpack(again["c"])) == "ba"


def test_learned_orders_are_bounded() -> None:
    desk = Desk()
    for size in range(1, 3 * ORDERS_MAX):
        desk.unpack(desk.pack("a", 0, size))
        assert len(desk.prefetcher._orders) <= ORDERS_MAX


# --- the window ---------------------------------------------------------------


@given(st.lists(st.integers(1, 3 * WINDOW_BYTES), min_size=1, max_size=20))
def test_the_window_is_respected(sizes: list[int]) -> None:
    """What is read ahead fits the window, or is one tensor that is larger than it."""
    desk = Desk()
    saved = [desk.pack(f"{index} ", index, size) for index, size in enumerate(sizes)]
    for one in reversed(saved):
        if one is not saved[-1]:
            assert one.ahead is not None, "the next one was not read ahead"
        desk.unpack(one)
        waiting = [other.record.nbytes for other in saved if other.ahead is not None]
        assert sum(waiting) <= WINDOW_BYTES or len(waiting) == 1
    assert len(desk.begun) == len(set(desk.begun)), "read twice"


def test_the_window_moves_on_by_what_was_used() -> None:
    desk = Desk()
    saved = packs(desk, list("abcdefgh"), nbytes=10 * MIB)
    assert "".join(desk.unpack(saved["h"])) == "gfe"
    assert "".join(desk.unpack(saved["g"])) == "d"
    assert "".join(desk.unpack(saved["f"])) == "c"


@pytest.mark.parametrize(("nbytes", "first"), [(MIB, 32), (MIB // 4, 64)])
def test_small_reads_are_begun_a_quarter_of_the_window_at_a_time(nbytes: int, first: int) -> None:
    """Each would wake the disk's thread, which takes as long as the rest of an unpack."""
    desk = Desk()
    saved = [desk.pack(f"{number} ", number, nbytes) for number in range(3 * first)]
    counts = [len(desk.unpack(one)) for one in reversed(saved)]
    quarter = first // 4
    assert counts[: 2 * quarter + 1] == [
        first,
        *([0] * (quarter - 1) + [quarter]) * 2,
    ]
    assert sum(counts) == len(saved) - 1


def test_views_of_one_storage_count_once() -> None:
    desk = Desk()
    fused = desk.pack("q", 0, 20 * MIB)
    views = [desk.pack(name, 0, record=fused.record) for name in "kv"]
    first = desk.pack("x", 1)
    assert "".join(desk.unpack(first)) == "qqq"
    assert ahead([fused, *views]) == "qkv"


def test_room_bounds_what_is_begun() -> None:
    desk = Desk()
    desk.residency.room = 2 * MIB + MIB // 2
    saved = packs(desk, list("abcdef"))
    assert "".join(desk.unpack(saved["f"])) == "ed"
    desk.residency.room = 0
    assert desk.unpack(saved["e"]) == []
    assert saved["d"].ahead is not None
    desk.residency.room = NO_BOUND
    assert "".join(desk.unpack(saved["d"])) == "cba"


def slow_plan(desk: Desk, current: Round, start_by_s: float) -> None:
    """Let a slow disk's plan say that all reads should begin at ``start_by_s`` after the first.

    By that plan the tensors are needed one second apart, in the reverse of their packing.
    """
    keys = [item[0] for item in current.items if item is not None]
    starts = dict.fromkeys(keys, start_by_s)
    needs = {key: float(second) for second, key in enumerate(reversed(keys))}
    desk.policy.plans[current.signature] = Plan(frozenset(), starts, needs, 0.0)


def test_a_slow_disk_reads_ahead_as_far_as_its_plan_says() -> None:
    desk = Desk()
    saved = packs(desk, list("abcdefgh"), nbytes=20 * MIB)
    slow_plan(desk, saved["a"].round, start_by_s=1.5)
    assert "".join(desk.unpack(saved["h"])) == "g"
    assert "".join(desk.unpack(saved["g"])) == "f"
    # By now the start of all is past.
    assert "".join(desk.unpack(saved["f"])) == "edcba"


def test_a_storage_with_two_users_is_read_ahead_by_its_plan_too() -> None:
    desk = Desk()
    shared = desk.pack("a", 0, 20 * MIB)
    other = desk.pack("b", 1, 20 * MIB)
    second = desk.pack("A", 2, record=shared.record)
    rest = {name: desk.pack(name, 3 + place, 20 * MIB) for place, name in enumerate("cde")}
    slow_plan(desk, shared.round, start_by_s=-1.0)
    assert "".join(desk.unpack(rest["e"])) == "dcaba"
    assert ahead([shared, other, second, *rest.values()]) == "abAcd"


def test_a_write_that_ends_late_does_not_drop_what_was_begun() -> None:
    """A tensor that the plan would have kept turns up on the disk in the middle of a backward."""
    desk = Desk()
    saved = packs(desk, list("abcdef"), nbytes=20 * MIB)
    slow_plan(desk, saved["a"].round, start_by_s=-1.0)
    learned = desk.policy.plans.get(saved["a"].round.signature)
    assert learned is not None
    del learned.start_by_s[saved["c"].record.key]
    saved["c"].record.source = object()
    assert "".join(desk.unpack(saved["f"])) == "edba"
    saved["c"].record.source = None
    desk.unpack(saved["e"])
    for letter in "dcba":
        desk.unpack(saved[letter])
    assert sorted(desk.begun) == sorted("edbac"), "read twice"


def test_writes_that_end_late_do_not_drop_what_the_window_held() -> None:
    desk = Desk()
    saved = packs(desk, list("abcdefgh"), nbytes=10 * MIB)
    for late in "fe":
        saved[late].record.source = object()
    assert "".join(desk.unpack(saved["h"])) == "gdc"
    for late in "fe":
        saved[late].record.source = None
    for letter in "gfedcba":
        desk.unpack(saved[letter])
    assert sorted(desk.begun) == sorted("gfedcba"), "read twice"


# --- wrong guesses ------------------------------------------------------------


def test_a_wrong_guess_drops_what_was_skipped() -> None:
    desk = Desk()
    saved = packs(desk, list("abcdef"))
    assert "".join(desk.unpack(saved["f"])) == "edcba"
    assert desk.unpack(saved["b"]) == []
    assert ahead(saved.values()) == "a"
    # What was dropped is read again when the order turns back to it.
    assert "".join(desk.unpack(saved["e"])) == "dcb"


def test_another_round_drops_the_window_of_this_one() -> None:
    desk = Desk()
    first = packs(desk, ["a", "b", "c"])
    assert "".join(desk.unpack(first["c"])) == "ba"
    second = packs(desk, ["d", "e"])
    assert "".join(desk.unpack(second["e"])) == "d"
    assert ahead(first.values()) == ""
    assert ahead(second.values()) == "d"
    assert "".join(desk.unpack(first["b"])) == "a"


def test_drop_window() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b", "c"])
    desk.unpack(saved["c"])
    desk.prefetcher.give_way()
    assert ahead(saved.values()) == ""
    assert "".join(desk.unpack(saved["b"])) == "a"


def test_the_dead_are_skipped() -> None:
    desk = Desk()
    saved = packs(desk, list("abcde"))
    del saved["c"]
    gc.collect()
    assert "".join(desk.unpack(saved["e"])) == "dba"
    # Dying while read ahead gives the read up with it.
    del saved["b"]
    gc.collect()
    assert desk.unpack(saved["d"]) == []
    assert ahead(saved.values()) == "a"


def test_what_is_in_memory_is_not_read() -> None:
    desk = Desk()
    saved = packs(desk, list("abcde"))
    saved["c"].record.source = object()
    saved["b"].record.handle = None
    saved["b"].record.source = object()
    assert "".join(desk.unpack(saved["e"])) == "da"


def test_a_read_that_cannot_begin_does_not_stop_the_others() -> None:
    desk = Desk()
    saved = packs(desk, list("abcd"))
    desk.refused.append("c")
    assert "".join(desk.unpack(saved["d"])) == "ba"
    assert saved["c"].ahead is None


# --- rounds -------------------------------------------------------------------


def test_a_round_ends_when_a_pack_follows_an_unpack() -> None:
    desk = Desk()
    first = packs(desk, ["a", "b"])
    assert len({id(one.round) for one in first.values()}) == 1
    for letter in "ba":
        desk.unpack(first[letter])
    second = packs(desk, ["c"])
    assert second["c"].round is not first["a"].round
    assert [names(filter(None, (e() for e in one.entries))) for one in desk.finished] == ["ab"]


def test_micro_batches_before_one_backward_are_one_round() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b"]) | {
        letter: desk.pack(letter, 10 + place) for place, letter in enumerate("cd")
    }
    assert len({id(one.round) for one in saved.values()}) == 1
    assert "".join(desk.unpack(saved["d"])) == "cba"


def test_packs_inside_a_backward_are_a_round_of_their_own() -> None:
    desk = Desk()
    outer = packs(desk, ["a", "b"])
    desk.unpack(outer["b"])
    inner = desk.pack("i", 5, phase=7)
    second = desk.pack("j", 6, phase=7)
    other = desk.pack("k", 7, phase=8)
    assert inner.round is second.round
    assert len({id(one.round) for one in (outer["a"], inner, other)}) == 3
    assert inner.round.phase == 7
    # An unpack within the same backward does not end its round: recomputation packs and unpacks.
    desk.unpack(other)
    assert desk.pack("l", 8, phase=8).round is other.round
    assert desk.pack("m", 9).round.phase == FORWARD


def test_rounds_of_a_forward_and_of_a_backward_never_share_an_order() -> None:
    desk = Desk()
    forward = desk.pack("a", 0)
    inner = desk.pack("b", 1, phase=3)
    assert forward.round.signature != inner.round.signature


def test_equal_beginnings_have_equal_keys() -> None:
    desk = Desk()
    first = packs(desk, ["a", "b", "c"])
    desk.unpack(first["c"])
    second = packs(desk, ["a", "b"])
    keys = [[one.record.key for one in each.values()] for each in (first, second)]
    assert keys[0][:2] == keys[1]
    assert len(set(keys[0])) == 3
    assert keys[0][1] == next_key(keys[0][0], MIB)


def test_a_round_is_finished_when_all_is_asked_for_or_dead() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b", "c"])
    desk.unpack(saved["c"])
    desk.unpack(saved["b"])
    later = desk.pack("x", 0)
    assert not desk.finished
    assert not desk.prefetcher.take_finished()
    del saved["a"]
    gc.collect()
    (done,) = desk.prefetcher.take_finished()
    assert done is saved["b"].round
    assert desk.prefetcher.take_finished() == []
    assert later.round is not done


def test_what_a_finished_round_teaches() -> None:
    desk = Desk()
    saved = packs(desk, ["a", "b"]) | {"c": desk.pack("c", 2, 5 * MIB)}
    began_s = [0.0, 1.0, 2.0]
    del saved["b"]
    gc.collect()
    for letter in "ca":
        desk.unpack(saved[letter])
    items = saved["a"].round.learned_items()
    assert [(one.nbytes, one.packed_s, one.needed_s) for one in items] == [
        (MIB, began_s[0], 4.0),
        (5 * MIB, began_s[2], 3.0),
    ]
    assert [one.key for one in items] == [saved[letter].record.key for letter in "ac"]


def test_a_storage_is_needed_when_its_first_user_asks() -> None:
    """Backward meets the users of a storage in reverse: the one packed last asks first."""
    desk = Desk()
    first = desk.pack("a", 0)
    between = [desk.pack(name, sequence) for sequence, name in enumerate("bcd", 1)]
    last = desk.pack("A", 4, record=first.record)
    asked_s = desk.now_s
    for one in (last, *reversed(between), first):
        desk.unpack(one)
    items = {item.key: item for item in first.round.learned_items()}
    assert items[first.record.key].needed_s == asked_s


def test_unfinished_rounds_are_bounded() -> None:
    desk = Desk()
    kept = []
    for _ in range(3 * UNFINISHED_MAX):
        saved = packs(desk, ["a", "b"])
        desk.unpack(saved["b"])
        kept.append(saved)
        assert len(desk.prefetcher._unfinished) <= UNFINISHED_MAX
    # The newest are watched still: they teach when they end.
    desk.unpack(kept[-2]["a"])
    assert kept[-2]["a"].round in desk.prefetcher.take_finished()


# --- with autograd ------------------------------------------------------------


class Watched(Prefetcher):
    """A prefetcher that notes in which order tensors are asked for, and whether it foresaw them."""

    def watch(self) -> list[bool]:
        self.foreseen: list[bool] = []
        return self.foreseen

    def note_unpack(self, saved: Any) -> bool:
        self.foreseen.append(saved.ahead is not None)
        return super().note_unpack(saved)


@pytest.mark.parametrize("step_count", [1, 3])
def test_a_real_backward_is_foreseen(tmp_path: Any, step_count: int) -> None:
    rig = Rig(tmp_path)
    prefetcher = rig.prefetcher
    prefetcher.__class__ = Watched
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, *[torch.nn.Linear(64, 64), torch.nn.GELU()] * 3)
    for _ in range(step_count):
        with rig.context():
            loss = model(torch.randn(8, 64, requires_grad=True)).square().sum()
            foreseen = prefetcher.watch()
            rig.flush()
            loss.backward()
        assert len(foreseen) >= 8
        assert all(foreseen[1:]), foreseen


def test_a_gradient_penalty_is_foreseen_the_second_time(tmp_path: Any) -> None:
    rig = Rig(tmp_path)
    prefetcher = rig.prefetcher
    prefetcher.__class__ = Watched
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.Tanh()] * 3)
    misses = []
    for _ in range(3):
        foreseen = prefetcher.watch()
        with rig.context():
            x = torch.randn(4, 32, requires_grad=True)
            out = model(x).sum()
            rig.flush()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            loss = out + slope.square().sum()
            rig.flush()
            loss.backward()
        misses.append(foreseen.count(False))
    assert misses[-1] <= misses[0]
    assert len(foreseen) > 10
    assert foreseen.count(True) > foreseen.count(False)
