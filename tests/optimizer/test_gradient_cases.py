"""Gradients on the disk that more than the optimizer and autograd have to do with."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
import support
from gradients_away import (
    BOUND,
    LAYERS,
    LOOKED,
    ONE,
    WIDTH,
    bounded,
    large,
    layers,
    numbered,
    resident_bytes,
    steps,
)
from ssdtrain.away.classes import is_away
from ssdtrain.away.known import KNOWN
from stores import ChosenStore


def loss_of(module: nn.Module, number: int) -> Any:
    return module(numbered(number)).square().mean()


def backwards(module: nn.Module, *numbers: int) -> None:
    for number in numbers:
        loss_of(module, number).backward()


def sgd(module: nn.Module, place: Any, **options: Any) -> Any:
    return bounded(torch.optim.SGD(module.parameters(), lr=0.1), place, **options)


def of(module: nn.Module) -> list[Any]:
    return [*large(module).values()]


def seen_by_dlpack(module: nn.Module) -> list[Any]:
    """Another library has the memory, of which torch counts no user."""
    arrays = [np.from_dlpack(one) for one in of(module)]
    backwards(module, 2)
    assert all(one is not None for one in [torch.full((WIDTH, WIDTH), 7.0) for _ in range(30)])
    return [torch.tensor(one) for one in arrays]


def seen_by_dlpack_alone(module: nn.Module) -> list[Any]:
    arrays = [np.from_dlpack(one) for one in of(module)]
    module.zero_grad()
    backwards(module, 2, 3)
    assert all(one is not None for one in [torch.full((WIDTH, WIDTH), 7.0) for _ in range(30)])
    return [torch.tensor(one) for one in arrays]


def saved_by_a_graph(module: nn.Module) -> list[Any]:
    factors = [torch.ones(WIDTH, WIDTH, requires_grad=True) for _ in of(module)]
    found = [one * factor for one, factor in zip(of(module), factors, strict=True)]
    torch.autograd.backward([one.sum() for one in found])
    return [factor.grad for factor in factors]


def turned(module: nn.Module) -> list[Any]:
    for one in of(module):
        one.t_()
    backwards(module, 2, 3)
    return [one.clone() for one in of(module)]


def of_another_form(module: nn.Module) -> list[Any]:
    gradients = of(module)
    for one in gradients:
        one.data = one.data.view(-1)
    sums = [one.sum() for one in [*gradients, *gradients]]
    shapes = [torch.tensor(one.shape) for one in gradients]
    module.zero_grad()
    return [*sums, *shapes, *gradients]


def under_the_compiler(module: nn.Module) -> list[Any]:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        backwards(module, 2, 3)
    return [one.clone() for one in of(module)]


def by_numbers(module: nn.Module) -> list[Any]:
    torch._foreach_mul_(of(module), [0.5] * LAYERS)
    return [one.clone() for one in of(module)]


def by_masks(module: nn.Module) -> list[Any]:
    torch._foreach_mul_(of(module), [torch.eye(WIDTH)] * LAYERS)
    return [one.clone() for one in of(module)]


def norms_by_name(module: nn.Module) -> list[Any]:
    return list(torch._foreach_norm(self=of(module), ord=2))


@pytest.mark.filterwarnings("ignore:grad and param do not obey", "ignore:The .grad attribute")
# Of hooks that other tests of this process have set.
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
@pytest.mark.parametrize(
    "use",
    [
        *(seen_by_dlpack, seen_by_dlpack_alone, saved_by_a_graph, turned, of_another_form),
        *(by_numbers, by_masks, norms_by_name),
        pytest.param(under_the_compiler, marks=pytest.mark.long),
    ],
)
def test_who_uses_gradients_sees_those_of_the_plain_run(
    use: Callable[[nn.Module], list[Tensor]], tmp_path: Path
) -> None:
    plain, ours = layers(), layers()
    # It is closed at the end, because torch's compiler holds what it has seen.
    with ssdtrain.TensorStore(tmp_path) as store:
        _optimizer = sgd(ours, store)
        backwards(plain, 0, 1)
        backwards(ours, 0, 1)
        expected, found = use(plain), use(ours)
        for one, other in zip(found, expected, strict=True):
            assert one.stride() == other.stride()
            support.assert_equal_bits({"": one}, {"": other})
        backwards(plain, 4)
        backwards(ours, 4)
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))


@pytest.mark.defends("gradients stay that a graph or another library has")
def test_a_gradient_that_another_library_has_stays(tmp_path: Path) -> None:
    module = layers()
    _optimizer = sgd(module, tmp_path)
    backwards(module, 0, 1)
    arrays = [np.from_dlpack(one) for one in of(module)]
    backwards(module, 2)
    assert not any(is_away(one) for one in of(module))
    for array, one in zip(arrays, of(module), strict=True):
        assert torch.equal(torch.tensor(array), one)
    del arrays, array
    backwards(module, 3)
    assert resident_bytes(module) <= BOUND


def test_the_bound_holds_when_a_graph_is_asked_for_gradients(tmp_path: Path) -> None:
    module = layers()
    optimizer = sgd(module, tmp_path)
    backwards(module, 0, 1)
    torch.autograd.grad(loss_of(module, 2), list(module.parameters()))
    assert not any(one.users for one in optimizer._gradients._alive()), "that backward has ended"
    assert resident_bytes(module) <= BOUND
    assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


def test_a_backward_that_fails_keeps_no_gradient_in_memory(tmp_path: Path) -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    module: Any = layers()
    # It is closed at the end, because torch holds for good what is left of such a backward.
    with ssdtrain.TensorStore(tmp_path) as store:
        optimizer = sgd(module, store)
        backwards(module, 0, 1)
        for layer in module:
            handle = layer[0].weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                backwards(module, 2)
            handle.remove()
        for one in of(module):
            one.sum()
            assert resident_bytes(module) <= BOUND
        assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


def test_who_drops_a_gradient_waits_for_nobody(tmp_path: Path) -> None:
    module = layers()
    with ssdtrain.TensorStore(tmp_path) as store:
        optimizer = sgd(module, store)
        backwards(module, 0, 1)
        # As a thread that waits for a read, and might wait for a lock that the dropping one has.
        dropping = threading.Thread(target=optimizer.zero_grad)
        with optimizer._gradients._lock:
            dropping.start()
            dropping.join(60)
            assert not dropping.is_alive()
        backwards(module, 2)
        assert resident_bytes(module) <= BOUND
        figures = optimizer._gradients.figures()
        assert figures.resident_bytes + figures.on_disk_bytes == LAYERS * ONE, "of the new ones"
        # With the lock free it is done at once.
        optimizer.zero_grad()
        assert not optimizer._gradients._gone
        support.wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the disk is empty")


def test_two_optimizers_count_each_gradient_once(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    both = [sgd(ours, tmp_path), sgd(ours, tmp_path)]
    for _ in range(5):
        backwards(plain, 0, 1)
        backwards(ours, 0, 1)
        assert resident_bytes(ours) <= BOUND
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
        plain.zero_grad()
        ours.zero_grad()
    gc.collect()
    for optimizer in both:
        assert optimizer._gradients.figures().resident_bytes == 0
        assert optimizer.offload_stats.gradient_on_disk_bytes == 0
        assert optimizer.offload_stats.gradient_peak_bytes <= BOUND + LOOKED


@pytest.fixture
def a_process_alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_processes_that_meet_between_micro_batches(tmp_path: Path) -> None:
    """What is away by then comes back when autograd adds to it."""
    plain, ours = layers(), layers()
    optimizer = sgd(ours, tmp_path)
    backwards(plain, 0, 1)
    backwards(ours, 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        backwards(ours, 1)
        assert optimizer.offload_stats.gradient_read_bytes > 0
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("a_process_alone")
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_process_alone_that_exchanges_gradients(overlap: Any, tmp_path: Path) -> None:
    def trained(*, offloaded: bool) -> dict[str, Tensor]:
        module = layers()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if offloaded:
            bounded(optimizer, tmp_path, overlap=overlap)
        replica = DistributedDataParallel(module)
        for number in range(3):
            backwards(replica, number)
            optimizer.step()
            optimizer.zero_grad()
        return dict(module.named_parameters())

    support.assert_equal_bits(trained(offloaded=True), trained(offloaded=False))


def test_a_bound_is_for_what_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), layers(2))
    module[0].requires_grad_(False)
    module[1].requires_grad_(False)
    adam = torch.optim.Adam(module.parameters())
    optimizer = bounded(adam, tmp_path, max_gradient_bytes=ONE)
    module[1].requires_grad_(True)
    optimizer.step()
    backwards(module, 0, 1, 2)
    assert not is_away(module[1].weight.grad)
    assert "does not hold the gradients of some parameters" in caplog.text
    assert optimizer.offload_stats.gradient_peak_bytes <= ONE + LOOKED


def test_what_a_failed_step_left_out_is_not_told_later(tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        module = nn.Sequential(layers(), nn.Linear(WIDTH, 4))
        optimizer = bounded(Failing(module.parameters(), lr=0.1), store)
        backwards(module, 0, 1, 2)
        for _ in range(LAYERS):
            store.fail_after(0)
            optimizer.fails = True
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            store.fail_after(0, 0)
            optimizer.fails = False
            optimizer.step()


class Failing(torch.optim.SGD):
    """Fails at the last part of its step."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails and self.param_groups[0]["params"][-1].shape == (4,):
            raise ZeroDivisionError
        return result


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
    optimizer = bounded(Keeping(ours.parameters()), tmp_path, max_gradient_bytes=bound * ONE)
    for one, other in zip(steps(ours, optimizer), expected, strict=True):
        support.assert_equal_bits(one, other)


