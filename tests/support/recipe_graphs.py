"""A graph whose saved tensors stay in memory, and a comparison of what recipes make of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import Kept
from ssdtrain.rematerialize.find import Outputs, find_recipe
from ssdtrain.rematerialize.recipe import Recipe


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


def assert_makes(recipe: Recipe | None, root: Tensor) -> None:
    assert recipe is not None
    made = recipe.make(bring)
    assert (made.dtype, made.shape, made.stride()) == (root.dtype, root.shape, root.stride())
    assert torch.equal(bits(made), bits(root))
    assert not made.requires_grad
    assert not made.storage_offset()
    assert made.untyped_storage().nbytes() == root.untyped_storage().nbytes()
    addresses = {bring(source).untyped_storage().data_ptr() for source in recipe.sources}
    assert made.untyped_storage().data_ptr() not in addresses
