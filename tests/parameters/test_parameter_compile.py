"""Weights of compiled modules leave between their forwards, and the bits are those without."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from ssdtrain import ConfigError
from weights_away import adamw, away, numbered

# The compiler warns of its own doings, and torch of hooks for all modules.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

WIDTH, BLOCKS, STEPS = 136, 4, 3
LOOKED_BYTES = 4 * WIDTH * WIDTH
"""The results are looks, which take the memory of one weight more."""
BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])]


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Compile anew in each test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.second(torch.nn.functional.gelu(self.first(x))))


class Model(nn.Module):
    """Compiled blocks between layers that are not."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def in_place(model: Any, backend: str, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, **options)
    return model


def in_wrappers(model: Any, backend: str) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def step(model: nn.Module, optimizer: Any, number: int) -> dict[str, Tensor]:
    """Train with two micro-batches and evaluate; return all there is."""
    torch.manual_seed(number)
    for part in range(2):
        model(numbered(2 * number + part, 6, WIDTH)).square().mean().backward()
    found = {f"{name} gradient": one for name, one in support.gradients(model).items()}
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["output"] = model(numbered(number, 6, WIDTH))
    model.train()
    return found | {name: one.detach().clone() for name, one in model.named_parameters()}


def trained(model: nn.Module, optimizer: Any = None) -> list[dict[str, Tensor]]:
    optimizer = optimizer or adamw(model.parameters())
    return [step(model, optimizer, number) for number in range(STEPS)]


def as_plain(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        support.assert_equal_bits(one, other)


def offloaded(model: Any, place: Any, blocks: int = 2) -> Any:
    return ssdtrain.offload_parameters(model, place, max_resident_bytes=blocks * BLOCK_BYTES)


@pytest.mark.parametrize("checkpointed", support.shared_out([True, False], quick=[True]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks(backend: str, checkpointed: bool, tmp_path: Path) -> None:
    expected = trained(in_place(Model(checkpointed=checkpointed), backend))
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model = offloaded(in_place(Model(checkpointed=checkpointed), backend), tmp_path)
    as_plain(trained(model), expected)
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled again"
    assert not counters["graph_break"]
    stats = ssdtrain.parameter_stats(model)
    assert stats.peak_resident_bytes <= 2 * BLOCK_BYTES + LOOKED_BYTES
    assert stats.read_bytes > 0
    assert away(model)


@pytest.mark.parametrize("overlap", support.shared_out(["step", "backward"], quick=["backward"]))
def test_with_state_and_activations_on_the_disk(overlap: Any, tmp_path: Path) -> None:
    expected = trained(in_place(Model(), "aot_eager"))
    with ssdtrain.offload(
        tmp_path, max_resident_bytes="16MiB", min_bytes=1 << 10, direct_io="optional"
    ) as session:
        model = offloaded(in_place(Model(), "aot_eager"), session)
        optimizer = adamw(model.parameters())
        ssdtrain.offload_optimizer(optimizer, session, overlap=overlap, buffer_bytes="512KiB")
        for number, one in enumerate(expected):
            torch.manual_seed(number)
            for part in range(2):
                optimizer.set_is_last_backward(part == 1)
                model(numbered(2 * number + part, 6, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, param in model.named_parameters():
                assert torch.equal(param, one[name]), name
            # As `step` does, for the numbers that dropout draws.
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(numbered(number, 6, WIDTH)), one["output"])
            model.train()
        assert session.stats.resident_bytes_peak <= 16 << 20
        assert session.stats.bytes_written > 0
    assert ssdtrain.parameter_stats(model).peak_resident_bytes <= 2 * BLOCK_BYTES + LOOKED_BYTES


def test_a_block_that_fails_keeps_no_weight_in_memory(tmp_path: Path) -> None:
    expected = trained(in_place(Model(), "aot_eager"))
    model = offloaded(in_place(Model(), "aot_eager"), tmp_path)
    for number in range(BLOCKS):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            model.blocks[number](torch.zeros(2, 7))
    as_plain(trained(model), expected)
    assert ssdtrain.parameter_stats(model).peak_resident_bytes <= 2 * BLOCK_BYTES + LOOKED_BYTES


@pytest.mark.long
def test_a_model_that_is_compiled_as_a_whole_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    model = in_place(Model(), "aot_eager")
    model.compile(backend="aot_eager")
    with pytest.raises(ConfigError, match="the Model itself with all modules in it uses at once"):
        offloaded(model, tmp_path)
    expected = copy.deepcopy(model)
    expected.compile(backend="aot_eager")
    ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes="64MiB")
    as_plain(trained(model), trained(expected))


def test_blocks_that_are_compiled_later(tmp_path: Path) -> None:
    expected = trained(in_wrappers(Model(), "aot_eager"))
    model = offloaded(Model(), tmp_path)
    first = trained(in_wrappers(model, "aot_eager"))
    as_plain(first, expected)
    assert ssdtrain.parameter_stats(model).peak_resident_bytes <= 2 * BLOCK_BYTES + LOOKED_BYTES
    assert away(model)
