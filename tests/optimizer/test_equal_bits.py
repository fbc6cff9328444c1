"""An offloaded optimizer gives weights and state the bits that the plain one gives them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from ssdtrain import UnsupportedError, offload_optimizer
from support import shared_out
from trained import WIDTH, Step, model, plain_step, prove, train

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adam-tensor-rate": (torch.optim.Adam, {"lr": torch.tensor(1e-3)}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
QUICK = ("adamw", "adamw-fused", "sgd-momentum")
"""The others are tried by the long tests."""


@pytest.mark.parametrize(
    "name",
    shared_out(OPTIMIZERS, quick=QUICK),
)
def test_optimizers_of_torch(name: str, tmp_path: Path) -> None:
    kind, options = OPTIMIZERS[name]
    prove(lambda module: kind(module.parameters(), **options), tmp_path)


def test_a_state_that_is_small_stays_in_memory(tmp_path: Path) -> None:
    prove(lambda module: torch.optim.Adafactor(module.parameters()), tmp_path, goes_to_disk=False)


class Lion(Optimizer):
    """A class that torch does not know, written as users write theirs: through `.data`."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "counted": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            group["counted"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "average" not in state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"]
                sign = (average * first + param.grad * (1 - first)).sign()
                param.data.add_(sign, alpha=-group["lr"] / group["counted"])
                average.data.mul_(second).add_(param.grad, alpha=1 - second)
        return loss


def test_a_class_of_the_user_with_a_count_in_its_group(tmp_path: Path) -> None:
    def make(module: nn.Module) -> Optimizer:
        return Lion(module.parameters())

    prove(make, tmp_path)
    _, optimizer = train(make, tmp_path, steps=3)
    assert optimizer.param_groups[0]["counted"] == 3, "once for each step, not for each part"


