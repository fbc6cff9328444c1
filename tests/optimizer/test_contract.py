"""The contract of a step: torch's own classes keep it, and a trial refuses others that break it."""

from __future__ import annotations

import copy
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import support
from ssdtrain import ConfigError, UnsupportedError, offload_optimizer
from ssdtrain.optimizer.chunks import Chunk, own_step, run, update
from ssdtrain.optimizer.contract import OF_TORCH, Rebound, is_same, own_attributes, params_of
from stepped import OVERLAPS, backward, trained
from trained import everything, model

STEPS = 4
OPTIONS: list[dict[str, Any]] = [
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"foreach": False, "lr": torch.tensor(0.01)},
    {"fused": True, "lr": torch.tensor(0.01)},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "centered": True},
]


def takes(kind: type[Optimizer], options: dict[str, Any]) -> bool:
    """Whether a class has these options, and can have them together."""
    if not options.keys() <= inspect.signature(kind).parameters.keys():
        return False
    try:
        kind([Parameter(torch.ones(2, 2))], **options)
    except (ValueError, RuntimeError):
        return False
    return True


CASES = [
    (kind, options)
    for kind in sorted(OF_TORCH, key=lambda kind: kind.__name__)
    for options in ({}, *OPTIONS)
    if takes(kind, options)
]


def of_torch(kind: Any, options: dict[str, Any]) -> Optimizer:
    """Return an optimizer of two groups of parameters of several shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (7, 5)] if kind.__name__ == "Muon" else [(40, 30), (30,), (7, 5, 3), (1,)]
    groups = [
        {"params": [Parameter(torch.randn(one, generator=generator)) for one in shapes]}
        for _ in range(2)
    ]
    groups[1]["lr"] = 0.005  # type: ignore[assignment]
    if isinstance(options.get("lr"), Tensor):
        groups[1]["lr"] = torch.tensor(0.005)  # type: ignore[assignment]
    made: Optimizer = kind(groups, **copy.deepcopy(options))
    return made


def ends_with(kind: Any, options: dict[str, Any], per_part: int) -> list[Any]:
    """Return parameters, state and options after steps over parts, or over all at once."""
    optimizer = of_torch(kind, options)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        for param in params_of(optimizer):
            gradient = torch.randn(param.shape, generator=generator) * 10 ** (number - 2)
            param.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        named = {"attributes": own_attributes(optimizer)} | {
            str(group): {name: one for name, one in options.items() if name != "params"}
            for group, options in enumerate(optimizer.param_groups)
        }
        before = copy.deepcopy(named)
        if per_part:
            step_in_parts(optimizer, per_part)
        else:
            run(optimizer, own_step(kind), {})
        assert is_same(named, before), "nothing is changed in place"
        # A schedule changes the rate between steps: rebound, or in place if it is a tensor.
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    states = [dict(optimizer.state[param]) for param in params_of(optimizer)]
    return [params_of(optimizer), states, optimizer.param_groups, own_attributes(optimizer)]


def step_in_parts(optimizer: Optimizer, per_part: int) -> None:
    rebound = Rebound()
    for group in list(optimizer.param_groups):
        for first in range(0, len(group["params"]), per_part):
            chunk = Chunk(group, group["params"][first : first + per_part])
            update(optimizer, own_step(type(optimizer)), chunk, rebound, {})
    rebound.apply(optimizer)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_classes_of_torch_keep_the_contract(kind: Any, options: dict[str, Any]) -> None:
    together = ends_with(kind, options, 0)
    for per_part in (1, 2):
        assert is_same(ends_with(kind, options, per_part), together)


def test_each_class_of_torch_is_held_to_the_contract() -> None:
    assert {kind for kind, _ in CASES} == OF_TORCH
    assert torch.optim.LBFGS not in OF_TORCH


def test_a_class_of_torch_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], torch.optim.SGD.step

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(given[0])
        return own(*given, **named)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    offload_optimizer(torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9), tmp_path)
    assert len(calls) <= 2, "one small step tells how much state there is"


class Rebinding(torch.optim.SGD):
    """Counts its steps in a number of its own and of its group, and goes by both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = 0
        self.rate = 1.0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.rate *= 0.5 if self.calls % 3 == 0 else 1.0
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = self.rate / (self.calls + group["count"])
        return super().step(closure)


IN_BACKWARD = {"overlap": "backward", "per_parameter": True}


