"""An optimizer's state in the store of a session: one set of disks, one bound, one report."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from children import forked_python
from ssdtrain import BudgetError, ConfigError, offload_optimizer
from ssdtrain.optimizer import in_backward_update, offloaded
from ssdtrain.optimizer.buffers import Buffers
from ssdtrain.optimizer.offload import STATE_MIN_BYTES
from ssdtrain.sharing import Budget
from support import Rig
from trained import WIDTH, everything, model, plain_step

MIB = 1 << 20
BATCH = 512
"""Rows: activations of 320 and 640 KiB, seven of them, beside 1.4 MiB of state."""
BOUND = 3 * MIB
SCHEDULES = ("step", "backward")
STEPS = 5


class Training:
    """A model and its optimizer, and the same steps without ssdtrain to compare with."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, build: Callable[[], nn.Module] = model
    ) -> None:
        self.module = build().to(dtype)
        self.optimizer: Any = torch.optim.AdamW(self.module.parameters())
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        x = torch.randn(BATCH, WIDTH, generator=self._generator).to(self.dtype)
        plain_step(self.module, self.optimizer, x)

    def steps(self, count: int = STEPS) -> Training:
        for _ in range(count):
            self.step()
        return self

    def now(self) -> dict[str, Tensor]:
        return everything(self.module, self.optimizer)

    def assert_as_plain(self, count: int, **options: Any) -> None:
        """Compare with as many steps without a session."""
        expected = Training(self.dtype)
        if options.get("master_dtype"):
            # What the masters are in memory, test_masters.py proves.
            with ssdtrain.TensorStore(options.pop("directory")) as store:
                offload_optimizer(expected.optimizer, store, **options)
                support.assert_equal_bits(self.now(), expected.steps(count).now())
        else:
            support.assert_equal_bits(self.now(), expected.steps(count).now())


def block(directory: Path, **options: Any) -> ssdtrain.offload:
    options = {"min_bytes": 64 << 10, "direct_io": "optional", **options}
    return ssdtrain.offload(directory, **options)


def rows(session: ssdtrain.Session) -> dict[str, Any]:
    return {one.name: one for one in session.stats.classes}


KINDS = list(product(["plain", "masters", "undo"], SCHEDULES, [None, 8 * MIB, BOUND]))


@pytest.mark.parametrize(
    ("kind", "overlap", "bound"),
    support.shared_out(
        KINDS,
        quick=[
            *(one for one in KINDS if one[2] == BOUND),
            ("plain", "step", None),
            ("masters", "backward", 8 * MIB),
        ],
    ),
)
def test_equal_bits(kind: str, overlap: Any, bound: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"masters": {"master_dtype": torch.float32}, "undo": {"undo": True}}
    options = {"overlap": overlap, "buffer_bytes": "1MiB", **options.get(kind, {})}
    training = Training(torch.bfloat16 if kind == "masters" else torch.float32)
    with block(tmp_path, max_resident_bytes=bound) as session:
        offload_optimizer(training.optimizer, session, **options)
        training.steps()
        training.assert_as_plain(STEPS, directory=tmp_path, **options)
    stats = session.stats
    state, activations = rows(session)["optimizer state"], rows(session)["activations"]
    assert state.bytes_written > 0
    assert state.bytes_read > 0
    if bound is not None:
        assert activations.bytes_read > 0
        assert 0 < stats.resident_bytes_peak <= bound


@contextlib.contextmanager
def watched_updates(monkeypatch: pytest.MonkeyPatch, look: Any) -> Iterator[None]:
    """Call ``look`` before and after each update of a part."""
    with monkeypatch.context() as patch:
        for module in (offloaded, in_backward_update):
            update = module.update

            def watched(*arguments: Any, update: Any = update) -> None:
                look()
                update(*arguments)
                look()

            patch.setattr(module, "update", watched)
        yield


def large_in_memory(optimizer: Any) -> int:
    """Return the bytes of large state that are in memory, on their way there or to the disk."""
    disk = optimizer._disk
    store = disk.store._store
    tensors = [away.source for away, _ in list(disk._in_flight)]
    tensors += [
        value
        for state in list(dict.values(optimizer._states))
        for value in list(dict.values(state))
    ]
    apart = {
        one.data_ptr(): one.nbytes
        for one in tensors
        if isinstance(one, Tensor)
        and one.nbytes >= STATE_MIN_BYTES
        and not store.owns(one.data_ptr())
    }
    return sum(apart.values()) + store.resident_bytes()


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*one, bias=False) for one in pairwise(widths)))


