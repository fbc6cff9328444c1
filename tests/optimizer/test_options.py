"""Options of groups and attributes, of all kinds, that change in place at any moment of a step."""

from __future__ import annotations

import threading
from array import array
from collections import ChainMap, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
from ssdtrain.optimizer.in_backward import InBackward
from ssdtrain.optimizer.taken import TakenGradient
from stepped import OVERLAPS, RATE, STEPS, backward, train
from trained import everything, model


@dataclass
class Config:
    """Options that compare as values."""

    rate: float


class Plain:
    """Options that compare as objects."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Own(list[float]):
    """A list that has an attribute."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(values)
        self.rate = values[0]


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


def halve_first(value: Tensor) -> None:
    value[0] *= 0.5


def halve_nested(value: dict[str, tuple[list[list[float]]]]) -> None:
    value["a"][0][0][0] *= 0.5


def halve_byte(value: bytearray) -> None:
    value[0] //= 2


def halve_set(value: set[float]) -> None:
    value.add(value.pop() * 0.5)


def halve_order(value: OrderedDict[float, None]) -> None:
    value.move_to_end(next(iter(value)))


def closure() -> Any:
    rates = [RATE]

    def own() -> list[float]:
        return rates

    return own


def parameter() -> Parameter:
    return Parameter(torch.tensor(RATE), requires_grad=False)


def objects() -> Any:
    found = np.empty(1, dtype=object)
    found[0] = [RATE]
    return found


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
    "set": Kind(lambda: {RATE}, lambda one: next(iter(one)), halve_set),
    "order": Kind(
        lambda: OrderedDict.fromkeys((RATE, RATE / 2)), lambda one: next(iter(one)), halve_order
    ),
    "bytearray": Kind(
        lambda: bytearray([64]),
        lambda one: one[0] / 512,
        lambda one: one.__setitem__(0, one[0] // 2),
    ),
    "array of Python": Kind(lambda: array("d", [RATE]), lambda one: one[0], halve_item(0)),
    "array of objects": Kind(objects, lambda one: one[0][0], lambda one: halve_item(0)(one[0])),
    "chain": Kind(lambda: ChainMap({0: RATE}), lambda one: one[0], halve_item(0)),
    "dataclass": Kind(lambda: Config(RATE), lambda one: one.rate, halve_rate),
    "list with an attribute": Kind(lambda: Own([RATE]), lambda one: one.rate, halve_rate),
    "array of columns": Kind(
        lambda: np.asfortranarray(np.full((2, 3), RATE)),
        lambda one: float(one[0, 0]),
        halve_item(...),
    ),
    "expanded": Kind(lambda: torch.tensor(RATE).expand(4), lambda one: one[0], halve_first),
    "a method of a list": Kind(
        lambda: [RATE].__getitem__, lambda one: one(0), halve_owner, is_kept=False
    ),
    "class": Kind(
        lambda: type("Config", (), {"rate": RATE}), lambda one: one.rate, halve_rate, is_kept=False
    ),
    "namespace": Kind(lambda: SimpleNamespace(rate=RATE), lambda one: one.rate, halve_rate),
    "object": Kind(lambda: Plain(RATE), lambda one: one.rate, halve_rate),
    "closure": Kind(closure, lambda one: one()[0], lambda one: halve_item(0)(one()), is_kept=False),
}
QUICK = ["nested", "parameter", "set", "order", "dataclass", "object"]


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
        own = getattr(optimizer, "_in_backward", None)
        if isinstance(own, InBackward):
            own.join()
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


@pytest.mark.parametrize("value", [float("nan"), Plain(1.0), (float("nan"), Plain(1.0))])
def test_options_that_equal_nothing(value: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["own"] = value
    offload_optimizer(optimizer, tmp_path, overlap="backward")
    assert optimizer.param_groups[0]["own"] is value


def test_attributes_are_copied_for_the_trial(tmp_path: Path) -> None:
    own = {"a": ([[RATE]],)}
    optimizer = Momentum(model().parameters(), "nested", own, is_attribute=True)
    optimizer.never_read = threading.Lock()  # type: ignore[attr-defined]
    offload_optimizer(optimizer, tmp_path, overlap="backward")
    assert optimizer.own is own
    assert own == {"a": ([[RATE]],)}


@pytest.mark.defends("options that cannot be copied are read in step() only")
@pytest.mark.parametrize("name", ["a method of a list", "closure"])
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
