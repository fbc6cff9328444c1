"""What a round does on a GPU is learned by the GPU's clock, which Python runs ahead of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ssdtrain
from fake_device import FakeDevice
from offloading import ELEMENTS, Everything, ToldWhen, chain, check, made, offloaded, settle
from on_fake import on_fake_device
from ssdtrain.errors import CudaError
from ssdtrain.planning.policy import Item, Policy
from ssdtrain.planning.recording import Recording
from test_captures import captured, on_a_stream

COUNT = 6
HELD_S = 0.05
LARGE_ELEMENTS = 2 << 20
"""8 MiB in float32: each of them has moments of its own."""
LARGE_COUNT = 4
PINNED_BYTES = 256 << 20
KERNEL_US_MAX = 40_000
MARKED_MAX = 16
"""So many rounds have events at once."""


class Noted(Everything):
    """Remembers the items of each round that it learns from; offloads all."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[list[Item]] = []

    def learn(self, signature: int, items: Sequence[Item], *rest: Any) -> None:
        super().learn(signature, items, *rest)
        self.rounds.append(list(items))

    def saved_bytes(self) -> list[int]:
        return [sum(item.nbytes for item in items) for items in self.rounds]


@on_fake_device()
def test_a_step_lasts_until_the_gpu_has_come_to_its_end(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(noted, pinned_bytes=64 << 20) as session:
        saved = chain(leaf, COUNT)
        settle(session)
        fake.hold("kernels")
        began_s = perf_counter()
        saved.sum().backward()
        del saved
        # Python has gone through it, and through the next ones.
        for _ in range(3):
            chain(leaf, 1).sum().backward()
        assert not noted.rounds, "its end has not come"
        wait_while_held()
        held_s = perf_counter() - began_s
        fake.release()
        torch.cuda.synchronize()
        chain(leaf, 1)
        items = noted.rounds[0]
        last_s = max(item.needed_s for item in items)
        assert last_s - min(item.packed_s for item in items) >= held_s - 1e-3
        assert noted.saved_bytes()[0] == COUNT * leaf.nbytes


def wait_while_held() -> None:
    threading.Event().wait(HELD_S)


def newest(session: ssdtrain.Session) -> Recording:
    """Return the last round that was learned from."""
    recorded: Recording = list(session._hooks.prefetcher.recorded.values())[-1]  # type: ignore[union-attr]
    return recorded


def learned_items(session: ssdtrain.Session) -> list[Item]:
    """Return what the last round taught, in the order in which it was needed."""
    (recorded,) = session._hooks.prefetcher.recorded.values()
    return sorted(recorded.items, key=lambda item: item.needed_s)


@on_fake_device()
def test_a_tensor_lies_idle_until_the_gpu_needs_it(fake: FakeDevice) -> None:
    leaf = made(0, LARGE_ELEMENTS)
    with offloaded(pinned_bytes=PINNED_BYTES) as session:
        saved = chain(leaf, LARGE_COUNT)
        settle(session)
        fake.hold("kernels")
        # Python is through the backward long before the GPU is.
        saved.sum().backward()
        del saved
        chain(leaf, 1)
        assert not session.traces
        wait_while_held()
        fake.release()
        torch.cuda.synchronize()
        assert len(session.traces) == 1
        items = learned_items(session)
        assert [item.key for item in items[::-1]] == [
            item.key for item in sorted(items, key=lambda item: item.packed_s)
        ]
        assert len({item.packed_s for item in items}) == LARGE_COUNT, "each has its own moments"
        assert len({item.needed_s for item in items}) == LARGE_COUNT
        assert items[0].needed_s - max(item.packed_s for item in items) >= HELD_S - 1e-3
        check(leaf, LARGE_COUNT)
    assert not fake.races()


@on_fake_device()
def test_a_gpu_that_waits_for_a_load_is_seen(fake: FakeDevice) -> None:
    leaf = made(0, LARGE_ELEMENTS)
    with offloaded(pinned_bytes=PINNED_BYTES) as session:
        saved = chain(leaf, LARGE_COUNT)
        settle(session)
        fake.hold("copies to the device")
        saved.sum().backward()
        del saved
        began_s = perf_counter()
        wait_while_held()
        fake.release()
        torch.cuda.synchronize()
        took_s = perf_counter() - began_s
        chain(leaf, 1)
        torch.cuda.synchronize()
        assert session.traces
        stats, items = session.stats, learned_items(session)
        assert stats.gpu_stall_s >= HELD_S - 1e-3
        assert stats.limit != "compute"
        assert f"GPU stalls {stats.gpu_stall_s:.3f} s" in str(session)
        # What it waited for is no time of the step: the disk could not be given it.
        assert items[-1].needed_s - items[0].needed_s <= took_s - HELD_S / 2
        check(leaf, LARGE_COUNT)
    assert not fake.races()


@pytest.mark.parametrize("is_planned", [False, True])
@on_fake_device()
def test_a_gpu_that_waits_until_memory_has_been_copied_is_seen(
    fake: FakeDevice, is_planned: bool
) -> None:
    leaf = made(0, LARGE_ELEMENTS)
    # By the plan each copy has ended when its tensor is packed.
    policy = ToldWhen(0) if is_planned else Everything()
    # Half of the three quarters of it is what may be under way where no plan tells more.
    with offloaded(policy, pinned_bytes=64 << 20) as session:
        began_s = perf_counter()
        chain(leaf, COUNT).sum().backward()
        torch.cuda.synchronize()
        # The device is a program, which may be slow: it comes to the first wait within this.
        busy_s = perf_counter() - began_s
        chain(leaf, 1).sum().backward()
        settle(session)
        leaf.grad = None
        before_s = session.stats.gpu_stall_s
        fake.hold("copies to the host")
        began_s = perf_counter()
        saved = chain(leaf, COUNT)
        threading.Event().wait(2 * busy_s + 3 * HELD_S)
        fake.release()
        torch.cuda.synchronize()
        took_s = perf_counter() - began_s
        saved.sum().backward()
        del saved
        torch.cuda.synchronize()
        chain(leaf, 1)
        torch.cuda.synchronize()
        items = list(session._hooks.prefetcher.recorded.values())[-1].items
        assert len(items) == COUNT
        # It is no time of computing, in which the link could copy more.
        packed_s = [item.packed_s for item in items]
        assert packed_s == sorted(packed_s)
        assert packed_s[-1] - packed_s[0] <= took_s - 3 * HELD_S
        # The plan was wrong if it had told of no wait.
        stall_s = session.stats.gpu_stall_s - before_s
        assert (stall_s >= 3 * HELD_S) == is_planned
        if isinstance(policy, ToldWhen):
            # Next time memory goes later, and no less leaves.
            assert policy.stall_share is not None
            whole_s = max(item.needed_s for item in items) - packed_s[0] + stall_s
            assert policy.stall_share * whole_s <= stall_s - 3 * HELD_S
        check(leaf, COUNT)
    assert not fake.races()


def held_back(fake: FakeDevice, *roots: Tensor, retain_graph: bool = False) -> float:
    """Run a backward while nothing is copied to the device; return how long that was so."""
    reached: list[torch.cuda.Event] = []

    def note_begin(_: Tensor) -> None:
        event = torch.cuda.Event()
        event.record()
        reached.append(event)

    hooks = [root.register_hook(note_begin) for root in roots]
    fake.hold("copies to the device")
    began_s = perf_counter()
    torch.autograd.backward(roots, retain_graph=retain_graph)
    for hook in hooks:
        hook.remove()
    # The device is a program, which may be slow: right after these it comes to its first wait.
    for event in reached:
        event.synchronize()
    wait_while_held()
    fake.release()
    torch.cuda.synchronize()
    return perf_counter() - began_s


def check_stalls(session: ssdtrain.Session, leaf: Tensor, held_s: float) -> None:
    """Begin the next round; the stall is what it was, and no moment lies before another."""
    chain(leaf, 1)
    torch.cuda.synchronize()
    assert session.traces
    assert HELD_S - 1e-3 <= session.stats.gpu_stall_s <= held_s
    for recorded in session._hooks.prefetcher.recorded.values():
        assert all(item.needed_s >= item.packed_s for item in recorded.items)


@on_fake_device()
def test_a_load_that_several_nodes_wait_for_is_one_stall(fake: FakeDevice) -> None:
    leaf = made(0, LARGE_ELEMENTS)
    with offloaded(pinned_bytes=PINNED_BYTES) as session:
        saved = chain(leaf, 1)
        total = torch.sin(saved) + torch.cos(saved) + torch.tanh(saved).exp()
        del saved
        settle(session)
        held_s = held_back(fake, total.sum())
        del total
        check_stalls(session, leaf, held_s)


@on_fake_device()
def test_a_wait_for_a_small_load_is_no_time_of_the_step(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=PINNED_BYTES) as session:
        saved = chain(leaf, COUNT).sum()
        settle(session)
        held_s = held_back(fake, saved)
        del saved
        check_stalls(session, leaf, held_s)
        items = learned_items(session)
        assert items[-1].needed_s - items[0].needed_s <= held_s - HELD_S / 2


@on_fake_device()
def test_python_that_is_far_ahead_is_learned_from_all_the_same(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(noted, pinned_bytes=64 << 20) as session:
        for _ in range(3):
            known_count = len(noted.rounds)
            fake.hold("kernels")
            for _ in range(40):
                chain(leaf, COUNT).sum().backward()
            assert len(noted.rounds) - known_count <= 1, "the one from before this at most"
            fake.release()
            torch.cuda.synchronize()
            before_count = len(noted.rounds)
            chain(leaf, 1).sum().backward()
            torch.cuda.synchronize()
            assert len(noted.rounds) - before_count == MARKED_MAX
        assert session.stats.gpu_stall_s >= 0
    assert set(noted.saved_bytes()) <= {COUNT * leaf.nbytes, leaf.nbytes}


class Stalls(Policy):
    """Remembers the stalls of each round, and makes a plan after each."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float | None] = []

    def learn(self, signature: int, items: Sequence[Item], *rest: Any) -> None:
        _rates, share, *_ = rest
        self.shares.append(share)
        self._basis.clear()
        super().learn(signature, items, *rest)


@on_fake_device()
def test_stalls_of_rounds_that_went_by_an_older_plan_do_not_count(fake: FakeDevice) -> None:
    leaf, policy = made(0), Stalls()
    with offloaded(policy, pinned_bytes=64 << 20):
        chain(leaf, COUNT).sum().backward()
        torch.cuda.synchronize()
        fake.hold("kernels")
        # The first plan is made before the first of these, and is that of all of them.
        for _ in range(4):
            chain(leaf, COUNT).sum().backward()
        fake.release()
        torch.cuda.synchronize()
        chain(leaf, COUNT).sum().backward()
        assert len(policy.shares) == 5
        assert policy.shares[1] is not None
        assert policy.shares[2:] == [None] * 3


@on_fake_device()
def test_steps_of_reentrant_checkpoints_are_learned_from(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(noted, pinned_bytes=64 << 20):
        for _ in range(3):
            saved = leaf * 1.01
            for _ in range(3 * MARKED_MAX):
                saved = checkpoint(lambda x: torch.sin(x * 1.01), saved, use_reentrant=True)
            saved.sum().backward()
        torch.cuda.synchronize()
        chain(leaf, 1)
        assert len(noted.rounds) == 3


@on_fake_device()
def test_a_gpu_that_failed_keeps_no_session_open(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=64 << 20) as session:
        chain(leaf, COUNT).sum().backward()
        fake.hold("kernels")
        chain(leaf, COUNT).sum().backward()
        chain(leaf, 1)
        fake.fail("cuEventQuery", nth=None)
        session.close()
        assert session._hooks is None
        fake.recover()
        fake.release()


@on_fake_device()
def test_a_plan_reckons_with_the_time_of_the_gpu(fake: FakeDevice) -> None:
    """By the moments of Python, nothing would lie idle for as long as its way takes."""
    leaf, policy = made(0, LARGE_ELEMENTS), Policy()
    with offloaded(policy, pinned_bytes=PINNED_BYTES):
        fake.lag(KERNEL_US_MAX, "kernels")
        for _ in range(3):
            leaf.grad = None
            chain(leaf, LARGE_COUNT).sum().backward()
        torch.cuda.synchronize()
        chain(leaf, LARGE_COUNT)
    (made_plan,) = policy.plans.values()
    assert made_plan.written_bytes > 0
    check(leaf, LARGE_COUNT)


@on_fake_device()
def test_small_tensors_share_their_moments(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=PINNED_BYTES) as session:
        chain(leaf, COUNT).sum().backward()
        torch.cuda.synchronize()
        chain(leaf, 1)
        torch.cuda.synchronize()
        assert session.traces
        items = learned_items(session)
        assert len(items) == COUNT
        assert len({item.packed_s for item in items}) == 1
        # But for those that were waited for.
        loaded_count = session.stats.to_gpu_bytes // leaf.nbytes
        assert len({item.needed_s for item in items}) <= 1 + loaded_count


@on_fake_device()
def test_tensors_of_the_cpu_have_moments_of_those_of_the_gpu(fake: FakeDevice) -> None:
    """Their backward runs in another thread, which may be the first one to need a tensor."""
    leaf, noted = made(0, LARGE_ELEMENTS), Noted()
    on_cpu = torch.randn(ELEMENTS, requires_grad=True)
    with offloaded(noted, pinned_bytes=PINNED_BYTES) as session:
        for _ in range(2):
            total = chain(leaf, 2).sum() + chain(on_cpu, 1).sum().cuda()
            total.backward()
            torch.cuda.synchronize()
        chain(leaf, 1)
        torch.cuda.synchronize()
        assert session.traces
        assert noted.rounds
        items = learned_items(session)
        assert {item.gpu for item in items} == {None, 0}
        of_cpu = [item for item in items if item.gpu is None]
        of_gpu = [item for item in items if item.gpu == 0]
        for moments_of in (lambda item: item.packed_s, lambda item: item.needed_s):
            assert set(map(moments_of, of_cpu)) <= set(map(moments_of, of_gpu))


@on_fake_device(devices=2)
def test_a_round_on_two_gpus_has_the_clock_of_each(fake: FakeDevice) -> None:
    leaves = [made(0), made(0).detach().to("cuda:1").requires_grad_()]
    with offloaded(pinned_bytes=64 << 20) as session:
        for _ in range(2):
            first, second = (chain(leaf, COUNT).sum() for leaf in leaves)
            loss = first + second.to("cuda:0")
            del first, second
            settle(session)
            held_back(fake, loss)
            del loss
            torch.cuda.synchronize(1)
        chain(leaves[0], 1)
        (recorded,) = session._hooks.prefetcher.recorded.values()
        assert recorded.began_s == 0, "it is a moment of GPUs, and not of the session"
        for gpu in (0, 1):
            items = [item for item in recorded.items if item.gpu == gpu]
            assert len(items) == COUNT
            packed_s = [item.packed_s for item in items]
            assert packed_s == sorted(packed_s)
            assert all(item.needed_s >= packed_s[-1] for item in items)
        # The hooks know nothing of it.
        assert session.stats.gpu_stall_s >= 2 * HELD_S - 1e-3
    assert fake.races() == []


@on_fake_device(devices=2)
def test_rounds_on_two_gpus_in_turns_have_the_clock_of_each(fake: FakeDevice) -> None:
    noted = Noted()
    leaves = [
        torch.randn(1 << (13 + gpu), device=f"cuda:{gpu}", requires_grad=True) for gpu in (0, 1)
    ]
    with offloaded(noted):
        for leaf in (*leaves, *leaves):
            chain(leaf, COUNT).sum().backward()
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
        chain(leaves[1], 1)
    assert noted.saved_bytes() == [COUNT * leaf.nbytes for leaf in (*leaves, *leaves)]


@on_fake_device()
def test_a_graph_that_is_captured_is_not_broken_and_has_no_gpu_time(fake: FakeDevice) -> None:
    leaf, noted = made(0), Noted()
    with offloaded(noted, pinned_bytes=64 << 20) as session, on_a_stream():
        for _ in range(2):
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
        torch.cuda.synchronize()
        result = torch.zeros_like(leaf, requires_grad=False)
        with captured() as graph:
            result.copy_(chain(leaf, 1).detach())
        assert len(noted.rounds) == 2
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, chain(leaf, 1).detach())
        for has_moments_of_hooks in (True, False):
            chain(leaf, 1).sum().backward()
            torch.cuda.synchronize()
            chain(leaf, 1)
            # The first one began in the graph.
            assert (newest(session).began_s > 0) == has_moments_of_hooks
    assert not fake.races()


@on_fake_device()
def test_a_driver_that_refuses_is_named_and_the_next_step_works(fake: FakeDevice) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=64 << 20) as session:
        for _ in range(2):
            chain(leaf, COUNT).sum().backward()
            torch.cuda.synchronize()
        for symbol in ("cuStreamIsCapturing", "cuEventRecord"):
            fake.fail(symbol)
            with pytest.raises(CudaError, match=symbol):
                chain(leaf, COUNT)
            leaf.grad = None
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
            check(leaf, COUNT)
        fake.fail("cuEventElapsedTime", nth=None)
        for _ in range(3):
            chain(leaf, COUNT).sum().backward()
            torch.cuda.synchronize()
        assert newest(session).began_s > 0, "it is a moment of the session, and not of a GPU"
        fake.recover()
    assert not fake.races()
