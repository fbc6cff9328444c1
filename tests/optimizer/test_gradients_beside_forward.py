"""Bounded gradients with updates beside the forward: what is in memory is updated there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from gradients_away import (
    BOUND,
    LAYERS,
    LOOKED,
    MICRO_BATCHES,
    ONE,
    STEPS,
    adamw,
    backward,
    backwards,
    bounded,
    clipped,
    large,
    layers,
    nothing,
    resident_bytes,
    sgd,
    steps,
)
from moments import AtCall, interrupt
from ssdtrain import StorageError
from ssdtrain.away.classes import is_away
from ssdtrain.away.known import KNOWN
from ssdtrain.optimizer.deferred import Deferred
from ssdtrain.optimizer.pending import PendingGradient, in_update, is_pending
from stores import ChosenStore
from trained import everything

WAIT_MAX_S = 60.0


OPENED = threading.Event()


class Gated(torch.optim.SGD):
    """An optimizer whose updates beside the forward wait for a gate."""

    def step(self, closure: Any = None) -> Any:
        if in_update():
            assert OPENED.wait(WAIT_MAX_S), "nobody opened the gate"
        return super().step(closure)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Have updates beside the forward wait until the event is set."""
    OPENED.clear()
    yield OPENED
    OPENED.set()


def gated(module: nn.Module, place: Any, **options: Any) -> Any:
    return beside(Gated(module.parameters(), lr=0.1), place, **options)


def beside(optimizer: Any, place: Any, **options: Any) -> Any:
    return bounded(optimizer, place, overlap="forward", **options)


def pending(module: nn.Module) -> set[str]:
    return {name for name, one in large(module).items() if type(one) is PendingGradient}


def stepped(optimizer: Any) -> None:
    """Make a step, and see its end."""
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("between", [nothing, clipped], ids=["plain", "clipped"])
@pytest.mark.parametrize("bound", [1, 3, LAYERS - 1, LAYERS])
def test_equal_bits_under_the_bound(bound: int, between: Any, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, adamw(plain), between)
    optimizer = beside(adamw(ours), tmp_path, max_gradient_bytes=bound * ONE)
    for one, other in zip(steps(ours, optimizer, between), expected, strict=True):
        support.assert_equal_bits(one, other)
    stats = optimizer.offload_stats
    assert stats.gradient_peak_bytes <= bound * ONE + LOOKED
    assert (stats.gradient_read_bytes > 0) == (bound < LAYERS)
    assert stats.step_count == STEPS


@pytest.mark.parametrize("bound", [4, LAYERS])
def test_what_is_in_memory_is_updated_beside_the_forward(
    bound: int, gate: threading.Event, tmp_path: Path
) -> None:
    plain, ours = layers(), layers()
    plainly, optimizer = sgd(plain), gated(ours, tmp_path, max_gradient_bytes=bound * ONE)
    backwards(plain)
    backwards(ours)
    in_memory = {name for name, one in large(ours).items() if not is_away(one)}
    plainly.step()
    optimizer.step()
    # Where some have to be read, there is room for one part of them.
    room = 0 if bound == LAYERS else bound // 2
    assert pending(ours) <= in_memory
    assert len(pending(ours)) == bound - room
    gate.set()
    optimizer.synchronize()
    assert not pending(ours)
    support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
    support.assert_equal_bits(dict(ours.state_dict()), dict(plain.state_dict()))


@pytest.mark.defends("gradients of updates beside the forward stay")
def test_gradients_of_updates_that_go_on_stay(gate: threading.Event, tmp_path: Path) -> None:
    module = layers()
    optimizer = gated(module, tmp_path, max_gradient_bytes=4 * ONE)
    backwards(module)
    optimizer.step()
    waiting = pending(module)
    assert waiting, "some are updated beside the forward"
    # Whoever looks at the others has them brought, and in the place of none of these.
    for _ in range(2):
        for one in large(module).values():
            if type(one) is not PendingGradient:
                one.sum()
                assert resident_bytes(module) <= 4 * ONE
    assert pending(module) == waiting
    gate.set()
    optimizer.synchronize()
    assert optimizer.offload_stats.gradient_peak_bytes <= 4 * ONE + LOOKED


