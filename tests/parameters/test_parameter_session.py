"""Weights in the store of a session: one set of disks, one bound, one report, and equal bits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from children import forked_python
from ssdtrain import BudgetError, ConfigError, NoSpaceError
from ssdtrain.activations import blocks
from ssdtrain.parameters.weights import weight_of
from ssdtrain.sharing import Budget
from ssdtrain.sizes import shown_bytes
from support import Rig
from weights_away import (
    WIDTH,
    Case,
    Training,
    adamw,
    away,
    largest_bytes,
    layers,
    numbered,
    plain,
    quarter,
    squared,
    unique,
)

MIB = 1 << 20
ROWS = 256
"""Saved tensors of 136 KiB, two for each layer, beside 74 KiB of weights in each."""
BOUND = MIB
WEIGHT_BYTES = WIDTH * WIDTH * 4
SCHEDULES = ("none", "step", "backward")


def block(directory: Path, **options: Any) -> ssdtrain.offload:
    options = {"min_bytes": 64 << 10, "direct_io": "optional", **options}
    return ssdtrain.offload(directory, **options)


def rows(session: ssdtrain.Session) -> dict[str, Any]:
    return {one.name: one for one in session.stats.classes}


def reserved_bytes(session: ssdtrain.Session) -> int:
    hooks = session._hooks
    assert hooks is not None
    return hooks._residency.account.reserved_bytes


def through(module: nn.Module, number: int, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    x = numbered(number, ROWS, WIDTH)
    for one in module.children():
        x = call(one, x).tanh()
    return x.square().mean()


def plainly(module: nn.Module, number: int) -> Tensor:
    return through(module, number, lambda one, x: one(x))


def recomputed(module: nn.Module, number: int) -> Tensor:
    return through(module, number, lambda one, x: checkpoint(one, x, use_reentrant=False))


def reentrant(module: nn.Module, number: int) -> Tensor:
    def call(one: nn.Module, x: Tensor) -> Any:
        return checkpoint(one, x.requires_grad_(), use_reentrant=True)

    return through(module, number, call)


def chosen(module: nn.Module, number: int) -> Tensor:
    """Leave it to the plan what is computed again."""
    return through(module, number, lambda one, x: ssdtrain.checkpoint(one)(x))


STEPS = 3


def begun(session: ssdtrain.Session, overlap: str = "none", loss: Any = plainly) -> Training:
    """Return a model whose weights are in a session, a quarter of them in memory."""
    model = layers()
    optimizer = adamw(model.parameters())
    assert ssdtrain.offload_parameters(model, session, max_resident_bytes=quarter(model)) is model
    if overlap != "none":
        ssdtrain.offload_optimizer(optimizer, session, overlap=overlap, buffer_bytes="512KiB")  # type: ignore[arg-type]
    return Training(model, optimizer, loss, session.flush)


def step(training: Training, number: int) -> None:
    """Update before anybody looks at the gradients, which updates in backward take."""
    loss = training.loss(number)
    training.note("loss", loss)
    training.flush()
    loss.backward()
    training.update()


def assert_as_plain(training: Training, loss: Any = plainly) -> None:
    expected = plain(Case(layers, loss, step), STEPS)
    for one, other in zip(training.seen, expected[: len(training.seen)], strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize(
    ("loss", "bound", "overlap"),
    [
        (plainly, None, "none"),
        (plainly, BOUND, "step"),
        (plainly, BOUND, "backward"),
        (recomputed, BOUND, "step"),
        (reentrant, BOUND, "step"),
        (chosen, BOUND, "backward"),
    ],
)
def test_equal_bits(overlap: str, loss: Any, bound: int | None, tmp_path: Path) -> None:
    with block(tmp_path, max_resident_bytes=bound) as session:
        training = begun(session, overlap, loss)
        training.run(step, STEPS)
        assert_as_plain(training, loss)
    found = rows(session)
    assert found["weights"].bytes_written > 0
    assert found["weights"].bytes_read > 0
    assert found["weights"].resident_bytes <= quarter(training.model)
    assert found["activations"].bytes_read > 0 or loss is not plainly
    assert ("optimizer state" in found) == (overlap != "none")
    stats = ssdtrain.parameter_stats(training.model)
    # What an update in backward brings finds the other thread in the middle of its backward.
    assert stats.peak_resident_bytes <= quarter(training.model) or overlap == "backward"
    assert stats.write_failed_count == 0
    if bound is not None:
        assert quarter(training.model) < session.stats.resident_bytes_peak <= bound


def test_the_report_has_a_row_for_weights(tmp_path: Path) -> None:
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        one, other = begun(session, "step"), begun(session)
        for training in (one, other):
            training.run(step, 2)
        assert list(rows(session)) == ["activations", "weights", "optimizer state"]
        row = rows(session)["weights"]
        told = [ssdtrain.parameter_stats(training.model) for training in (one, other)]
        assert row.bytes_written == sum(stats.written_bytes for stats in told) > 0
        assert row.bytes_read == sum(stats.read_bytes for stats in told) > 0
        assert row.resident_bytes == sum(stats.resident_bytes for stats in told) > 0
        assert row.on_disk_bytes == sum(stats.on_disk_bytes for stats in told) > 0
        assert row.stall_s == sum(stats.stall_s for stats in told) > 0
        total = session.stats
        assert total.exposed_s >= row.stall_s
        assert total.as_dict()["weights_bytes_written"] == row.bytes_written
        assert total.bytes_written >= sum(one.bytes_written for one in total.classes)
        assert "\n             weights: " in str(session)
        # What it tells of weights, it tells beside a thread that waits for one.
        owner: Any = weight_of(next(one.model.parameters())).owner  # type: ignore[union-attr]
        with owner._lock:
            reports: list[str] = []
            thread = threading.Thread(target=lambda: reports.append(str(session)), daemon=True)
            thread.start()
            thread.join(60)
        assert "weights: " in reports[0]
        # Nothing of activations is left, and of the rest no more than was reserved for it.
        assert rows(session)["activations"].resident_bytes == 0
        assert session.stats.resident_bytes == 2 * quarter(one.model) == reserved_bytes(session)


def test_a_model_that_is_gone_gives_all_back(tmp_path: Path) -> None:
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        training = begun(session)
        training.run(step, 2)
        used_bytes = session.stats.disk_used_bytes
        assert used_bytes >= 5 * WEIGHT_BYTES
        assert reserved_bytes(session) == quarter(training.model)
        last = rows(session)["weights"]
        del training

        def is_given_back() -> bool:
            gc.collect()
            return session.stats.disk_used_bytes == 0

        support.wait_until(is_given_back, "the space on the disk is given back")
        assert reserved_bytes(session) == 0
        gone = rows(session)["weights"]
        assert gone.bytes_written == last.bytes_written > 0
        assert (gone.bytes_read, gone.stall_s) == (last.bytes_read, last.stall_s)
        assert gone.resident_bytes == gone.on_disk_bytes == 0
        # The next one has the room of the first.
        model = layers()
        ssdtrain.offload_parameters(model, session)
        assert reserved_bytes(session) == BOUND // 2
        plainly(model, 1).backward()


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_the_block_may_end_before_the_model(overlap: str, tmp_path: Path) -> None:
    with support.nothing_leaks():
        with block(tmp_path, max_resident_bytes=BOUND) as session:
            training = begun(session, overlap)
            training.run(step, 2)
            assert away(training.model)
        at_the_end = session.stats
        training.flush = support.nothing
        seen = training.seen
        for number in range(2, STEPS):
            seen.append({})
            torch.manual_seed(number)
            step(training, number)
            training.note_weights()
            training.note("random state", torch.get_rng_state())
        assert_as_plain(training)
        stats = ssdtrain.parameter_stats(training.model)
        assert stats.resident_bytes <= quarter(training.model), "they stay under their bound"
        assert session.stats == at_the_end
        del training, session


def test_a_graph_of_the_block_may_outlive_it(tmp_path: Path) -> None:
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        training = begun(session)
        loss = training.loss(0)
    del session
    loss.backward()
    expected = layers()
    plainly(expected, 0).backward()
    support.assert_equal_bits(gradients(training.model), gradients(expected))


class TestBound:
    """What of a session's bound is for weights."""

    @pytest.mark.parametrize(
        ("given", "limit", "expected"),
        [
            (None, None, 0),
            ("200KiB", None, 0),
            ("200KiB", MIB, 200 << 10),
            ("8GiB", MIB, 8 * WEIGHT_BYTES),
            (None, MIB, MIB // 2),
            (None, 8 * MIB, 8 * WEIGHT_BYTES),
            (None, WEIGHT_BYTES + 1, WEIGHT_BYTES),
            (WEIGHT_BYTES, WEIGHT_BYTES, WEIGHT_BYTES),
        ],
    )
    def test_it_is_reserved(
        self, given: Any, limit: int | None, expected: int, tmp_path: Path
    ) -> None:
        model = layers()
        with block(tmp_path, max_resident_bytes=limit) as session:
            ssdtrain.offload_parameters(model, session, max_resident_bytes=given)
            assert reserved_bytes(session) == expected
            owner: Any = weight_of(next(model.parameters())).owner  # type: ignore[union-attr]
            if limit is None:
                expected = 3 * largest_bytes(model) if given is None else 200 << 10
            assert owner.max_resident_bytes == expected
            assert ssdtrain.parameter_stats(model).resident_bytes <= expected

    def test_a_second_model_has_half_of_what_is_left(self, tmp_path: Path) -> None:
        with block(tmp_path, max_resident_bytes=MIB) as session:
            models = [layers(), layers()]
            for model in models:
                ssdtrain.offload_parameters(model, session)
            assert reserved_bytes(session) == MIB // 2 + MIB // 4
            for number in range(2):
                for model in models:
                    assert torch.equal(squared(model, number), squared(layers(), number))
        assert session.stats.resident_bytes_peak <= MIB

    @pytest.mark.parametrize("given", [None, "300KiB"])
    def test_a_bound_that_cannot_be_kept_is_refused(self, given: Any, tmp_path: Path) -> None:
        model, limit = layers(), (200 << 10) if given else WEIGHT_BYTES - 1
        wanted, whole = ("300 KiB", "200 KiB") if given else ("72.2 KiB", "72.2 KiB")
        with block(tmp_path, max_resident_bytes=limit) as session:
            with pytest.raises(ConfigError, match="does not hold") as info:
                ssdtrain.offload_parameters(model, session, max_resident_bytes=given)
            said = str(info.value)
            assert f"max_resident_bytes={whole} of this session does not hold {wanted} of" in said
            assert "(Linear) alone uses 72.2 KiB of them at once" in said
            assert session.stats.classes == ()
            assert reserved_bytes(session) == 0
        assert not away(model)

    def test_the_share_of_other_weights_is_said(self, tmp_path: Path) -> None:
        with block(tmp_path, max_resident_bytes="300KiB") as session:
            first = layers()
            ssdtrain.offload_parameters(first, session, max_resident_bytes="250KiB")
            with pytest.raises(ConfigError, match=r"300 KiB of this session, of which 250 "):
                ssdtrain.offload_parameters(layers(), session)
            optimizer = adamw(first.parameters())
            with pytest.raises(ConfigError, match=r"of which 250 KiB are for weights, is too"):
                ssdtrain.offload_optimizer(optimizer, session)
            assert type(optimizer) is torch.optim.AdamW

    def test_updates_have_a_quarter_of_what_is_left(self, tmp_path: Path) -> None:
        with block(tmp_path, max_resident_bytes=4 * MIB) as session:
            training = begun(session)
            ssdtrain.offload_optimizer(training.optimizer, session)
            left_bytes = 4 * MIB - quarter(training.model)
            assert training.optimizer._part_bytes == left_bytes // 16

    def test_the_choice_of_blocks_reckons_with_what_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits: list[int] = []
        told = blocks.disk_of

        def noted(rates: Any, limit_bytes: int) -> Any:
            limits.append(limit_bytes)
            return told(rates, limit_bytes)

        monkeypatch.setattr(blocks, "disk_of", noted)
        with block(tmp_path, max_resident_bytes=BOUND) as session:
            training = begun(session, loss=chosen)
            training.run(step, 2)
            assert set(limits) == {BOUND - quarter(training.model)}

    def test_other_reservations_may_leave_too_little(self, tmp_path: Path) -> None:
        model = layers()
        with block(tmp_path, max_resident_bytes=MIB) as session:
            assert session._hooks is not None
            others = session._hooks._residency.account.reserve(MIB)
            with pytest.raises(BudgetError, match="offload_parameters, whose weights share") as _:
                ssdtrain.offload_parameters(model, session)
            del _
            assert not away(model)
            assert session.stats.classes == ()
            others.resize(0)
            ssdtrain.offload_parameters(model, session)
            assert away(model)

    def test_nobody_waits_for_its_end(self, tmp_path: Path) -> None:
        """Also in a thread that has nothing to do with it; the error says what would help."""
        rig = Rig(tmp_path, max_resident_bytes=1000)
        budget = Budget(rig.residency, rig.lock, "weights")
        room = budget.set_aside(600, lambda: "weights", "give less")
        assert budget.left_bytes == 400
        errors: list[BudgetError] = []

        def ask() -> None:
            with rig.lock, pytest.raises(BudgetError) as info:
                rig.residency.admit(800, lambda: "this test")
            errors.append(info.value)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(60)
        assert "600 bytes is reserved for weights" in str(errors[0])
        assert "or give less. " in str(errors[0])
        room.end()
        assert budget.left_bytes == 1000
        with rig.lock:
            rig.residency.admit(800, lambda: "this test")

    def test_activations_that_do_not_fit_beside_it_say_so(self, tmp_path: Path) -> None:
        model = layers()
        with block(tmp_path, max_resident_bytes="620KiB") as session:
            ssdtrain.offload_parameters(model, session, max_resident_bytes="578KiB")
            small = torch.ones(2000, requires_grad=True).exp()
            with pytest.raises(
                BudgetError, match="give offload_parameters a smaller max_resident"
            ) as info:
                plainly(model, 1).backward()
            # What is reserved is not shared out to what stays in memory as well.
            assert f"{shown_bytes(small.nbytes)} in tensors below min_bytes" in str(info.value)
        support.assert_equal_bits(dict(model.named_parameters()), dict(layers().named_parameters()))


class TestDropped:
    """A model of which nobody has anything may be in a cycle still, with its part of the bound."""

    @pytest.fixture(autouse=True)
    def _no_collector(self) -> Iterator[None]:
        gc.disable()
        yield
        gc.enable()

    @staticmethod
    def drop_one(session: ssdtrain.Session, bound: str) -> None:
        model = layers()
        ssdtrain.offload_parameters(model, session, max_resident_bytes=bound)
        cycle: list[Any] = [model]
        cycle.append(cycle)

    def test_its_part_is_for_the_next_one(self, tmp_path: Path) -> None:
        with block(tmp_path, max_resident_bytes="620KiB") as session:
            self.drop_one(session, "578KiB")
            assert reserved_bytes(session) == 578 << 10
            model = layers()
            ssdtrain.offload_parameters(model, session)
            assert reserved_bytes(session) == 310 << 10

    def test_its_part_is_for_activations(self, tmp_path: Path) -> None:
        model, expected = layers(), layers()
        with block(tmp_path, max_resident_bytes="620KiB") as session:
            self.drop_one(session, "578KiB")
            plainly(model, 1).backward()
            assert reserved_bytes(session) == 0
        plainly(expected, 1).backward()
        support.assert_equal_bits(gradients(model), gradients(expected))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def test_a_full_quota_keeps_what_does_not_fit_in_memory(tmp_path: Path) -> None:
    """Weights go to the disk first, and activations find little room there."""
    with block(tmp_path, max_disk_bytes="1MiB") as session:
        training = begun(session, "step")
        training.run(step, STEPS)
        assert 0 < session.stats.disk_reserved_bytes <= MIB
        assert_as_plain(training)
        stats = training.optimizer.offload_stats
        assert session.stats.write_refused_count + stats.write_failed_count > 0
        weights = rows(session)["weights"]
        assert weights.bytes_read > 0
        assert session.stats.disk_used_bytes >= weights.on_disk_bytes > 0


def test_a_call_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = layers()
    with block(tmp_path, max_disk_bytes="256KiB", max_resident_bytes=MIB) as session:
        with pytest.raises(NoSpaceError) as info:
            ssdtrain.offload_parameters(model, session, max_resident_bytes=quarter(model))
        # Also as long as somebody has the error.
        assert reserved_bytes(session) == 0
        assert session.stats.classes == ()
        assert not away(model)
        del info
        support.assert_equal_bits(dict(model.named_parameters()), dict(layers().named_parameters()))


def test_a_model_that_never_was_in_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = layers()
    with block(tmp_path, max_resident_bytes=4 * WEIGHT_BYTES) as session:
        torch.manual_seed(0)
        ssdtrain.offload_parameters(model, session)
        assert len(away(model)) == len(unique(model)) - 2
        assert rows(session)["weights"].on_disk_bytes == 6 * WEIGHT_BYTES
        assert torch.equal(squared(model, 1), squared(layers(), 1))


def test_a_closed_session_is_refused(tmp_path: Path) -> None:
    with block(tmp_path) as session:
        pass
    model = layers()
    with pytest.raises(ConfigError, match="this session has ended, and weights would need"):
        ssdtrain.offload_parameters(model, session)
    with pytest.raises(ConfigError, match="offload_parameters takes a session, not ssdtrain"):
        ssdtrain.offload_parameters(model, block(tmp_path))  # type: ignore[arg-type]
    assert not away(model)
    for options in ({"verify": True}, {"max_disk_bytes": "1GiB"}):
        with block(tmp_path) as session, pytest.raises(ConfigError, match=r"ssdtrain\.offload\("):
            ssdtrain.offload_parameters(model, session, **options)  # type: ignore[arg-type]


def test_a_decorated_step_shares_its_session(tmp_path: Path) -> None:
    training = Training(layers(), None, plainly)
    training.optimizer = adamw(training.model.parameters())
    tool = block(tmp_path, max_resident_bytes=2 * MIB)
    decorated = tool(step)
    training.run(decorated, 1)
    assert tool.session is not None
    ssdtrain.offload_parameters(training.model, tool.session, max_resident_bytes="200KiB")
    for number in (1, 2):
        training.seen.append({})
        torch.manual_seed(number)
        decorated(training, number)
        training.note_weights()
        training.note("random state", torch.get_rng_state())
    assert_as_plain(training)
    assert rows(tool.session)["weights"].bytes_read > 0


FORKED = """
import os, signal, sys, threading, torch, ssdtrain
from torch import nn
from ssdtrain.parameters.weights import weight_of
held, leave = threading.Event(), threading.Event()
def hold(lock, other):
    with lock, other:
        held.set()
        leave.wait()
model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(4)))
with ssdtrain.offload(sys.argv[1], direct_io="optional", max_resident_bytes="8MiB") as session:
    ssdtrain.offload_parameters(model, session, max_resident_bytes="200KiB")
    locks = session._hooks._lock, weight_of(model[0].weight).owner._lock
    thread = threading.Thread(target=hold, args=locks, daemon=True)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        other = nn.Linear(200, 200)
        act = lambda: [param.sum() for param in model.parameters()]
        for act in (lambda: ssdtrain.offload_parameters(other, session), act):
            try:
                act()
            except ssdtrain.SsdtrainError as error:
                print(type(error).__name__, str(error)[:45], flush=True)
        print("weights: " in str(session), flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    assert status == 0
    for param in model.parameters():
        param.sum()
"""


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    done = forked_python(FORKED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ConfigError this session belongs to the process that was")
    assert lines[1].startswith("ClosedError")
    assert lines[2:] == ["True"]