def test_an_optimizer_that_replaces_gradients(tmp_path: Path) -> None:
    plain, ours = layers(), layers()
    plainly = Replacing(plain.parameters(), lr=0.1)
    optimizer = bounded(Replacing(ours.parameters(), lr=0.1), tmp_path)
    found = []
    for module, one in ((plain, plainly), (ours, optimizer)):
        backwards(module, 0, 1, 2)
        before = [param.grad for param in module.parameters()]
        one.step()
        # Those of before are nobody's any more, and whole.
        found.append({str(n): one.clone() for n, one in enumerate(before)})
        found[-1].update(support.gradients(module))
        found[-1].update(module.state_dict())
    support.assert_equal_bits(found[1], found[0])


def test_a_gradient_is_not_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    """An interrupt may keep one from being forgotten, whose number the next one then has."""
    plain, ours = layers(), layers()
    with ssdtrain.TensorStore(tmp_path) as store:
        optimizer = sgd(ours, store)
        backwards(ours, 0)
        entries = [KNOWN[id(one)] for one in large(ours).values()]
        optimizer.zero_grad()
        assert all(there() is None for there, _ in entries)
        for module in (plain, ours):
            for param in module.parameters():
                param.grad = torch.zeros_like(param)
        KNOWN.update(
            (id(one), entry) for one, entry in zip(large(ours).values(), entries, strict=True)
        )
        backwards(plain, 0, 1, 2)
        backwards(ours, 0, 1, 2)
        assert resident_bytes(ours) <= BOUND
        support.assert_equal_bits(support.gradients(ours), support.gradients(plain))
