"""What the tests of offloaded parameters share: models trained with and without, and who is away.

The stand-in for "with" is always the same model, built from the same seed, under a bound that holds
about a quarter of its weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import ssdtrain
import support
from mastered import InMemory
from ssdtrain import TensorStore
from ssdtrain.away.classes import AwayParameter
from ssdtrain.parameters.weights import weight_of

STEPS = 5
WIDTH = 136
"""Of square weights of float32, which are a little larger than the smallest that may leave."""
LEAVING_BYTES_MIN = 64 << 10
MIB = 1 << 20

READ_IN_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that hand the weights of modules in them to one operation."""

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int], Tensor]
Step = Callable[["Training", int], None]
Make = Callable[[Any], Any]


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-2)


def numbered(number: int, *shape: int) -> Tensor:
    """Return the input of a step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def layers(count: int = 8, width: int = WIDTH) -> nn.Sequential:
    """A model whose weights may all leave, and whose biases stay."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def squared(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a model that takes rows."""
    kind = next(model.parameters()).dtype
    loss: Tensor = model(numbered(number, 4, WIDTH).to(kind)).float().square().mean()
    return loss


# Bounds, and who is where


def unique(module: nn.Module) -> dict[str, Parameter]:
    """Return the weights that may leave, each once; asks for nothing but their sizes."""
    return {
        name: param
        for name, param in module.named_parameters()
        if param.nbytes >= LEAVING_BYTES_MIN
    }


def largest_bytes(module: nn.Module) -> int:
    """Return how much the module with the largest weights of its own has of them."""
    own = (one.parameters(recurse=isinstance(one, READ_IN_WHOLE)) for one in module.modules())
    return max(sum(p.nbytes for p in params if p.nbytes >= LEAVING_BYTES_MIN) for params in own)


def quarter(module: nn.Module) -> int:
    """Return a bound that holds a quarter of the weights, or the largest module."""
    total_bytes = sum(param.nbytes for param in unique(module).values())
    bound = max(total_bytes // 4, largest_bytes(module))
    assert 2 * bound <= total_bytes, "a bound that holds everything proves nothing"
    return bound


def is_away(param: Tensor) -> bool:
    """Whether a weight is not in memory; no look that brings it."""
    assert isinstance(param, Parameter)
    return type(param) is AwayParameter


def away(module: nn.Module) -> dict[str, Parameter]:
    """Return the weights that are away now."""
    return {name: param for name, param in unique(module).items() if is_away(param)}


def offloaded(
    module: nn.Module, place: Path | TensorStore, bound_bytes: int | None = None, **options: Any
) -> nn.Module:
    """Offload a model's weights, a quarter in memory if nothing else is said; look at what left."""
    bound = quarter(module) if bound_bytes is None else bound_bytes
    params = {name: (id(param), param.nbytes) for name, param in module.named_parameters()}
    assert ssdtrain.offload_parameters(module, place, max_resident_bytes=bound, **options) is module
    assert params == {name: (id(p), p.nbytes) for name, p in module.named_parameters()}
    return module


def settle(module: nn.Module) -> None:
    """Wait until no more is in memory than the bound of `offloaded` lets stay."""
    total_bytes = sum(param.nbytes for param in unique(module).values())

    def left() -> bool:
        gc.collect()
        return ssdtrain.parameter_stats(module).resident_bytes <= total_bytes // 2

    support.wait_until(left, "weights leave memory")


def use(param: Tensor) -> None:
    """Use a weight as a module's forward does; a look of the program lets it leave again."""
    weight = weight_of(param)
    assert weight is not None
    weight.look(param)


def leave(module: nn.Module, name: str) -> Parameter:
    """Have a weight leave memory: use the others until there is no room for it; return it."""
    param = module.get_parameter(name)
    others = [one for other, one in unique(module).items() if other != name]

    def left() -> bool:
        for other in others:
            if is_away(param):
                break
            if weight_of(other) is not None:
                use(other)
        return is_away(param)

    support.wait_until(left, f"{name} leaves memory")
    return param


def return_everything(store: TensorStore) -> None:
    """Wait until nothing is left on the disk of a store."""

    def empty() -> bool:
        gc.collect()
        return store.stats()["disk_used_bytes"] == 0

    support.wait_until(empty, "the space on the disk is given back")


# Training


@dataclass
class Training:
    """A model in training, and what was seen of it in each step."""

    model: nn.Module
    optimizer: Any
    loss_of: Loss
    flush: Callable[[], None] = support.nothing
    hooks: Callable[[], AbstractContextManager[object]] = nullcontext
    seen: list[dict[str, Tensor]] = field(default_factory=list)

    def loss(self, number: int) -> Tensor:
        return self.loss_of(self.model, number)

    def note(self, name: str, tensor: Tensor) -> None:
        now = self.seen[-1]
        now[f"{len(now)} {name}"] = tensor.detach().clone()

    def note_gradients(self) -> None:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                self.note(f"gradient of {name}", param.grad)

    def note_weights(self) -> None:
        for name, value in [*self.model.named_parameters(), *self.model.named_buffers()]:
            self.note(name, value)

    def backward(self, loss: Tensor) -> None:
        """Go back, with all that was saved on the disk, and look at what comes of it."""
        self.note("loss", loss)
        self.flush()
        loss.backward()
        self.note_gradients()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, step: Step, steps_count: int = STEPS) -> list[dict[str, Tensor]]:
        for number in range(steps_count):
            self.seen.append({})
            torch.manual_seed(number)
            with self.hooks():
                step(self, number)
            self.note_weights()
            self.note("random state", torch.get_rng_state())
        return self.seen


