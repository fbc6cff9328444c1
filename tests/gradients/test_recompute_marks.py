"""What may be marked: a block that may run twice. Others are refused, there or in backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

import ssdtrain
from recomputed import (
    ROWS,
    STEPS,
    WIDTH,
    Again,
    Mlp,
    Model,
    Normalised,
    Plain,
    Step,
    fresh,
    one_input,
    prove_both,
    training,
)
from ssdtrain.errors import UnsupportedError
from ssdtrain.notices import PROCESS
from support import assert_equal_bits, batch, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = "did not compute what its forward did .* No gradient"
IN_PLACE = "one of them was changed in place, by the block or after the call"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ssdtrain.Session]:
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        yield session


# Refused at the mark.


def with_vectors() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)))


def with_parametrized_vectors() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


STATISTICS = r"changes its running statistics .* take a norm without them \(LayerNorm"
VECTORS = "changes the vectors of spectral_norm in each forward of training"
UNWRITTEN = "saves memory that its kernel writes only in part"


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (Normalised, rf"this Normalised, .* its module 'norm' \(BatchNorm1d\) {STATISTICS}"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d()), rf"\(LazyBatchNorm1d\) {STATISTICS}"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(4)), rf"\(SyncBatchNorm\) {STATISTICS}"),
        (with_vectors, rf"its module '0' \(Linear\) {VECTORS}"),
        (with_parametrized_vectors, rf"its module '0.parametrizations.weight.0' .* {VECTORS}"),
        (lambda: nn.Sequential(nn.LSTM(8, 8)), rf"its module '0' \(LSTM\) {UNWRITTEN}"),
        (nn.RReLU, UNWRITTEN),
    ],
)
def test_modules_that_may_not_run_twice_are_refused_by_name(
    build: Callable[[], nn.Module], what: str
) -> None:
    block = build()
    kind = type(block)
    with pytest.raises(UnsupportedError, match=f"ssdtrain.checkpoint cannot mark .*{what}"):
        ssdtrain.checkpoint(block)
    assert type(block) is kind


@pytest.mark.parametrize(
    "build",
    [
        lambda: Normalised().eval(),
        lambda: nn.Sequential(nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh()),
        lambda: with_parametrized_vectors().eval(),
    ],
)
def test_modules_that_move_nothing_are_computed_again(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    stats = prove_both(tmp_path, lambda: training(Model(build, fresh)))
    assert stats.blocks_recomputed == 3 * STEPS


def test_a_copy_of_a_marked_module_is_not_refused_for_what_it_does_in_training() -> None:
    module = ssdtrain.checkpoint(Normalised().eval()).train()
    assert type(copy.deepcopy(module)) is type(module)


def test_classes_are_marked_only_by_their_objects() -> None:
    with pytest.raises(ssdtrain.ConfigError, match=r"ssdtrain.checkpoint\(Plain\(\.\.\.\)\)"):
        ssdtrain.checkpoint(Plain)


# A block that changes something is an error in backward.


class PastTheModules(Plain):
    """Has its statistics moved by a function, past all modules and past their counters."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = torch.zeros(WIDTH), torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.batch_norm(x, self.mean, self.variance, training=True))


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.line(x.mul_(0.5).exp().mul(1e-3))
        return out


class InContainer(Plain):
    """Changes what is in a container that it is given."""

    def forward(self, x: list[Tensor]) -> Tensor:
        out: Tensor = self.layers(x[0].mul_(0.5)).sin()
        return out


