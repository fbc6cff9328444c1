"""The bound on resident bytes: it holds, or it is refused, whatever is dropped meanwhile."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from disks import MIB
from ssdtrain.activations import hooks
from ssdtrain.errors import BudgetError
from support import (
    Flush,
    Result,
    Rig,
    assert_equal_bits,
    bits,
    chain,
    functions_of,
    nothing,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def big_step(rig: Rig | None) -> Result:
    """Ten chained saves of 4 MB with small ones between them."""
    torch.manual_seed(0)
    x = torch.randn(1_000_000, requires_grad=True)
    scales = torch.randn(10, 10, requires_grad=True)
    if rig is None:
        y = forward_big(x, scales)
        y.backward()
    else:
        with rig.context():
            y = forward_big(x, scales)
            y.backward()
    assert x.grad is not None
    assert scales.grad is not None
    return {"loss": y, "x": x.grad, "scales": scales.grad}


def forward_big(x: Tensor, scales: Tensor) -> Tensor:
    y = x * 0.5
    for row in scales:
        y = (y * row.sin().exp().mean()).tanh()
    return y.sum()


def test_a_budget_of_a_third_of_what_is_kept_holds(tmp_path: Path) -> None:
    expected = big_step(None)
    kept = Rig(tmp_path, min_bytes=1 << 40)
    assert_equal_bits(big_step(kept), expected)
    budget = kept.stats.resident_bytes_peak // 3
    for min_bytes in (1, 4096):
        rig = Rig(tmp_path, backend="auto", max_resident_bytes=budget, min_bytes=min_bytes)
        for _ in range(2):
            assert_equal_bits(big_step(rig), expected)
        assert 0 < rig.stats.resident_bytes_peak <= budget
        assert rig.stats.bytes_read > 0
        rig.assert_empty()


def test_a_budget_holds_when_backward_goes_in_an_order_that_was_not_foreseen(
    tmp_path: Path,
) -> None:
    x = torch.linspace(-1, 1, 500_000).requires_grad_()
    rig = Rig(tmp_path, min_bytes=4096, max_resident_bytes=6_500_000)
    shuffle = random.Random(0)
    with rig.context():
        for _ in range(15):
            losses = [(x * n).tanh().sum() for n in range(8)]
            shuffle.shuffle(losses)
            while losses:
                losses.pop().backward()
    assert x.grad is not None
    actual, x.grad = x.grad, None
    shuffle = random.Random(0)
    for _ in range(15):
        order = list(range(8))
        shuffle.shuffle(order)
        while order:
            (x * order.pop()).tanh().sum().backward()
    assert bits(actual) == bits(x.grad)
    assert rig.stats.resident_bytes_peak <= 6_500_000
    rig.assert_empty()


def test_small_tensors_make_room_by_the_write_of_a_large_one_before_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_bytes=100_000, max_resident_bytes=1_100_000)

    def step(flush: Flush) -> Result:
        large = torch.linspace(0, 1, 250_000).requires_grad_()
        small = torch.linspace(0, 1, 1000).requires_grad_()
        a, b = (large * 2).exp(), small
        for _ in range(100):
            b = b.sin()
        loss = b.sum() + a.sum()
        del a
        b_grad = torch.autograd.grad(loss, small)[0]
        return {"loss": loss, "small": b_grad}

    expected = step(nothing)
    with rig.context():
        assert_equal_bits(step(nothing), expected)
    rig.assert_empty()


def sines(y: Tensor) -> Tensor:
    for _ in range(5):
        y = y.sin()
    return y


def test_small_tensors_ask_for_room_only_after_others_have_looked_at_it(tmp_path: Path) -> None:
    """Room that was found must be there still when it is used, and each gate must be opened."""
    rig = Rig(tmp_path, min_bytes=100_000, max_resident_bytes=10 * MIB)
    large, small = torch.ones(MIB // 4, requires_grad=True), torch.ones(8, requires_grad=True)
    with rig.context():
        y = sines(small)
        assert rig.small_asked_count() == 0
        # The small one of the same node comes too early to open the gate, the next one does.
        y = sines(sines(y) + (y.sum() * (large + 1)).sum())
        assert rig.small_asked_count() == 2
        assert rig.writes_count() == 1, "the gate was not opened"
        rig.residency.room_bytes()
        y = sines(y)
        assert rig.small_asked_count() == 3
    y.sum().backward()
    del y
    rig.assert_empty()


def test_small_tensors_say_that_a_node_of_a_region_has_been_passed(tmp_path: Path) -> None:
    """What is computed again may be written then, if room is short."""
    rig = Rig(tmp_path, min_bytes=100_000, max_resident_bytes=10 * MIB)
    large, small = torch.ones(MIB // 4, requires_grad=True), torch.ones(8, requires_grad=True)

    def region(y: Tensor) -> Tensor:
        return sines((y.sum() * (large + 1)).sum())

    with rig.context():
        checkpoint(region, small, use_reentrant=True).backward()
    assert rig.small_asked_count() == 2
    rig.assert_empty()


def test_small_tensors_fill_the_bound_and_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_bytes=MIB, max_resident_bytes=100 * 4096)
    y = torch.ones(1024, requires_grad=True)
    with rig.context():
        y = y.sin()
        for _ in range(100):
            y = y.sin()
        assert rig.small_asked_count() == 0
        with pytest.raises(BudgetError, match="in tensors below min_bytes"):
            y.sin().sum().backward()
    assert rig.stats.resident_bytes_peak == 100 * 4096
    del y
    rig.assert_empty()


def test_a_detached_part_counts_as_the_storage_that_it_keeps(tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_bytes=MIB, max_resident_bytes=MIB)
    weight = torch.ones(10, requires_grad=True)
    with rig.context():
        loss = weight * torch.ones(1000)[:10].detach()
        assert rig.stats.resident_bytes == 4000
    assert rig.small_asked_count() == 0
    del loss
    rig.assert_empty()


def test_reads_ahead_give_way_to_recomputed_tensors(tmp_path: Path) -> None:
    """Reading ahead is a hint: under a bound it must not take the room of what is needed."""
    expected = torch.zeros(0)
    for offloaded in (False, True):
        rig = Rig(tmp_path, max_resident_bytes=8 * MIB)
        x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        with rig.context() if offloaded else contextlib.nullcontext():
            y = x * 1.0
            for _ in range(16):
                y = checkpoint(chain, y, 2, use_reentrant=True)
            y.sum().backward()
        assert x.grad is not None
        if offloaded:
            assert rig.stats.bytes_read > 0
            assert torch.equal(x.grad, expected)
        expected = x.grad
    rig.assert_empty()


# What nobody wants any more, and what the kernel has all the same


def paused_rig(directory: Path, bound_bytes: int) -> Rig:
    faults = {"seed": 1, "paused": True}
    return Rig(directory, backend="simulated", faults=faults, max_resident_bytes=bound_bytes)


def wait_for_operations(rig: Rig, direction: str) -> None:
    name = f"{direction}_operation_count"
    wait_until(lambda: rig.store.stats()[name] > 0, f"the first {direction}")


def test_the_source_of_a_write_that_died_on_its_way_counts_and_is_waited_for(
    tmp_path: Path,
) -> None:
    x = torch.randn(MIB // 4, requires_grad=True)
    rig = paused_rig(tmp_path, MIB * 3 // 2)
    grads = []

    def train() -> None:
        with rig.context():
            grads.extend(torch.autograd.grad(x.exp().sum(), x))

    trainer = threading.Thread(target=train)

    def waits() -> bool:
        return "wait_for_transfer" in functions_of(trainer.ident or 0)

    with rig.context():
        y = x.exp()
        rig.begin_writes()
        wait_for_operations(rig, "write")
        del y
        assert rig.stats.resident_bytes == x.nbytes
        trainer.start()
        wait_until(waits, "the wait for what was given up")
        rig.disk.resume()
        trainer.join()
    assert bits(grads.pop()) == bits(x.detach().exp())
    assert rig.stats.resident_bytes_peak <= MIB * 3 // 2
    rig.assert_empty()


def abandon_a_write(rig: Rig) -> int:
    """Drop a graph while the disk has its bytes; return how many."""
    x = torch.randn(MIB // 4, requires_grad=True)
    with rig.context():
        y = x.exp()
        rig.begin_writes()
        wait_for_operations(rig, "write")
        del y
    assert rig.stats.resident_bytes == x.nbytes
    return x.nbytes


def test_the_last_counts_are_those_after_what_was_abandoned_has_ended(tmp_path: Path) -> None:
    rig = paused_rig(tmp_path, 4 * MIB)
    abandon_a_write(rig)
    main = threading.get_ident()
    is_closed = threading.Event()

    def waits() -> bool:
        return is_closed.is_set() or "settle" in functions_of(main)

    def resume() -> None:
        wait_until(waits, "the end of the session")
        rig.disk.resume()

    resumer = threading.Thread(target=resume)
    resumer.start()
    rig.session.close()
    is_closed.set()
    resumer.join()
    assert rig.session.stats.resident_bytes == 0


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "SETTLE_S_MAX", 0.01)
    rig = paused_rig(tmp_path, 4 * MIB)
    abandoned_bytes = abandon_a_write(rig)
    rig.session.close()
    assert rig.session.stats.resident_bytes == abandoned_bytes, "it is told as it is"
    rig.disk.resume()
    wait_until(lambda: rig.store.resident_bytes() == 0, "the end of the write")


def test_reads_ahead_of_an_abandoned_backward_are_freed_with_its_graph(
    tmp_path: Path,
) -> None:
    def give_up(_: Tensor) -> None:
        raise ArithmeticError("given up")

    x = torch.randn(MIB // 4, requires_grad=True)
    rig = Rig(tmp_path, max_resident_bytes=16 * MIB)
    with rig.context():
        y = chain(x, 3)
        y.register_hook(give_up)
        loss = chain(y, 1).sum()
        del y
        rig.flush()
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert rig.store.stats()["arena_live_bytes"] >= 2 * MIB, "nothing was read ahead"
        del loss
        # No hook runs and nobody asks the session: the reads end by themselves.
        wait_until(lambda: rig.store.stats()["arena_live_bytes"] == 0, "the end of the reads")
    rig.assert_empty()


def test_tensors_saved_by_ended_threads_make_room(tmp_path: Path) -> None:
    """What a thread saved last waits for its next pack, which never comes."""
    rig = Rig(tmp_path, max_resident_bytes=4 * MIB)
    losses: list[Tensor] = []
    x = torch.randn(MIB // 4, requires_grad=True)

    def build() -> None:
        with rig.context():
            losses.append(x.exp().sum())

    for _ in range(12):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert len(losses) == 12, "a thread was refused"
    (grad,) = torch.autograd.grad(losses.pop(), x)
    assert bits(grad) == bits(x.detach().exp())
    assert rig.stats.resident_bytes_peak <= 4 * MIB
    losses.clear()
    del thread, grad
    rig.assert_empty()


def test_a_queue_that_is_full_of_what_nobody_wants_delays_a_write_only(tmp_path: Path) -> None:
    rig = paused_rig(tmp_path, 16 * MIB)
    x = torch.linspace(-1, 1, 1024, requires_grad=True)
    main = threading.get_ident()
    is_filled = threading.Event()

    def waits() -> bool:
        return is_filled.is_set() or "wait_for_transfer" in functions_of(main)

    def resume() -> None:
        wait_until(waits, "a wait for the disk, or the end of the filling")
        rig.disk.resume()

    resumer = threading.Thread(target=resume)
    resumer.start()
    with rig.context():
        for _ in range(10_000):
            # Graph after graph is dropped with its writes in the queue.
            x.sin().sin().sin().sin()
        held = [x.exp().sum() for _ in range(4)]
        is_filled.set()
        resumer.join()
        large = torch.randn(3 * MIB, requires_grad=True)
        large.exp().sum().backward()
    del held
    assert rig.store.stats()["cancelled_count"] > 1000
    assert rig.stats.resident_bytes_peak <= 16 * MIB
    rig.assert_empty()


def test_a_write_that_dies_under_way_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(MIB // 4, requires_grad=True)
    rig = paused_rig(tmp_path, 4 * MIB)
    graphs = []
    residency = rig.residency
    ask = residency._transfer_bytes

    def drop_and_ask() -> int:
        graphs.clear()
        return ask()

    with rig.context():
        graphs.append(x.exp())
        rig.begin_writes()
        wait_for_operations(rig, "write")
        monkeypatch.setattr(residency, "_transfer_bytes", drop_and_ask)
        assert rig.stats.resident_bytes == MIB
        assert rig.stats.resident_bytes_peak == MIB
    monkeypatch.undo()
    rig.assert_empty()


def test_room_for_one_storage_is_asked_for_once(tmp_path: Path) -> None:
    """Several nodes save it: in memory it counts once, and so it does where room is asked for."""
    x = torch.ones(150_000, requires_grad=True)
    with Rig(tmp_path, min_bytes=1 << 20, max_resident_bytes=1_000_000).context():
        y = x.exp()
        (y.sin() + y.cos()).sum().backward()
    assert x.grad is not None


class Twice(torch.autograd.Function):
    """Asks for the tensor that it saved twice, and holds both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        assert first.data_ptr() == second.data_ptr()
        return grad * 2


def test_bytes_that_are_here_need_no_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=6 * MIB)
    x = torch.ones(MIB, requires_grad=True)
    with rig.context():
        loss = Twice.apply(x.exp()).sum()
        rig.flush()
        loss.backward()
    assert rig.stats.resident_bytes_peak <= 6 * MIB
    del loss
    rig.assert_empty()
