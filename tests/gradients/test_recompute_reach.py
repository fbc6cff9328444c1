"""What a block changes besides what it returns happens once, and what it used is there still."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ssdtrain
from recomputed import (
    ROWS,
    STEPS,
    TURN,
    WIDTH,
    Again,
    Counts,
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
from ssdtrain.activations.reach import Reach
from ssdtrain.errors import UnsupportedError
from support import Result, assert_equal_bits, batch

pytestmark = pytest.mark.usefixtures("one_thread")


class WithoutCounter(Normalised):
    """Its kernel moves the statistics, and no version counter."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        normalised = functional.batch_norm(x, *statistics, training=self.training)
        out: Tensor = self.line(normalised).relu()
        return out


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


GENERATOR = torch.Generator()


class Drawing(Plain):
    """Draws from generators that are not torch's own."""

    shared = torch.Generator()

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.generator = torch.Generator().manual_seed(0)
        self.of_python, self.of_numpy = random.Random(0), np.random.default_rng(0)
        self.listed = [torch.Generator().manual_seed(0)]
        self.boxed = SimpleNamespace(generator=np.random.default_rng(0))

    def forward(self, x: Tensor) -> Tensor:
        draw: dict[str, Callable[[], Any]] = {
            "python": random.random,
            "python's own": self.of_python.random,
            "numpy": np.random.random,
            "numpy's own": self.of_numpy.random,
            "generator": lambda: torch.rand(WIDTH, generator=self.generator),
            "in a list": lambda: torch.rand(WIDTH, generator=self.listed[0]),
            "of the class": lambda: torch.rand(WIDTH, generator=self.shared),
            "of the file": lambda: torch.rand(WIDTH, generator=GENERATOR),
            "in an object": self.boxed.generator.random,
        }
        return super().forward(x * draw[self.kind]())


class InMethod(Normalised):
    """Has its statistics moved by a method that is marked, and was a function when it was."""

    @ssdtrain.checkpoint
    def normalised(self, x: Tensor) -> Tensor:
        return Normalised.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.normalised(x)
        return out


