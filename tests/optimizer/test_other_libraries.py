"""Offloaded optimizers with classes, objects and settings of other libraries around them."""

from __future__ import annotations

import threading
from abc import ABC
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import support
from ssdtrain import UnsupportedError, load, offload_optimizer, save
from trained import WIDTH, Step, away, everything, model, plain_step, prove

OVERLAPS = pytest.mark.parametrize("overlap", ["step", "backward"])
T = TypeVar("T")


class Front:
    """Stands in front of an optimizer, as those of Fabric and Lightning do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        bases = (type(self), type(optimizer))
        self.__class__ = type(f"Front{type(optimizer).__name__}", bases, {})

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class CopyingFront(Front):
    """Has copies of the optimizer's attributes, as Lightning's had once."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        vars(self).update(vars(optimizer))


FRONTS = pytest.mark.parametrize("kind", [Front, CopyingFront])


def prepare_front(kind: Any, _module: nn.Module, optimizer: Any) -> Step:
    front: Any = kind(optimizer)

    def step(module: nn.Module, _: Any, x: Any) -> None:
        plain_step(module, front, x)
        front.param_groups[0]["lr"] *= 0.9
        saved = front.state_dict()
        assert len(front.state) == len(saved["state"]) > 0
        assert repr(front).startswith("Front")

    return step


@FRONTS
def test_an_object_in_front_of_an_optimizer(kind: Any, tmp_path: Path) -> None:
    prepare = partial(prepare_front, kind)
    prove(lambda module: torch.optim.AdamW(module.parameters()), tmp_path, prepare)


@FRONTS
def test_an_object_in_front_changes_the_optimizer_alone(kind: Any, tmp_path: Path) -> None:
    module = model()
    optimizer = offload_optimizer(torch.optim.AdamW(module.parameters()), tmp_path)
    front: Any = kind(optimizer)
    own = {*vars(front)}
    plain_step(module, front, torch.ones(8, WIDTH))
    before = everything(module, optimizer)
    front.load_state_dict(front.state_dict())
    support.assert_equal_bits(everything(module, optimizer), before)
    front.add_param_group({"params": [nn.Parameter(torch.ones(300, 300))]})
    plain_step(module, front, torch.ones(8, WIDTH))
    assert away(optimizer) > 0
    assert front.offload_stats == optimizer.offload_stats
    assert not front.lost_parameters
    assert len(optimizer.param_groups) == 2
    assert {*vars(front)} == own


@FRONTS
def test_a_checkpoint_through_an_object_in_front(kind: Any, tmp_path: Path) -> None:
    module = model()
    optimizer = offload_optimizer(torch.optim.AdamW(module.parameters()), tmp_path)
    front: Any = kind(optimizer)
    own = {*vars(front)}
    plain_step(module, front, torch.ones(8, WIDTH))
    saved = everything(module, optimizer)
    save(tmp_path / "checkpoint", module, front)
    plain_step(module, front, torch.ones(8, WIDTH))
    load(tmp_path / "checkpoint", module, front)
    support.assert_equal_bits(everything(module, optimizer), saved)
    assert {*vars(front)} == own


class AfterAbstract(ABC, torch.optim.AdamW):  # type: ignore[misc]
    """As those of the package pytorch_optimizer."""


class BeforeAbstract(torch.optim.AdamW, ABC):
    """The same bases in the other order."""


class AfterGeneric(Generic[T], torch.optim.AdamW):  # type: ignore[misc]  # noqa: PYI059 - so do some
    """An optimizer that is generic."""


@pytest.mark.parametrize("kind", [AfterAbstract, BeforeAbstract, AfterGeneric])
def test_classes_with_other_bases(kind: Any, tmp_path: Path) -> None:
    prove(lambda module: kind(module.parameters()), tmp_path)


def test_a_model_may_be_moved_to_the_cpu_without_its_gradients(tmp_path: Path) -> None:
    found = []
    for place in (None, tmp_path):
        module = model()
        optimizer = torch.optim.AdamW(module.parameters())
        if place is not None:
            offload_optimizer(optimizer, place, overlap="backward", buffer_bytes="1MiB")
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(8, WIDTH)).square().mean().backward()
            optimizer.step()
            module.cpu()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


