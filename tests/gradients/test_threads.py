"""Threads, ends and copies at every bad moment: no hang, no leak, no wrong gradient."""

from __future__ import annotations

import _thread
import copy
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdtrain
from children import forked_python
from ssdtrain.errors import ClosedError
from support import (
    MODES,
    Mode,
    Rig,
    batch,
    bits,
    chain,
    gradients,
    mlp,
    nothing_leaks,
    say,
    shared_out,
    wait_until,
)

WATCHDOG_S = 60
"""No step here takes a second; what takes this long hangs."""

pytestmark = pytest.mark.usefixtures("one_thread")


def slow_rig(directory: Path, **options: Any) -> Rig:
    """A rig whose disk can be paused at will."""
    return Rig(directory, backend="simulated", faults={"seed": 1}, **options)


def leaf(rows: int = 1000) -> Tensor:
    return torch.linspace(-1, 1, rows).requires_grad_()


def plain_gradient(x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(chain(x).sum(), x)
    return grad


def waits_for_a_read(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_qualname == "Hooks.wait_for"


class Walker:
    """A backward in a thread of its own, which waits for a disk that stands still."""

    def __init__(self, rig: Rig, loss: Tensor) -> None:
        rig.flush()
        rig.disk.pause()
        self.ended: Future[None] = Future()
        self._loss: Tensor | None = loss
        self._thread = threading.Thread(target=self._walk, daemon=True)
        self._thread.start()
        ident = self._thread.ident
        assert ident is not None
        wait_until(lambda: waits_for_a_read(ident), "the wait for a read")

    def _walk(self) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001 - for whoever joins
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def join(self) -> None:
        """Wait for the end; raise what it raised."""
        try:
            self.ended.result(WATCHDOG_S)
        finally:
            self._thread.join(WATCHDOG_S)


# Others, while one thread waits for the disk


@pytest.mark.defends("no lock while waiting for a read")
def test_forwards_go_on_while_a_backward_waits_for_the_disk(tmp_path: Path) -> None:
    rig = slow_rig(tmp_path)
    x, other = leaf(), leaf()
    expected = plain_gradient(x)
    with rig.context():
        walker = Walker(rig, chain(x).sum())

        def step() -> Tensor:
            with rig.context():
                (grad,) = torch.autograd.grad(chain(other).sum(), other)
                return grad

        with ThreadPoolExecutor(1) as pool:
            stepping = pool.submit(step)
            try:
                # A lock that is held while waiting would hold this one up too.
                assert bits(stepping.result(WATCHDOG_S)) == bits(expected)
            finally:
                rig.disk.resume()
    walker.join()
    assert x.grad is not None
    assert bits(x.grad) == bits(expected)
    assert rig.stats.bytes_read > 0
    del stepping
    rig.assert_empty()


def test_several_backwards_wait_for_one_read(tmp_path: Path) -> None:
    def losses(x: Tensor) -> list[Tensor]:
        h = x * 2
        return [h.sin().sum(), h.cos().sum(), h.tan().sum(), h.square().sum()]

    rig = slow_rig(tmp_path)
    x = leaf()
    expected = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses(x)]
    with rig.context():
        graphs = losses(x)
        rig.flush()
        before = rig.store.stats()["read_count"]
        rig.disk.pause()
        with ThreadPoolExecutor(4) as pool:
            try:
                walks = [
                    pool.submit(torch.autograd.grad, loss, x, retain_graph=True) for loss in graphs
                ]
                wait_until(
                    lambda: sum(waits_for_a_read(one) for one in sys._current_frames()) == 4,
                    "the wait of all",
                )
            finally:
                rig.disk.resume()
            grads = [walk.result(WATCHDOG_S)[0] for walk in walks]
    assert [bits(one) for one in grads] == [bits(one) for one in expected]
    # The tangent's own, and less than one for each of the four who saved `h`.
    assert rig.store.stats()["read_count"] - before < 1 + 4
    del graphs, walks
    rig.assert_empty()


@pytest.mark.parametrize("mode", MODES)
def test_graphs_dropped_by_other_threads_leave_nothing(mode: Mode, tmp_path: Path) -> None:
    rig = Rig.in_mode(tmp_path, mode)
    graphs: Queue[Tensor | None] = Queue()

    def drop() -> None:
        while (graph := graphs.get()) is not None:
            del graph

    droppers = [threading.Thread(target=drop) for _ in range(3)]
    for one in droppers:
        one.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with rig.context():
            for number in range(60):
                graphs.put(chain(leaf(64 + number)).sum())
                if mode == "disk" and number % 8 == 0:
                    rig.flush()
    finally:
        sys.setswitchinterval(interval)
        for _ in droppers:
            graphs.put(None)
        for one in droppers:
            one.join(WATCHDOG_S)
    rig.assert_empty()


def test_a_saved_tensor_keeps_its_counter_after_its_write(tmp_path: Path) -> None:
    """To detach lets other threads run, and one of them may let the memory go."""
    rig = Rig(tmp_path)
    hooks: Any = rig.context()
    tensor = leaf() * 2
    packed = hooks.pack_hook(tensor)
    counter = packed.counter
    assert counter.numel() == 0
    assert packed.record.source.untyped_storage() is tensor.untyped_storage()
    rig.flush()
    assert packed.record.source is None
    assert packed.counter is counter
    tensor.detach().add_(1)
    assert counter._version == tensor._version
    del packed


def test_nothing_is_needed_before_it_was_saved(tmp_path: Path) -> None:
    """The clock of the rounds goes back where several threads wait for the disk at once."""
    rig = Rig(tmp_path)
    with rig.context():
        loss = (leaf() * 2).sin().sum()
        rig.stalls.note(100.0)
        loss.backward()
        (leaf() * 2).sin().sum().backward()
    assert rig.session.traces
    rig.session.close()


def build(rig: Rig, x: Tensor, built: list[Tensor]) -> None:
    with rig.context():
        built.append(chain(x).sum())


def test_threads_that_end_leave_their_graphs_to_others(tmp_path: Path) -> None:
    """What a thread saved last waits for its next pack, which never comes: it is kept."""
    x = leaf()
    expected = plain_gradient(x)
    with nothing_leaks():
        rig = Rig(tmp_path)
        for _ in range(30):
            built: list[Tensor] = []
            thread = threading.Thread(target=build, args=(rig, x, built))
            thread.start()
            thread.join()
            rig.flush()
            (grad,) = torch.autograd.grad(built.pop(), x)
            assert bits(grad) == bits(expected)
        del thread
        assert rig.stats.bytes_written > 0
        rig.assert_empty()
        del rig


# A store that closes under them


def test_a_store_that_closes_under_a_waiting_backward_is_a_clear_error(tmp_path: Path) -> None:
    rig = slow_rig(tmp_path)
    x = leaf(1 << 20)
    with rig.context():
        walker = Walker(rig, chain(x).sum())
    # Closing lets the pieces that the engine has begun end; the many others are refused.
    rig.store.close()
    with pytest.raises(ClosedError, match="clos"):
        walker.join()
    assert x.grad is None
    del walker
    gc.collect()
    wait_until(lambda: rig.store.stats()["arena_live_bytes"] == 0, "the return of the slots")
    assert rig.store.stats()["disk_used_bytes"] == 0


def test_a_store_that_closes_under_its_writes_loses_no_tensor_silently(tmp_path: Path) -> None:
    rig = slow_rig(tmp_path)
    rig.disk.pause()
    x = leaf(1 << 20)
    expected = plain_gradient(x)
    with rig.context():
        loss = chain(x).sum()
        rig.begin_writes()
        rig.store.close()
        # Writes that had begun may have ended, and nobody reads them any more.
        try:
            loss.backward()
        except ClosedError:
            assert x.grad is None
        else:
            assert x.grad is not None
            assert bits(x.grad) == bits(expected)
        # A block over a closed store trains on in memory.
        (again,) = torch.autograd.grad(chain(x).sum(), x)
        assert bits(again) == bits(expected)
    assert rig.stats.bytes_read == 0
    del loss
    gc.collect()
    wait_until(lambda: rig.stats.resident_bytes == 0, "the return of the memory")


# Ctrl-C


def test_ctrl_c_while_a_backward_waits_for_the_disk_and_the_next_backward_works(
    tmp_path: Path,
) -> None:
    rig = slow_rig(tmp_path)
    x = leaf()
    expected = plain_gradient(x)
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: waits_for_a_read(main), "the wait for a read")
        _thread.interrupt_main()

    watcher = threading.Thread(target=interrupt)
    with rig.context():
        loss = chain(x).sum()
        rig.flush()
        rig.disk.pause()
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        watcher.join()
        assert x.grad is None
        rig.disk.resume()
        # The same graph, and a new one.
        loss.backward()
        assert x.grad is not None
        assert bits(x.grad) == bits(expected)
        loss = chain(x).sum()
        rig.flush()
        x.grad = None
        loss.backward()
        assert x.grad is not None
        assert bits(x.grad) == bits(expected)
    del loss
    rig.assert_empty()