def even() -> nn.Sequential:
    """Weights with 512 KiB of state each: of two, the second one is not read early."""
    return chain(WIDTH, 400, WIDTH, 400, WIDTH)


def uneven() -> nn.Sequential:
    """Weights that find no room for their 800 KiB of state before smaller ones are written."""
    return chain(WIDTH, 110, WIDTH, 640, WIDTH, 110, WIDTH)


@pytest.mark.parametrize("overlap", SCHEDULES)
@pytest.mark.parametrize("build", [model, even, uneven], ids=lambda one: one.__name__)
def test_what_is_reserved_holds_all_state_that_is_in_memory(
    build: Any, overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, seen = Training(build=build), []
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        offload_optimizer(training.optimizer, session, overlap=overlap)
        assert training.optimizer._part_bytes == BOUND // 16
        account = session._hooks._residency.account

        def look() -> None:
            seen.append((large_in_memory(training.optimizer), account.reserved_bytes))

        with watched_updates(monkeypatch, look):
            training.steps()
        assert account.reserved_bytes == 0
        assert large_in_memory(training.optimizer) == 0
    assert seen
    assert max(state for state, _ in seen) > WIDTH * WIDTH * 8
    assert all(state <= reserved for state, reserved in seen), seen
    assert max(reserved for _, reserved in seen) <= BOUND // 3
    assert session.stats.resident_bytes_peak <= BOUND


def test_more_state_than_expected_is_told_in_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pairs(torch.optim.SGD):
        """Has one tensor in its state, which is twice as large as its parameter."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and "pair" not in self.state[param]:
                        self.state[param]["pair"] = torch.zeros(2, *param.shape)
            return super().step(closure)

    training, seen = Training(), []
    training.optimizer = Pairs(training.module.parameters(), lr=1e-3)
    with block(tmp_path, max_resident_bytes=8 * MIB) as session:
        offload_optimizer(training.optimizer, session)
        account, note = session._hooks._residency.account, Buffers.note

        def noted(*arguments: Any) -> None:
            note(*arguments)
            seen.append(account.reserved_bytes)

        monkeypatch.setattr(Buffers, "note", noted)
        training.step()
        assert account.reserved_bytes == 0
    # Nothing was expected of it, so all parameters are one part.
    assert seen == [2 * sum(one.nbytes for one in training.module.parameters())]
    assert session.stats.resident_bytes_peak >= seen[0]


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_a_step_without_room_raises_before_it_changes_anything(
    overlap: Any, tmp_path: Path
) -> None:
    training = Training()
    with block(tmp_path, max_resident_bytes=8 * MIB) as session:
        offload_optimizer(training.optimizer, session, overlap=overlap)
        training.steps(2)
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2))
        before = training.now()
        training.module(x).square().mean().backward()
        # What activations of another graph hold that cannot leave memory.
        others = session._hooks._residency.account.reserve(8 * MIB)
        for _ in range(2):
            with pytest.raises(BudgetError, match="whose state shares this bound") as caught:
                training.optimizer.step()
            del caught
        others.resize(0)
        weights = dict(training.module.named_parameters())
        support.assert_equal_bits({name: before[name] for name in weights}, weights)
        training.optimizer.step()
        assert session._hooks._residency.account.reserved_bytes == 0
    plain = Training().steps(2)
    plain_step(plain.module, plain.optimizer, x)
    support.assert_equal_bits(training.now(), plain.now())


def test_without_room_in_backward_updates_are_made_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, made = Training(), []
    # Activations stay in memory, and as long as their graph is kept.
    with block(tmp_path, min_bytes=1 << 40, max_resident_bytes=8 * MIB) as session:
        offload_optimizer(training.optimizer, session, overlap="backward")
        training.steps(2)
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2))
        with watched_updates(monkeypatch, lambda: made.append(1)):
            loss = training.module(x).square().mean()
            residency = session._hooks._residency
            others = residency.account.reserve(residency.room_bytes())
            loss.backward(retain_graph=True)
            assert not made
            others.resize(0)
            training.optimizer.step()
            assert made
    plain = Training().steps(2)
    plain_step(plain.module, plain.optimizer, x)
    support.assert_equal_bits(training.now(), plain.now())


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_the_block_may_end_before_the_optimizer(overlap: Any, tmp_path: Path) -> None:
    training = Training()
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        offload_optimizer(training.optimizer, session, overlap=overlap)
        training.steps(2)
    at_the_end = session.stats
    training.steps(3)
    training.assert_as_plain(5)
    assert session.stats == at_the_end
    assert training.optimizer.offload_stats.on_disk_bytes > 0
    assert open_files(tmp_path)
    del training, session
    gc.collect()
    assert not open_files(tmp_path)


def open_files(directory: Path) -> list[str]:
    """Return the files in a directory that this process has open; those of stores have no names."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if name.startswith(str(directory))]


def test_nothing_of_the_activations_lives_on_with_the_optimizer(tmp_path: Path) -> None:
    """Such as the pinned memory of a GPU, which the session's transfers have."""
    training = Training()
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        offload_optimizer(training.optimizer, session)
        training.step()
        transfer = weakref.ref(session._hooks._transfer)
    gc.collect()
    assert transfer() is None
    training.step()
    training.assert_as_plain(2)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_two_optimizers_share_one_bound(overlap: Any, tmp_path: Path) -> None:
    both = Training(), Training()
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        for one in both:
            offload_optimizer(one.optimizer, session, overlap=overlap)
        for _ in range(STEPS):
            for one in both:
                one.step()
    for one in both:
        one.assert_as_plain(STEPS)
    assert 0 < session.stats.resident_bytes_peak <= BOUND


def test_a_block_for_each_step(tmp_path: Path) -> None:
    training = Training()
    for number in range(STEPS):
        with block(tmp_path, max_resident_bytes=BOUND) as session:
            if not number:
                offload_optimizer(training.optimizer, session, overlap="backward")
            training.step()
    training.assert_as_plain(STEPS)


def test_a_full_quota_keeps_both_in_memory_as_need_be(tmp_path: Path) -> None:
    training = Training()
    with block(tmp_path, max_disk_bytes=2 * MIB) as session:
        offload_optimizer(training.optimizer, session, buffer_bytes="1MiB")
        training.steps()
        assert 0 < session.stats.disk_reserved_bytes <= 2 * MIB
    training.assert_as_plain(STEPS)
    stats = training.optimizer.offload_stats
    assert stats.write_failed_count + session.stats.write_refused_count > 0


def test_an_error_after_the_state_has_begun_to_leave_keeps_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training().steps(1)

    def fail(_: Any) -> None:
        raise MemoryError

    with block(tmp_path) as session:
        with monkeypatch.context() as patched:
            patched.setattr(offloaded.Offloaded, "_send_all", fail)
            with pytest.raises(MemoryError):
                offload_optimizer(training.optimizer, session)
        training.steps(STEPS - 1)
        assert rows(session)["optimizer state"].bytes_written > 0
    training.assert_as_plain(STEPS)


def test_the_report_has_a_row_for_each_class(tmp_path: Path) -> None:
    training, other = Training(), Training()
    with block(tmp_path) as session:
        assert "of these" not in str(session)
        assert session.stats.classes == ()
        offload_optimizer(training.optimizer, session)
        offload_optimizer(other.optimizer, session)
        training.step()
        session.flush()
        other.step()
        first = session.stats
        training.optimizer._disk.flush()
        other.optimizer._disk.flush()
        flushed = rows(session)["optimizer state"]
        for state in training.optimizer._parameter_states():
            state.prefetch()
        ahead = rows(session)["optimizer state"]
        assert flushed.on_disk_bytes == 2 * ahead.on_disk_bytes > 0
        assert ahead.resident_bytes == flushed.resident_bytes + ahead.on_disk_bytes
        training.step()
        stats = session.stats
        assert [one.name for one in stats.classes] == ["activations", "optimizer state"]
        state = stats.classes[1]
        told = [one.optimizer.offload_stats for one in (training, other)]
        assert state.bytes_written == sum(one.written_bytes for one in told)
        assert state.bytes_read == sum(one.read_bytes for one in told) > 0
        assert state.on_disk_bytes == sum(one.on_disk_bytes for one in told)
        assert state.resident_bytes == sum(one.resident_bytes for one in told)
        assert state.stall_s == sum(one.stall_s for one in told)
        assert stats.exposed_s == stats.stall_s + state.stall_s
        done = stats.since(first).classes[1]
        assert done.bytes_written == state.bytes_written - first.classes[1].bytes_written > 0
        assert done.on_disk_bytes == state.on_disk_bytes
        values = stats.as_dict()
        assert values["optimizer_state_bytes_written"] == state.bytes_written
        assert values["activations_hidden_s"] == stats.classes[0].hidden_s
        assert all(type(value) in (int, float, str) for value in values.values())
        text = str(session)
        assert "\n  of these   activations: " in text
        assert "\n             optimizer state: " in text
        assert re.search(r"I/O time .* stalls? of activations\n", text)
        del other
        gc.collect()
        assert session.stats.classes[1].bytes_written == sum(one.written_bytes for one in told)


def test_activations_are_told_without_what_others_moved(tmp_path: Path) -> None:
    """Also where the other is gone."""
    training = Training()
    with block(tmp_path, max_resident_bytes=BOUND) as session:
        share = session.share("another")
        store = ssdtrain.TensorStore.over(share.store)
        offload_optimizer(training.optimizer, session)
        training.steps(2)
        before = rows(session)["activations"]
        stored = store.write(torch.zeros(MIB))
        stored.wait()
        result = store.read(stored).result()
        after = rows(session)["activations"]
        assert session.stats.bytes_written >= before.bytes_written + 4 * MIB
        assert (after.bytes_written, after.bytes_read) == (before.bytes_written, before.bytes_read)
        assert session.stats.resident_bytes == 0
        del result


def test_saved_tensors_on_the_disk_are_told_by_activations(tmp_path: Path) -> None:
    training = Training()
    with block(tmp_path, min_bytes=256 << 10) as session:
        offload_optimizer(training.optimizer, session)
        loss = training.module(torch.randn(BATCH, WIDTH)).square().mean()
        assert rows(session)["activations"].on_disk_bytes == 0, "too little for a batch of writes"
        session.flush()
        others = session._hooks._residency.account.reserve(1000)
        activations = rows(session)["activations"]
        assert activations.on_disk_bytes >= 5 * BATCH * WIDTH * 4
        assert activations.resident_bytes == session.stats.resident_bytes - 1000 > 0
        others.resize(0)
        loss.backward()
        del loss
        assert rows(session)["activations"].on_disk_bytes == 0


class TestBudget:
    """Who is short of room waits for who has reserved some."""

    @staticmethod
    def waiting(rig: Rig) -> tuple[threading.Thread, list[Any]]:
        """Ask for more than there is in another thread, as a read of activations does."""
        ended: list[Any] = []

        def ask() -> None:
            try:
                with rig.lock:
                    rig.residency.admit(800, lambda: "this test")
                ended.append(None)
            except BudgetError as error:
                ended.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread, ended

    def test_who_needs_room_waits_until_it_is_given_back(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_resident_bytes=1000)
        room = Budget(rig.residency, rig.lock, "a test").reserve(300, 300, lambda: "a test")
        room.fill_here()
        budget = room._budget
        thread, ended = self.waiting(rig)
        support.wait_until(
            lambda: "wait_for_room" in support.functions_of(thread.ident or 0), "the wait"
        )
        # Meanwhile the session's lock is free, for other hooks.
        with rig.lock:
            assert rig.residency.room_bytes() == 700
        assert not ended
        room.end()
        thread.join()
        assert ended == [None]
        assert rig.residency.resident_bytes() == 0
        del budget

    def test_room_that_is_lost_is_given_back(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_resident_bytes=1000)
        budget = Budget(rig.residency, rig.lock, "a test")
        room = budget.reserve(300, 300, lambda: "a test")
        thread, ended = self.waiting(rig)
        support.wait_until(
            lambda: "wait_for_room" in support.functions_of(thread.ident or 0), "the wait"
        )
        del room
        thread.join()
        assert ended == [None]

    def test_room_that_another_thread_fills_is_waited_for(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_resident_bytes=1000)
        budget = Budget(rig.residency, rig.lock, "a test")
        room = budget.reserve(300, 300, lambda: "a test")
        here = threading.get_ident()

        def fill() -> None:
            support.wait_until(lambda: "wait_for_room" in support.functions_of(here), "the wait")
            room.end()

        thread = threading.Thread(target=fill)
        thread.start()
        with rig.lock:
            rig.residency.admit(800, lambda: "this test")
        thread.join()

    def test_nobody_waits_for_oneself(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_resident_bytes=1000)
        budget = Budget(rig.residency, rig.lock, "a test")
        room = budget.reserve(300, 300, lambda: "a test")
        room.fill_here()
        with pytest.raises(BudgetError, match="300 bytes is reserved for a test"), rig.lock:
            rig.residency.admit(800, lambda: "this test")
        room.end()
        with rig.lock:
            rig.residency.admit(800, lambda: "this test")

    def test_as_much_is_reserved_as_there_is(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path, max_resident_bytes=1000)
        budget = Budget(rig.residency, rig.lock, "a test")
        assert budget.reserve(100, 900, lambda: "a test").nbytes == 900
        gc.collect()
        held = rig.residency.account.reserve(400)
        assert budget.reserve(100, 900, lambda: "a test").nbytes == 600
        assert budget.try_to_reserve(601) is None
        room = budget.try_to_reserve(600)
        assert room is not None
        assert rig.residency.room_bytes() == 0
        room.end()
        held.resize(0)
        assert rig.residency.account.peak_bytes == 1000


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_forwards_wait_for_the_room_of_an_update(overlap: Any, tmp_path: Path) -> None:
    """Another graph is there all the time, so both are short of room; the bound holds."""
    training = Training()
    bound = 3 * MIB
    with block(tmp_path, max_resident_bytes=bound) as session:
        offload_optimizer(training.optimizer, session, overlap=overlap, buffer_bytes="64MiB")
        module = model()
        for _ in range(STEPS):
            loss = module(torch.randn(BATCH, WIDTH)).square().mean()
            training.step()
            loss.backward()
    assert session.stats.resident_bytes_peak <= bound
    training.assert_as_plain(STEPS)


def test_a_session_that_has_ended_is_refused(tmp_path: Path) -> None:
    with block(tmp_path) as session:
        pass
    training = Training()
    with pytest.raises(ConfigError, match="this session has ended"):
        offload_optimizer(training.optimizer, session)
    assert type(training.optimizer) is torch.optim.AdamW
    with pytest.raises(ConfigError, match="takes a session, not ssdtrain"):
        offload_optimizer(training.optimizer, block(tmp_path))  # type: ignore[arg-type]
    decorator = block(tmp_path)
    with pytest.raises(ConfigError, match="None before the first call of its function"):
        offload_optimizer(training.optimizer, decorator.session)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"verify": True}, {"max_disk_bytes": "1GiB"}])
