"""A graph whose saved tensors stay in memory, and a comparison of what recipes make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import Kept
from ssdtrain.rematerialize.find import Outputs, find_recipe
from ssdtrain.rematerialize.recipe import Recipe
from support import Result, Rig, assert_equal_bits


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


class Made:
    """Notes the recipes by which a session makes tensors again."""

    def __init__(self, rig: Rig) -> None:
        self.names: list[tuple[str, ...]] = []
        assert rig.rematerializer is not None
        rematerialize = rig.rematerializer.rematerialize

        def noted(saved: Any, use: Any, unpack: Any) -> Tensor:
            self.names.append(use.recipe.operations)
            return rematerialize(saved, use, unpack)

        rig.rematerializer.rematerialize = noted  # type: ignore[method-assign]


def made_always(tmp_path: Path, run: Callable[[], Result]) -> list[tuple[str, ...]]:
    """Run once with every recipe, compare with a plain run, and return the recipes used."""
    expected = run()
    rig = Rig(tmp_path, rematerialize="always")
    made = Made(rig)
    with rig.context():
        assert_equal_bits(run(), expected)
    rig.assert_empty()
    return made.names


def through(inner: Callable[[Tensor], Tensor], y: Tensor, *, checkpointed: bool) -> Tensor:
    """Return ``inner(y)``, of a region that is computed again if ``checkpointed``."""
    if not checkpointed:
        return inner(y)
    made: Tensor = torch.utils.checkpoint.checkpoint(inner, y, use_reentrant=False)
    return made


def derivatives(x: Tensor, loss: Tensor, *, checkpointed: bool) -> Result:
    """Differentiate a loss twice on one graph, and the second gradient again.

    A non-reentrant checkpoint has no second derivatives here.
    """
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, x, create_graph=not checkpointed)[0]
    third = first
    if not checkpointed:
        third = torch.autograd.grad(second.float().square().sum(), x)[0]
    return {"first": first, "second": second.detach(), "third": third}
