"""What the tests of offloaded optimizers share: a model, and its training with and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import support
from ssdtrain import offload_optimizer
from ssdtrain.optimizer.disk import Away

STEPS = 10
WIDTH = 160
Make = Callable[[nn.Module], Optimizer]
Step = Callable[[nn.Module, Optimizer, Tensor], None]
Prepare = Callable[[nn.Module, Optimizer], Step]
"""Puts around an optimizer what a test is about, and returns how a step goes."""


def model() -> nn.Sequential:
    """A model whose weights have a state that goes to the disk, and biases whose state stays."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.LayerNorm(2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def plain_step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def prepare_nothing(_module: nn.Module, _optimizer: Optimizer) -> Step:
    return plain_step


def everything(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of all weights, and of all of the optimizer's state."""
    named = {name: param.detach().clone() for name, param in module.named_parameters()}
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in state.items():
            if value is not None:
                named[f"state {number} {name}"] = torch.as_tensor(value).clone()
    return named


def train(
    make: Make,
    directory: Path | None,
    prepare: Prepare = prepare_nothing,
    *,
    build: Callable[[], nn.Module] = model,
    steps: int = STEPS,
    looks_every: int = 1,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], Optimizer]:
    """Train, offloaded if a directory is given; return what there is after each step.

    With ``looks_every`` nobody looks at weights and state between the other steps.
    """
    module = build()
    optimizer = make(module)
    if directory is not None:
        # So small that there are several parts, and one is never in memory with all others.
        options = {"buffer_bytes": "1MiB", **options}
        assert offload_optimizer(optimizer, directory, **options) is optimizer
    step = prepare(module, optimizer)
    generator = torch.Generator().manual_seed(1)
    after = []
    for number in range(steps):
        step(module, optimizer, torch.randn(8, WIDTH, generator=generator))
        if (number + 1) % looks_every:
            continue
        if directory is not None and number % 2:
            # The next step has to read; without it, it may find what is on its way to the disk.
            optimizer._disk.flush()  # type: ignore[attr-defined]
        after.append(everything(module, optimizer))
    return after, optimizer


def prove(
    make: Make,
    directory: Path,
    prepare: Prepare = prepare_nothing,
    *,
    goes_to_disk: bool = True,
    in_backward: bool = True,
    **options: Any,
) -> None:
    """Train with and without, on every schedule; weights and state have equal bits at each look.

    ``in_backward`` says whether the steps can be made on that schedule, too.
    """
    plain, _ = train(make, None, prepare, **options)
    ways: list[dict[str, Any]] = [{"overlap": "step"}, {"overlap": "step", "looks_every": 3}]
    if in_backward:
        ways += [{"overlap": "backward", "per_parameter": True}]
    for way in ways:
        offloaded, optimizer = train(make, directory, prepare, **{**options, **way})
        expected = plain[way.get("looks_every", 1) - 1 :: way.get("looks_every", 1)]
        for actual, plainly in zip(offloaded, expected, strict=True):
            support.assert_equal_bits(actual, plainly)
        stats = optimizer.offload_stats  # type: ignore[attr-defined]
        assert (stats.read_bytes > 0) == goes_to_disk
        if way["overlap"] != "backward":  # which also writes weights that are updated in place
            assert (stats.written_bytes > 0) == goes_to_disk


def away(optimizer: Optimizer) -> int:
    """Return how many tensors of the state are not in memory, without a look that brings them."""
    optimizer._disk.flush()  # type: ignore[attr-defined]
    return sum(
        type(value) is Away for state in optimizer.state.values() for value in dict.values(state)
    )
