"""Saved tensors that are made again under ``max_resident_bytes``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssdtrain.config import Rematerialize
from ssdtrain.planning.policy import Item
from ssdtrain.planning.rematerialize import CHAIN_SHARE_MAX, PROOF_COUNT, Pressure
from ssdtrain.residency import WIDENING_BYTES
from support import Patient, Result, Rig, assert_equal_bits, gradients
from test_rematerialize import ROWS, WIDTH, model, step

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = PROOF_COUNT + 4
ELEMENTS = 256 << 10
UNIT = ELEMENTS * 4


class Pressed(Patient):
    """A policy of steps that wait for most of their time."""

    def learn(self, signature: int, items: Sequence[Item], *rest: Any) -> None:
        """Tell of long waits."""
        rates, stall_share, pressure = rest
        pressed = Pressure(pressure.limit_bytes, 1e9)
        super().learn(signature, items, rates, stall_share, pressed)


def compare(rig: Rig, run: Callable[[], Result], steps: int = STEPS) -> None:
    """Compare each of some steps with a plain one."""
    expected = run()
    for _ in range(steps):
        with rig.context():
            assert_equal_bits(run(), expected)
    rig.assert_empty()


def saved_bytes(tmp_path: Path, run: Callable[[], Result]) -> int:
    rig = Rig(tmp_path)
    compare(rig, run, 1)
    return rig.stats.saved_bytes_peak


def test_recipes_are_used_under_a_bound(tmp_path: Path) -> None:
    module = model()
    bound = saved_bytes(tmp_path, lambda: step(module)) // 2
    seen = []
    for rematerialize in ("never", "auto"):
        rig = Rig(tmp_path, rematerialize=rematerialize, policy=Patient(), max_resident_bytes=bound)
        compare(rig, lambda: step(module))
        assert rig.stats.resident_bytes_peak <= bound
        seen.append(rig.stats)
    never, auto = seen
    assert auto.bytes_rematerialized > never.bytes_rematerialized == 0
    # How many bytes of the others are written, and how many cancelled, is a matter of time.
    moved, others = (it.bytes_offloaded + it.bytes_forwarded + it.bytes_kept for it in seen)
    assert others == moved - auto.bytes_rematerialized


def test_dear_recipes_are_used_only_if_a_step_waits(tmp_path: Path) -> None:
    module = model()
    whole_bytes = saved_bytes(tmp_path, lambda: step(module))
    operations: dict[type[Patient], set[str]] = {Patient: set(), Pressed: set()}
    for kind, seen in operations.items():
        rig = Rig(tmp_path, rematerialize="auto", policy=kind(), max_resident_bytes=2 * whole_bytes)
        rematerializer = rig.rematerializer
        assert rematerializer is not None
        make = rematerializer.rematerialize

        def noted(
            saved: Any, use: Any, unpack: Any, make: Any = make, seen: set[str] = seen
        ) -> Tensor:
            seen.update(use.recipe.operations)
            made: Tensor = make(saved, use, unpack)
            return made

        rematerializer.rematerialize = noted  # type: ignore[method-assign]
        compare(rig, lambda: step(module), STEPS + 2)
        assert rig.stats.resident_bytes_peak <= 2 * whole_bytes
    dear = {"addmm", "mm", "attention"}
    assert operations[Patient]
    assert not operations[Patient] & dear
    assert operations[Pressed] & dear


class Together(torch.autograd.Function):
    """A node that needs many tensors at once."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return torch.stack(given).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(gradients[0] * saved for saved in ctx.saved_tensors)


def together(count: int, place: int) -> Result:
    """Save a product beside so many others, which no recipe makes; its factors are saved before."""
    torch.manual_seed(0)
    leaf = torch.randn(ELEMENTS, requires_grad=True)
    gate = leaf.cumsum(0)
    product = F.silu(gate)
    others = [leaf.cumsum(0) for _ in range(count)]
    given = [*others[:place], product, *others[place:]]
    loss = Together.apply(*given).square().sum()  # type: ignore[no-untyped-call]
    del given, others, product, gate
    loss.backward()
    assert leaf.grad is not None
    return {"loss": loss.detach(), "leaf": leaf.grad}


@pytest.mark.parametrize("rematerialize", ["never", "auto", "always"])
@pytest.mark.parametrize("place", [0, 9, 18])
def test_no_recipe_takes_the_room_of_its_node(
    rematerialize: Rematerialize, place: int, tmp_path: Path
) -> None:
    """The bound is just enough for a node with one tensor that can be made again."""
    count = 18
    bound = (1 + count) * (UNIT + WIDENING_BYTES)
    assert 2 * UNIT < CHAIN_SHARE_MAX * bound < 3 * UNIT
    rig = Rig(tmp_path, rematerialize=rematerialize, policy=Patient(), max_resident_bytes=bound)
    compare(rig, lambda: together(count, place))
    stats = rig.stats
    if rematerialize == "always":
        # An unproved recipe may find no room, and is used all the same.
        assert stats.bytes_rematerialized == STEPS * UNIT
        assert stats.resident_bytes_peak <= (1 + CHAIN_SHARE_MAX) * bound
    else:
        is_made = rematerialize == "auto" and place < count
        assert (stats.bytes_rematerialized > 0) == is_made
        assert stats.resident_bytes_peak <= bound


def test_no_proof_begins_another(tmp_path: Path) -> None:
    """A chain of products and sines, of which the sines are made again already."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(12)])
    x = torch.randn(ROWS, WIDTH)

    def run() -> Result:
        layers.zero_grad()
        y = x
        for layer in layers:
            y = torch.sin(layer(y))
        loss = y.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.detach(), **gradients(layers)}

    rig = Rig(tmp_path, rematerialize="auto", policy=Patient(), max_resident_bytes=1 << 30)
    rematerializer = rig.rematerializer
    assert rematerializer is not None
    prove, depth, depths = rematerializer.prove, 0, []

    def noted(*arguments: Any) -> None:
        nonlocal depth
        depth += 1
        depths.append(depth)
        prove(*arguments)
        depth -= 1

    rematerializer.prove = noted
    for number in range(2 * STEPS):
        # Sines are made again when the proofs of products begin.
        rig.policy.proofs.takes_dear = number >= STEPS
        with rig.context():
            run()
    assert rig.stats.bytes_rematerialized > 0
    assert max(depths) == 1


def retained(module: nn.Module) -> Result:
    """Use one graph for two backwards."""
    module.zero_grad()
    y = module(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)))
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()
    return gradients(module)


def penalized(module: nn.Module) -> Result:
    """Add a gradient penalty."""
    module.zero_grad()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + (slope.norm(2, 1) - 1).square().mean()).backward()
    return gradients(module)


@pytest.mark.parametrize("train", [retained, penalized])
def test_graphs_that_are_retained_need_no_larger_bound(
    train: Callable[[nn.Module], Result], tmp_path: Path
) -> None:
    """A tensor that was made again may go once its node has ended, though its graph lives."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.linear(x)).tanh()

    module = nn.Sequential(*(Block() for _ in range(48)))
    bound = saved_bytes(tmp_path, lambda: train(module)) // 4
    made_again = []
    for rematerialize in ("never", "always"):
        rig = Rig(tmp_path, rematerialize=rematerialize, max_resident_bytes=bound)
        compare(rig, lambda: train(module), 2)
        assert rig.stats.resident_bytes_peak <= bound
        made_again.append(rig.stats.bytes_rematerialized)
    assert made_again[1] > made_again[0] == 0
