"""A session that offloads little or nothing names the first cause, and what to change."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import ssdtrain
from disks import MIB
from ssdtrain._core import Account
from ssdtrain.notices import log
from ssdtrain.planning.policy import RATE_GUESS, Copies, Policy, Rates
from ssdtrain.reasons import NO_DIRECTORY, Evidence, Observed, PlannedRound, Reason, reason_of
from ssdtrain.seen import Seen
from support import Rig, chain, shared_out

pytestmark = pytest.mark.usefixtures("one_thread")

BIG = 4 * MIB // 4
"""Numbers of a tensor of 4 MiB."""


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger=log.name):
        yield


def last_words(caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """Return level and text of what was logged on leaving."""
    records = [one for one in caplog.records if one.name == log.name]
    said = [one for one in records if "little or nothing" in one.getMessage()]
    assert len(said) <= 1, "it is said once"
    return (said[0].levelno, said[0].getMessage()) if said else (0, "")


def train(x: Tensor) -> None:
    chain(x, 6).sum().backward()


def leaf(count: int = BIG) -> Tensor:
    return torch.linspace(-1, 1, count, requires_grad=True)


# Each cause, in a real session


def below_min_bytes() -> None:
    train(leaf(MIB // 4 // 8))
    xs = [leaf(MIB // 4 // 8) for _ in range(16)]
    sum(chain(x, 6).sum() for x in xs).backward()


def on_top(inner: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    def body() -> None:
        with inner():
            x = leaf()
            loss = chain(x, 6).sum()
            gc.collect()
        loss.backward()

    return body


class OthersHooks(saved_tensors_hooks):
    """As trainers have them, in a class of their own."""

    def __init__(self) -> None:
        super().__init__(self.keep_it, self.give_it)

    def keep_it(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def give_it(self, packed: Tensor) -> Tensor:
        return packed


def wrapped() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    offload_wrapper(layers)(torch.ones(2, 8)).sum().backward()


def in_a_thread() -> None:
    thread = threading.Thread(target=lambda: train(leaf()))
    thread.start()
    thread.join()


BUSY = "import time\nwhile time.process_time() < 1.3: pass"


def in_child_processes() -> None:
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)


def in_a_forked_process() -> None:
    child = os.fork()
    if child == 0:
        # It computes, and leaves without what pytest would do at the end.
        while os.times().user < 1.2:
            sum(range(10_000))
        os._exit(0)
    os.waitpid(child, 0)


def without_gradients() -> None:
    with torch.no_grad():
        chain(leaf(), 6)


def only_weights() -> None:
    (nn.Parameter(torch.ones(BIG)) * nn.Parameter(torch.ones(BIG))).sum().backward()


def in_arrays() -> None:
    x = leaf()
    for _ in range(4):
        (x * torch.from_numpy(np.ones(BIG, dtype=np.float32))).sum().backward()


def only_sums() -> None:
    (leaf() + 1).sum().backward()


def nothing_at_all() -> None:
    pass


WARNED, TOLD = logging.WARNING, logging.INFO
OUTSIDE = r"but 1 backward ran: the forward ran outside of the block \(before it, or in another"
CASES: dict[str, tuple[Callable[[], None], int, str]] = {
    "small": (
        below_min_bytes,
        WARNED,
        (
            r"in tensors below min_bytes=262144 \(256(\.0)? KiB\), the largest of 128(\.0)? KiB, .*"
            r" on average; lower min_bytes to \d+$"
        ),
    ),
    "save_on_cpu": (on_top(save_on_cpu), WARNED, r"those of torch\.autograd\.graph\.save_on_cpu\."),
    "a trainer's hooks": (on_top(OthersHooks), WARNED, r"those of test_reasons\.OthersHooks\.keep"),
    "offload_wrapper": (wrapped, WARNED, r"others were inside of ssdtrain.*offload_wrap"),
    "another thread": (in_a_thread, WARNED, OUTSIDE),
    "child processes": (
        in_child_processes,
        WARNED,
        r"for \d\.\d s, which the hooks do not reach: enter",
    ),
    "forked": (in_a_forked_process, WARNED, r"child processes computed for \d\.\d s, which the"),
    "no gradients": (without_gradients, TOLD, r"no operation in the block was recorded"),
    "weights": (only_weights, TOLD, r"only weights were saved"),
    "arrays": (in_arrays, TOLD, r"are in the memory of numpy arrays"),
    "sums": (only_sums, TOLD, r"made \d nodes in the block.* so few may save nothing"),
    "nothing": (nothing_at_all, TOLD, r"no operation in the block was recorded"),
}


@pytest.mark.parametrize(
    "case", shared_out(CASES, quick=[one for one in CASES if one != "child processes"])
)
def test_the_cause_is_named_when_the_block_ends(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body, level, expected = CASES[case]
    with ssdtrain.offload(tmp_path, direct_io="optional") as session:
        body()
    assert session.stats.reason is not None
    assert re.search(expected, session.stats.reason), session.stats.reason
    assert session.stats.reason in str(session), "the report says it too"
    assert last_words(caplog)[0] == level
    assert session.stats.reason in last_words(caplog)[1]


def test_a_forward_before_the_block_is_told(tmp_path: Path) -> None:
    loss = chain(leaf(), 6).sum()
    with ssdtrain.offload(tmp_path, direct_io="optional") as session:
        loss.backward()
    first, *_, last = str(session).splitlines()
    assert first == (
        "ssdtrain: no saved tensor was taken here, so nothing was gained; the last line tells why"
    )
    assert re.search(OUTSIDE, last), last


def test_a_cause_is_that_of_the_block_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What ran in other threads, and which hooks were on, before it is no cause."""
    in_a_thread()
    on_top(save_on_cpu)()
    with ssdtrain.offload(tmp_path, direct_io="optional") as session:
        nothing_at_all()
    assert last_words(caplog)[0] == TOLD
    assert "no operation in the block" in str(session.stats.reason)
    assert not [one for one in gc.callbacks if "ssdtrain" in getattr(one, "__module__", "")]


