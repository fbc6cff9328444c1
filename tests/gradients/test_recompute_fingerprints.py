"""A block that is computed again saves what its forward saved, or its backward is an error."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from recomputed import ROWS, WIDTH, Again, Plain
from ssdtrain.errors import UnsupportedError
from ssdtrain.geometry import checksum_of
from support import batch, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN: dict[str, Any] = {}
"""Where no look at a block finds anything."""


@pytest.fixture(autouse=True)
def _hidden() -> Iterator[None]:
    torch.manual_seed(0)
    HIDDEN.update(
        number=1.0,
        layer=nn.Linear(WIDTH, WIDTH),
        mask=torch.ones(ROWS, WIDTH),
        rows=torch.arange(ROWS),
        generator=torch.Generator().manual_seed(0),
        counter=itertools.count(1),
        is_on=False,
    )
    yield
    HIDDEN.clear()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ssdtrain.Session]:
    tool = ssdtrain.offload(tmp_path, min_bytes=1, max_resident_bytes="64MiB")
    tool._choices = Again()
    with tool as session:
        yield session


class Block(nn.Module):
    """Computes something of ``x`` by a function that nobody sees, which reads ``HIDDEN``."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        HIDDEN["read"] = read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(HIDDEN["read"](self.first(x)).sin())
        return out


def called(session: ssdtrain.Session, block: nn.Module, *arguments: Tensor) -> Tensor:
    """Call a block so that backward computes it again."""
    before = session.stats.blocks_recomputed
    ssdtrain.checkpoint(block)
    loss: Tensor = block(*arguments).square().mean()
    assert session.stats.blocks_recomputed == before + 1
    return loss


def permute(x: Tensor) -> Tensor:
    return x[HIDDEN["rows"]]


def transpose(x: Tensor) -> Tensor:
    return x.t().contiguous().t() if HIDDEN["is_on"] else x


def leave_out(x: Tensor) -> Tensor:
    return x if HIDDEN["is_on"] else x.cos().exp()


def widen(x: Tensor) -> Tensor:
    return x.double().float() * (1.0 + 1e-7) if HIDDEN["is_on"] else x * 1.0


def through_layer(x: Tensor) -> Tensor:
    out: Tensor = HIDDEN["layer"](x)
    return out


def chunks(x: Tensor) -> Tensor:
    _, first, second, _ = x.chunk(4, -1)
    return torch.cat([first.exp(), second.sin(), x[:, ::2].cos()], -1)


def change_layer() -> None:
    with torch.no_grad():
        HIDDEN["layer"].weight.add_(1e-3)


def change_past_the_counter() -> None:
    HIDDEN["layer"].weight.data[3, 3] += 1.0


def turn_on() -> None:
    HIDDEN["is_on"] = True


NOTHING = object
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], object]]] = {
    "a number": (lambda x: x * HIDDEN["number"], lambda: HIDDEN.update(number=2.0)),
    "one element": (lambda x: x * HIDDEN["mask"], lambda: HIDDEN["mask"][5, 7].fill_(0.0)),
    "the order of rows": (permute, lambda: HIDDEN.update(rows=torch.arange(ROWS).flip(0))),
    "a layer": (through_layer, change_layer),
    "a layer, past its counter": (through_layer, change_past_the_counter),
    "the order in memory": (transpose, turn_on),
    "fewer operations": (leave_out, turn_on),
    "the last bits": (widen, turn_on),
    "a generator": (lambda x: x * torch.rand(WIDTH, generator=HIDDEN["generator"]), NOTHING),
    "a counter": (lambda x: x * next(HIDDEN["counter"]), NOTHING),
}