def compiled(optimizer: Any) -> Any:
    # With whatever backend: the step runs outside of the compiler.
    return torch.compile(optimizer.step, backend="eager")


def compiled_with_closure(optimizer: Any) -> Any:
    @torch.compile(backend="eager")
    def step() -> Any:
        return optimizer.step(lambda: torch.tensor(1.0))

    return step


def compiled_with_hooks(optimizer: Any) -> Any:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step = torch.compile(optimizer.step, backend="eager")

    def counted() -> None:
        calls.clear()
        step()
        assert calls == ["before", "after"]

    return counted


@OVERLAPS
@pytest.mark.parametrize("compiled", [compiled, compiled_with_closure, compiled_with_hooks])
def test_a_compiled_step_has_the_bits_of_the_plain_one(
    compiled: Any, overlap: Any, tmp_path: Path
) -> None:
    """Of NAdam, whose arithmetic is another one while the compiler is at work in any thread."""
    found = []
    for place in (None, tmp_path):
        torch.compiler.reset()
        module = model()
        optimizer = torch.optim.NAdam(module.parameters())
        step = optimizer.step
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")
            step = compiled(optimizer)
        for _ in range(3):
            module(torch.ones(8, WIDTH)).square().mean().backward()
            step()
            optimizer.zero_grad()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


def test_a_compiled_function_that_trains(tmp_path: Path) -> None:
    found = []
    for place in (None, tmp_path):
        module = model()
        optimizer = torch.optim.AdamW(module.parameters())

        def train(module: Any = module, optimizer: Any = optimizer) -> None:
            plain_step(module, optimizer, torch.ones(8, WIDTH))

        if place is not None:
            offload_optimizer(optimizer, place, overlap="backward", buffer_bytes="1MiB")
            train = torch.compile(train, backend="eager")
        for _ in range(3):
            train()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


@pytest.fixture(params=["set", "entered"])
def on_device(request: pytest.FixtureRequest) -> Any:
    """How a default device is set: for all that follows, or for a block."""

    @contextmanager
    def setting(device: str) -> Iterator[None]:
        torch.set_default_device(device)
        try:
            yield
        finally:
            torch.set_default_device(None)

    return setting if request.param == "set" else torch.device


def test_updates_in_backward_go_on_with_a_default_device(on_device: Any, tmp_path: Path) -> None:
    module, x = model(), torch.ones(8, WIDTH)
    optimizer = torch.optim.AdamW(module.parameters())
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    with on_device("cpu"):
        module(x).square().mean().backward()
        with pytest.raises(UnsupportedError, match="this gradient is gone"):
            module[4].weight.grad.sum()
        optimizer.step()


def test_an_optimizer_is_offloaded_under_the_meta_device(tmp_path: Path) -> None:
    module, x = model(), torch.ones(8, WIDTH)
    with torch.device("meta"):
        optimizer = torch.optim.AdamW(module.parameters())
        offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32)
    plain_step(module, optimizer, x)


@OVERLAPS
def test_an_optimizer_is_offloaded_while_a_thread_draws(overlap: Any, tmp_path: Path) -> None:
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            torch.rand(8)

    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        for _ in range(10):
            optimizer = torch.optim.AdamW(nn.Linear(256, 256).parameters())
            offload_optimizer(optimizer, tmp_path, overlap=overlap)
    finally:
        ended.set()
        drawing.join()


class Halved(torch.Tensor):
    """A tensor made of another one, without `clone`, as the 8-bit states of torchao are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, _context: Any, _size: Any, _stride: Any) -> Any:
        return cls(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach())
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].inner.clone())
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(args[1].inner)
            return args[0]
        # torch raises a TypeError that names the function.
        return NotImplemented


def bare(momentum: torch.Tensor) -> torch.Tensor:
    return momentum.inner if isinstance(momentum, Halved) else momentum


class WithHalved(torch.optim.Optimizer):
    """Keeps its momentum in bfloat16, in a tensor of another class."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        momentum = torch.zeros_like(param, dtype=torch.bfloat16)
                        # Not of small ones, as torchao.
                        is_large = param.numel() > 4096
                        state["momentum"] = Halved(momentum) if is_large else momentum
                    momentum = bare(state["momentum"])
                    momentum.mul_(0.9).add_(param.grad.bfloat16())
                    param.add_(momentum, alpha=-group["lr"])