def test_nothing_is_said_of_a_session_that_offloads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ssdtrain.offload(tmp_path, direct_io="optional", max_resident_bytes=16 * MIB) as session:
        train(leaf())
    assert session.stats.reason is None
    assert last_words(caplog) == (0, "")
    begun = [one.getMessage() for one in caplog.records if one.name == log.name]
    expected = (
        rf"of at least 256(\.0)? KiB to {tmp_path} \((io_uring|psync)\); at most 16(\.0)? MiB of"
    )
    assert re.search(expected, begun[0]), begun


def test_a_disk_that_fails_is_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tool = ssdtrain.offload(tmp_path, direct_io="optional", max_disk_bytes=1 * MIB)
    with tool as session:
        for _ in range(3):
            train(leaf())
    assert re.search(
        r"\d+ writes failed or were refused, the last one with: .*max_disk_bytes", str(session)
    )
    assert last_words(caplog)[0] == WARNED


def test_a_bound_without_room_is_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = ssdtrain.offload(tmp_path, direct_io="optional", max_resident_bytes=1 * MIB)
    with pytest.raises(ssdtrain.BudgetError), tool:
        train(leaf())
    assert "max_resident_bytes left no room for what an operation saved" in str(tool.session)
    assert last_words(caplog)[0] == TOLD, "the error has said it"


