"""Generated training programs: each schedule gives the plain bits, with masters and without.

A program is a list of steps; each has its micro-batches, and what happens around it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import support
from checkout import SCRATCH
from mastered import InMemory, inner_of
from ssdtrain import offload_optimizer
from trained import everything

WIDTH = 184
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"centered": True}),
]


@dataclass(frozen=True)
class Program:
    overlap: Literal["step", "backward"]
    masters: bool
    bounded: bool
    """Gradients leave memory between micro-batches."""
    optimizer: int
    groups: int
    frozen: bool
    tied: bool
    checkpointed: bool
    scheduled: bool
    scaled: bool
    steps: list[Training]


@dataclass(frozen=True)
class Training:
    micro_batches: int
    clips: bool
    overflows: bool
    """A scaler then leaves the step out."""
    skipped: bool
    """The user leaves it out."""
    zeroes: Literal["none", "in place", "module", "by hand", "not"]
    after: list[str]


# Plainly too, if a scaler leaves the first step out.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
AFTER = ("evaluate", "look", "state", "gradient", "change", "part", "save")

programs = some.builds(
    Program,
    overlap=some.sampled_from(["step", "backward"]),
    masters=some.booleans(),
    bounded=some.booleans(),
    optimizer=some.integers(0, len(OPTIMIZERS) - 1),
    groups=some.integers(1, 2),
    frozen=some.booleans(),
    tied=some.booleans(),
    checkpointed=some.booleans(),
    scheduled=some.booleans(),
    scaled=some.booleans(),
    steps=some.lists(
        some.builds(
            Training,
            micro_batches=some.integers(1, 3),
            clips=some.booleans(),
            overflows=some.booleans(),
            skipped=some.booleans(),
            zeroes=some.sampled_from(["none", "in place", "module", "by hand", "not"]),
            after=some.lists(some.sampled_from(AFTER), max_size=2),
        ),
        min_size=2,
        max_size=6,
    ),
)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = program.checkpointed
        if program.tied:
            self.layers[3].weight = self.layers[0].weight  # type: ignore[union-attr]
        if program.frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = torch.nn.functional.dropout(torch.tanh(x), 0.1, self.training)
        return self.norm(x)  # type: ignore[no-any-return]


def started(program: Program, directory: Path | None) -> tuple[Model, Any]:
    """Return the model and its optimizer: plain, with masters in memory, or offloaded."""
    module = Model(program)
    if program.masters:
        module.bfloat16()
    kind, options = OPTIMIZERS[program.optimizer]
    cut = len(list(module.parameters())) // 2 if program.groups == 2 else 0

    def make(given: Any) -> Any:
        params = list(given)
        first = [{"params": params[:cut], "lr": 3e-3}] if cut else []
        return kind([*first, {"params": params[cut:]}], lr=1e-2, **options)

    if directory is None:
        params = module.parameters()
        return module, InMemory(make, params) if program.masters else make(params)
    return module, offload_optimizer(
        make(module.parameters()),
        directory,
        overlap=program.overlap,
        buffer_bytes="512KiB",
        master_dtype=torch.float32 if program.masters else None,
        max_gradient_bytes=2 * module.norm.weight.itemsize * WIDTH**2 if program.bounded else None,
    )


def possible(program: Program) -> Program:
    """Return the program without what the updates in backward refuse."""
    if program.overlap != "backward":
        return replace(program, steps=[replace(one, skipped=False) for one in program.steps])
    steps = [
        replace(one, clips=False, zeroes="none" if one.zeroes == "not" else one.zeroes)
        for one in program.steps
    ]
    return replace(program, scaled=False, steps=steps)


def played(program: Program, directory: Path | None) -> list[dict[str, Tensor]]:
    """Return everything that was seen on the way, and all there is at the end."""
    module, optimizer = started(program, directory)
    dtype = torch.bfloat16 if program.masters else torch.float32
    scheduler = lr_scheduler.StepLR(inner_of(optimizer), 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program.scaled)
    seen: list[dict[str, Tensor]] = []
    for number, training in enumerate(program.steps):
        for part in range(training.micro_batches):
            generator = torch.Generator().manual_seed(7 * number + part)
            x = torch.randn(4, WIDTH, generator=generator).to(dtype)
            getattr(optimizer, "set_is_last_backward", bool)(part == training.micro_batches - 1)
            loss = scaler.scale(module(x).float().square().mean())
            (loss * (torch.inf if training.overflows and program.scaled else 1)).backward()
        if training.clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 0.01)
        if not training.skipped:
            scaler.step(optimizer)
            scaler.update()
        zero(training.zeroes, module, optimizer, overflowed=training.overflows or training.skipped)
        if program.scheduled:
            scheduler.step()
        seen += [after(what, module, optimizer) for what in training.after]
    if program.masters:
        # Whoever changes a weight changes its master in the next step.
        optimizer.zero_grad()
        module(torch.ones(4, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return [*seen, everything(module, optimizer)]


def zero(how: str, module: nn.Module, optimizer: Any, *, overflowed: bool) -> None:
    if how in ("in place", "module"):
        zeroing = optimizer if how == "in place" else module
        zeroing.zero_grad(set_to_none=how == "module")
    elif how == "by hand":
        for param in module.parameters():
            param.grad = None
    elif how == "none" or overflowed:
        optimizer.zero_grad()


def after(what: str, module: Any, optimizer: Any) -> dict[str, Tensor]:
    """Do what people do between two steps, and return what it shows."""
    if what == "evaluate":
        module.eval()
        with torch.no_grad():
            result = module(torch.ones(2, WIDTH, dtype=module.norm.weight.dtype))
        module.train()
        return {what: result}
    if what == "change":
        with torch.no_grad():
            module.layers[2].weight.mul_(0.99)
        return {what: module.layers[2].weight.detach().clone()}
    if what == "part":
        ones = torch.ones(2, WIDTH, dtype=module.norm.weight.dtype)
        return {what: module.layers[1](ones).detach()}
    if what == "gradient":
        gradient = module.layers[0].bias.grad
        return {what: torch.zeros(1) if gradient is None else gradient.clone()}
    if what == "state":
        weight = module.layers[0].weight
        is_loop = isinstance(optimizer, InMemory)
        state = optimizer.state_of(weight) if is_loop else optimizer.state[weight]
        return {what: torch.zeros(1), **{k: v.clone() for k, v in state.items()}}
    if what == "save":
        optimizer.load_state_dict(optimizer.state_dict())
        return {what: torch.zeros(1)}
    return {name: value.clone() for name, value in module.state_dict().items()}


def prove(program: Program) -> None:
    program = possible(program)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        for expected, actual in zip(
            played(program, None), played(program, Path(directory)), strict=True
        ):
            support.assert_equal_bits(actual, expected)


@settings(max_examples=25)
@given(programs)
def test_programs(program: Program) -> None:
    prove(program)


@pytest.mark.long
@settings(max_examples=300)
@given(programs)
def test_many_programs(program: Program) -> None:
    prove(program)