@pytest.mark.defends("what is computed again is compared")
@pytest.mark.parametrize(("read", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_that_alters_saved_tensors_is_an_error(
    session: ssdtrain.Session,
    read: Callable[[Tensor], Tensor],
    change: Callable[[], object],
) -> None:
    block = Block(read)
    loss = called(session, block, batch(rows=ROWS, width=WIDTH).requires_grad_())
    change()
    with pytest.raises(UnsupportedError, match=r"the block Block, .*did not compute what its"):
        loss.backward()
    assert all(one.grad is None for one in block.first.parameters())


class Scaled(Plain):
    """Multiplies its result by what nobody sees, and no tensor that is saved depends on that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * HIDDEN["number"]


def test_a_change_that_alters_no_saved_tensor_alters_no_gradient(
    session: ssdtrain.Session,
) -> None:
    x, block = batch(rows=ROWS, width=WIDTH).requires_grad_(), Scaled()
    loss = called(session, block, x)
    HIDDEN["number"] = 3.0
    loss.backward()
    found = {**gradients(block), "x": x.grad}
    HIDDEN["number"], x.grad = 1.0, None
    block.zero_grad()
    Scaled.forward(block, x).square().mean().backward()
    expected = {**gradients(block), "x": x.grad}
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_weight_that_was_changed_is_the_error_of_a_plain_call(
    session: ssdtrain.Session,
) -> None:
    block = Block(torch.cos)
    loss = called(session, block, batch(rows=ROWS, width=WIDTH).requires_grad_())
    with torch.no_grad():
        block.last.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_was_replaced_is_that_of_the_forward(session: ssdtrain.Session) -> None:
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()
    block = Block(torch.cos)
    weight = block.last.weight.detach().clone()
    loss = called(session, block, x)
    block.last.weight.data = weight * 2
    loss.backward()
    found, x.grad = x.grad, None
    block.last.weight.data = weight
    Block.forward(block, x).square().mean().backward()
    assert torch.equal(found, x.grad)  # type: ignore[arg-type]


class OfPairs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (y, x) if HIDDEN["is_on"] else (x, y)
        return first.exp() * second.sin()


@pytest.mark.parametrize("start", [0, 1])
def test_arguments_that_share_memory_are_known_apart(session: ssdtrain.Session, start: int) -> None:
    whole = batch(rows=ROWS + 1, width=WIDTH).requires_grad_()
    inner = whole * 1
    loss = called(session, OfPairs(), inner[:ROWS], inner[start : ROWS + start])
    loss.backward(retain_graph=True)
    found, whole.grad = whole.grad, None
    plain = whole * 1
    OfPairs.forward(OfPairs(), plain[:ROWS], plain[start : ROWS + start]).square().mean().backward()
    assert torch.equal(found, whole.grad)  # type: ignore[arg-type]
    if start:
        turn_on()
        with pytest.raises(UnsupportedError, match="did not compute what its forward did"):
            loss.backward()


def sparse(x: Tensor) -> Tensor:
    rows = torch.eye(ROWS).to_sparse()
    return torch.sparse.mm(rows * 2.0, x)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": sparse,
    "chunks": lambda x: torch.cat(
        [x.chunk(4, -1)[1].exp(), x.chunk(4, -1)[2].sin(), x[:, ::2]], -1
    ),
    "expanded": lambda x: x[:1].exp().expand(ROWS, WIDTH) * x.exp(),
    "windows": lambda x: x.exp().flatten().unfold(0, WIDTH, WIDTH // 2)[:ROWS].sin(),
    "conjugate": lambda x: (torch.complex(x, x.exp()).conj() * torch.complex(x, x)).real,
    "negative": lambda x: torch.complex(x, x.exp()).conj().imag.sin(),
    "empty": lambda x: torch.cat([x, x[:0].exp()]),
    "half": lambda x: x.bfloat16().exp().float(),
    "indices": lambda x: x.sort(-1).values * x.max(-1, keepdim=True).values,
}


@pytest.mark.parametrize("read", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_tensor_comes_back(
    session: ssdtrain.Session, read: Callable[[Tensor], Tensor]
) -> None:
    x = batch(rows=ROWS, width=WIDTH).requires_grad_()
    block = Block(lambda one: read(one)[:, :WIDTH].reshape(-1, 16).repeat(1, 4)[:ROWS])
    loss = called(session, block, x)
    loss.backward()
    found = {**gradients(block), "x": x.grad}
    block.zero_grad()
    x.grad = None
    Block.forward(block, x).square().mean().backward()
    expected = {**gradients(block), "x": x.grad}
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def same_as_plain(session: ssdtrain.Session, block: nn.Module, *arguments: Tensor) -> None:
    """Compare the gradients of three calls with those of plain ones."""
    ssdtrain.checkpoint(block)
    for _ in range(3):
        found = []
        for call in (block, block.forward):
            torch.manual_seed(0)
            inner = {id(one): one * 1 for one in arguments}
            result = call(*(inner[id(one)] for one in arguments))
            first = result if isinstance(result, Tensor) else result[0]
            leaves = [*arguments, *(one for one in block.parameters() if one.requires_grad)]
            found.append(torch.autograd.grad(first.square().sum(), leaves, allow_unused=True))
        for one, expected in zip(*found, strict=True):
            assert (one is None) == (expected is None)
            assert one is None or torch.equal(one, expected)


def test_an_argument_given_twice_stays_one_tensor(session: ssdtrain.Session) -> None:
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    same_as_plain(session, attention, x, x, x)
    assert session.stats.blocks_recomputed == 3


def test_arguments_are_not_held_by_the_graph(session: ssdtrain.Session) -> None:
    block = ssdtrain.checkpoint(Plain())
    losses, arguments = [], []
    for _ in range(4):
        x = batch(rows=ROWS, width=WIDTH).requires_grad_() * 1
        arguments.append(weakref.ref(x))
        losses.append(block(x).sum())
        del x
    assert session.stats.blocks_recomputed == 4
    assert [one() for one in arguments] == [None] * 4
    for loss in losses:
        loss.backward()


def test_two_backwards_of_one_graph_at_once(session: ssdtrain.Session) -> None:
    x, block = batch(rows=ROWS, width=WIDTH).requires_grad_(), Block(torch.cos)
    loss = called(session, block, x)
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]

    def differentiate(_: int) -> Tensor:
        return torch.autograd.grad(loss, x, retain_graph=True)[0]

    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(one, expected) for one in pool.map(differentiate, range(40)))


class Rectified(nn.Module):
    """Saves nothing of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.line(x.relu())
        return out


def test_an_argument_that_is_changed_after_the_call_is_an_error(session: ssdtrain.Session) -> None:
    block = Rectified()
    x = batch(rows=ROWS, width=WIDTH)
    loss = called(session, block, x)
    x.add_(1.0)
    with pytest.raises(UnsupportedError, match=r"block Rectified, .*as `x \+= block\(x\)` does"):
        loss.backward()
    x = batch(rows=ROWS, width=WIDTH).requires_grad_() * 1
    x += block(x)
    with pytest.raises(UnsupportedError, match=r"block Rectified, .*as `x \+= block\(x\)` does"):
        x.sum().backward()
    assert all(one.grad is None for one in block.parameters())


def strided() -> list[Tensor]:
    def whole() -> Tensor:
        return torch.arange(960.0).reshape(2, 6, 8, 10)

    return [
        whole(),
        whole().permute(2, 0, 3, 1),
        whole()[:, 1:4, ::2, 3:7],
        whole()[1:, :, 5],
        whole()[0, 0, 0, 0],
        whole()[:1].expand(5, 6, 8, 10),
        whole().flatten().unfold(0, 16, 8),
        whole()[:, :, :, ::3].transpose(1, 3),
    ]


@pytest.mark.parametrize("tensor", strided(), ids=lambda one: f"{one.shape}-{one.stride()}")
def test_a_checksum_is_of_every_element_and_of_nothing_between(tensor: Tensor) -> None:
    before = checksum_of(tensor)
    for place in itertools.product(*(sorted({0, size - 1}) for size in tensor.shape)):
        value = tensor[place].item()
        tensor[place].fill_(-1.0)
        assert checksum_of(tensor) != before
        tensor[place].fill_(value)
    own = set(torch.arange(960.0)[tensor.flatten().long()].long().tolist())
    outer = torch.as_strided(tensor, (960,), (1,), 0)
    outer[[place for place in range(960) if place not in own]] = -1.0
    assert checksum_of(tensor) == before


def test_a_checksum_tells_the_order() -> None:
    rows = torch.randn(4, 8)[:, :6]
    other = torch.empty(4, 8)[:, :6].copy_(rows.flip(0))
    assert checksum_of(rows) != checksum_of(other)
    assert checksum_of(rows) == checksum_of(rows.clone())