@pytest.mark.parametrize("options", [{}, {"max_disk_bytes": MIB, "max_resident_bytes": 24 * MIB}])
def test_a_forward_that_raises_is_no_fault_of_the_disk(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = ssdtrain.offload(tmp_path, direct_io="optional", **options)
    held = []

    def forward() -> None:
        held.append(chain(leaf(), 4))
        raise ValueError("a mistake of the user")

    with pytest.raises(ValueError, match="of the user"), tool:
        forward()
    level, text = last_words(caplog)
    assert level == TOLD
    assert ("max_disk_bytes" if options else "before a backward used") in text


# What no small session shows


def round_with(rates: Rates) -> Callable[[], PlannedRound]:
    usual = PlannedRound(
        saved_bytes=50 * MIB,
        staying_bytes=40 * MIB,
        idle_s=0.25,
        rates=rates,
        caution=0.8,
        plan_count=2,
    )
    return lambda: usual


def evidence(**changes: Any) -> Evidence:
    known = Evidence(
        seen=Seen(Account()),
        min_bytes=256 << 10,
        has_directory=True,
        offloaded_bytes=0,
        saved_bytes=100 * MIB,
        peak_bytes=50 * MIB,
        failed_count=0,
        failure=None,
        stayed=None,
        budget_error_count=0,
        is_one_node=False,
        usual_round=round_with(Rates(100.0 * MIB, 200.0 * MIB)),
        observed=None,
    )
    return replace(known, **changes)


def test_tensors_that_cannot_leave_their_gpu_are_told() -> None:
    seen = Seen(Account())
    seen.eligible.add(100 * MIB)
    known = evidence(seen=seen, stayed="it has 2 GiB")
    reason = reason_of(known)
    assert reason is not None
    assert reason.text.endswith("could not leave the GPU, the last one because: it has 2 GiB")
    seen.planned.add(90 * MIB)
    planned = reason_of(known)
    assert planned is not None
    assert "could not leave" not in planned.text


@pytest.mark.parametrize("planned_bytes", [0, 100 * MIB])
def test_a_session_without_a_directory_is_told_so(planned_bytes: int) -> None:
    seen = Seen(Account())
    seen.eligible.add(100 * MIB)
    seen.planned.add(planned_bytes)
    usual = round_with(Rates(0.0, 0.0))
    known = evidence(seen=seen, has_directory=False, stayed="nothing is written", usual_round=usual)
    assert reason_of(known) == Reason(NO_DIRECTORY, is_warning=True)
    seen.small_here.add(300 * MIB)
    reason = reason_of(known)
    assert reason is not None
    assert "min_bytes" in reason.text, "a directory would not change that"


def test_a_rate_that_is_a_guess_is_told_as_one() -> None:
    seen = Seen(Account())
    seen.eligible.add(100 * MIB)
    seen.planned.add(100 * MIB)
    for read, words in (
        (200.0 * MIB, "reads 200 MiB a"),
        (RATE_GUESS, "reads 953.7 MiB (a guess) a"),
    ):
        usual = round_with(Rates(100.0 * MIB, read))
        reason = reason_of(evidence(seen=seen, usual_round=usual))
        assert reason is not None
        assert f"the disk writes 100 MiB and {words}" in reason.text


def test_a_link_that_is_slower_than_the_disk_is_told() -> None:
    seen = Seen(Account())
    seen.eligible.add(100 * MIB)
    seen.planned.add(100 * MIB)
    rates = Rates(100.0 * MIB, 200.0 * MIB)
    for copies, words in (
        (
            Copies(down=50.0 * MIB),
            ", GPU 0 copies 50 MiB to memory and an unknown size back a second",
        ),
        (Copies(down=1e12, up=50.0 * MIB), " to memory and 50 MiB back a second"),
    ):
        usual = round_with(replace(rates, copies={0: copies}))
        reason = reason_of(evidence(seen=seen, usual_round=usual))
        assert reason is not None
        assert words in reason.text
        assert "so a faster disk changes nothing" in reason.text
    usual = round_with(replace(rates, copies={0: Copies(1e12, 1e12)}))
    fast = reason_of(evidence(seen=seen, usual_round=usual))
    assert fast is not None
    assert "a faster disk, or several (dir=[...]), changes that" in fast.text
    assert "GPU 0 copies" in fast.text


def test_children_with_blocks_of_their_own_are_the_reason_whatever_time_they_took() -> None:
    observed = Observed(
        node_count=0,
        backward_count=0,
        has_reached_children=True,
        child_s=0.0,
        process_s=2.0,
        others=None,
    )
    reason = reason_of(evidence(observed=observed))
    assert reason is not None
    assert not reason.is_warning
    assert "child processes that Python started (multiprocessing, os.fork) have" in reason.text


def parts() -> Seen:
    """As LSTMCell makes them."""
    seen = Seen(Account())
    seen.apart.add(90 * MIB)
    seen.eligible.add(10 * MIB)
    return seen


def test_a_first_step_is_told_as_one_without_figures() -> None:
    usual = round_with(Rates(100.0 * MIB, RATE_GUESS))()
    assert usual is not None
    reason = reason_of(evidence(seen=planned(1), usual_round=lambda: replace(usual, plan_count=1)))
    assert reason is not None
    assert reason.text.endswith(
        "held them; this was the first step of its kind, and a plan is made after it"
    )
    assert "MiB" not in reason.text


def detached_parts() -> Seen:
    seen = Seen(Account())
    for _ in range(2):
        seen.detached.add(45 * MIB)
    return seen


def planned(count: int) -> Seen:
    seen = Seen(Account())
    for _ in range(10):
        seen.eligible.add(10 * MIB)
    for _ in range(count):
        seen.planned.add(10 * MIB)
    return seen


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"seen": planned(9)},
            r"in time: a step saves 50 MiB, of which 40 MiB stay: they are needed 0\.250 s after",
        ),
        ({"seen": planned(9)}, r"to write and read them takes 0\.750 s; the disk writes 100 MiB"),
        ({"seen": planned(9)}, r"reads 200 MiB a second, of which the plan counts on 80%;"),
        ({"seen": planned(9), "is_one_node": True}, r"^one node .* compile block by block"),
        ({"seen": planned(1), "is_one_node": True}, r"^one node .* compile block by block"),
        (
            {"seen": parts(), "is_one_node": True},
            r"^most saved bytes are in parts of storages that",
        ),
        (
            {"seen": parts()},
            r"^most saved bytes are in parts of storages that count .*\(LSTMCell and GRUCell\)",
        ),
        (
            {"seen": detached_parts()},
            r"^most saved bytes are in parts .* that the program detached.*; detach the whole",
        ),
        ({"seen": planned(1)}, r"backward asked for most tensors before they had been written"),
    ],
)
def test_a_plan_is_named_with_the_figures_it_was_made_of(
    changes: dict[str, Any], expected: str
) -> None:
    reason = reason_of(evidence(**changes))
    assert reason is not None
    assert reason.is_warning
    assert re.search(expected, reason.text), reason.text


