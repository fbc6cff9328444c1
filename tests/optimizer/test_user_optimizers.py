"""Optimizers of users, which keep things in attributes and groups that no state of torch's has."""

from __future__ import annotations

import threading
import time
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR

import support
from ssdtrain import UnsupportedError, offload_optimizer
from stepped import OVERLAPS, RATE, STEPS, backward, train
from trained import WIDTH, everything, model


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, and goes by it; the fifth is after what a trial sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = 0
        self.rate = 1.0

    def step(self, closure: Any = None) -> Any:
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            self.calls += 1
            if self.calls % 5 == 0:
                self.rate *= 0.5
        for group in self.param_groups:
            group["lr"] = self.rate / (self.calls + 1)
        return super().step(closure)


@pytest.mark.defends("what parts of a step change differently is an error")
def test_parts_that_change_an_attribute_differently_are_told(tmp_path: Path) -> None:
    optimizer = Differing(model().parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB")
    for _ in range(4):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        if optimizer.calls == 3:
            with pytest.raises(UnsupportedError, match="sets 'last' to something else for some"):
                optimizer.step()
            return
        optimizer.step()
    raise AssertionError("the fourth step sets it")


class Differing(torch.optim.SGD):
    """Notes something of its last parameter, but not before its fourth step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 4:
            self.last = self.param_groups[-1]["params"][-1].shape
        return super().step(closure)


@pytest.mark.parametrize("undo", [False, True])
def test_a_step_that_counts_its_calls_counts_steps(undo: bool, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        # The last one gets no gradient.
        idle = Parameter(torch.ones(300, 300))
        groups = [{"params": list(module.parameters())}, {"params": [idle]}]
        optimizer = Counting(groups)
        if place is not None:
            offload_optimizer(optimizer, place, buffer_bytes="1MiB", undo=undo)
        for seed in train(module, optimizer, steps=12):
            assert optimizer.calls == seed + 1
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


class WarmedUp(torch.optim.SGD):
    """Notes in its first step what it goes by later, in its groups and in itself."""

    started = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("first_lr", float(group["lr"]))
            if not self.started:
                self.own_lr = float(group["lr"])
            group["momentum"] = 0.5 + group["first_lr"] + self.own_lr
        self.started = True
        return super().step(closure)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_a_first_step_notes_is_there_in_the_second(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        optimizer = WarmedUp(module.parameters(), lr=0.1, momentum=0.9)
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
        scheduler = ExponentialLR(optimizer, 0.5)
        for _ in train(module, optimizer):
            scheduler.step()
        told.append(everything(module, optimizer))
        assert optimizer.started
    support.assert_equal_bits(*told)


class Stepping(torch.optim.SGD):
    """Counts its steps in its groups, as many do, and takes a rate that is a tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = float(group["own"]) / group["count"]
        return super().step(closure)


def test_a_rate_of_a_step_that_changes_its_groups(tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module, rate = model(), torch.tensor(RATE)
        optimizer = Stepping(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["own"] = rate
        if place is not None:
            offload_optimizer(optimizer, place, overlap="backward", buffer_bytes="1MiB")
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            rate.mul_(0.5)
            optimizer.zero_grad()
        told.append(everything(module, optimizer))
        assert optimizer.param_groups[0]["count"] == STEPS
    support.assert_equal_bits(*told)


@dataclass
class Valued(torch.optim.SGD):
    """An optimizer that is equal to others, and has no hash."""

    params: InitVar[Any]
    when: Any = None

    def __post_init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_that_is_a_dataclass(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        optimizer: Any = Valued(list(module.parameters()), time.localtime())
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
        for _ in train(module, optimizer):
            pass
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


class Failing(torch.optim.SGD):
    """Counts its steps in its groups, and fails at a parameter of some shape."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if any(param.shape == (WIDTH, WIDTH) for param in group["params"]):
                raise ValueError("a mistake of the user")
        return super().step(closure)


@pytest.mark.parametrize("undo", [False, True])
def test_what_a_failed_step_has_counted(undo: bool, tmp_path: Path) -> None:
    module = model()
    optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="64KiB", undo=undo)
    backward(module, 0)
    with pytest.raises(ValueError, match="of the user"):
        optimizer.step()
    assert optimizer.param_groups[0].get("count", 0) == (0 if undo else 1)


class GlobalNorm(torch.optim.SGD):
    """Takes a step that all gradients together tell."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(
            [one for group in self.param_groups for one in group["params"]], 1.0
        )
        return super().step(closure)


class Summing(torch.optim.SGD):
    """Notes something of all its parameters, as those that learn their rate do."""

    def step(self, closure: Any = None) -> Any:
        self.total = sum(
            float(param.grad.sum())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        )
        return super().step(closure)


def test_what_a_trial_refuses_names_the_class(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^Summing cannot be offloaded: .* sets 'total' to"):
        offload_optimizer(Summing(model().parameters(), lr=0.1), tmp_path)


def test_what_couples_parameters_is_seen_with_one_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        offload_optimizer(GlobalNorm([Parameter(torch.ones(8, 8))], lr=0.1), tmp_path)


class Bound(torch.optim.SGD):
    """Calls a method that was bound before the optimizer was offloaded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.look = self.look_at_state

    def look_at_state(self) -> int:
        return len(self.state)

    def step(self, closure: Any = None) -> Any:
        self.look()
        return super().step(closure)


def test_a_look_past_self_in_a_step_after_backward_is_told(tmp_path: Path) -> None:
    module = model()
    optimizer = Bound(module.parameters())
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    backward(module, 0)
    with pytest.raises(UnsupportedError, match=r"step calls it, use self \(the step was undone"):
        optimizer.step()


class Slotted(torch.optim.SGD):
    """Has an attribute that is in no dict."""

    __slots__ = ("calls",)


class Wrapped(torch.optim.SGD):
    """Stands before another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)


@pytest.mark.parametrize(("kind", "message"), [(Slotted, "in __slots__"), (Wrapped, "'inner'")])
def test_what_nobody_can_follow_is_refused(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        offload_optimizer(kind(model().parameters()), tmp_path)


class Locked(torch.optim.SGD):
    """Has an attribute that cannot be copied."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        with self.lock:
            return super().step(closure)


def test_an_attribute_that_cannot_be_copied_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"'lock' could not be copied for that: cannot pickle '_thread.lock'"
    ):
        offload_optimizer(Locked(model().parameters()), tmp_path)
