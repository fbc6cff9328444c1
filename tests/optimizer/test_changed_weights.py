"""With ``overlap="backward"`` a weight that is changed past its version counter is not lost.

Whoever changes it between backward and ``step()`` is told, as an update may have begun with what it
was. What is changed before backward, or after ``step()``, has the bits of the plain run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ssdtrain
import support
from ssdtrain import UnsupportedError, offload_optimizer
from trained import STEPS, WIDTH, everything, model

Change = Callable[[Tensor], Any]
BOUND = 410 << 10
"""Twice the largest weight, which is half of the model."""


def in_whole(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def in_one_element(weight: Tensor) -> None:
    weight.data[3, 5] += 1


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[-1, -1] = 7


CHANGES: list[tuple[Change, torch.dtype]] = [
    (in_whole, torch.float32),
    (in_one_element, torch.float32),
    (by_numpy, torch.float32),
    (in_whole, torch.bfloat16),
    (in_one_element, torch.bfloat16),
]


def built(
    place: Path | None, *, is_away: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, Any]:
    """Return a model and its optimizer; without a place, plain ones."""
    module = model().to(dtype)
    if place is not None and is_away:
        ssdtrain.offload_parameters(module, place, max_resident_bytes=BOUND)
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    if place is not None:
        masters = torch.float32 if dtype is torch.bfloat16 else None
        offload_optimizer(
            optimizer, place, overlap="backward", buffer_bytes="1MiB", master_dtype=masters
        )
    return module, optimizer


def backward(module: nn.Module, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    module(x.to(next(module.parameters()).dtype)).square().mean().backward()


def begun_with(optimizer: Any) -> int:
    """Return the place of a weight whose update was made in the backward before."""
    own = optimizer._in_backward
    params = optimizer.param_groups[0]["params"]
    made = [one.param for one in own._taken.values() if one.updated is not None]
    return next(place for place, param in enumerate(params) if param in set(made))


@pytest.mark.defends("a weight that changed past its counter since its update began")
@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize(("change", "dtype"), CHANGES)
def test_a_change_after_backward_raises(
    change: Change, dtype: torch.dtype, is_away: bool, tmp_path: Path
) -> None:
    module, optimizer = built(tmp_path, is_away=is_away, dtype=dtype)
    for seed in range(2):
        backward(module, seed)
        optimizer.step()
        optimizer.zero_grad()
    backward(module, 2)
    place = begun_with(optimizer)
    weight = optimizer.param_groups[0]["params"][place]
    change(weight)
    told = rf"a weight \(params\[{place}\] of group 0, shape .* was changed after updates of this"
    before = {name: one.clone() for name, one in module.state_dict().items()}
    with pytest.raises(UnsupportedError, match=told):
        optimizer.step()
    support.assert_equal_bits(dict(module.state_dict()), before)


@pytest.mark.parametrize("is_away", [False, True])
def test_after_that_the_step_is_left_out(is_away: bool, tmp_path: Path) -> None:
    expected, plain = built(None)
    module, optimizer = built(tmp_path, is_away=is_away)
    for seed in range(STEPS):
        backward(expected, seed)
        backward(module, seed)
        if seed == 2:
            place = begun_with(optimizer)
            for its in (plain, optimizer):
                in_one_element(its.param_groups[0]["params"][place])
            with pytest.raises(UnsupportedError, match="a weight"):
                optimizer.step()
        else:
            plain.step()
            optimizer.step()
        plain.zero_grad()
        optimizer.zero_grad()
    support.assert_equal_bits(everything(module, optimizer), everything(expected, plain))


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_gradient_that_another_library_has_is_changed_by_it(overlap: Any, tmp_path: Path) -> None:
    def train(place: Path | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        # Large enough that updates are made in backward.
        module = nn.Sequential(nn.Linear(WIDTH, 800), *(nn.Linear(800, 800) for _ in range(3)))
        optimizer: Any = torch.optim.AdamW(module.parameters())
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap)
        is_told = place is not None and overlap == "backward"
        for seed in range(STEPS):
            if is_told:
                optimizer.set_is_last_backward(False)
            backward(module, seed)
            given = [torch.from_dlpack(param.grad) for param in module.parameters()]
            if is_told:
                optimizer.set_is_last_backward(True)
            backward(module, seed + STEPS)
            for one in given:
                one.clamp_(-1e-4, 1e-4)
            optimizer.step()
            for one in given:
                one.fill_(1)
            optimizer.zero_grad()
        return everything(module, optimizer)

    support.assert_equal_bits(train(tmp_path), train(None))


@pytest.mark.parametrize("is_away", [False, True])
def test_a_change_before_backward_or_after_the_step_is_as_in_a_plain_run(
    is_away: bool, tmp_path: Path
) -> None:
    def train(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for seed in range(STEPS):
            for param in module.parameters():
                param.data.mul_(0.99)
            backward(module, seed)
            optimizer.step()
            for param in module.parameters():
                param.data.add_(1e-3)
            optimizer.zero_grad()
        return everything(module, optimizer)

    expected = train(*built(None))
    support.assert_equal_bits(train(*built(tmp_path, is_away=is_away)), expected)


def test_two_optimizers_of_weights_on_one_memory_are_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, first, second = (nn.Parameter(torch.randn(400, 400) / 20) for _ in range(3))
    other = nn.Parameter(one.data)
    optimizers: list[Any] = []
    for params in ([one], [other, second, first]):
        optimizer = torch.optim.AdamW(params, lr=0.1)
        offload_optimizer(optimizer, tmp_path, overlap="backward")
        optimizers.append(optimizer)
    # The gradient of the other is there first, so its update is made in backward.
    (torch.randn(8, 400) @ one @ first @ second @ other).square().mean().backward()
    assert begun_with(optimizers[1]) == 0
    optimizers[0].step()
    after = one.detach().clone()
    with pytest.raises(UnsupportedError, match="was changed after updates of this step had begun"):
        optimizers[1].step()
    assert torch.equal(one, after)
