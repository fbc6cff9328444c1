"""Weights, and what is made of them, are neither written nor kept, and each forward has its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ssdtrain.planning.policy import Policy
from support import (
    Flush,
    Result,
    Rig,
    assert_equal_bits,
    gradients,
    nothing,
    prove,
    watch_records,
)

pytestmark = pytest.mark.usefixtures("one_thread")


ROWS = 24
"""A dimension that all activations here have, and no weight."""
WIDTH = 64


def rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def half(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


class Shared(nn.Module):
    """One weight is the table and the head, by way of two casts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(torch.arange(ROWS))
        with half():
            return self.head(found + x).float() + self.head((x * 2).float()).float()


class Attention(nn.Module):
    """Queries, keys and values from different tensors: the fused weight is cast, then split."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        with half(enabled=self.kind == "half"):
            mixed, _ = self.inner(x * 2, x * 3, x * 5)
        return mixed.float()


class Nested(nn.Module):
    """The same weight in three types, one within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with half():
            x = self.inner(x * 2)
            with half(enabled=False):
                x = self.inner(x.float())
            with half(cache_enabled=False):
                x = self.inner(x)
            return self.inner(x).float()


class Made(nn.Module):
    """A product with a tensor that is made of a larger weight."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self.weight)
        return ((x * 2).to(made.dtype) @ made).float()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        with half():
            return self.inner((x * 2)[:, None, :, None].expand(-1, 1, -1, 3)).float()


class Frozen(nn.Module):
    """A frozen layer beside small ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x) + self.up(self.down(x))
        return self.frozen(x * 2) + self.up(self.down(x)) + x @ self.frozen.weight.t()[:, :WIDTH]


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda weight: weight.t().bfloat16(),
    "cast twice": lambda weight: weight.bfloat16().double().t(),
    "chunk of a cast": lambda weight: weight.bfloat16().chunk(3)[1].t(),
    "transposed copy": lambda weight: weight.t().contiguous(),
    "cast of a transposed copy": lambda weight: weight.t().contiguous().bfloat16(),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Shared,
    "attention": lambda: Attention("full"),
    "attention in half precision": lambda: Attention("half"),
    "nested autocast": Nested,
    "convolution": Convolution,
    "frozen": Frozen,
    **{name: lambda make=make: Made(make) for name, make in MADE.items()},
}


