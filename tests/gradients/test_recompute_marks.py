"""What may be marked: a block that may run twice. Others are refused, there or in backward."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
        (lambda: nn.BatchNorm2d(4), rf"this BatchNorm2d, .* twice: it {STATISTICS}"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d()), rf"\(LazyBatchNorm1d\) {STATISTICS}"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(4)), rf"\(SyncBatchNorm\) {STATISTICS}"),
        (lambda: nn.InstanceNorm1d(4, track_running_stats=True), f"it {STATISTICS}"),
        (with_vectors, rf"its module '0' \(Linear\) {VECTORS}"),
        (with_parametrized_vectors, rf"its module '0.parametrizations.weight.0' .* {VECTORS}"),
        (lambda: nn.Sequential(nn.LSTM(8, 8)), rf"its module '0' \(LSTM\) {UNWRITTEN}"),
        (nn.CTCLoss, UNWRITTEN),
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
        lambda: nn.Sequential(nn.InstanceNorm1d(WIDTH), nn.Tanh()),
        lambda: with_vectors().eval(),
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


class WithKeyword(Plain):
    """A class that takes a keyword when one is derived from it, and notes those that are."""

    derived: list[type] = []  # noqa: RUF012 - of all that derive

    def __init_subclass__(cls, *, noted: bool, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.derived.append(cls)


def test_classes_are_marked_only_by_their_objects() -> None:
    assert type(ssdtrain.checkpoint(WithKeyword())).__name__ == "WithKeyword"
    assert not WithKeyword.derived
    with pytest.raises(ssdtrain.ConfigError, match=r"ssdtrain.checkpoint\(Plain\(\.\.\.\)\)"):
        ssdtrain.checkpoint(Plain)


def test_a_scripted_module_may_be_marked(tmp_path: Path) -> None:
    with pytest.warns((FutureWarning, DeprecationWarning), match="deprecated"):
        scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    expected = scripted(x)
    called = ssdtrain.checkpoint(scripted)
    with ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="1MiB"):
        assert torch.equal(called(x), expected)


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


class Replacing(Plain):
    """Puts another buffer in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return super().forward(x + self.mean)


class Counting(Plain):
    """Depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


class OwnCache:
    """Has the keys of all calls so far; no class of Transformers."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Plain):
    """Appends to a cache that it is given, as models that generate text do."""

    def forward(self, x: Tensor, cache: OwnCache) -> Tensor:  # type: ignore[override]
        cache.keys.append(x)
        return super().forward(torch.cat(cache.keys)) * 0.5


class Drawing(Plain):
    """Draws from a generator that is not torch's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draws: dict[str, Callable[[], Any]] = {
            "python": random.Random(0).random,
            "numpy": np.random.default_rng(0).random,
            "torch": lambda: torch.rand(WIDTH, generator=generator),
        }
        self.draw = draws[kind]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.draw())


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
        (Replacing, one_input, OTHER),
        (Counting, one_input, OTHER),
        (Caching, with_a_cache, r"a cache of keys and values.* No gradient"),
        *((lambda kind=kind: Drawing(kind), one_input, OTHER) for kind in ("python", "numpy")),
        (lambda: Drawing("torch"), one_input, OTHER),
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


def test_a_mark_may_be_taken_off_before_backward(tmp_path: Path) -> None:
    def build() -> Step:
        model = Model(Mlp, one_input)
        forward = model.forward

        def unmarked(x: Tensor) -> Tensor:
            for block in model.blocks:
                ssdtrain.checkpoint(block)
            out = forward(x)
            ssdtrain.remove_checkpoint(model)
            return out

        model.forward = unmarked  # type: ignore[method-assign]
        return training(model)

    assert prove_both(tmp_path, build).blocks_recomputed == 3 * STEPS


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_buffers_of_other_forms_do_no_harm(tmp_path: Path, buffer: Tensor) -> None:
    def build() -> Step:
        model = Model(Plain, fresh)
        for block in model.blocks:
            block.register_buffer("odd", buffer)
        step = training(model)
        return lambda: {name: one for name, one in step().items() if "odd" not in name}

    assert prove_both(tmp_path, build).blocks_recomputed == 3 * STEPS


def test_modules_that_get_their_weights_in_the_first_call(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.LazyLinear(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.line(x).tanh()
            return out

    stats = prove_both(tmp_path, lambda: training(Model(Lazy, fresh)))
    assert stats.blocks_recomputed == 3 * STEPS


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


def test_what_is_in_containers_is_that_of_the_call(tmp_path: Path) -> None:
    def replaced(block: nn.Module, x: Tensor) -> Any:
        given, seen = [x * 1], list[Tensor]()
        out = block(given, seen)
        given[0] = x * 7
        return out + seen[0]

    class Listed(Plain):
        def forward(self, x: list[Tensor], seen: list[Tensor]) -> Tensor:  # type: ignore[override]
            seen.append(x[0])
            return super().forward(x[0])

    stats = prove_both(tmp_path, lambda: training(Model(Listed, replaced)))
    assert stats.blocks_recomputed == 3 * STEPS


def llama() -> tuple[nn.Module, Iterable[nn.Module]]:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return model, model.model.layers


def gpt2() -> tuple[nn.Module, Iterable[nn.Module]]:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, model.transformer.h


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["default", "no cache"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_blocks_of_transformers_are_computed_again_if_they_have_no_cache(
    build: Callable[[], tuple[nn.Module, Iterable[nn.Module]]],
    options: dict[str, bool],
    session: ssdtrain.Session,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "_topics", set())
    model, layers = build()
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
def test_what_changed_since_a_forward_is_an_error_in_its_backward(
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
def test_what_a_block_reads_may_change_between_steps_and_not_in_them(
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