class OwnCache:
    """Has the keys of all calls so far; no class of Transformers."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Plain):
    """Appends to a cache that it is given, as models that generate text do."""

    def forward(self, x: Tensor, cache: OwnCache) -> Tensor:  # type: ignore[override]
        cache.keys.append(x)
        return super().forward(torch.cat(cache.keys)) * 0.5


def trained_later() -> nn.Module:
    return ssdtrain.checkpoint(Normalised().eval()).train()


def in_list(block: Any, x: Tensor) -> Any:
    return block([x])


def with_a_cache(block: Any, x: Tensor) -> Any:
    return block(x, OwnCache())


def in_closure(block: nn.Module, x: Tensor) -> Any:
    ssdtrain.remove_checkpoint(block)
    return ssdtrain.checkpoint(lambda one: block(one).relu())(x)


@pytest.mark.parametrize(
    ("build", "how", "what"),
    [
        (trained_later, one_input, f"the block Normalised, .* {OTHER}"),
        (trained_later, in_closure, f"the block in_closure.*lambda.*, .* {OTHER}"),
        (PastTheModules, one_input, f"the block PastTheModules, .* {OTHER}"),
        (InPlace, one_input, f"the block InPlace, .* {IN_PLACE}"),
        (InContainer, in_list, f"the block InContainer, .* {IN_PLACE}"),
        (Caching, with_a_cache, r"a cache of keys and values.* No gradient"),
    ],
)
def test_a_block_that_changes_something_is_an_error_in_backward(
    session: ssdtrain.Session, build: Callable[[], nn.Module], how: Callable[..., Tensor], what: str
) -> None:
    block = ssdtrain.checkpoint(build())
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()
    loss = how(block, x * 1).square().mean()
    with pytest.raises(UnsupportedError, match=what):
        loss.backward()
    assert session.stats.blocks_recomputed == 1
    assert all(one.grad is None for one in (x, *block.parameters()))


# Programs of all kinds around blocks that may run twice.


def test_a_block_that_differentiates_in_its_forward(tmp_path: Path) -> None:
    class Force(Plain):
        """Returns the slope of an energy, as models of molecules do."""

        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return x - slope * 1e-3

    stats = prove_both(tmp_path, lambda: training(Model(Force, one_input)))
    assert stats.blocks_recomputed == 3 * STEPS


def test_a_block_that_is_put_into_evaluation_and_back(tmp_path: Path) -> None:
    def build() -> Step:
        model, modes = Model(Mlp, one_input), itertools.cycle([False, True])
        step = training(model)
        return lambda: model.train(next(modes)) and step()

    assert prove_both(tmp_path, build).blocks_recomputed == 3 * STEPS


def llama() -> tuple[nn.Module, Iterable[nn.Module]]:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return model, model.model.layers


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["default", "no cache"])
def test_blocks_of_transformers_are_computed_again_if_they_have_no_cache(
    options: dict[str, bool],
    session: ssdtrain.Session,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "_topics", set())
    model, layers = llama()
    ids = torch.randint(0, 64, (2, 16))
    found = []
    for mark in (lambda layer: layer, ssdtrain.checkpoint):
        for layer in layers:
            mark(layer)
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, labels=ids, **options).loss.backward()
        found.append(gradients(model))
    assert_equal_bits(*found)
    assert session.stats.blocks_recomputed == (2 if options else 0)
    assert ("train with use_cache=False" in caplog.text) != bool(options)


# What must stay until backward.


def change_weights(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def replace_weights(model: Model) -> None:
    for block in model.blocks:
        line = block.layers[1]  # type: ignore[index]
        line.weight = nn.Parameter(line.weight.detach() * 2)


@pytest.mark.parametrize("change", [change_weights, replace_weights, nn.Module.eval])
def test_a_block_changed_after_its_forward_is_an_error_in_backward(
    session: ssdtrain.Session, change: Callable[[Model], Any]
) -> None:
    model = Model(Mlp, one_input)
    step, x = training(model), batch(rows=ROWS, width=WIDTH)
    step()
    model.zero_grad()
    loss = model(x).square().mean()
    change(model)
    with pytest.raises(UnsupportedError, match=f"the block Mlp, .*{OTHER}"):
        loss.backward()
    assert all(one.grad is None for one in model.blocks[0].parameters())
    model.train()
    step()
    assert session.stats.blocks_recomputed == 9


SCALE = {"factor": 1.0}


class Reads(Plain):
    """Reads what its caller sets: an attribute, a tensor, an option of a module, a global name."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(self.drop(x) * self.mask * self.factor * SCALE["factor"])
        return out


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda block: setattr(block, "factor", 3.0),
    "another mask": lambda block: setattr(block, "mask", torch.zeros(WIDTH)),
    "a mask in place": lambda block: block.mask.zero_(),
    "a global number": lambda _: SCALE.update(factor=3.0),
    "a module's option": lambda block: setattr(block.drop, "p", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_inputs_of_a_block_may_change_between_steps_only(
    change: Callable[[Any], object], session: ssdtrain.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALE, "factor", 1.0)  # put back at the end
    block, x = ssdtrain.checkpoint(Reads()), batch(width=WIDTH)
    loss = block(x * 1).sum()
    change(block)
    with pytest.raises(UnsupportedError, match=OTHER):
        loss.backward()
    block(x * 1).sum().backward()
    assert session.stats.blocks_recomputed == 2
