"""Offloaded optimizers in two processes: weights and state have the bits of plain ones."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import support
from ranks import RANKS, run_ranks
from ssdtrain import UnsupportedError, offload_optimizer

STEPS = 4
MICRO_BATCHES = 2
WIDTH = 160
OVERLAPS = ("step", "backward")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def train(module: nn.Module, optimizer: Any, rank: int, *, clips: bool) -> dict[str, Tensor]:
    """Train in the way of DDP: gradients are exchanged at the last micro-batch only."""
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            is_last = number == MICRO_BATCHES - 1
            getattr(optimizer, "set_is_last_backward", bool)(is_last)
            seed = (step * MICRO_BATCHES + number) * RANKS + rank
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            with contextlib.nullcontext() if is_last else module.no_sync():
                module(x.to(next(module.parameters()).dtype)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def state_of(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{number} {name}": torch.as_tensor(value)
        for number, state in sorted(optimizer.state_dict()["state"].items())
        for name, value in state.items()
    }


def replicated(rank: int, directory: Path) -> None:
    messages: list[str] = []
    log = logging.getLogger("ssdtrain")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: bool(messages.append(record.getMessage())))
    for overlap in OVERLAPS:
        found = []
        for is_offloaded in (False, True):
            module = DistributedDataParallel(model())
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            if is_offloaded:
                offload_optimizer(optimizer, directory, overlap=overlap, buffer_bytes="256KiB")
            weights = train(module, optimizer, rank, clips=overlap != "backward")
            found.append(weights | state_of(optimizer))
        support.assert_equal_bits(found[1], found[0])
        assert optimizer.offload_stats.read_bytes > 0  # type: ignore[attr-defined]
    said = "gradients are not complete before processes have exchanged them"
    assert any(said in one for one in messages)


@pytest.mark.long
def test_replicated(tmp_path: Path) -> None:
    run_ranks(replicated, tmp_path / "run", tmp_path)


def bounded(rank: int, directory: Path) -> None:
    """Gradients that DDP exchanges past Python stay, whatever their bound."""
    messages: list[str] = []
    log = logging.getLogger("ssdtrain")
    log.addFilter(lambda record: bool(messages.append(record.getMessage())))
    found = []
    for is_offloaded in (False, True):
        module = DistributedDataParallel(model())
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if is_offloaded:
            offload_optimizer(optimizer, directory, max_gradient_bytes=WIDTH * WIDTH * 4)
        found.append(train(module, optimizer, rank, clips=True))
    support.assert_equal_bits(found[1], found[0])
    assert optimizer.offload_stats.gradient_peak_bytes == 0
    assert sum("gradients stay in memory beyond" in one for one in messages) == 1


def test_bounded_gradients(tmp_path: Path) -> None:
    run_ranks(bounded, tmp_path / "run", tmp_path)


def clipped_too(rank: int, directory: Path) -> None:
    """In several processes nothing is taken in backward, so a clip comes in time there too."""
    found = []
    for is_offloaded in (False, True):
        module = DistributedDataParallel(model())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if is_offloaded:
            offload_optimizer(optimizer, directory, overlap="backward", buffer_bytes="256KiB")
        found.append(train(module, optimizer, rank, clips=True) | state_of(optimizer))
    support.assert_equal_bits(found[1], found[0])


@pytest.mark.long
def test_clipped_with_updates_meant_for_backward(tmp_path: Path) -> None:
    run_ranks(clipped_too, tmp_path / "run", tmp_path)


def with_masters(rank: int, directory: Path) -> None:
    """The masters of a rank are those of the loop in memory under DDP."""
    for overlap in OVERLAPS:
        module = DistributedDataParallel(model().bfloat16())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        offload_optimizer(
            optimizer,
            directory,
            overlap=overlap,
            buffer_bytes="256KiB",
            master_dtype=torch.float32,
        )
        ours = train(module, optimizer, rank, clips=False) | state_of(optimizer)
        plain = DistributedDataParallel(model().bfloat16())
        loop = Loop(list(plain.parameters()))
        expected = train(plain, loop, rank, clips=False)
        for name, weight in expected.items():
            assert torch.equal(ours[name], weight), name
        for number, master in enumerate(loop.masters):
            assert torch.equal(ours[f"{number} master_weight"], master)


class Loop:
    """Float32 masters in memory."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.masters = [param.detach().float() for param in params]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-2)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@pytest.mark.long
def test_replicated_masters(tmp_path: Path) -> None:
    run_ranks(with_masters, tmp_path / "run", tmp_path)


def sharded(rank: int, directory: Path) -> None:
    """Each rank has the state of its own parameters, and its local optimizer keeps it on disk."""
    found = []
    for is_offloaded in (False, True):
        module = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
        if is_offloaded:
            with pytest.raises(UnsupportedError, match="cannot be offloaded"):
                offload_optimizer(optimizer, directory)
            offload_optimizer(optimizer.optim, directory, buffer_bytes="256KiB")
        weights = train(module, optimizer, rank, clips=True)
        found.append(weights | state_of(optimizer.optim))
    support.assert_equal_bits(found[1], found[0])
    stats = optimizer.optim.offload_stats
    assert stats.on_disk_bytes + stats.resident_bytes < 2 * 4 * 2 * WIDTH * WIDTH, "not of all"


@pytest.mark.long
def test_sharded_state(tmp_path: Path) -> None:
    run_ranks(sharded, tmp_path / "run", tmp_path)
