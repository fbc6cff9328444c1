"""Blocks that are computed again in backward: models of them, and training both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.planning.recompute import Choices, Disk, Measured
from support import Result, assert_equal_bits, batch, gradients

ROWS, WIDTH = 64, 64
STEPS = 3

Step = Callable[[], Result]


class Everything(set[int]):
    def __contains__(self, key: object) -> bool:
        return True


class Again(Choices):
    """Computes again whatever may be."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = Everything()

    def learn(self, kind: int, measured: Measured | None, disk: Disk, stall_s: float) -> float:
        return 0.0


class Nothing(Again):
    """Offloads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = set()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.2)
        )
        self.out = nn.Linear(96, WIDTH)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, debug: Tensor | None = None
    ) -> Any:
        out = self.out(self.layers(x))
        out = out if scale is None else out * scale.sin()
        return x + (out if debug is None else out + debug.cos())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).sin()
        return out


class Normalised(nn.Module):
    """Has statistics, which each forward in training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.line(self.norm(x)).relu()
        return out


class Model(nn.Module):
    """Runs blocks by ``how``."""

    def __init__(self, kind: Callable[[], nn.Module], how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ssdtrain.checkpoint(kind()) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return x


def one_input(block: nn.Module, x: Tensor) -> Any:
    return block(x)


def fresh(block: nn.Module, x: Tensor) -> Any:
    return block(x * 1)


def training(model: nn.Module) -> Step:
    """Return a training step: forward, backward, and an update."""
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()

    def step() -> Result:
        model.zero_grad()
        x.grad = None
        loss = model(x * 1).square().mean()
        loss.backward()
        found = {"loss": loss.detach(), **gradients(model)}
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        assert x.grad is not None
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        return {**found, "x": x.grad, "random": torch.rand(3), **buffers}

    return step


def results(build: Callable[[], Step]) -> Iterator[Result]:
    torch.manual_seed(0)
    step = build()
    for _ in range(STEPS):
        yield step()


def prove_both(directory: Path, build: Callable[[], Step]) -> ssdtrain.Stats:
    """Run steps plainly, offloaded and computed again; return the counts of the last."""
    plain = list(results(build))
    for choices in (Nothing(), Again()):
        tool = ssdtrain.offload(directory, min_bytes=1, max_resident_bytes="64MiB")
        tool._choices = choices
        with tool as session:
            for actual, expected in zip(results(build), plain, strict=True):
                assert_equal_bits(actual, expected)
        assert session.stats.bytes_eligible > 0
        if isinstance(choices, Nothing):
            assert session.stats.blocks_recomputed == 0
    return session.stats
