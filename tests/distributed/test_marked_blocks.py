"""Marked blocks (`ssdtrain.checkpoint`) in two processes, which would choose each for itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ssdtrain
import support
from ranks import RANKS, run_ranks
from recomputed import Again, Nothing

WIDTH = 64
STEPS = 3


class Summed(torch.autograd.Function):
    """The sum over all processes, as parallel layers make it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Communicating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(Summed.apply(self.inner(x).sin())).cos()
        return out


def train(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(ssdtrain.checkpoint(Communicating()) for _ in range(3)))
    found = {}
    for step in range(STEPS):
        x = support.batch(step * RANKS + rank, rows=24, width=WIDTH).requires_grad_()
        model(x * 1).square().mean().backward()
        assert x.grad is not None
        found[f"x {step}"] = x.grad
    return {**found, **support.gradients(model)}


def chosen_apart(rank: int, directory: Path) -> None:
    """One process would compute blocks again, and the other would not."""
    messages: list[str] = []
    log = logging.getLogger("ssdtrain")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: bool(messages.append(record.getMessage())))
    plain = train(rank)
    tool = ssdtrain.offload(directory, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again() if rank == 0 else Nothing()
    with tool as session:
        support.assert_equal_bits(train(rank), plain)
    assert session.stats.blocks_recomputed == 0
    assert sum("each of several processes" in one for one in messages) == 1


@pytest.mark.defends("blocks in several processes")
def test_blocks_that_communicate_run_alike_in_all_processes(tmp_path: Path) -> None:
    run_ranks(chosen_apart, tmp_path / "run", tmp_path)