# The end of the process in the middle of a step


def ends_in_the_middle(directory: str, moment: str) -> None:
    """Leave the interpreter, with whatever is under way held by a global."""
    torch.set_num_threads(1)
    x = leaf(100_000)
    rig = slow_rig(Path(directory))
    held = globals()
    held["rig"] = rig
    context = rig.context()
    context.__enter__()
    if moment == "a write is under way":
        rig.disk.pause()
        held["loss"] = chain(x).sum()
        rig.begin_writes()
    elif moment == "a thread waits":
        held["walker"] = Walker(rig, chain(x).sum())
    else:
        held["loss"] = loss = chain(x).sum()
        rig.flush()
        rig.disk.pause()
        main = threading.get_ident()

        def interrupt() -> None:
            wait_until(lambda: waits_for_a_read(main), "the wait for a read")
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        say("interrupted")
        sys.stdout.flush()
        loss.backward()
    say("ended")


ENDS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from test_threads import ends_in_the_middle
ends_in_the_middle(*sys.argv[2:])
"""
MOMENTS = ("a write is under way", "a thread waits", "ctrl-c")


@pytest.mark.parametrize(
    "moment", shared_out(MOMENTS, quick=["a write is under way", "a thread waits"])
)
def test_the_interpreter_may_end_in_the_middle_of_a_step(moment: str, tmp_path: Path) -> None:
    done = forked_python(ENDS, str(Path(__file__).parent), str(tmp_path), moment)
    if moment == "ctrl-c":
        assert done.stdout == "interrupted\n", done.stderr
        assert done.returncode == -signal.SIGINT
        assert done.stderr.endswith("KeyboardInterrupt\n"), done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
    assert not list(tmp_path.iterdir())


# Copies


def by_torch(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    found = torch.load(file)
    assert isinstance(found, Tensor)
    return found


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda tensor: tensor.view(-1),
    "torch.save": by_torch,
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "shared memory": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("way", shared_out(COPIES, quick=["a view", "numpy"]))
def test_an_unpacked_tensor_outlives_graph_block_and_store(way: str, tmp_path: Path) -> None:
    with nothing_leaks():
        x = leaf()
        with ssdtrain.offload(tmp_path, min_bytes=1, direct_io="optional") as session:
            y = (x * 2).exp()
            expected = bits(y)
            node: Any = y.grad_fn
            del y
            session.flush()
            found = COPIES[way](node._saved_result.detach())
            assert session.stats.bytes_read > 0
        del node, session
        gc.collect()
        assert bits(found) == expected
        found.add_(1)
        del found


def test_a_model_copied_or_saved_while_another_thread_trains_it(tmp_path: Path) -> None:
    model, rig = mlp().eval(), slow_rig(tmp_path)
    model(batch()).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with rig.context():
        walker = Walker(rig, model(batch()).square().sum())
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    rig.disk.resume()
    walker.join()
    file.seek(0)
    for one in (model, twin, torch.load(file, weights_only=False)):
        if one is not model:
            with rig.context():
                loss = one(batch()).square().sum()
                rig.flush()
                loss.backward()
            del loss
        found = gradients(one)
        assert [bits(found[name]) for name in expected] == [bits(g) for g in expected.values()]
    assert rig.stats.bytes_read > 0
    del walker
    rig.assert_empty()