@pytest.mark.defends("a backward waits for updates whose gradients are under the bound")
def test_the_next_backward_waits_for_updates(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Deferred.join

    def join(self: Deferred) -> None:
        assert gate.is_set() or any(map(is_pending, module[0].parameters()))
        gate.set()
        own(self)

    results = []
    for is_ours in (False, True):
        module: Any = nn.ModuleList([layers(4), layers(4)])
        optimizer: Any = sgd(module)
        if is_ours:
            optimizer = gated(module, tmp_path, max_gradient_bytes=4 * ONE)
            # Weights that others see are updated in the step, so the next forward waits for none.
            _seen = [param.data for param in module[1].parameters()]
        backward(module[0], 0)
        optimizer.step()
        optimizer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(Deferred, "join", join)
            backward(module[1], 0)
        if is_ours:
            gate.set()
        optimizer.step()
        if is_ours:
            # Before the looks of the comparison, which take the memory of one more.
            assert optimizer.offload_stats.gradient_peak_bytes <= 4 * ONE
        results.append(everything(module, optimizer))
    support.assert_equal_bits(results[1], results[0])


@pytest.mark.parametrize("bound", [4, 5, 6])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_cannot_leave_take_the_room_of_updates_that_go_on(
    count: int, bound: int, tmp_path: Path
) -> None:
    module = layers()
    optimizer = beside(sgd(module), tmp_path, max_gradient_bytes=bound * ONE)
    backward(module, 0)
    here = [one for one in large(module).values() if not is_away(one)]
    views = [one[0] for one in here[:count]]
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.offload_stats.gradient_peak_bytes <= bound * ONE
    del views


@pytest.mark.defends("gradients that another optimizer bounds are used at once")
@pytest.mark.parametrize("second", [BOUND, None], ids=["bound", "no bound"])
@pytest.mark.parametrize("first", ["step", "forward"])
def test_another_optimizer_bounds_the_gradients(
    first: Any, second: int | None, tmp_path: Path
) -> None:
    plain, ours = layers(), layers()
    plainly = [sgd(plain), sgd(plain)]
    bounding = bounded(sgd(ours), tmp_path, overlap=first)
    other = beside(sgd(ours), tmp_path, max_gradient_bytes=second)
    for number in range(2):
        backwards(plain)
        backwards(ours)
        for optimizer in (*plainly, bounding, other):
            optimizer.step()
        other.synchronize()
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
        support.assert_equal_bits(dict(ours.state_dict()), dict(plain.state_dict()))
        if number == 0:
            plain.zero_grad()
            ours.zero_grad()
    assert bounding.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


class Keeping(torch.optim.Optimizer):
    """An optimizer that uses the gradient of the step before, too, and keeps it as it is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
                if "before" in self.state[param]:
                    param.add_(self.state[param]["before"], alpha=-0.01)
                self.state[param]["before"] = param.grad


class Replacing(torch.optim.SGD):
    """An optimizer that gives parameters other gradients."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.grad = None if param.dim() == 1 else param.grad * 0.25
        return result


@pytest.mark.parametrize("bound", [3, LAYERS])
def test_an_optimizer_that_keeps_gradients(bound: int, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    expected = steps(plain, Keeping(plain.parameters()))
    optimizer = beside(Keeping(ours.parameters()), tmp_path, max_gradient_bytes=bound * ONE)
    for one, other in zip(steps(ours, optimizer), expected, strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize("bound", [LAYERS * ONE, None])
def test_an_optimizer_that_replaces_gradients(bound: int | None, tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    plainly = Replacing(plain.parameters(), lr=0.1)
    optimizer = beside(Replacing(ours.parameters(), lr=0.1), tmp_path, max_gradient_bytes=bound)
    found = []
    for module, one in ((plain, plainly), (ours, optimizer)):
        backwards(module)
        before = [param.grad for param in module.parameters()]
        one.step()
        getattr(one, "synchronize", bool)()
        # Those of before are nobody's any more, and whole.
        found.append({str(n): one.clone() for n, one in enumerate(before)})
        assert all(type(one) is Tensor for one in before)
        found[-1].update(support.gradients(module))
        found[-1].update(module.state_dict())
    support.assert_equal_bits(found[1], found[0])


def test_a_gradient_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    with ChosenStore(tmp_path) as store:
        optimizer = beside(sgd(ours), store, max_gradient_bytes=BOUND)
        backwards(plain)
        backwards(ours)
        store.fail_after(0)
        with pytest.raises(StorageError, match=r"the gradients of some parameters could not be"):
            stepped(optimizer)
        # It is on the disk still.
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))


def test_a_gradient_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    """An interrupt may keep one from being forgotten, whose number the next one then has."""
    plain, ours = layers(), layers()
    with ssdtrain.TensorStore(tmp_path) as store:
        optimizer = beside(sgd(ours), store)
        backward(ours, 0)
        entries = [KNOWN[id(one)] for one in large(ours).values()]
        optimizer.zero_grad()
        assert all(there() is None for there, _ in entries)
        for module in (plain, ours):
            for param in module.parameters():
                param.grad = torch.zeros_like(param)
        KNOWN.update(
            (id(one), entry) for one, entry in zip(large(ours).values(), entries, strict=True)
        )
        backwards(plain)
        backwards(ours)
        assert resident_bytes(ours) <= BOUND
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))


@pytest.mark.usefixtures("_unheard")
@pytest.mark.parametrize("every", support.sizes(small=593, whole=41))
def test_an_interrupt_at_any_moment(every: int, tmp_path: Path) -> None:
    def once(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        backwards(module, MICRO_BATCHES)
        found = support.gradients(module)
        optimizer.step()  # at a rate of 0
        return found

    plain = layers(5)
    expected = once(plain, sgd(plain, 0.0))
    came_count = 0
    with ssdtrain.TensorStore(tmp_path) as store:
        for number in range(0, 1_000_000, every):
            module = layers(5)
            optimizer = beside(sgd(module, 0.0), store, max_gradient_bytes=2 * ONE)
            try:
                with AtCall(number, interrupt) as signalled:
                    once(module, optimizer)
            except KeyboardInterrupt:
                came_count += 1
            for _ in range(2):
                support.assert_equal_bits(once(module, optimizer), expected)
            optimizer.synchronize()
            assert resident_bytes(module) <= 2 * ONE
            if not signalled.came:
                break
    assert came_count > 0