@pytest.mark.parametrize("name", MODULES)
def test_weights_and_what_is_made_of_them_are_not_managed(name: str, tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        module, x = MODULES[name](), rows()
        losses = []
        for _ in range(2):
            loss = module(x).sin().sum()
            flush()
            loss.backward()
            losses.append(loss.detach())
        assert x.grad is not None
        return {"losses": torch.stack(losses), "x": x.grad, **gradients(module)}

    with watch_records() as seen:
        prove(step, tmp_path)
    assert seen
    assert all(ROWS in one.shape for one in seen), {one.shape for one in seen}


@pytest.mark.defends("what is larger than its parameter")
def test_a_row_of_a_weight_repeated_for_a_batch_is_an_activation(tmp_path: Path) -> None:
    token = Parameter(torch.randn(1, WIDTH))

    def step(flush: Flush) -> Result:
        token.grad = None
        repeated = token.expand(ROWS, WIDTH).contiguous()
        loss = repeated.sin().sum()
        flush()
        del repeated
        loss.backward()
        assert token.grad is not None
        return {"token": token.grad}

    stats = prove(step, tmp_path)
    assert stats.bytes_offloaded == ROWS * WIDTH * 4


# Several forwards before a backward


def test_each_forward_has_its_own_cast_though_the_weight_changes_between(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x, losses = rows(), []
        for _ in range(3):
            with half():
                losses.append(module(x).sin().sum())
            for one in module.parameters():
                one.grad = torch.ones_like(one)
            optimizer.step()
        flush()
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        assert x.grad is not None
        return {"losses": torch.stack(losses), "x": x.grad, **gradients(module)}

    prove(step, tmp_path)


class Quantised(nn.Module):
    """Eight bits and a scale for each row, in buffers; the weight is made anew in each forward."""

    scale: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.rand(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.scale)


class FrozenInHalf(nn.Module):
    """Autocast casts a frozen weight anew in each forward, and the cast says not of what."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        with half():
            return self.inner(x).float()


@pytest.mark.parametrize("make", [Quantised, FrozenInHalf])
def test_each_forward_has_its_own_copy_of_a_weight_and_frees_it(
    make: type[nn.Module], tmp_path: Path
) -> None:
    """Only the graph holds such a copy, so it goes to the disk like an activation."""

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        module, x, losses = make(), rows(), []
        for _ in range(3):
            losses.append(module(x * 2).sin().sum())
            module.weight.mul_(2)
        flush()
        torch.stack(losses).sum().backward()
        assert x.grad is not None
        return {"losses": torch.stack(losses), "x": x.grad}

    stats = prove(step, tmp_path)
    itemsize = 4 if make is Quantised else 2
    assert stats.bytes_offloaded >= 3 * WIDTH * WIDTH * itemsize
    rig = Rig(tmp_path)
    with rig.context():
        loss = make()(rows() * 2).sum()
        rig.flush()
        assert rig.stats.resident_bytes == 0
        loss.backward()


class Futile(Policy):
    """A policy that writes all but what it once wrote in vain."""

    def learn(self, *arguments: Any) -> None:
        kept = set(self.keep)
        super().learn(*arguments)
        self.keep &= kept

    def is_settled(self, _: int) -> bool:
        """Have each round followed in whole: its plan keeps what is written here."""
        return False


@pytest.mark.parametrize("saves", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_buffers_are_written_once_at_most_and_read_from_their_module(
    training: bool, saves: int, tmp_path: Path
) -> None:
    """Nothing tells a buffer from data; that its module still holds it shows in backward."""

    rig = Rig(tmp_path, policy=Futile(), backend="simulated")
    written, buffers = [], set()

    def write() -> None:
        rig.begin_writes()
        written.append(sum(one.address in buffers for one in rig.records.under_way()))
        rig.disk.resume()
        rig.flush()

    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        norm, x, found = nn.BatchNorm1d(WIDTH), rows(), []
        buffers.clear()
        buffers.update(one.data_ptr() for one in norm.buffers())
        for number in range(4):
            # So that no write ends before it is counted.
            rig.disk.pause()
            losses = []
            for seed in range(saves):
                # What a forward in training does to the statistics, no version tells.
                with torch.no_grad():
                    norm.train()(rows(seed))
                losses.append(norm.train(training)(x * (number + 1)).sin().sum())
            flush()
            torch.stack(losses).sum().backward()
            found.append(torch.stack(losses).detach())
        assert x.grad is not None
        return {"x": x.grad, "losses": torch.stack(found), **gradients(norm)}

    expected = step(nothing)
    with rig.context():
        assert_equal_bits(step(write), expected)
    # A second save takes their bytes from memory again, where the module holds them.
    assert written == [2 if saves == 1 else 0, 0, 0, 0]
    rig.assert_empty()


def test_nothing_of_a_module_outlives_it_in_an_open_session(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Frozen(), Quantised())
    tensors = [*module.parameters(), *module.buffers()]
    storages = [weakref.ref(one.untyped_storage()) for one in tensors if one.dim()]
    del tensors
    with rig.context():
        for seed in range(3):
            with half():
                loss = module(rows(seed)).sum()
            rig.flush()
            loss.backward()
        del module, loss
        assert not [one for one in storages if one() is not None]
    assert rig.stats.bytes_read > 0
    rig.assert_empty()


# Tensors that are more than their bytes


class Int8(torch.Tensor):
    """A weight of eight bits that is a float to all who look at it, as quantising libraries do."""

    raw: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, scale: Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride())
        made.raw, made.scale = raw, scale
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        first = arguments[0]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(function(first.raw), function(first.scale))
        plain = [one.raw.float() * one.scale if isinstance(one, Int8) else one for one in arguments]
        return function(*plain, **(options or {}))


def test_tensors_of_other_classes_stay_where_they_are(tmp_path: Path) -> None:
    def step(flush: Flush) -> Result:
        torch.manual_seed(0)
        raw = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        weight = Int8(raw, torch.rand(WIDTH, 1))
        frozen = Parameter(Int8(raw, torch.rand(WIDTH, 1)), requires_grad=False)
        x = rows()
        loss = (F.linear((x * 2).sin(), weight).cos() @ frozen).sin().sum()
        flush()
        loss.backward()
        assert x.grad is not None
        return {"loss": loss, "x": x.grad}

    with watch_records() as seen:
        prove(step, tmp_path)
    assert all(ROWS in one.shape for one in seen), {one.shape for one in seen}
