"""``torch.compile``: whole and by block, with each backend, in every way that walks a graph."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ssdtrain
from support import (
    MODES,
    Flush,
    Result,
    Rig,
    Step,
    assert_equal_bits,
    gradients,
    nothing,
    prove,
    prove_refused,
    shared_out,
)

# The compiler warns of its own doings.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

ROWS, WIDTH = 16, 32
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])]
"""Each graph takes inductor seconds: `make test` has it compile the blocks of one test."""


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Compile anew in each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Saves what the compiler keeps, what it computes again, and what its backward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        gate = torch.sigmoid(self.second(h) * h)
        return (gate * h).exp() * gate.sin() * (self.drop(x).sin() * x.cos()).exp()


class Chain(nn.Sequential):
    """One after the other. torch 2.11 compiles the parts of a plain ``Sequential`` one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def blocks(kind: type[Block] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return Chain(*(kind() for _ in range(2)))


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def training(model: nn.Module, counts: tuple[int, ...] = (ROWS, ROWS)) -> Step:
    """Return a step for each count of rows; the model is compiled once and used again."""

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model.zero_grad()
        losses = []
        for count in counts:
            # An eager node around the graphs saves what they save too.
            x = rows(count).requires_grad_()
            out = model(x * 2)
            loss = (out.sin() * out).sum()
            flush()
            del out
            loss.backward()
            assert x.grad is not None
            losses += [loss.detach().reshape(1), x.grad.flatten()]
        return {"losses": torch.cat(losses), **gradients(model)}

    return step


def compile_all(model: nn.Sequential, way: str, **options: Any) -> None:
    for part in (model,) if way == "whole" else model:
        part.compile(fullgraph=True, **options)


@pytest.mark.parametrize("way", ["whole", "by block"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_models_give_equal_bits(backend: str, way: str, tmp_path: Path) -> None:
    model = blocks()
    compile_all(model, way, backend=backend)
    step = training(model)
    step(nothing)
    graph_count = counters["stats"]["unique_graphs"]
    prove(step, tmp_path)
    assert counters["stats"]["unique_graphs"] == graph_count, "the hooks had it compiled again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_compiled_under_the_hooks_gives_equal_bits(backend: str, tmp_path: Path) -> None:
    model = blocks()
    compile_all(model, "by block", backend=backend)
    rig = Rig(tmp_path)
    with rig.context():
        first = training(model)(rig.flush)
    assert rig.stats.bytes_read > 0
    assert_equal_bits(training(model)(nothing), first)
    rig.assert_empty()


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "by itself"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lengths_give_equal_bits(backend: str, dynamic: bool | None, tmp_path: Path) -> None:
    """A graph for every length saves its sizes beside its tensors."""
    model = blocks()
    compile_all(model, "by block", backend=backend, dynamic=dynamic)
    prove(training(model, (ROWS, 3 * ROWS, ROWS)), tmp_path)


@pytest.mark.parametrize("where", ["in the graph", "around it"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_and_compiled_blocks_give_equal_bits(
    backend: str, where: str, tmp_path: Path
) -> None:
    model = blocks(Checkpointed if where == "in the graph" else Block)
    compile_all(model, "by block", backend=backend)
    if where == "around it":
        for place, block in enumerate(list(model)):
            model[place] = Around(block)
    prove(training(model), tmp_path)


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def test_a_graph_break_in_the_middle_gives_equal_bits(tmp_path: Path) -> None:
    def broken(model: nn.Sequential, x: Tensor) -> Tensor:
        h: Tensor = model[0](x)
        torch._dynamo.graph_break()
        out: Tensor = model[1](h)
        return out

    model = blocks()
    compiled = torch.compile(partial(broken, model), backend="aot_eager")

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model.zero_grad()
        loss = compiled(rows(ROWS)).sin().sum()
        flush()
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    prove(step, tmp_path)


# One graph saves all at its end


def deep(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = Chain(*(Block() for _ in range(4)))
    if way != "eager":
        compile_all(model, way, backend="aot_eager")
    return model


@pytest.mark.parametrize(
    "way", shared_out(["whole", "by block", "eager"], quick=["whole", "eager"])
)
def test_a_graph_that_saves_all_at_once_is_warned_of_once(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = training(deep(way), (ROWS, ROWS, 2 * ROWS, 2 * ROWS))
    # The loss around the graph saves its output too: small beside what the blocks save.
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        rig = Rig(tmp_path)
        with rig.context():
            step(rig.flush)
    said = [one for one in caplog.messages if "compile block by block" in one]
    assert len(said) == (1 if way == "whole" else 0)


def test_a_block_inside_a_compiled_function_gives_equal_bits(tmp_path: Path) -> None:
    """Entering breaks the graph; what the block does on its way in and out is not traced."""
    model = blocks()
    results = []
    for offloaded in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        opened: list[ssdtrain.Session] = []

        @torch.compile(backend="aot_eager")
        def loss_of(x: Tensor) -> Tensor:
            if not offloaded:  # noqa: B023 - called in this turn
                return model(x).square().sum()
            with ssdtrain.offload(tmp_path, min_bytes=1) as session:
                opened.append(session)  # noqa: B023
                return model(x).square().sum()

        loss = loss_of(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH))
        loss.backward()
        assert len(opened) == offloaded
        results.append({"loss": loss.detach(), **gradients(model)})
    assert_equal_bits(results[1], results[0])


# Compiled autograd: the backward is traced too, with the unpacks between its parts


@pytest.mark.long
@pytest.mark.parametrize("way", ["eager forward", "compiled forward"])
def test_compiled_autograd_gives_equal_bits(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Few saved tensors: the compiler stops at each unpack, and compiles what follows anew.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh(), nn.Linear(WIDTH, 1))
    if way == "compiled forward":
        model.compile(fullgraph=True, backend="aot_eager")
    step = training(model, (ROWS,))
    expected = step(nothing)
    for mode in MODES:
        rig = Rig.in_mode(tmp_path, mode)
        with rig.context(), compiled_autograd._enable(torch.compile(backend="aot_eager")):
            actual = step(rig.flush if mode == "disk" else nothing)
        assert_equal_bits(actual, expected)
        assert mode != "disk" or rig.stats.bytes_read > 0
        del actual
        torch._dynamo.reset()
        rig.assert_empty()


# Donated buffers: the compiled backward overwrites what unpack returned


class Watch:
    """Copies what unpack returns, and tells which of it a backward has overwritten."""

    def __init__(self, rig: Rig) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        installed = rig.session.context()
        self._unpack = installed.unpack_hook
        self.hooks = saved_tensors_hooks(installed.pack_hook, self.unpack)

    def unpack(self, packed: object) -> Tensor:
        tensor = self._unpack(packed)
        self.seen.append((tensor, tensor.clone()))
        return tensor

    def overwritten_count(self) -> int:
        count = sum(not torch.equal(now, then) for now, then in self.seen)
        self.seen.clear()
        return count


@pytest.mark.long
@needs_compiler
def test_a_compiled_backward_overwrites_only_its_own_buffers(tmp_path: Path) -> None:
    """In each place the bytes may be: on the disk and checked, in a write that hangs, in memory."""
    model = blocks()
    compile_all(model, "by block", backend="inductor")
    step = training(model)
    expected = step(nothing)
    for mode in MODES:
        rig = Rig.in_mode(tmp_path, mode)
        watch = Watch(rig)
        with watch.hooks:
            actual = step(rig.flush if mode == "disk" else nothing)
        assert watch.overwritten_count() > 0, "nothing was donated, so nothing is proved"
        assert_equal_bits(actual, expected)
        del actual
        rig.assert_empty()


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("donate", [True, False])
def test_a_graph_that_is_kept_is_refused_or_not_overwritten(donate: bool, tmp_path: Path) -> None:
    """What was donated cannot be used twice, by torch's own rule; else all of it comes back."""
    model = blocks()
    compile_all(model, "by block", backend="inductor")

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        # The first backward is compiled for what it is asked: here, a graph used once.
        model(rows(ROWS) * 2).sum().backward()
        model.zero_grad()
        loss = model(rows(ROWS) * 2).sum()
        flush()
        for _ in range(3):
            loss.backward(retain_graph=True)
        return gradients(model)

    # The compiler's caches do not ask whether buffers may be donated, and would give what may not.
    caches = inductor_config.patch(force_disable_caches=True)
    with caches, functorch_config.patch(donated_buffer=donate):
        if not donate:
            prove(step, tmp_path)
            return
        words = "donated buffers which requires create_graph=False and retain_graph=False"
        prove_refused(step, tmp_path, words)


@pytest.mark.long
@needs_compiler
def test_a_second_handle_on_what_a_graph_saved_gives_equal_bits(tmp_path: Path) -> None:
    """Inputs and outputs of a graph are saved by eager nodes too, before it and after it."""
    model = blocks()
    compile_all(model, "by block", backend="inductor")

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        model.zero_grad()
        x = rows(ROWS).requires_grad_()
        h = (x * 2).exp()
        first = model[0](h)
        second = model[1](first)
        loss = (first.sin() * h.cos() * second.exp() + first * second + h * h).sum()
        flush()
        del h, first, second
        loss.backward()
        assert x.grad is not None
        return {"loss": loss.detach(), "x": x.grad, **gradients(model)}

    prove(step, tmp_path)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_an_offloaded_optimizer_has_nothing_compiled_again(overlap: Any, tmp_path: Path) -> None:
    def trained(*, offloaded: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))
        for layer in module:
            layer.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(module.parameters())
        if offloaded:
            ssdtrain.offload_optimizer(optimizer, tmp_path, overlap=overlap)
        for _ in range(4):
            module(torch.ones(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in module.parameters()], counters["stats"][
            "unique_graphs"
        ]

    weights, count = trained(offloaded=True)
    expected, expected_count = trained(offloaded=False)
    assert count == expected_count
    for one, other in zip(weights, expected, strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_that_is_gone_breaks_no_graph(tmp_path: Path) -> None:
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(module.parameters())
    ssdtrain.offload_optimizer(optimizer, tmp_path, overlap="backward")
    x = torch.ones(ROWS, WIDTH)
    module(x).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    expected = nn.functional.linear(x, module.weight, module.bias)
    module.compile(backend="eager", fullgraph=True)
    assert torch.equal(module(x), expected)