def test_a_short_last_step_does_not_stand_for_the_others(tmp_path: Path) -> None:
    policy = Policy()
    rig = Rig(tmp_path, policy=policy)
    with rig.context():
        for count in (BIG, BIG, BIG, BIG // 64):
            chain(leaf(count), 6).sum().backward()
    rig.prefetcher.learn_from_last()
    whole, short = rig.prefetcher.recorded
    usual = rig.prefetcher.usual_round()
    assert usual is not None
    whole_bytes = sum(item.nbytes for item in rig.prefetcher.recorded[whole].items)
    assert usual.saved_bytes == whole_bytes >= 6 * 4 * BIG
    assert usual.staying_bytes == whole_bytes - policy.plans[whole].leaving_bytes
    assert (usual.rates, usual.caution) == policy.basis(whole)
    assert sum(item.nbytes for item in rig.prefetcher.recorded[short].items) < whole_bytes // 32


def test_a_short_first_step_does_not_stand_for_others_that_keep_as_little(tmp_path: Path) -> None:
    policy = Policy()
    rig = Rig(tmp_path, policy=policy)
    with rig.context():
        for count in (BIG // 64, BIG, BIG):
            chain(leaf(count), 6).sum().backward()
    rig.prefetcher.learn_from_last()
    for signature, plan in list(policy.plans.items()):
        policy.plans[signature] = replace(plan, keep=frozenset())
    usual = rig.prefetcher.usual_round()
    assert usual is not None
    assert usual.staying_bytes == 0
    assert usual.saved_bytes >= 6 * 4 * BIG


def test_too_small_for_any_disk_is_said_so() -> None:
    seen = Seen(Account())
    for _ in range(100):
        seen.small_here.add(512)
    reason = reason_of(evidence(seen=seen, peak_bytes=51_200))
    assert reason is not None
    assert not reason.is_warning, "nobody is warned of a model that takes no memory"
    assert "too small for a disk" in reason.text
    assert reason_of(evidence(seen=seen, offloaded_bytes=50 * MIB)) is None


def test_an_inner_block_of_ours_is_named(tmp_path: Path) -> None:
    with ssdtrain.offload(tmp_path) as outer:
        with ssdtrain.offload(tmp_path):
            loss = chain(leaf(), 6).sum()
        loss.backward()
    assert "those of an inner `with ssdtrain.offload` block" in str(outer.stats.reason)