def plain_step(training: Training, number: int) -> None:
    training.backward(training.loss(number))
    training.update()


@dataclass(frozen=True)
class Way:
    """What else is offloaded beside the weights."""

    activations: bool = False
    optimizer: str | None = None
    """The schedule of its updates."""


WAYS = {"alone": Way(), "everything": Way(activations=True, optimizer="step")}


def each_way(
    cases: Collection[Any], *, alone: Collection[Any], rare: Collection[Any] = ()
) -> list[ParameterSet]:
    """Return each case in each way.

    `make test` tries all but the rare ones with everything else offloaded too, and some alone.
    """
    assert set(rare) | set(alone) <= set(cases)
    quick = [(one, "everything") for one in cases if one not in rare]
    quick += [(one, "alone") for one in cases if one in alone]
    return support.shared_out([(one, way) for one in cases for way in WAYS], quick=quick)


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    build: Build
    loss: Loss = squared
    step: Step = plain_step
    make: Make = adamw
    keeps_bound: bool = True
    """Whether nothing in it, such as a graph of its own, holds more weights than the bound."""
    masters: bool = False


def started(case: Case, directory: Path | None, way: Way) -> tuple[Training, support.Rig | None]:
    model = case.build()
    if directory is None:
        params = model.parameters()
        optimizer = InMemory(case.make, params) if case.masters else case.make(params)
        return Training(model, optimizer, case.loss), None
    optimizer = case.make(model.parameters())
    offloaded(model, directory)
    if way.optimizer:
        options: dict[str, Any] = {"buffer_bytes": "512KiB", "overlap": way.optimizer}
        options["master_dtype"] = torch.float32 if case.masters else None
        ssdtrain.offload_optimizer(optimizer, directory, **options)
    training = Training(model, optimizer, case.loss)
    if not way.activations:
        return training, None
    rig = support.Rig(directory, min_bytes=256, verify=True)
    training.flush, training.hooks = rig.flush, rig.context
    return training, rig


_plain_runs: dict[Case, list[dict[str, Tensor]]] = {}


def plain(case: Case, steps_count: int = STEPS) -> list[dict[str, Tensor]]:
    """Return what the plain model gives; each case is trained once."""
    if case not in _plain_runs:
        _plain_runs[case] = started(case, None, Way())[0].run(case.step, steps_count)
    return _plain_runs[case]


def prove(case: Case, directory: Path, way: Way, steps_count: int = STEPS) -> None:
    """Train with and without; every loss, gradient, weight and random state has equal bits."""
    expected = plain(case, steps_count)
    training, rig = started(case, directory, way)
    bound = quarter(training.model)
    actual = training.run(case.step, steps_count)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        try:
            support.assert_equal_bits(one, other)
        except AssertionError as error:
            error.add_note(f"in step {number}")
            raise
    peak_bytes = ssdtrain.parameter_stats(training.model).peak_resident_bytes
    if not case.keeps_bound:
        # Whoever held more has let it go, and the next forward, which holds none, finds that.
        training.model.eval()
        with torch.no_grad():
            training.loss(0)
    stats = ssdtrain.parameter_stats(training.model)
    assert stats.read_bytes > 0
    assert stats.written_bytes > 0
    assert stats.on_disk_bytes > 0
    assert stats.write_failed_count == 0
    # The results are looks, which take the memory of one weight more.
    bound += max(param.nbytes for param in unique(training.model).values())
    assert stats.resident_bytes <= bound
    if case.keeps_bound:
        assert peak_bytes <= bound
    in_memory = set(unique(training.model)) - set(away(training.model))
    in_memory_bytes = sum(training.model.get_parameter(name).nbytes for name in in_memory)
    assert in_memory_bytes <= stats.resident_bytes, "more is in memory than is counted"
    if rig is not None:
        rig.assert_empty()


class Lion(Optimizer):
    """An optimizer as users write theirs: it changes weights through `.data`."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param.data))
                param.data.add_((average * 0.9 + param.grad * 0.1).sign(), alpha=-group["lr"])
                average.mul_(0.99).add_(param.grad, alpha=0.01)
        return loss