class Called:
    """Calls a module that it has, without being one."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [module]

    def __call__(self, x: Tensor) -> Any:
        return self.modules[0](x)


def in_list(block: nn.Module, x: Tensor) -> Any:
    return block([x * 1])


def marked_once(block: nn.Module, function: Callable[..., Tensor]) -> Any:
    return vars(block).setdefault("marked", ssdtrain.checkpoint(function))


def in_closure(block: nn.Module, x: Tensor) -> Any:
    return marked_once(block, lambda one: block(one).relu())(x)


def in_partial(block: nn.Module, x: Tensor) -> Any:
    return marked_once(block, functools.partial(nn.Module.__call__, block))(x)


def in_object(block: nn.Module, x: Tensor) -> Any:
    return marked_once(block, Called(block))(x)


def in_two_methods(block: nn.Module, x: Tensor) -> Any:
    assert isinstance(block, Normalised)
    return ssdtrain.checkpoint(block.forward)(ssdtrain.checkpoint(block.apart)(x))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, fresh) for kind in (Normalised, WithoutCounter, InPlace, Replacing, Counting)),
        (InMethod, lambda block, x: ssdtrain.remove_checkpoint(block) or block(x)),
        (InContainer, in_list),
        *((kind, in_closure) for kind in (Normalised, WithoutCounter)),
        (Normalised, in_partial),
        (Normalised, in_object),
    ],
)
def test_what_a_block_changes_it_changes_once(
    tmp_path: Path, kind: type[nn.Module], how: Callable[..., Tensor]
) -> None:
    def build() -> Step:
        model = Model(kind, how)
        if how not in (fresh, in_list):
            ssdtrain.remove_checkpoint(model)
        return training(model)

    stats = prove_both(tmp_path, build)
    assert stats.blocks_called == 3 * STEPS
    assert stats.blocks_recomputed == 0


OF_TORCH = ("generator", "in a list", "of the class", "of the file")
OF_OTHERS = ("python", "python's own", "numpy", "numpy's own", "in an object")


@pytest.mark.parametrize("kind", [*OF_TORCH, *OF_OTHERS])
def test_what_torch_does_not_draw_is_drawn_once(tmp_path: Path, kind: str) -> None:
    def build() -> Step:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - what older code draws from
        GENERATOR.manual_seed(0)
        Drawing.shared.manual_seed(0)
        return training(Model(lambda: Drawing(kind), fresh))

    assert prove_both(tmp_path, build).blocks_recomputed == 0


def test_a_flag_by_which_a_block_changes_things_makes_another_mode(tmp_path: Path) -> None:
    class Flagged(Normalised):
        def forward(self, x: Tensor, moves: bool = False) -> Tensor:
            norm = self.norm
            return super().forward(x) if moves else self.apart(x * norm.weight + norm.bias)

    def build() -> Step:
        flags = iter([False] * 3 + [True] * 6)
        return training(Model(Flagged, lambda block, x: block(x, moves=next(flags))))

    assert prove_both(tmp_path, build).blocks_recomputed == 0


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

    assert prove_both(tmp_path, build).blocks_recomputed == 3 * (STEPS - 1)


def test_a_closure_over_much_data_is_not_gone_through() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("it has data, and no modules")

    data, block = Unread(range(1000)), Normalised()
    reach = Reach(lambda x: block(x) + len(data), [])
    assert reach.owner is block
    assert len(reach.snapshot().buffers) == 3


def test_methods_of_one_module_are_known_apart(tmp_path: Path) -> None:
    def build() -> Step:
        model = Model(Normalised, in_two_methods)
        ssdtrain.remove_checkpoint(model)
        return training(model)

    stats = prove_both(tmp_path, build)
    assert stats.blocks_called == 6 * STEPS
    # What only the other one changes may be needed again once it has changed.
    assert stats.blocks_recomputed == 0


def test_a_module_within_that_is_put_into_training_is_tried_again(tmp_path: Path) -> None:
    def build() -> Step:
        model, modes = Model(Normalised, fresh), iter([False, True, True])
        trained = training(model)

        def step() -> Result:
            is_training = next(modes)
            for block in model.blocks:
                block.norm.train(is_training)
            return trained()

        return step

    assert prove_both(tmp_path, build).blocks_recomputed == 0


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_buffers_that_cannot_be_compared_do_no_harm(tmp_path: Path, buffer: Tensor) -> None:
    def build() -> Step:
        model = Model(Plain, fresh)
        for block in model.blocks:
            block.register_buffer("odd", buffer)
        step = training(model)
        return lambda: {name: one for name, one in step().items() if "odd" not in name}

    assert prove_both(tmp_path, build).blocks_recomputed == 3 * (STEPS - 1)


def test_modules_that_get_their_weights_in_the_first_call(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.LazyLinear(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.line(x).tanh()
            return out

    assert prove_both(tmp_path, lambda: training(Model(Lazy, fresh))).blocks_recomputed == 3


def test_in_evaluation_statistics_stay_so_the_block_is_computed_again(tmp_path: Path) -> None:
    stats = prove_both(tmp_path, lambda: training(Model(Normalised, one_input).eval()))
    assert stats.blocks_recomputed == 3 * (STEPS - 1)


def test_what_is_known_in_evaluation_does_not_count_in_training(tmp_path: Path) -> None:
    def build() -> Step:
        model = Model(Normalised, one_input)
        trained, modes = training(model), iter([False, True, True])

        def step() -> Result:
            model.train(next(modes))
            return trained()

        return step

    assert prove_both(tmp_path, build).blocks_recomputed == 0


# What must stay until backward.


def change_weights(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def replace_weights(model: Model) -> None:
    for block in model.blocks:
        line = block.layers[1]  # type: ignore[index]
        line.weight = nn.Parameter(line.weight.detach() * 2)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (change_weights, "Mlp, .* did not compute what its forward did .* No gradient"),
        (replace_weights, "Mlp, .* did not compute what its forward did"),
        (nn.Module.eval, "Mlp, .* was put into another mode .* Change the mode after backward"),
    ],
)
def test_what_changed_since_a_forward_is_an_error_in_its_backward(
    tmp_path: Path, change: Callable[[Model], Any], what: str
) -> None:
    model = Model(Mlp, one_input)
    step, x = training(model), batch(rows=ROWS, width=WIDTH)
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        step()
        model.zero_grad()
        loss = model(x).square().mean()
        change(model)
        with pytest.raises(ssdtrain.UnsupportedError, match=what):
            loss.backward()
        assert all(one.grad is None for one in model.blocks[0].parameters())
        model.train()
        step()
    assert session.stats.blocks_recomputed >= 5


class Caches(Plain):
    """Keeps in its first call what all others use."""

    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0.5, 1.5, WIDTH)
        return super().forward(x * self.cache)


@pytest.mark.parametrize(
    ("kind", "turns", "recomputed"),
    [
        (Counts, "0000", 3),
        (Counts, "0100", 1),
        (Counts, "0001", 2),
        (Counts, "1000", 2),
        (Counts, "10100000", 3),
        (Counts, "1111", 0),
        (Counts, "1010101000000", 0),
        (Caches, "0000", 2),
    ],
)
def test_a_call_that_changes_something_is_not_computed_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], nn.Module],
    turns: str,
    recomputed: int,
) -> None:
    def run() -> Iterator[Result]:
        torch.manual_seed(0)
        step = training(Model(kind, one_input))
        for turn in turns:
            monkeypatch.setitem(TURN, "counts", turn == "1")
            yield step()

    plain = list(run())
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        for found, expected in zip(run(), plain, strict=True):
            assert_equal_bits(found, expected)
    assert session.stats.blocks_recomputed == 3 * recomputed


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
    assert stats.blocks_recomputed == 3 * (STEPS - 1)


class Reads(Plain):
    """Reads what its caller sets, in its attributes, in an object, in a list, in an array."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(WIDTH)
        self.memory = SimpleNamespace(shift=torch.zeros(WIDTH))
        self.names = {"shift": torch.zeros(WIDTH)}
        self.others = [nn.Linear(WIDTH, WIDTH, bias=False)]
        self.array = np.zeros(3)
        self.seen: set[int] = set()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            other: Tensor = self.others[0].weight.mean(0)
        shift = self.memory.shift + self.names["shift"] + other + float(self.array.sum())
        factor = self.factor * SCALE * (2.0 if self.seen else 1.0)
        out: Tensor = super().forward(self.drop(x) * self.mask * factor + shift)
        return out