@pytest.mark.parametrize(
    "options", [{}, {"undo": True}, {"overlap": "backward"}, IN_BACKWARD], ids=str
)
def test_numbers_that_are_rebound_count_steps(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        # The last parameter gets no gradient.
        groups = [{"params": list(module.parameters())}, {"params": [Parameter(torch.ones(300))]}]
        optimizer = Rebinding(groups)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", **options)
        found.append(trained(module, optimizer, steps=6))
        assert optimizer.calls == 6
        assert [group["count"] for group in optimizer.param_groups] == [6, 6]
    support.assert_equal_bits(found[1], found[0])


class Differing(torch.optim.SGD):
    """Notes something of its last parameter, but not before its fourth step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 4:
            self.last = self.param_groups[-1]["params"][-1].shape
        return super().step(closure)


@pytest.mark.defends("a number that parts of a step rebind to different values is an error")
def test_parts_that_rebind_an_attribute_differently_are_told(tmp_path: Path) -> None:
    module = model()
    optimizer = Differing(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=True)
    trained(module, optimizer, steps=3)
    before = everything(module, optimizer)
    backward(module, 3)
    with pytest.raises(UnsupportedError, match=r"rebinds 'last' to .* \(the step was undone"):
        optimizer.step()
    support.assert_equal_bits(everything(module, optimizer), before)
    assert optimizer.calls == 3
    assert not hasattr(optimizer, "last")


class Caching(torch.optim.SGD):
    """Fills a table of its own in its first step, as the 8-bit optimizers of bitsandbytes do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.table: dict[str, Tensor] = {}
        self.is_ready = False

    def step(self, closure: Any = None) -> Any:
        if not self.is_ready:
            self.table.setdefault("scale", torch.tensor(0.5))
            self.is_ready = True
        for group in self.param_groups:
            group["lr"] = 0.1 * float(self.table["scale"])
        return super().step(closure)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_first_step_may_fill_a_table(overlap: Any, tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = Caching(module.parameters())
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, overlap=overlap, buffer_bytes="1MiB")
        found.append(trained(module, optimizer, steps=3))
        assert list(optimizer.table) == ["scale"]
    support.assert_equal_bits(found[1], found[0])


class GlobalNorm(torch.optim.SGD):
    """Takes a step that all gradients together tell, above a bound that is seldom reached."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(params_of(self), 10.0)
        return super().step(closure)


class OfTheFirst(torch.optim.SGD):
    """Uses the rate of the first group for all."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        return super().step(closure)


class Summing(torch.optim.SGD):
    """Notes something of all its parameters, as those that learn their rate do."""

    def step(self, closure: Any = None) -> Any:
        self.total = sum(float(param.grad.sum()) for param in params_of(self))  # type: ignore[union-attr]
        return super().step(closure)


class Listing(torch.optim.SGD):
    """Notes each of its steps in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.steps.append(len(self.steps))
        return super().step(closure)


class CountingInAnOption(torch.optim.SGD):
    """Counts steps in a dict of its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            counts = group.setdefault("counts", {"steps": 0})
            counts["steps"] += 1
        return super().step(closure)


class Wrapped(torch.optim.SGD):
    """Stands before another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)


def test_a_dict_of_a_group_that_a_step_changes_is_refused(tmp_path: Path) -> None:
    optimizer = CountingInAnOption(model().parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="leaves another option 'counts' of group 0 if"):
        offload_optimizer(optimizer, tmp_path)
    assert type(optimizer) is CountingInAnOption


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GlobalNorm, "couples its parameters"),
        (OfTheFirst, "couples its parameters"),
        (Summing, "rebinds 'total' to"),
        (Listing, "leaves another attribute 'steps'"),
        (Wrapped, "'inner'"),
    ],
)
@pytest.mark.parametrize("rate", [0, 0.1])
def test_what_breaks_the_contract_is_refused(
    kind: Any, message: str, rate: float, tmp_path: Path
) -> None:
    groups = [{"params": [param]} for param in model().parameters()]
    with pytest.raises(
        UnsupportedError, match=f"^{kind.__name__} cannot be offloaded: .*{message}"
    ):
        offload_optimizer(kind(groups, lr=rate), tmp_path)


class ByName(torch.optim.SGD):
    """Has a rate for each parameter by its name, or by its place."""

    def __init__(self, params: Any, rates: list[float] | None = None) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0]["rates"] = rates

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            names, rates = group["param_names"], group["rates"]
            for place, (name, param) in enumerate(zip(names, group["params"], strict=True)):
                rate = rates[place] if rates else 1 / (2 + len(name))
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                # Of bfloat16 with masters it is the master's.
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=rate)


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_part_has_the_names_of_its_parameters(
    overlap: Any, has_masters: bool, tmp_path: Path
) -> None:
    found = []
    for way in ("step", overlap):
        module = model()
        if has_masters:
            module = module.bfloat16()
        optimizer = ByName(
            (f"{'x' * n}.{name}", one) for n, (name, one) in enumerate(module.named_parameters())
        )
        if has_masters or way != "step" or found:
            # One part has all of them.
            size = "1MiB" if found else "64MiB"
            master_dtype = torch.float32 if has_masters else None
            offload_optimizer(
                optimizer, tmp_path, overlap=way, buffer_bytes=size, master_dtype=master_dtype
            )
        for seed in range(3):
            for number, param in enumerate(module.parameters()):
                param.grad = torch.full_like(param, (seed + 1) * (number + 1) / 64)
            optimizer.step()
        found.append(everything(module, optimizer))
        assert len(optimizer.param_groups[0]["param_names"]) == len(list(module.parameters()))
    support.assert_equal_bits(found[1], found[0])


class Drawing(torch.optim.SGD):
    """Draws from torch's generator, once for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad += torch.rand_like(param)
        return super().step(closure)


def test_the_trial_puts_the_generator_back(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    offload_optimizer(Drawing(model().parameters(), lr=0.1), tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


class Projecting(torch.optim.SGD):
    """Draws random numbers for large parameters alone, as those do that project gradients."""

    def step(self, closure: Any = None) -> Any:
        for param in params_of(self):
            if param.grad is not None and param.numel() > 1000:
                param.grad += torch.rand_like(param)
        return super().step(closure)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_random_numbers_are_drawn_in_the_order_of_the_plain_step(
    overlap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = Projecting(module.parameters(), lr=0.1, momentum=0.9)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, overlap=overlap, buffer_bytes="1MiB")
        torch.manual_seed(5)
        with caplog.at_level("INFO"):
            found.append(trained(module, optimizer, steps=3))
    support.assert_equal_bits(found[1], found[0])
    assert ("pass per_parameter=True to offload_optimizer" in caplog.text) == (overlap != "step")


class Locked(torch.optim.SGD):
    """Has an attribute that cannot be copied."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        with self.lock:
            return super().step(closure)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_that_says_it_keeps_the_contract_is_trusted(
    overlap: Any, tmp_path: Path
) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = Locked(module.parameters())
        if is_offloaded:
            with pytest.raises(UnsupportedError, match=r"cannot pickle .*per_parameter=True"):
                offload_optimizer(optimizer, tmp_path, overlap=overlap)
            offload_optimizer(
                optimizer, tmp_path, overlap=overlap, buffer_bytes="1MiB", per_parameter=True
            )
        found.append(trained(module, optimizer, steps=3))
        assert optimizer.calls == 3
    support.assert_equal_bits(found[1], found[0])


def test_what_is_trusted_is_not_tried(tmp_path: Path) -> None:
    optimizer = GlobalNorm(model().parameters(), lr=0.1)
    offload_optimizer(optimizer, tmp_path, per_parameter=True)
    optimizer.add_param_group({"params": [Parameter(torch.ones(8, 8))]})
    other = GlobalNorm(model().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="per_parameter must be True or False, not 'yes'"):
        offload_optimizer(other, tmp_path, per_parameter="yes")  # type: ignore[arg-type]


SAME: list[tuple[Any, Any]] = [
    *((np.float64(one), np.float64(one)) for one in (1.0, float("nan"))),
    (float("nan"), float("nan")),
    ({1: [(0.5, None)]}, {1: [(0.5, None)]}),
    (np.array([0.0, np.nan]), np.array([0.0, np.nan])),
    (torch.tensor([0.0, torch.nan]), torch.tensor([0.0, torch.nan])),
]
OTHER: list[tuple[Any, Any]] = [
    (np.float64(1.0), np.float64(2.0)),
    (np.float32(0.0), np.float32(-0.0)),
    (np.ones(2), np.ones(3)),
    (0.0, -0.0),
    (torch.tensor(0.0), torch.tensor(-0.0)),
    ({1: [1.0]}, {1: [2.0]}),
    ([1], [1, 2]),
    (len, max),
    (1, True),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_is_the_same(one: Any, other: Any) -> None:
    assert is_same(one, other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_is_not_the_same(one: Any, other: Any) -> None:
    assert not is_same(one, other)
