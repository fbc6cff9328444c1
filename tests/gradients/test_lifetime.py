"""Whatever ends a step, and whatever the disk does, nothing leaks and no gradient is wrong."""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from children import forked_python
from ssdtrain.errors import CorruptError, StorageError
from ssdtrain.planning.policy import Policy
from support import (
    MODES,
    Flush,
    Mode,
    Result,
    Rig,
    assert_equal_bits,
    batch,
    bits,
    chain,
    functions_of,
    gradients,
    mlp,
    nothing,
    nothing_leaks,
    open_files,
    store_threads,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_gradients(steps: int = 1, **options: int) -> Result:
    model = mlp(**options)
    for step in range(steps):
        model(batch(step)).square().sum().backward()
    return gradients(model)


# The end of a graph


@pytest.mark.defends("lifetime by handle", "never the tensor itself")
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_dropped_without_backward_leaves_nothing_and_needs_no_collector(
    mode: Mode, tmp_path: Path
) -> None:
    rig = Rig.in_mode(tmp_path, mode)
    x = torch.randn(1000, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with rig.context():
            for _ in range(5):
                loss = chain(x).sum()
                if mode == "disk":
                    rig.flush()
                    assert rig.stats.disk_used_bytes > 0
                assert loss.requires_grad
                del loss
        rig.disk.resume()
        wait_until(lambda: rig.stats.disk_used_bytes == 0, "the return of the extents")
        assert rig.stats.resident_bytes == 0
    finally:
        gc.enable()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.where = where
        if where == "forward":
            raise ZeroDivisionError("in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        assert x.numel()
        if ctx.where == "backward":
            raise ZeroDivisionError("in backward")
        return grad, None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_and_the_next_step_works(
    where: str, mode: Mode, tmp_path: Path
) -> None:
    rig = Rig.in_mode(tmp_path, mode)
    flush = rig.flush if mode == "disk" else nothing
    model = mlp()
    state = torch.get_rng_state()
    with rig.context():
        with pytest.raises(ZeroDivisionError, match=where):
            model[-1](Failing.apply(model[:2](batch()), where)).sum().backward()
        rig.assert_empty()
        rig = Rig.in_mode(tmp_path, mode)
    flush = rig.flush if mode == "disk" else nothing
    model.zero_grad()
    torch.set_rng_state(state)
    with rig.context():
        loss = model(batch()).square().sum()
        flush()
        loss.backward()
    del loss
    assert_equal_bits(gradients(model), plain_gradients())
    rig.assert_empty()


@contextlib.contextmanager
def signals_raise(what: type[BaseException]) -> Iterator[None]:
    """Have SIGINT raise something for as long as the block lasts."""

    def handle(*_: object) -> None:
        raise what

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_ctrl_c_while_a_slow_disk_holds_the_step_and_the_next_step_works(
    raised: type[BaseException], tmp_path: Path
) -> None:
    """Or whatever another handler of a signal raises."""
    x = torch.randn(50_000, requires_grad=True)
    rig = Rig(
        tmp_path,
        backend="simulated",
        faults={"seed": 1, "paused": True},
        max_resident_bytes=3 * x.nbytes,
    )
    main = threading.get_ident()

    def waits() -> bool:
        return "wait_for_transfer" in functions_of(main)

    def interrupt() -> None:
        wait_until(waits, "the wait for the disk")
        _thread.interrupt_main()

    with rig.context():
        held = x.exp()
        for _ in range(3):
            watcher = threading.Thread(target=interrupt)
            watcher.start()
            with signals_raise(raised), pytest.raises(raised):
                chain(x)
            watcher.join()
        rig.disk.resume()
        # What was interrupted frees its memory all the same: this needs nearly all there is.
        torch.cat([x, x]).exp()
        del held
        rig.assert_empty()
        loss = chain(x).sum()
        loss.backward()
        del loss
    actual = x.grad
    assert actual is not None
    x.grad = None
    chain(x).sum().backward()
    assert x.grad is not None
    assert bits(actual) == bits(x.grad)
    rig.assert_empty()


# Contexts


def test_threads_and_files_end_with_the_last_graph(tmp_path: Path) -> None:
    with nothing_leaks():
        for backend in ("psync", "io_uring"):
            with ssdtrain.offload(tmp_path, min_bytes=1, backend=backend):
                loss = mlp()(batch()).sum()
                # A thread names itself, once it runs.
                wait_until(lambda: bool(store_threads()), "a thread of the store")
            loss.backward()
            del loss
        assert os.listdir(tmp_path) == []


def test_backward_works_after_the_block_has_ended(tmp_path: Path) -> None:
    for mode in MODES:
        rig = Rig.in_mode(tmp_path, mode)
        model = mlp()
        with rig.context():
            loss = model(batch()).square().sum()
        if mode == "disk":
            rig.flush()
        rig.session.close()
        loss.backward()
        del loss
        rig.disk.resume()
        wait_until(lambda rig=rig: not rig.store.stats()["disk_used_bytes"], "empty")
        assert_equal_bits(gradients(model), plain_gradients())


def test_a_store_that_was_closed_under_a_graph_is_a_clear_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    x = torch.randn(1000, requires_grad=True)
    with rig.context():
        loss = chain(x).sum()
        rig.flush()
        rig.store.close()
        with pytest.raises(ssdtrain.errors.ClosedError, match="clos"):
            loss.backward()
    assert x.grad is None


def test_nested_contexts_each_take_their_own(tmp_path: Path) -> None:
    outer, inner = Rig(tmp_path), Rig(tmp_path)
    first, second = mlp(1), mlp(2)

    def run(flush: Flush, one: Any, two: Any) -> Result:
        torch.manual_seed(0)
        with one:
            a = first(batch())
            with two:
                b = second(batch())
            loss = (a * b).square().sum()
            flush()
            loss.backward()
        found = {**gradients(first), **{f"second {k}": v for k, v in gradients(second).items()}}
        first.zero_grad()
        second.zero_grad()
        return found

    def flush() -> None:
        outer.flush()
        inner.flush()

    expected = run(nothing, torch.enable_grad(), torch.enable_grad())
    actual = run(flush, outer.context(), inner.context())
    assert_equal_bits(actual, expected)
    for rig in (outer, inner):
        assert rig.stats.bytes_read > 0
        rig.assert_empty()


def test_the_same_object_may_be_entered_twice_and_within_itself(tmp_path: Path) -> None:
    offload = ssdtrain.offload(tmp_path, min_bytes=1)
    with nothing_leaks():
        for _ in range(2):
            model = mlp()
            with offload as outer:
                a = model[:2](batch())
                with offload as inner:
                    loss = model[2:](a).square().sum()
                assert inner is not outer
                loss.backward()
            del a, loss, inner, outer
            assert_equal_bits(gradients(model), plain_gradients())


def test_as_a_decorator_one_session_serves_all_calls_and_threads(tmp_path: Path) -> None:
    def train(model: nn.Module, deep: int = 0) -> Result:
        """Train in a call within ``deep`` others."""
        if deep:
            return decorated[0](model, deep - 1)
        model.zero_grad()
        model(batch()).square().sum().backward()
        return gradients(model)

    models = [mlp(seed).eval() for seed in range(3)]
    expected = [train(model) for model in models]
    with nothing_leaks():
        decorated = [ssdtrain.offload(tmp_path, min_bytes=1)(train)]
        assert decorated[0].__name__ == "train"
        with ThreadPoolExecutor(3) as pool:
            actual = list(pool.map(decorated[0], models, range(3)))
        for one, other in zip(actual, expected, strict=True):
            assert_equal_bits(one, other)
        assert len([one for one in open_files() if str(tmp_path) in one]) == 1
        decorated.clear()


# Forks


FORK = """
import os, signal, sys, threading, warnings, gc
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from support import Rig
import ssdtrain
torch.set_num_threads(1)
for backend in ("psync", "io_uring"):
    rig = Rig(Path(sys.argv[1]), backend=backend)
    x = torch.randn(100_000, requires_grad=True)
    expected, = torch.autograd.grad((x * 2).exp().sin().sum(), x)
    with rig.context():
        loss = (x * 2).exp().sin().sum()
        rig.flush()
        # Another thread is in a hook at this moment; its lock is never released in the child.
        entered, leave = threading.Event(), threading.Event()
        def hold():
            with rig.lock:
                entered.set()
                leave.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        entered.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            # The child drops the graph and the store, and is refused a read: none may hang.
            code = 1
            try:
                loss.backward()
            except ssdtrain.errors.ClosedError:
                code = 0
            own, = torch.autograd.grad((x * 2).exp().sin().sum(), x)
            assert torch.equal(own, expected)
            del loss, rig
            gc.collect()
            # An orderly exit would run the finalizers of torch, which do not expect a fork.
            os._exit(code)
        _, status = os.waitpid(child, 0)
        leave.set()
        holder.join()
        assert status == 0, (backend, status)
        loss.backward()
        assert torch.equal(x.grad, expected)
        second = (x * 2).exp().sin().sum()
        rig.flush()
        x.grad = None
        second.backward()
        assert torch.equal(x.grad, expected)
    assert rig.stats.bytes_read > 0
    del loss, second
    rig.assert_empty()
print("done")
"""


@pytest.mark.defends("a forked child owns nothing")
def test_a_forked_child_neither_reads_nor_closes_the_store_of_its_parent(tmp_path: Path) -> None:
    done = forked_python(FORK, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Faults of the disk


FAULTS: dict[str, dict[str, Any]] = {
    "every write fails": {"io_error_rate": 1.0},
    "no quota left": {"space_error_rate": 1.0},
    "a device that is gone": {"gone_after_count": 0},
    "calls that move nothing": {"zero_rate": 1.0},
    "a full disk": {"capacity_bytes": 20_000},
    "short transfers": {"short_rate": 0.9},
    "interrupted calls": {"retry_rate": 0.5},
    "transfers overtaken by others": {"late_rate": 0.5},
}
HARMLESS = {"short_rate", "retry_rate", "late_rate"}


@pytest.mark.parametrize("name", FAULTS)
def test_training_goes_on_with_equal_bits_on_a_disk_that_fails_writes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = {"seed": 3, **FAULTS[name]}
    expected = plain_gradients(steps=3)
    rig = Rig(tmp_path, backend="simulated", faults=faults)
    model = mlp()
    with caplog.at_level(logging.WARNING, "ssdtrain"), rig.context():
        for step in range(3):
            loss = model(batch(step)).square().sum()
            rig.flush()
            loss.backward()
    del loss
    assert_equal_bits(gradients(model), expected)
    rig.assert_empty()
    fails = not HARMLESS & faults.keys()
    assert (rig.stats.write_failed_count > 0) == fails
    assert (rig.stats.tensors_kept > 0) == fails
    said = [record.getMessage() for record in caplog.records]
    assert ["keeping tensors in memory" in one for one in said[:1]] == [True] * fails
    # A directory that fails again and again is given up, which is said once too; a full one is not.
    is_given_up = fails and name not in ("no quota left", "a full disk")
    assert ["out of use" in one for one in said[1:]] == [True] * is_given_up
    assert (rig.stats.bytes_read > 0) == (not fails or "capacity_bytes" in faults)


def test_tensors_beyond_max_disk_bytes_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(300_000, requires_grad=True)
    (expected,) = torch.autograd.grad(chain(x, 20).sum(), x)
    rig = Rig(tmp_path, max_disk_bytes=16 << 20)
    with caplog.at_level(logging.INFO, "ssdtrain"), rig.context():
        for _ in range(2):
            loss = chain(x, 20).sum()
            rig.flush()
            assert rig.stats.disk_reserved_bytes <= 16 << 20
            (grad,) = torch.autograd.grad(loss, x)
            assert bits(grad) == bits(expected)
    del loss
    rig.assert_empty()
    stats = rig.stats
    assert stats.bytes_read > 0
    assert stats.tensors_kept > 0
    assert stats.write_refused_count > 0
    assert stats.write_failed_count == 0, "what was asked for is called a failure"
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    report = str(stats)
    assert "writes beyond max_disk_bytes" in report
    assert "failures" not in report


def failure_of(work: Callable[[], object]) -> StorageError | None:
    try:
        work()
    except StorageError as error:
        return error
    return None


NEVER_LEFT = """
import gc, logging, sys, torch, ssdtrain

# It would warn of a block within another one.
logging.getLogger("ssdtrain").setLevel(logging.ERROR)

class Last:
    def __del__(self, collect=gc.collect):
        for _ in range(20):
            collect()

def step():
    x = torch.ones(512, 512, requires_grad=True)
    (x.sin() * x.cos()).sum().backward()

sys.modules["last"] = Last()
gc.collect()
session = ssdtrain.offload(sys.argv[1]).__enter__()
step()

def blocks():
    with ssdtrain.offload(sys.argv[1]) as session:
        yield session

suspended = blocks()
next(suspended)
step()
"""


@pytest.mark.long
def test_a_block_that_is_never_left(tmp_path: Path) -> None:
    """Torch counts no references while Python ends, and collections of garbage go on meanwhile."""
    words = [sys.executable, "-P", "-c", NEVER_LEFT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "as much as the disk hides"),
        ({"max_resident_bytes": "2MiB"}, "at most 2 MiB of all stay in memory"),
    ],
)
def test_a_session_logs_its_bound_when_it_begins(
    options: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ssdtrain"), ssdtrain.offload(tmp_path, **options):
        first = caplog.records[0].getMessage()
    assert first.endswith(f"); {said}")


@pytest.mark.parametrize("verify", [True, False])
def test_a_read_that_fails_raises_and_gives_no_gradient(verify: bool, tmp_path: Path) -> None:
    failed_count = 0
    for seed in range(32):
        faults = {"seed": seed, "io_error_rate": 0.7}
        rig = Rig(tmp_path, backend="simulated", faults=faults, verify=verify)
        x = torch.ones(1000, requires_grad=True)
        with rig.context():
            loss = (x * 2).exp().sum()
            rig.flush()
            written = rig.stats.disk_used_bytes > 0
            error = failure_of(loss.backward)
        assert (x.grad is None) == (error is not None)
        if error is not None:
            assert written
            assert "no gradient was computed" in "".join(error.__notes__)
            failed_count += 1
        del loss, error
        rig.assert_empty()
    assert failed_count > 0, "no seed let a write through and failed its read"


@pytest.mark.defends("verify")
def test_every_flipped_bit_is_caught(tmp_path: Path) -> None:
    for seed in range(20):
        rig = Rig(
            tmp_path, backend="simulated", faults={"seed": seed, "bit_flip_rate": 1.0}, verify=True
        )
        x = torch.ones(1000, requires_grad=True)
        with rig.context():
            loss = chain(x).sum()
            rig.flush()
            with pytest.raises(CorruptError):
                loss.backward()
        assert x.grad is None
        del loss
        rig.assert_empty()


# The long run


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(None, id="all written"),
        pytest.param(Policy, id="as learned", marks=pytest.mark.long),
    ],
)
def test_200_steps_leave_memory_files_threads_and_extents_flat(
    policy: Callable[[], Policy] | None, tmp_path: Path
) -> None:
    def steps(count: int) -> Iterator[None]:
        for number in range(count):
            optimizer.zero_grad()
            loss = model(batch(number, rows=256)).square().mean()
            # Nothing is planned in the first round, so that is written whatever the disk is worth.
            if policy is None or rig.stats.bytes_written == 0:
                rig.flush()
            loss.backward()
            optimizer.step()
            yield

    model = mlp(layers=6)
    optimizer = torch.optim.AdamW(model.parameters())
    rig = Rig(tmp_path, backend="auto", policy=policy() if policy is not None else None)
    with rig.context():
        for _ in steps(50):
            pass
        rig.assert_empty()
        before = resident_kib(), len(open_files()), len(store_threads())
        reserved = rig.stats.disk_reserved_bytes
        for _ in steps(200):
            pass
        rig.assert_empty()
        assert rig.stats.disk_reserved_bytes <= reserved
        assert (len(open_files()), len(store_threads())) == before[1:]
        grown_kib = resident_kib() - before[0]
    # A step saves more than 600 KiB: a leak of one tensor in fifty steps shows.
    assert grown_kib < 2048
    assert rig.stats.bytes_written > 0


KILLED = """
import sys
from pathlib import Path
import torch
from support import Rig
rig = Rig(Path(sys.argv[1]), backend="auto", min_bytes=1)
x = torch.randn(1 << 20, requires_grad=True)
with rig.context():
    y = x
    for _ in range(16):
        y = (y * 2).sin()
    rig.flush()
    print(rig.stats.disk_used_bytes, flush=True)
    sys.stdin.read()
"""


def test_kill_9_in_the_middle_of_a_step_gives_the_space_back(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        used = int(child.stdout.readline())
        assert used >= 16 * 4 << 20
        files = [
            entry
            for entry in Path(f"/proc/{child.pid}/fd").iterdir()
            if str(tmp_path) in os.readlink(entry)
        ]
        assert len(files) == 1
        # No other name leads to the file, so its space goes with the last descriptor: the child's.
        status = files[0].stat()
        assert status.st_nlink == 0
        assert status.st_blocks * 512 >= used
        assert os.listdir(tmp_path) == []
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    assert os.listdir(tmp_path) == []
    assert not [one for one in open_files() if str(tmp_path) in one]