SCALE = 1.0


def replace_memory(block: Reads) -> None:
    block.memory.shift = torch.ones(WIDTH)


def change_weight_elsewhere(block: Reads) -> None:
    with torch.no_grad():
        block.others[0].weight.add_(1.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda block: setattr(block, "factor", 3.0),
    "another mask": lambda block: setattr(block, "mask", torch.zeros(WIDTH)),
    "a mask in place": lambda block: block.mask.zero_(),
    "an attribute of an object": replace_memory,
    "a tensor in a dict": lambda block: block.names.update(shift=torch.ones(WIDTH)),
    "a module in a list": change_weight_elsewhere,
    "an array": lambda block: block.array.fill(1.0),
    "a set": lambda block: block.seen.add(1),
    "a global number": lambda _: globals().update(SCALE=3.0),
    "a module's option": lambda block: setattr(block.drop, "p", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
class TestWhatABlockReads:
    @pytest.fixture
    def session(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ssdtrain.Session]:
        monkeypatch.setitem(globals(), "SCALE", SCALE)  # put back at the end
        tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
        tool._choices = Again()
        with tool as session:
            yield session

    def test_changed_after_the_forward_is_refused(
        self, change: Callable[[Any], object], session: ssdtrain.Session
    ) -> None:
        block, x = ssdtrain.checkpoint(Reads()), batch(width=WIDTH)
        block(x * 1).sum().backward()
        loss = block(x * 1).sum()
        change(block)
        with pytest.raises(UnsupportedError, match="did not compute what its forward did"):
            loss.backward()
        assert session.stats.blocks_recomputed == 1

    def test_changed_between_two_calls_is_never_computed_again(
        self, change: Callable[[Any], object], session: ssdtrain.Session
    ) -> None:
        block, x = ssdtrain.checkpoint(Reads()), batch(width=WIDTH)
        for _ in range(2):
            block(x * 1).sum().backward()
        change(block)
        for _ in range(2):
            block(x * 1).sum().backward()
        assert session.stats.blocks_recomputed == 1


step = 0
"""Another thing than the layer of this name below."""
FACTOR = 1.0


class Named(Plain):
    """Has a layer with the name of something global, and reads a global number in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)

    def scaled(self, x: Tensor) -> Tensor:
        return sum(x * FACTOR for _ in range(1))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.step(x))


def test_a_global_name_is_not_that_of_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Named()
    before = Reach(block, []).snapshot()
    monkeypatch.setitem(globals(), "step", 1)
    assert Reach(block, []).snapshot().is_as(before)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert not Reach(block, []).snapshot().is_as(before)


def test_code_that_was_made_at_run_time_has_no_module() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    reach = Reach(traced, [])
    assert reach.snapshot().is_as(reach.snapshot())
    names: dict[str, object] = {"line": nn.Linear(16, 16)}
    exec("def made(x): return line(x)", names)
    assert Reach(names["made"], []).owner is names["line"]  # type: ignore[arg-type]


class Slots:
    __slots__ = ("empty", "listed", "value")

    def __init__(self) -> None:
        self.value, self.listed = 1, [1]


class WithAttribute(dict[str, int]):
    value = 1


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"a": 1}, lambda one: one.update(b=one.pop("a"))),
        # The second number gets the address of the first one.
        ({float("1.5")}, lambda one: (one.clear(), one.add(float("2.5")))),
        (deque([1, 2]), lambda one: one.rotate()),
        (Slots(), lambda one: setattr(one, "value", 2)),
        (Slots(), lambda one: one.listed.append(2)),
        (WithAttribute(a=1), lambda one: setattr(one, "value", 2)),
    ],
    ids=["key of a dict", "number in a set", "deque", "slot", "in a slot", "attribute of a dict"],
)
def test_what_a_container_has_is_compared(value: Any, change: Callable[[Any], object]) -> None:
    block = Plain()
    block.value = value
    before = Reach(block, []).snapshot()
    assert Reach(block, []).snapshot().is_as(before)
    change(value)
    assert not Reach(block, []).snapshot().is_as(before)


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


def test_an_argument_that_contains_itself_is_passed_on(tmp_path: Path) -> None:
    block = Plain()
    endless: list[Any] = []
    endless.append(endless)

    @ssdtrain.checkpoint
    def called(x: Tensor, given: list[Any]) -> Tensor:
        assert given[0] is given
        out: Tensor = block(x)
        return out

    x = torch.randn(ROWS, WIDTH)
    with ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="1MiB"):
        assert torch.equal(called(x, endless), block(x))


def test_a_scripted_module_may_be_marked(tmp_path: Path) -> None:
    with pytest.warns((FutureWarning, DeprecationWarning), match="deprecated"):
        scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    expected = scripted(x)
    called = ssdtrain.checkpoint(scripted)
    with ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="1MiB"):
        assert torch.equal(called(x), expected)


def test_statistics_that_are_no_buffers_are_compared_by_their_bytes() -> None:
    mean, variance = torch.zeros(16), torch.ones(16)

    def normed(x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, mean, variance, training=True)

    reach = Reach(normed, [])
    have_stayed = reach.closely(reach.snapshot())
    assert have_stayed()
    normed(torch.randn(8, 16) + 3)
    assert not have_stayed()


def test_a_name_of_a_closure_that_goes_on_is_not_computed_again() -> None:
    block = Plain()
    factor = 1.0

    def scaled(x: Tensor) -> Tensor:
        out: Tensor = block(x) * factor
        return out

    before = Reach(scaled, []).snapshot().standing()
    assert Reach(scaled, []).snapshot().standing() == before
    factor = 2.0
    assert Reach(scaled, []).snapshot().standing() != before
