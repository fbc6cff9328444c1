"""Options of groups and attributes, of all kinds, that change in place at any moment of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import support
from ssdtrain import UnsupportedError, offload_optimizer
from ssdtrain.optimizer.taken import TakenGradient
from stepped import OVERLAPS, RATE, STEPS, backward, train
from trained import everything, model


class Plain:
    """Options in an object."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


@dataclass(frozen=True)
class Kind:
    """A kind of values: how to make one of a rate, to read the rate, and to halve it in place."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    halve: Callable[[Any], None]
    is_kept: bool = True
    """Whether updates may be made later or earlier than `step()`."""


def halve_item(key: Any) -> Callable[[Any], None]:
    def halve(value: Any) -> None:
        value[key] *= 0.5

    return halve


def halve_rate(value: Any) -> None:
    value.rate *= 0.5


def halve_owner(value: Any) -> None:
    value.__self__[0] *= 0.5


def closure() -> Any:
    rates = [RATE]

    def own() -> list[float]:
        return rates

    return own


def parameter() -> Parameter:
    return Parameter(torch.tensor(RATE), requires_grad=False)


KINDS = {
    "list": Kind(lambda: [RATE], lambda one: one[0], halve_item(0)),
    "nested": Kind(
        lambda: {"a": ([[RATE]],)},
        lambda one: one["a"][0][0][0],
        lambda one: halve_item(0)(one["a"][0][0]),
    ),
    "tensors": Kind(
        lambda: (torch.tensor(RATE),), lambda one: one[0], lambda one: one[0].mul_(0.5)
    ),
    "parameter": Kind(parameter, lambda one: one, lambda one: one.data.mul_(0.5)),
    "array": Kind(lambda: np.array([RATE]), lambda one: float(one[0]), halve_item(0)),
    "a method of a list": Kind(
        lambda: [RATE].__getitem__, lambda one: one(0), halve_owner, is_kept=False
    ),
    "object": Kind(lambda: Plain(RATE), lambda one: one.rate, halve_rate, is_kept=False),
    "closure": Kind(closure, lambda one: one()[0], lambda one: halve_item(0)(one()), is_kept=False),
}
QUICK = ["nested", "parameter", "array", "object"]


class Momentum(Optimizer):
    """An optimizer of a user, whose rate is in an option of its group, or in an attribute."""

    def __init__(self, params: Any, kind: str, value: Any, *, is_attribute: bool) -> None:
        super().__init__(params, {"kind": kind} if is_attribute else {"kind": kind, "own": value})
        self.own = value if is_attribute else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            own = group["own"] if self.own is None else self.own
            rate = KINDS[group["kind"]].read(own)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(param)
                    state["momentum"].mul_(0.9).add_(param.grad)
                    param.sub_(state["momentum"] * rate)


def trained(
    place: Path | None, overlap: str, name: str, *, is_attribute: bool, is_before: bool
) -> dict[str, Tensor]:
    """Train with a rate that is halved before each `step()`, or after each."""
    module, kind = model(), KINDS[name]
    value = kind.make()
    optimizer = Momentum(module.parameters(), name, value, is_attribute=is_attribute)
    if place is not None:
        offload_optimizer(
            optimizer,
            place,
            overlap=overlap,  # type: ignore[arg-type]
            buffer_bytes="1MiB",
            per_parameter=True,
        )
    for seed in range(STEPS):
        backward(module, seed)
        if is_before:
            kind.halve(value)
        optimizer.step()
        if not is_before:
            kind.halve(value)
        optimizer.zero_grad()
    return everything(module, optimizer)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("is_attribute", [True, False], ids=["attribute", "option"])
@pytest.mark.parametrize("name", support.shared_out(KINDS, quick=QUICK))
def test_what_changes_in_place_counts_when_it_does_plainly(
    name: str, is_attribute: bool, is_before: bool, tmp_path: Path
) -> None:
    if is_attribute and is_before and not KINDS[name].is_kept:
        pytest.skip("the contract: attributes that are objects do not change before step()")
    overlap = "backward"
    expected = trained(None, overlap, name, is_attribute=is_attribute, is_before=is_before)
    if is_before and KINDS[name].is_kept:
        # The updates have used what was there when the first gradient was.
        with pytest.raises(UnsupportedError, match=r"'own'.* was changed"):
            trained(tmp_path, overlap, name, is_attribute=is_attribute, is_before=is_before)
        return
    found = trained(tmp_path, overlap, name, is_attribute=is_attribute, is_before=is_before)
    support.assert_equal_bits(found, expected)


@pytest.mark.parametrize("name", support.shared_out(KINDS, quick=QUICK))
@pytest.mark.parametrize("is_attribute", [True, False], ids=["attribute", "option"])
def test_in_step_all_kinds_are_as_ever(name: str, is_attribute: bool, tmp_path: Path) -> None:
    expected = trained(None, "step", name, is_attribute=is_attribute, is_before=False)
    found = trained(tmp_path, "step", name, is_attribute=is_attribute, is_before=False)
    support.assert_equal_bits(found, expected)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_scheduler_of_a_rate_that_is_a_parameter(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=parameter(), foreach=False)
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
        scheduler = ExponentialLR(optimizer, 0.5)
        for _ in train(module, optimizer):
            scheduler.step()
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


@pytest.mark.defends("options that cannot be copied are read in step() only")
@pytest.mark.parametrize("name", ["a method of a list", "object", "closure"])
def test_what_cannot_be_copied_is_read_in_the_step(name: str, tmp_path: Path) -> None:
    expected = trained(None, "backward", name, is_attribute=False, is_before=True)
    found = trained(tmp_path, "backward", name, is_attribute=False, is_before=True)
    support.assert_equal_bits(found, expected)


def test_a_gradient_that_two_parameters_have_is_told(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    module(torch.randn(8, 256)).square().mean().backward()
    first, second = (one.weight for one in module)  # type: ignore[union-attr]
    assert type(second.grad) is TakenGradient
    first.grad = second.grad  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="this gradient is gone"):
        optimizer.step()


class OfDefaults(torch.optim.SGD):
    """Goes by the options that it was made with."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]
        return super().step(closure)


def test_options_that_an_optimizer_was_made_with_are_kept(tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = OfDefaults(module.parameters(), lr=0.1, momentum=0.9)
        if is_offloaded:
            offload_optimizer(
                optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB", per_parameter=True
            )
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            optimizer.defaults["lr"] *= 0.5
            optimizer.zero_grad()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


@pytest.mark.parametrize("name", ["lr", "weight_decay", "maximize"])
def test_each_option_that_is_changed_after_backward_is_seen(name: str, tmp_path: Path) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=np.float64(0.1))  # type: ignore[arg-type]
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    backward(module, 0)
    optimizer.param_groups[0][name] = np.float64(0.5)
    with pytest.raises(UnsupportedError, match=f"'{name}'\\] was changed"):
        optimizer.step()


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_tensor_of_a_rate_that_is_changed_after_backward_is_seen(
    is_in_place: bool, tmp_path: Path
) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), foreach=False)
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    backward(module, 0)
    if is_in_place:
        optimizer.param_groups[0]["lr"].mul_(0.5)
    else:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    with pytest.raises(UnsupportedError, match=r"'lr'\] was changed"):
        optimizer.step()


def test_options_that_an_optimizer_was_made_with_are_seen(tmp_path: Path) -> None:
    module = model()
    optimizer = OfDefaults(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(
        optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB", per_parameter=True
    )
    backward(module, 0)
    optimizer.defaults["lr"] = 0.5
    with pytest.raises(UnsupportedError, match="attribute 'defaults' was changed"):
        optimizer.step()
