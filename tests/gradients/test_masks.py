"""Masks of dropout are made again from a bit for each element, with the bits of the floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_graphs import Made, assert_makes, derivatives, made_always, through
from ssdtrain._core import Kept
from ssdtrain.planning.rematerialize import PROOF_COUNT
from ssdtrain.rematerialize.masks import find_mask
from support import IN_PLACE, Patient, Rig, assert_equal_bits, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 96
STEPS = PROOF_COUNT + 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def mask_like(x: Tensor, p: float = 0.1) -> Tensor:
    """Return a mask as a CPU's dropout fills it."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_is_made_from_its_bits(dtype: torch.dtype) -> None:
    x = torch.empty(6, 5, 64, dtype=dtype)
    for laid_out in (x, x.transpose(0, 1), x.permute(2, 0, 1)):
        for p in (0.1, 0.3, 0.9):
            mask = mask_like(laid_out, p)
            recipe = find_mask(mask)
            assert recipe is not None
            (bits,) = recipe.sources
            assert isinstance(bits, Kept)
            assert bits.tensor.nbytes == x.numel() / 8
            assert_makes(recipe, mask)


def test_every_byte_of_bits_is_right() -> None:
    rows = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    mask = torch.empty(256, 8).copy_(rows * 1.25)
    recipe = find_mask(mask)
    assert recipe is not None
    (bits,) = recipe.sources
    assert isinstance(bits, Kept)
    assert bits.tensor.tolist() == list(range(256))
    assert_makes(recipe, mask)


def no_mask() -> dict[str, Tensor]:
    """Return tensors that are no masks, most of them nearly."""
    mask = mask_like(torch.empty(ROWS, WIDTH))

    def with_last(number: float) -> Tensor:
        made = mask.clone().mul_(1)
        made[-1, -1] = number
        return made

    return {
        "other number": with_last(0.5),
        "next number": with_last(torch.nextafter(mask.max(), torch.tensor(2.0)).item()),
        "negative zero": with_last(-0.0),
        "NaN": with_last(torch.nan),
        "negative scale": mask.clone().neg_(),
        "zeros": mask.clone().zero_(),
        "random": mask.clone().normal_(),
        "not filled": mask.clone(),
        "view": mask.t(),
        "part": mask[8:],
        "narrow numbers": torch.empty(ROWS, WIDTH, dtype=torch.float8_e5m2).copy_(mask),
        "integers": (mask > 0).int().mul_(2),
        "leaf": mask.clone().mul_(1).requires_grad_(),
        "length that fills no byte": mask_like(torch.empty(3, 5)),
        "another device": mask.to("meta").mul_(1),
        "storage that is longer": torch.empty(ROWS * WIDTH).set_(
            torch.empty(2 * ROWS * WIDTH).untyped_storage(), 0, (ROWS, WIDTH)
        ),
    }


@pytest.mark.parametrize("what", no_mask())
def test_other_tensors_are_no_masks(what: str) -> None:
    assert find_mask(no_mask()[what]) is None


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.2, "gelu")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(dtype).train()


def step(module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    loss = module(torch.randn(ROWS, 2, WIDTH, dtype=dtype)).float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_session_proves_masks_and_then_makes_them(dtype: torch.dtype, tmp_path: Path) -> None:
    module = model(dtype)
    expected = step(module)
    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    made = Made(rig)
    for number in range(STEPS):
        with rig.context():
            assert_equal_bits(step(module), expected)
        if number <= PROOF_COUNT:
            assert not made.names, "a recipe was used unproved"
    # Of the attention, after it, in the feed-forward part and after that.
    assert made.names.count(("mask",)) == 2 * 4 * (STEPS - 1 - PROOF_COUNT)
    assert rig.stats.recipes_differing_count == 0
    rig.assert_empty()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_retained_graphs_and_second_derivatives(checkpointed: bool, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)

        def inner(y: Tensor) -> Tensor:
            return F.dropout(torch.sigmoid(F.dropout(y * 3, 0.3)), 0.2)

        loss = through(inner, x * 2, checkpointed=checkpointed).exp().sum()
        return derivatives(x, loss, checkpointed=checkpointed)

    assert (("mask",) in made_always(tmp_path, run)) is not checkpointed


def product(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return an input and a loss whose gradient is made of a mask."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return x, (x * mask).square().sum()


@pytest.mark.defends("values of a mask")
def test_a_tensor_that_is_nearly_a_mask_keeps_its_bits(tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        mask = mask_like(torch.empty(ROWS, WIDTH))
        mask[-1] = 0.5
        x, loss = product(mask)
        del mask
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return {"x": x.grad}

    assert ("mask",) not in made_always(tmp_path, run)


def test_other_values_at_the_place_of_a_proved_mask_are_kept(tmp_path: Path) -> None:
    def run(last: float | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        mask = mask_like(torch.empty(ROWS, WIDTH))
        if last is not None:
            mask[-1, -1] = last
        x, loss = product(mask)
        del mask
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return {"x": x.grad}

    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    made = Made(rig)
    for last in [None] * STEPS + [0.5, None, -0.0]:
        expected = run(last)
        made.names.clear()
        with rig.context():
            assert_equal_bits(run(last), expected)
    assert ("mask",) not in made.names
    with rig.context():
        run(None)
    assert ("mask",) in made.names
    rig.assert_empty()


def test_a_mask_that_changes_where_no_counter_tells_fails_the_proof(tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        mask = mask_like(torch.empty(ROWS, WIDTH))
        x, loss = product(mask)
        mask.data.mul_(2)
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return {"x": x.grad}

    expected = run()
    rig = Rig(tmp_path, rematerialize="auto", policy=Patient())
    made = Made(rig)
    for _ in range(STEPS):
        with rig.context():
            assert_equal_bits(run(), expected)
    assert ("mask",) not in made.names
    assert rig.stats.recipes_differing_count > 0
    rig.assert_empty()


def test_a_mask_that_was_changed_in_place_raises(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    mask = mask_like(torch.empty(ROWS, WIDTH))
    with rig.context():
        _, loss = product(mask)
        mask.mul_(2)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()  # type: ignore[no-untyped-call]
    del loss
    rig.assert_empty()


def test_the_bits_count_until_backward(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rematerialize="always")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with rig.context():
        loss = F.dropout(x, 0.2).sum()
        assert rig.residency.account.held_bytes == ROWS * WIDTH / 8
        loss.backward()  # type: ignore[no-untyped-call]
        assert rig.residency.account.held_bytes == 0
    rig.assert_empty()


def test_bits_take_a_small_part_of_a_bound(tmp_path: Path) -> None:
    """They cannot leave memory; the other masks are written."""
    nbytes = ROWS * WIDTH * 4
    bound = 16 * nbytes

    def run() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = y = torch.randn(ROWS, WIDTH, requires_grad=True)
        for _ in range(32):
            y = F.dropout(y, 0.2)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return {"x": x.grad}

    expected = run()
    rig = Rig(tmp_path, rematerialize="always", max_resident_bytes=bound)
    made = Made(rig)
    with rig.context():
        assert_equal_bits(run(), expected)
    assert made.names.count(("mask",)) == bound / 64 // (nbytes / 32)
    assert rig.stats.bytes_written > 0
    rig.assert_empty()