def test_options_of_the_store_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with block(tmp_path) as session, pytest.raises(ConfigError, match=r"to ssdtrain\.offload"):
        offload_optimizer(Training().optimizer, session, **options)


def test_a_bound_that_is_too_small_for_a_parameter_is_refused(tmp_path: Path) -> None:
    training = Training()
    needed = 2 * WIDTH * 2 * WIDTH * 4 + (64 << 10)
    with block(tmp_path, max_resident_bytes=needed - 1) as session:
        with pytest.raises(ConfigError, match=r"params\[0\] of group 0.* at least 475136 ") as info:
            offload_optimizer(training.optimizer, session)
        del info
        assert type(training.optimizer) is torch.optim.AdamW
        assert session.stats.classes == ()
    with block(tmp_path, max_resident_bytes=needed) as session:
        offload_optimizer(training.optimizer, session)
    # Activations do not fit beside it, so they stay out here.
    training.steps(3)
    training.assert_as_plain(3)
    assert training.optimizer.offload_stats.read_bytes > 0


FORKED = """
import os, signal, sys, threading, torch, ssdtrain
held, leave = threading.Event(), threading.Event()
def hold(lock):
    with lock:
        held.set()
        leave.wait()
with ssdtrain.offload(sys.argv[1], direct_io="optional", max_resident_bytes="8MiB") as session:
    weight = torch.randn(200, 200, requires_grad=True)
    optimizer = ssdtrain.offload_optimizer(torch.optim.AdamW([weight]), session)
    weight.sum().backward()
    optimizer.step()
    optimizer._disk.flush()
    thread = threading.Thread(target=hold, args=(session._hooks._lock,), daemon=True)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        other = torch.optim.AdamW([torch.randn(200, 200, requires_grad=True)])
        for act in (lambda: ssdtrain.offload_optimizer(other, session), optimizer.step):
            try:
                act()
            except ssdtrain.SsdtrainError as error:
                print(type(error).__name__, str(error)[:45], flush=True)
        str(session)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    assert status == 0
    optimizer.step()
"""


@pytest.mark.long
def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    done = forked_python(FORKED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ConfigError this session belongs to the process that was")
    assert lines[1].startswith("StorageError")
    assert len(lines) == 2


def test_a_decorated_step_shares_its_session(tmp_path: Path) -> None:
    training, tool = Training(), block(tmp_path, max_resident_bytes=BOUND)
    step = tool(training.step)
    step()
    offload_optimizer(training.optimizer, tool.session)
    for _ in range(STEPS - 1):
        step()
    training.assert_as_plain(STEPS)
    assert tool.session.stats.resident_bytes_peak <= BOUND
    assert rows(tool.session)["optimizer state"].bytes_read > 0
