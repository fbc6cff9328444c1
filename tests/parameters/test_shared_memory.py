"""Weights that lie on one memory, from the beginning or from some moment on, have the plain bits.

Such weights stay in memory, and each update of one changes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ssdtrain
import support
from ssdtrain import UnsupportedError
from weights_away import WIDTH, adamw, layers, offloaded, squared

STEPS = 4
Share = Callable[[nn.Sequential, Path], nn.Sequential]


def by_data(model: nn.Sequential, _: Path) -> nn.Sequential:
    model[5].weight.data = model[2].weight.data
    return model


def in_part(model: nn.Sequential, _: Path) -> nn.Sequential:
    memory = torch.full((WIDTH + WIDTH // 2, WIDTH), 0.01)
    model[2].weight.data, model[5].weight.data = memory[:WIDTH], memory[WIDTH // 2 :]
    return model


def loaded(model: nn.Sequential, place: Path, *, mmap: bool = False) -> nn.Sequential:
    """Tied weights of a checkpoint are two parameters, once they are assigned."""
    model[5].weight = model[2].weight
    torch.save(model.state_dict(), place / "tied")
    model[5].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    model.load_state_dict(torch.load(place / "tied", mmap=mmap), assign=True)
    assert model[5].weight is not model[2].weight
    return model


def mapped(model: nn.Sequential, place: Path) -> nn.Sequential:
    return loaded(model, place, mmap=True)


def trained(
    place: Path, share: Share, moment: str, *, is_away: bool, overlap: str | None = None
) -> tuple[nn.Sequential, Any]:
    # Of each its own: a file that is written anew takes the memory away from whom it is mapped for.
    place /= "away" if is_away else "plain"
    place.mkdir(exist_ok=True)
    model = layers()
    if moment == "before":
        model = share(model, place)
    if is_away:
        offloaded(model, place)
    if moment == "after":
        model = share(model, place)
    optimizer = adamw(model.parameters())
    if overlap is not None:
        ssdtrain.offload_optimizer(optimizer, place, overlap=overlap)  # type: ignore[arg-type]
    for number in range(STEPS):
        if moment == "between steps" and number == STEPS // 2:
            model = share(model, place)
        squared(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


CASES = [
    (by_data, "before"),
    (by_data, "between steps"),
    (in_part, "after"),
    (loaded, "before"),
    (mapped, "before"),
]


@pytest.mark.parametrize("overlap", [None, "step"])
@pytest.mark.parametrize(("share", "moment"), CASES)
def test_weights_on_one_memory(
    share: Share, moment: str, overlap: str | None, tmp_path: Path
) -> None:
    expected, _ = trained(tmp_path, share, moment, is_away=False)
    model, _ = trained(tmp_path, share, moment, is_away=True, overlap=overlap)
    assert ssdtrain.parameter_stats(model).on_disk_bytes > 0, "the others leave"
    support.assert_equal_bits(dict(model.state_dict()), dict(expected.state_dict()))
    one, other = model[2].weight, model[5].weight
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_an_array_of_a_weight_sees_later_changes(tmp_path: Path) -> None:
    model = layers()
    weight = model[2].weight
    held = weight.detach().numpy()
    offloaded(model, tmp_path)
    with torch.no_grad():
        weight.fill_(7)
    assert np.all(held == 7)


def test_memory_that_is_replaced_after_updates_began_raises(tmp_path: Path) -> None:
    model, optimizer = trained(
        tmp_path, lambda model, _: model, "never", is_away=True, overlap="backward"
    )
    expected, plain = trained(tmp_path, lambda model, _: model, "never", is_away=False)
    for one in (expected, model):
        squared(one, STEPS).backward()
        one[2].weight.data = one[2].weight.data * 0.5
    with pytest.raises(UnsupportedError, match=r"a weight .*was changed after updates .*"):
        optimizer.step()
    for one, its_optimizer in ((expected, plain), (model, optimizer)):
        # The step is left out.
        its_optimizer.zero_grad()
        squared(one, STEPS + 1).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    support.assert_equal_bits(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("moment", ["before", "after", "between steps"])
@pytest.mark.parametrize("share", [by_data, in_part])
def test_updates_in_backward_of_weights_on_one_memory_are_refused(
    share: Share, moment: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="two parameters of this optimizer lie in the same"):
        trained(tmp_path, share, moment, is_away=True, overlap="backward")


def test_masters_of_weights_on_one_memory_are_refused(tmp_path: Path) -> None:
    model = layers(width=256).bfloat16()
    model[5].weight.data = model[2].weight.data
    offloaded(model, tmp_path)
    optimizer = adamw(model.parameters())
    with pytest.raises(UnsupportedError, match="two parameters of this optimizer lie in the same"):
        ssdtrain.offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32)
