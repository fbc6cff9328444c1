"""Float32 casts of bfloat16 tensors are made again from a narrow copy, with equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_graphs import Made, Packed, assert_makes, derivatives, made_always, through
from ssdtrain.planning.rematerialize import PROOF_COUNT
from ssdtrain.rematerialize.narrow import narrowed, widening_from
from support import (
    IN_PLACE,
    Flush,
    Patient,
    Result,
    Rig,
    assert_equal_bits,
    gradients,
    nothing,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 96
STEPS = PROOF_COUNT + 4


def made_by_node(x: Tensor) -> Tensor:
    """Return a tensor with these numbers that a node has made and nobody has saved."""
    return x.detach().requires_grad_().clone()


def assert_widens(root: Tensor) -> None:
    narrow = narrowed(root)
    assert narrow is not None
    assert narrow.dtype is torch.bfloat16
    assert_makes(widening_from(Packed(narrow), root), root)


def test_casts_of_any_layout_are_made_from_narrow_copies() -> None:
    x = torch.randn(6, 5, 64).bfloat16()
    for laid_out in (x, x.transpose(0, 1), x.permute(2, 0, 1)):
        assert_widens(made_by_node(laid_out).float())


def test_every_bfloat16_has_its_bits() -> None:
    """Among them are infinities, negative zero, and NaNs with signs and payloads."""
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    assert_widens(made_by_node(x).float())


def not_narrow() -> dict[str, Tensor]:
    x = made_by_node(torch.randn(ROWS, WIDTH).bfloat16())
    return {
        "changed in place": x.float().mul_(1.5),
        "view": x.float().t(),
        "float16": made_by_node(torch.randn(ROWS, WIDTH).half()).float(),
        "float64": x.double(),
        "float32 before": x.float().to(torch.float32, copy=True),
        "narrower after": made_by_node(torch.randn(ROWS, WIDTH)).bfloat16(),
        "no cast": x.float() * 2,
        "no gradient": x.detach().float(),
        "another device": x.to("meta", torch.float32),
    }


@pytest.mark.parametrize("what", not_narrow())
def test_other_tensors_are_not_narrowed(what: str) -> None:
    assert narrowed(not_narrow()[what]) is None


class Norm(nn.Module):
    """A norm of the kind that models in bfloat16 compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


class Model(nn.Module):
    """Layers on a residual stream that nobody saves but as casts to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.norms = nn.ModuleList(Norm() for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(F.silu(norm(x)))
        out: Tensor = x
        return out


def model() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def step(module: nn.Module, flush: Flush = nothing) -> Result:
    module.zero_grad()
    loss = module(torch.arange(ROWS) % 16).float().square().mean()
    flush()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


def test_a_session_proves_casts_and_then_keeps_them_narrow(tmp_path: Path) -> None:
    module = model()
    expected = step(module)
    written = []
    for rematerialize in ("never", "auto"):
        rig = Rig(tmp_path, rematerialize=rematerialize, policy=Patient())
        made = Made(rig) if rematerialize == "auto" else None
        for number in range(STEPS):
            before = rig.stats.bytes_written
            with rig.context():
                # A write that has not begun when its tensor is needed is cancelled.
                assert_equal_bits(step(module, rig.flush), expected)
            if made is not None and number <= PROOF_COUNT:
                assert not made.names, "a recipe was used unproved"
        written.append(rig.stats.bytes_written - before)
        if made is not None:
            # Each norm's input, and the model's result, of which the loss is computed.
            assert made.names.count(("cast",)) == 5 * (STEPS - 1 - PROOF_COUNT)
            assert rig.stats.recipes_differing_count == 0
        rig.assert_empty()
    never, auto = written
    assert auto <= never - 5 * ROWS * WIDTH * 2


def stream() -> tuple[Tensor, Tensor]:
    """Return a weight, and rows of it that nobody saves."""
    torch.manual_seed(0)
    weight = torch.randn(16, WIDTH).bfloat16().requires_grad_()
    return weight, F.embedding(torch.arange(ROWS) % 16, weight)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_retained_graphs_and_second_derivatives(checkpointed: bool, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        weight, x = stream()

        def inner(y: Tensor) -> Tensor:
            return y.float().exp() * y.float().square()

        loss = through(inner, x, checkpointed=checkpointed).sum()
        del x
        return derivatives(weight, loss, checkpointed=checkpointed)

    assert (("cast",) in made_always(tmp_path, run)) is not checkpointed


def test_a_cast_that_was_changed_in_place_raises(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    _, x = stream()
    with rig.context():
        wide = x.float()
        loss = wide.square().sum()
        with torch.no_grad():
            wide.mul_(2)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()  # type: ignore[no-untyped-call]
    del loss, wide, x
    rig.assert_empty()


def test_the_source_of_a_cast_may_change(tmp_path: Path) -> None:
    """No node has saved it, so that plain autograd goes backward, too."""

    def run() -> dict[str, Tensor]:
        weight, x = stream()
        loss = x.float().square().sum()
        with torch.no_grad():
            x.mul_(2)
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return {"weight": weight.grad}

    assert made_always(tmp_path, run) == [("cast",)]


@pytest.mark.defends("rest of a cast")
def test_a_cast_that_changes_where_no_counter_tells_keeps_its_bits(tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        weight, x = stream()
        wide = x.float()
        wide.data.mul_(1.3)
        loss = wide.square().sum()
        del wide
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return {"weight": weight.grad}

    assert ("cast",) not in made_always(tmp_path, run)


def test_narrow_copies_leave_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    with rig.context():
        weight, x = stream()
        loss = x.float().square().sum()
        del x
        rig.flush()
        assert rig.residency.account.held_bytes == 0
        assert rig.stats.disk_used_bytes >= ROWS * WIDTH * 2
        loss.backward()  # type: ignore[no-untyped-call]
    del loss, weight
    rig.assert_empty()
