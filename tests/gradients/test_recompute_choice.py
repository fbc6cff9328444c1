"""Blocks of ``ssdtrain.checkpoint``: equal bits either way, and which of them are chosen."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

import ssdtrain
from checkout import BENCHES
from recomputed import (
    ROWS,
    STEPS,
    WIDTH,
    Again,
    Mlp,
    Model,
    Plain,
    Step,
    one_input,
    prove_both,
    training,
)
from ssdtrain.activations.blocks import Blocks
from ssdtrain.machine.torch_internals import top_hooks
from ssdtrain.planning.policy import Rates
from support import Result, assert_equal_bits, batch, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW, FAST = Rates(1.0, 1.0), Rates(1e18, 1e18)


class Pair(nn.Module):
    """Takes several tensors, also in other things, and returns some in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(
        self, pair: tuple[Tensor, Tensor], other: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        left, right = pair
        return self.first(left * other), {"right": self.second(right).tanh()}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ssdtrain.checkpoint(Mlp())
        self.other = ssdtrain.checkpoint(Mlp())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.inner(x)) * 2
        return out


class Neighbours(nn.Module):
    """A layer over a graph, whose edges are a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.sparse.mm(edges, self.line(x)).sin()


def by_name(block: nn.Module, x: Tensor) -> Any:
    return block(x, x * 2, debug=x + 1)


def pairs(block: nn.Module, x: Tensor) -> Any:
    left, rest = block((x, x * 3), other=x + 1)
    return left + rest["right"]


def twice(block: nn.Module, x: Tensor) -> Any:
    return block(block(x))


def with_neighbours(block: nn.Module, x: Tensor) -> Any:
    return block(x, torch.eye(ROWS).to_sparse())


def in_autocast(block: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x).float()


def as_function(block: nn.Module, x: Tensor) -> Any:
    return ssdtrain.checkpoint(ssdtrain.remove_checkpoint(block) or block.forward)(x)


def in_torchs_own(block: nn.Module, x: Tensor) -> Any:
    return checkpoint_of_torch(block, x, use_reentrant=False)


def in_torchs_reentrant(block: nn.Module, x: Tensor) -> Any:
    return checkpoint_of_torch(block, x, use_reentrant=True)


def penalised(model: nn.Module) -> Step:
    """Return a step with a gradient penalty: a backward through a backward."""
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()

    def step() -> Result:
        model.zero_grad()
        out = model(x * 1).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        return {"slope": slope.detach(), **gradients(model)}

    return step


def repeated(model: nn.Module) -> Step:
    """Return a step whose graph is gone through twice."""
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()

    def step() -> Result:
        model.zero_grad()
        loss = model(x * 1).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    return step


WAYS = {
    "dropout": (Mlp, one_input),
    "inputs by name": (Mlp, by_name),
    "tuples": (Pair, pairs),
    "one block twice": (Mlp, twice),
    "a sparse argument": (Neighbours, with_neighbours),
    "autocast": (Mlp, in_autocast),
    "nested": (Nested, one_input),
    "function": (Mlp, as_function),
}


@pytest.mark.parametrize(
    ("way", "make"),
    [
        *((way, training) for way in WAYS),
        *((way, make) for way in ("dropout", "nested") for make in (penalised, repeated)),
    ],
)
def test_computed_again_blocks_give_equal_bits(
    tmp_path: Path, way: str, make: Callable[[nn.Module], Step]
) -> None:
    stats = prove_both(tmp_path, lambda: make(Model(*WAYS[way])))
    calls = 6 if way == "one block twice" else 3
    assert stats.blocks_called == stats.blocks_recomputed == STEPS * calls
    assert stats.recomputed_s > 0


@pytest.mark.parametrize("how", [in_torchs_own, in_torchs_reentrant])
def test_in_checkpoints_of_others_blocks_are_plain(
    tmp_path: Path, how: Callable[..., Tensor]
) -> None:
    assert prove_both(tmp_path, lambda: training(Model(Mlp, how))).blocks_called == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_blocks_are_plain(tmp_path: Path, mode: Callable[[], Any]) -> None:
    def build() -> Step:
        model = Model(Mlp, one_input)
        trained = training(model)

        def step() -> Result:
            with mode():
                looked = model(batch(rows=ROWS, width=WIDTH)).clone()
            return {"looked": looked, **trained()}

        return step

    assert prove_both(tmp_path, build).blocks_called == 3 * STEPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_block", [False, True])
def test_compiled_blocks_give_equal_bits(tmp_path: Path, per_block: bool) -> None:
    """Compiled one by one they are chosen for; in a model that is compiled as a whole, not."""

    def build() -> Step:
        model = Model(Plain, one_input)
        for one in model.blocks if per_block else [model]:
            one.compile(backend="aot_eager", fullgraph=True)
        return training(model)

    stats = prove_both(tmp_path, build)
    assert stats.blocks_recomputed == (3 * STEPS if per_block else 0)


def test_blocks_that_several_threads_call_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waits(Mlp):
        """Lets another thread call a block in the middle of its own."""

        def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(called_there, x.detach()).result()
            return super().forward(x)

    other = ssdtrain.checkpoint(Mlp())

    def called_there(x: Tensor) -> None:
        with session.context():
            other(x)

    step = training(Model(Waits, one_input))
    with ssdtrain.offload(tmp_path, min_bytes=1, **BOUND) as session:
        assert session._hooks is not None
        monkeypatch.setattr(session._hooks._transfer, "rates", lambda: SLOW)
        for _ in range(5):
            step()
    assert session.stats.blocks_called == 15, "the inner calls are plain"
    assert session.stats.blocks_recomputed == 0


def test_an_error_in_a_block_leaves_the_next_call_as_it_was(tmp_path: Path) -> None:
    model = Model(Mlp, one_input)
    step = training(model)
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        step()
        with pytest.raises(RuntimeError, match="normalized_shape"):
            model(torch.ones(2, WIDTH + 1, requires_grad=True))
        step()
    assert session.stats.blocks_recomputed == 6


@pytest.mark.parametrize("where", ["_begin", "_end"])
def test_an_interrupt_beside_a_block_leaves_the_next_call_as_it_was(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training(Model(Mlp, one_input))
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        step()
        real = getattr(Blocks, where)

        def interrupted(*arguments: Any, **keywords: Any) -> None:
            if where == "_begin":
                real(*arguments, **keywords)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Blocks, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step()
        step()
    assert session.stats.blocks_recomputed == 6


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_an_interrupt_within_torchs_checkpoint_leaves_no_hooks_on(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, hooks = training(Model(Mlp, one_input)), torch.utils.checkpoint._checkpoint_hook
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        step()
        real = getattr(hooks, where)

        def interrupted(*arguments: Any) -> None:
            if where == "__enter__":
                real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(hooks, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step()
        step()
    assert session.stats.blocks_recomputed == 6
    assert top_hooks(True) is None


# What marks a block.


def test_a_marked_module_is_the_object_that_it_was() -> None:
    module = Mlp()
    keys, text = list(module.state_dict()), repr(module)
    assert ssdtrain.checkpoint(module) is module
    assert ssdtrain.checkpoint(module) is module
    assert isinstance(module, Mlp)
    assert (list(module.state_dict()), repr(module)) == (keys, text)
    assert [name for name, _ in module.named_parameters()] == keys
    ssdtrain.remove_checkpoint(nn.Sequential(module))
    assert type(module) is Mlp


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_are_marked_too(copied: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(ssdtrain.checkpoint(Mlp()))
    twin = copied(module)
    assert type(twin[0]) is type(module[0])  # type: ignore[index]
    assert_equal_bits(twin.state_dict(), module.state_dict())
    with ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB") as session:
        twin(batch(rows=ROWS, width=WIDTH)).sum().backward()
    assert session.stats.blocks_called == 1


def doubled(x: Tensor) -> Tensor:
    """Return twice of it."""
    return x * 2


def test_a_marked_function_is_named_and_pickled_as_before() -> None:
    marked = ssdtrain.checkpoint(doubled)
    assert (marked.__name__, marked.__doc__) == ("doubled", "Return twice of it.")
    assert torch.equal(pickle.loads(pickle.dumps(marked))(torch.ones(1)), torch.full((1,), 2.0))


def test_a_marked_method_is_one() -> None:
    class Doubler:
        @ssdtrain.checkpoint
        def run(self, x: Tensor) -> Tensor:
            return doubled(x)

    assert torch.equal(Doubler().run(torch.ones(1)), torch.full((1,), 2.0))


def test_an_object_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ssdtrain.ConfigError, match="a block is a module or a function, not 3"):
        ssdtrain.checkpoint(3)  # type: ignore[type-var]


def test_under_another_wrapper_a_mark_stays() -> None:
    module = ssdtrain.checkpoint(Mlp())
    other = type("Wrapped", (type(module),), {})
    module.__class__ = other
    with pytest.raises(ssdtrain.ConfigError, match=r"Mlp got another class .*, Wrapped; undo that"):
        ssdtrain.remove_checkpoint(module)
    assert type(module) is other


# What is chosen.


def session_of(
    directory: Path, rates: list[Rates], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[ssdtrain.Session, list[int]]:
    """Train a step on a disk of each of these rates; return how many blocks each computed again."""
    step, counts = training(Model(Mlp, one_input)), []
    with ssdtrain.offload(directory, min_bytes=1, **options) as session:
        assert session._hooks is not None
        transfer = session._hooks._transfer
        for now in rates:
            monkeypatch.setattr(transfer, "rates", lambda now=now: now)
            before = session.stats
            step()
            counts.append(session.stats.since(before).blocks_recomputed)
    return session, counts


BOUND = {"max_resident_bytes": 4 * ROWS * WIDTH * 4}
"""Less than what the three blocks save, and more than any node."""


def test_on_a_slow_disk_all_blocks_are_computed_again_after_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, counts = session_of(tmp_path, [SLOW] * 5, monkeypatch, **BOUND)
    assert counts == [0, 0, 3, 3, 3]
    stats = session.stats
    freed_bytes = stats.bytes_not_written // stats.blocks_recomputed
    assert freed_bytes > ROWS * WIDTH * 4
    assert stats.recompute_expected_s > 0
    assert stats.recompute_measured_s > 0
    line = next(line for line in str(session).splitlines() if line.startswith("  blocks "))
    assert "9 of 15 computed again in" in line
    assert "not written; a step of" in line


def test_on_a_fast_disk_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, counts = session_of(tmp_path, [FAST] * 5, monkeypatch, **BOUND)
    assert counts == [0] * 5
    assert session.stats.blocks_called == 15
    assert session.stats.bytes_not_written == 0


def test_without_a_bound_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, counts = session_of(tmp_path, [SLOW] * 5, monkeypatch)
    assert counts == [0] * 5
    assert session.stats.blocks_called == 0
    assert "computed again" not in str(session)


def test_blocks_that_fit_under_the_bound_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, counts = session_of(tmp_path, [SLOW] * 5, monkeypatch, max_resident_bytes="64MiB")
    assert counts == [0] * 5


def test_the_choice_follows_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [FAST] * 4 + [SLOW] * 3 + [FAST] * 3
    _, counts = session_of(tmp_path, rates, monkeypatch, **BOUND)
    assert counts == [0, 0, 0, 0, 3, 3, 3, 0, 0, 0]


@pytest.mark.long
def test_the_benchmark_of_the_choice_runs_small(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    bench = BENCHES / "training" / "swap_or_recompute.py"
    sizes = ("--layers", "2", "--hidden", "64", "--sequence", "32", "--batch", "1")
    # All is below `min_bytes`, and stays in memory.
    words = ("--dir", tmp_path, *sizes, "--shares", "1", "--turns", "1", "--bound", "4")
    done = subprocess.run(
        [sys.executable, bench, *words, "--json", figures],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["bit_equal"]
    assert row["plain_s"] > 0
    ways = {"keep", "offloaded", "recomputed", "ours", "made again", "both"}
    assert row["ways"].keys() == ways
    assert row["ways"]["recomputed"]["blocks_recomputed"] == 2
