"""Tensors that recipes make again have the bits, the layout and the bytes of the saved ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import Kept
from ssdtrain.rematerialize.find import Outputs, find_recipe
from ssdtrain.rematerialize.recipe import Recipe

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((4, 6), (3, 5, 7), (2, 33, 64))


class Packed:
    """Stands for a saved tensor of the core."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


class Graph:
    """Hooks that keep each saved tensor, and what the tests ask about the graph."""

    def __init__(self) -> None:
        self.outputs = Outputs()
        self.saved: list[tuple[Tensor, Packed]] = []

    def pack(self, tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        self.outputs.note(tensor, packed)
        self.saved.append((tensor, packed))
        return packed

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with saved_tensors_hooks(self.pack, bring):
            yield

    def input(self, tensor: Tensor) -> Tensor:
        """Return a tensor that a node made, as if another node had saved it."""
        made = tensor.detach().requires_grad_().clone()
        self.pack(made)
        return made

    def recipe(self, root: Tensor) -> Recipe | None:
        return find_recipe(root, self.outputs, lambda packed: isinstance(packed, Packed | Kept))


def bring(packed: Any) -> Tensor:
    if packed.version != packed.tensor._version:
        raise RuntimeError("modified by an inplace operation")
    return packed.tensor


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers, so that equal NaNs are equal."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def assert_makes(recipe: Recipe | None, root: Tensor, choice: int = 0) -> None:
    assert recipe is not None
    made = recipe.make(bring, choice)
    assert (made.dtype, made.shape, made.stride()) == (root.dtype, root.shape, root.stride())
    assert torch.equal(bits(made), bits(root))
    assert not made.requires_grad
    assert not made.storage_offset()
    assert made.untyped_storage().nbytes() == root.untyped_storage().nbytes()
    addresses = {bring(source).untyped_storage().data_ptr() for source in recipe.sources}
    assert made.untyped_storage().data_ptr() not in addresses


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def batch_of(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def heads_of(x: Tensor) -> Tensor:
    """Return queries, keys or values of shape (2, 4, 16, 8) with the numbers of a tensor."""
    return F.pad(x.flatten(), (0, 1024))[:1024].view(2, 4, 16, 8)


def image_of(x: Tensor) -> Tensor:
    return F.pad(x.flatten(), (0, 512))[:512].view(2, 4, 8, 8)


def indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).flip(0)


def vector(x: Tensor) -> Tensor:
    """Return a weight for the last dim."""
    return nn.Parameter(x.detach().reshape(-1, x.shape[-1])[-1].clone())


def mask(x: Tensor) -> Tensor:
    return x.detach() > 0


Case = Callable[[Tensor, Tensor], Tensor]

CASES: dict[str, tuple[Case, ...]] = {
    "AbsBackward0": (lambda x, y: x.abs(),),
    "SiluBackward0": (lambda x, y: F.silu(x),),
    "GeluBackward0": (lambda x, y: F.gelu(x), lambda x, y: F.gelu(x, approximate="tanh")),
    "MulBackward0": (
        lambda x, y: x * y,
        lambda x, y: x * 3,
        lambda x, y: 0.1 * x,
        lambda x, y: x * y.detach(),
        lambda x, y: x * vector(y),
        lambda x, y: x.sum() * 0.3,
        lambda x, y: x * y.float(),
    ),
    "ToCopyBackward0": (
        lambda x, y: x.to(torch.bfloat16 if x.dtype is torch.float32 else torch.float32),
    ),
    "TransposeBackward0": (lambda x, y: x.transpose(-1, 0), lambda x, y: x.mT),
    "NativeLayerNormBackward0": (
        lambda x, y: F.layer_norm(x, x.shape[-1:], vector(x), vector(y)),
        lambda x, y: F.layer_norm(x, x.shape[-2:]),
    ),
}


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Give pairs of inputs in several layouts."""
    seeds = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=seeds, dtype=torch.float64).to(dtype) for _ in range(2))
    turned = [t.mT.contiguous().mT for t in (x, y)]
    yield from ((x, y), (turned[0], y), (turned[0], turned[1]))


def has_made(name: str, root: Tensor) -> bool:
    """Return whether a node with this name has made a tensor, or what it was made from."""
    nodes: list[Any] = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            if node.name() == name:
                return True
            nodes += [edge[0] for edge in node.next_functions]
    return False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operation_is_repeated(name: str, dtype: torch.dtype) -> None:
    for case in CASES[name]:
        for shape in SHAPES:
            for x, y in layouts(shape, dtype):
                graph = Graph()
                x, y = graph.input(x), graph.input(y)
                with graph.hooks():
                    made = case(x, y)
                    root = made.clone() if made._is_view() else made
                    further = made * 2
                assert has_made(name, root)
                assert_makes(graph.recipe(root), root)
                assert_makes(graph.recipe(further), further)
