"""Optimizers of users, which keep things in attributes and groups that no state of torch's has."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import support
from ssdtrain import UnsupportedError, offload_optimizer
from ssdtrain.optimizer.offloaded import Offloaded
from stepped import OVERLAPS, RATE, STEPS, backward, train
from trained import WIDTH, everything, model


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
            offload_optimizer(
                optimizer,
                place,
                overlap=overlap,
                buffer_bytes="1MiB",
                per_parameter=overlap != "step",
            )  # type: ignore[arg-type]
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
            offload_optimizer(
                optimizer, place, overlap="backward", buffer_bytes="1MiB", per_parameter=True
            )
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
            offload_optimizer(
                optimizer,
                place,
                overlap=overlap,
                buffer_bytes="1MiB",
                per_parameter=overlap != "step",
            )  # type: ignore[arg-type]
        for _ in train(module, optimizer):
            pass
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


class Failing(torch.optim.SGD):
    """Counts its steps in its groups and in itself, and fails at a parameter of some shape."""

    calls = 0
    fails = True

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if self.fails and any(param.shape == (WIDTH, WIDTH) for param in group["params"]):
                raise ValueError("a mistake of the user")
        return super().step(closure)


@pytest.mark.parametrize("undo", [False, True])
def test_what_a_failed_step_has_counted(undo: bool, tmp_path: Path) -> None:
    module = model()
    optimizer = Failing(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="64KiB", undo=undo)
    backward(module, 0)
    for number in range(1, 3):
        with pytest.raises(ValueError, match="of the user"):
            optimizer.step()
        count = 0 if undo else number
        assert (optimizer.calls, optimizer.param_groups[0].get("count", 0)) == (count, count)
    optimizer.fails = False
    optimizer.step()
    assert (optimizer.calls, optimizer.param_groups[0]["count"]) == (count + 1, count + 1)


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
    offload_optimizer(
        optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB", per_parameter=True
    )
    backward(module, 0)
    with pytest.raises(UnsupportedError, match="step calls it, use self"):
        optimizer.step()


class WithOurs(torch.optim.SGD):
    """Has a method with a name of ours."""

    def set_is_last_backward(self) -> None:
        """Do something of its own."""


@pytest.mark.parametrize("name", ["_disk", "offload_stats", "set_is_last_backward"])
def test_a_name_of_ours_is_refused(name: str, tmp_path: Path) -> None:
    optimizer = (WithOurs if name == "set_is_last_backward" else torch.optim.SGD)(
        model().parameters(), lr=0.1
    )
    if name != "set_is_last_backward":
        vars(optimizer)[name] = 1
    with pytest.raises(UnsupportedError, match=f"'{name}', a name that"):
        offload_optimizer(optimizer, tmp_path)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_each_attribute_of_ours_has_a_name_that_is_refused(overlap: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    offload_optimizer(optimizer, tmp_path, overlap=overlap)
    named = {name for base in Offloaded.__mro__[:2] for name in base.__annotations__}
    assert vars(optimizer)["_ours"] <= named