class Accumulated(Optimizer):
    """Makes its state when it is constructed, and asks for it in its step, as torch's Adagrad did.

    Torch 2.11 has that one so.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.full_like(param, 0.1)
                self.state[param]["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] += 1
                state["sum"].addcmul_(param.grad, param.grad)
                param.addcdiv_(param.grad, state["sum"].sqrt(), value=-group["lr"])
        return loss


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_class_whose_state_is_there_from_the_start(is_trained: bool, tmp_path: Path) -> None:
    def make(module: nn.Module) -> Optimizer:
        optimizer = Accumulated(module.parameters())
        if is_trained:
            module(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    with pytest.raises(UnsupportedError, match="without state, and raised KeyError"):
        offload_optimizer(make(model()), tmp_path)
    prove(make, tmp_path, per_parameter=True)


def groups_of(module: nn.Module) -> Optimizer:
    weights = [param for param in module.parameters() if param.dim() > 1]
    others = [param for param in module.parameters() if param.dim() == 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}], lr=1e-3
    )


def with_scheduler(make: Any, _module: nn.Module, optimizer: Optimizer) -> Step:
    scheduler = make(optimizer)

    def step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        plain_step(module, optimizer, x)
        scheduler.step()

    return step


@pytest.mark.parametrize("name", shared_out(["step", "cycle", "cosine"], quick=["cycle"]))
def test_groups_and_schedulers(name: str, tmp_path: Path) -> None:
    make = {
        "step": lambda one: lr_scheduler.StepLR(one, 3, 0.5),
        "cycle": lambda one: lr_scheduler.OneCycleLR(one, 1e-2, total_steps=30),
        "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    }[name]
    prove(groups_of, tmp_path, partial(with_scheduler, make))


def test_a_scheduler_that_was_there_before(tmp_path: Path) -> None:
    def make(module: nn.Module) -> Optimizer:
        optimizer = groups_of(module)
        optimizer.scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)  # type: ignore[attr-defined]
        return optimizer

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> None:
        plain_step(module, optimizer, x)
        optimizer.scheduler.step()

    prove(make, tmp_path, lambda *_: step)


def clipped(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for part in x.chunk(4):
        (module(part).square().mean() / 4).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def test_accumulation_and_clipping(tmp_path: Path) -> None:
    prove(groups_of, tmp_path, lambda *_: clipped, in_backward=False)


def accumulated(module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """Accumulate as with FSDP2; a plain optimizer has no such method."""
    parts = x.chunk(4)
    for number, part in enumerate(parts):
        getattr(optimizer, "set_is_last_backward", bool)(number == len(parts) - 1)
        (module(part).square().mean() / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_accumulation_with_a_last_backward(tmp_path: Path) -> None:
    prove(groups_of, tmp_path, lambda *_: accumulated)


def scaled(_module: nn.Module, _optimizer: Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    skipped = []

    def step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        before = scaler.get_scale()
        # float16 overflows at this scale, so some steps are skipped until it has fallen.
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).square().mean()
        scaler.scale(loss * (1e30 if len(skipped) in (2, 5) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < before)

    return step


@pytest.mark.parametrize("fused", shared_out([False, True], quick=[True]))
def test_a_scaler_that_skips_steps(fused: bool, tmp_path: Path) -> None:
    prove(
        lambda module: torch.optim.AdamW(module.parameters(), fused=fused),
        tmp_path,
        scaled,
        in_backward=False,
    )


def with_closure(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    loss = optimizer.step(closure)
    assert calls == [loss], "once, whatever the number of parts"


def test_a_closure_runs_once(tmp_path: Path) -> None:
    prove(groups_of, tmp_path, lambda *_: with_closure)


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        module[2].weight = module[0].weight
        module[3].weight.requires_grad_(False)
        return module

    prove(lambda module: torch.optim.AdamW(module.parameters()), tmp_path, build=build)


def test_a_parameter_whose_gradient_comes_and_goes(tmp_path: Path) -> None:
    def prepare(_module: nn.Module, _optimizer: Optimizer) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
            last = module[:-1] if next(numbers) % 3 else module
            plain_step(last, optimizer, x)

        return step

    prove(lambda module: torch.optim.AdamW(module.parameters()), tmp_path, prepare)


def test_a_group_that_is_added(tmp_path: Path) -> None:
    def make(module: Any) -> Optimizer:
        return torch.optim.AdamW(module[:-1].parameters())

    def prepare(_module: Any, _optimizer: Optimizer) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
            if next(numbers) == 4:
                optimizer.add_param_group({"params": list(module[-1].parameters()), "lr": 0.1})
            plain_step(module, optimizer, x)

        return step

    prove(make, tmp_path, prepare)


def test_an_optimizer_that_has_trained_already(tmp_path: Path) -> None:
    def prepare(directory: Path | None, _module: nn.Module, optimizer: Optimizer) -> Step:
        numbers = iter(range(100))

        def step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
            if next(numbers) == 4 and directory is not None:
                offload_optimizer(optimizer, directory, buffer_bytes="1MiB")
            plain_step(module, optimizer, x)

        return step

    def make(module: nn.Module) -> Optimizer:
        return torch.optim.AdamW(module.parameters())

    plain, _ = train(make, None, partial(prepare, None))
    offloaded, _ = train(make, None, partial(prepare, tmp_path))
    for expected, actual in zip(plain, offloaded, strict=True):
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "goes_to_disk"),
    # Adagrad makes its state when it is constructed, before anybody knows of sparse gradients.
    [(torch.optim.SparseAdam, False), (torch.optim.Adagrad, True)],
)
def test_sparse_gradients_keep_their_state(kind: Any, goes_to_disk: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(500, WIDTH, sparse=True)

    def step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        torch.sparse.check_sparse_tensor_invariants.enable()
        rows = (x[0].abs() * 100).long() % 500
        plain_step(module, optimizer, rows)

    prove(
        lambda module: kind(module.parameters()),
        tmp_path,
        lambda *_: step,
        build=build,
        goes_to_disk=goes_to_disk,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(1))).to(dtype)

    def step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        plain_step(module, optimizer, x.to(dtype))

    prove(
        lambda module: torch.optim.AdamW(module.parameters()),
        tmp_path,
        lambda *_: step,
        build=build,
    )


def test_hooks_on_steps_run_once(tmp_path: Path) -> None:
    def make(module: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.seen = []  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(lambda one, *_: one.seen.append("before"))  # type: ignore[attr-defined]
        return optimizer

    _, optimizer = train(make, tmp_path, steps=2)
    optimizer.register_step_post_hook(lambda one, *_: one.seen.append("after"))  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.seen == ["before", "before", "before", "after"]  # type: ignore[attr-defined]