@pytest.mark.parametrize(
    "options", [{}, {"undo": True}, {"overlap": "backward", "per_parameter": True}], ids=str
)
def test_state_of_a_class_without_clone(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for place in (None, tmp_path):
        module, x = model(), torch.ones(8, WIDTH)
        optimizer = WithHalved(module.parameters())
        if place is not None:
            offload_optimizer(optimizer, place, buffer_bytes="1MiB", **options)
        for _ in range(2):
            plain_step(module, optimizer, x)
        saved = optimizer.state_dict()
        first = kept_in(saved)
        plain_step(module, optimizer, x)
        if place is not None:
            # A copy of its moment: the step has not changed it.
            assert all(map(torch.equal, first, kept_in(saved)))
            optimizer.load_state_dict(saved)
            plain_step(module, optimizer, x)
            assert not any(map(torch.equal, first, kept_in(optimizer.state_dict())))
        else:
            # That of a plain optimizer changes with each step.
            optimizer.load_state_dict({**saved, "state": halved(first)})
            plain_step(module, optimizer, x)
        weights = {name: one.clone() for name, one in module.state_dict().items()}
        kept = {str(number): one for number, one in enumerate(kept_in(optimizer.state_dict()))}
        found.append(weights | kept)
    support.assert_equal_bits(found[1], found[0])


def halved(tensors: list[torch.Tensor]) -> dict[int, Any]:
    made = [Halved(one) if one.numel() > 4096 else one for one in tensors]
    return {number: {"momentum": one} for number, one in enumerate(made)}


def kept_in(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [bare(one["momentum"]).clone() for _, one in sorted(state_dict["state"].items())]


class Nesting(torch.optim.Optimizer):
    """Keeps several momentums for each parameter in a dict, as AggMo does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["momentums"] = {beta: torch.zeros_like(param) for beta in (0.5, 0.9)}
                    for beta, momentum in state["momentums"].items():
                        momentum.mul_(beta).add_(param.grad)
                        param.add_(momentum, alpha=-group["lr"])


@OVERLAPS
def test_state_in_containers_stays_and_is_told(
    overlap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for place in (None, tmp_path):
        module, x = model(), torch.ones(8, WIDTH)
        optimizer: Any = Nesting(module.parameters())
        if place is not None:
            offload_optimizer(
                optimizer,
                place,
                overlap=overlap,
                buffer_bytes="1MiB",
                per_parameter=overlap != "step",
            )
        for _ in range(3):
            plain_step(module, optimizer, x)
        weights = {name: one.clone() for name, one in module.state_dict().items()}
        for number, state in sorted(optimizer.state_dict()["state"].items()):
            weights |= {f"{number} {beta}": one for beta, one in state["momentums"].items()}
        found.append(weights)
    support.assert_equal_bits(found[1], found[0])
    stats = optimizer.offload_stats
    assert stats.resident_bytes == 2 * sum(one.nbytes for one in module.parameters())
    assert "in a dict or list of the state" in str(stats)
    told = [
        one.message for one in caplog.records if "state 'momentums' stays in memory" in one.message
    ]
    assert len(told) == 1


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_state_dict_has_copies_of_the_tensors_in_containers(kind: Any, tmp_path: Path) -> None:
    module, x = model(), torch.ones(8, WIDTH)
    optimizer: Any = offload_optimizer(Nesting(module.parameters()), tmp_path)
    plain_step(module, optimizer, x)
    for state in optimizer.state.values():
        state["momentums"] = kind(state["momentums"])
    saved = [state["momentums"] for state in optimizer.state_dict()["state"].values()]
    expected = [{beta: value.clone() for beta, value in one.items()} for one in saved]
    plain_step(module, optimizer, x)
    assert {type(one) for one in saved} == {kind}
    for one, other in zip(saved, expected, strict=True):
        assert all(torch.equal(one[beta], other[beta]) for beta in other)


def test_small_state_in_containers_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Linear(8, 8)
    optimizer: Any = offload_optimizer(Nesting(module.parameters()), tmp_path)
    plain_step(module, optimizer, torch.ones(8, 8))
    assert not [one.message for one in caplog.records if "momentums" in one.message]
