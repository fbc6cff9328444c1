"""Handlers of signals that look at an offloaded optimizer, or save, between two lines of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from moments import BetweenLines
from ssdtrain.errors import UnsupportedError

WIDTH = 160
STEPS_COUNT = 3


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def loss_of(model: nn.Module, number: int) -> Tensor:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(rows).square().mean()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(state_dict: dict[str, dict[int, dict[str, Tensor]]]) -> list[Tensor]:
    return [value for _, one in sorted(state_dict["state"].items()) for value in one.values()]


def moments() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the state and the weights before each step, and after the last."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for number in range(STEPS_COUNT + 1):
        state = [one.clone() for one in state_of(optimizer.state_dict())]
        found.append((state, [one.detach().clone() for one in model.parameters()]))
        if number < STEPS_COUNT:
            step(model, optimizer, number)
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.defends("nothing is saved in the middle of a step")
@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("every", support.sizes(small=97, whole=11))
def test_a_state_dict_is_of_one_moment_or_refused(every: int, overlap: str, tmp_path: Path) -> None:
    expected = moments()
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    ssdtrain.offload_optimizer(optimizer, tmp_path, overlap=overlap, buffer_bytes="256KiB")
    seen, refused = [], []

    def look() -> None:
        try:
            seen.append(state_of(optimizer.state_dict()))
        except UnsupportedError as error:
            refused.append(str(error))

    for number in range(STEPS_COUNT):
        loss_of(model, number).backward()
        with BetweenLines(look, every=every):
            problem = ""
            try:
                optimizer.step()
            except UnsupportedError as error:
                problem = str(error)
            optimizer.zero_grad()
        if problem:
            # A look right before the step has discarded the updates of its backward.
            assert overlap == "backward"
            assert "Call optimizer.zero_grad() and begin the step again" in problem
            step(model, optimizer, number)
        look()
    states = [state for state, _ in expected]
    assert len(seen) >= STEPS_COUNT
    assert all(any(equal(one, state) for state in states) for one in seen)
    assert refused
    assert "set a flag there" in refused[0]
    assert equal(state_of(optimizer.state_dict()), states[-1])
    assert equal(list(model.parameters()), expected[-1][1])


@pytest.mark.parametrize("every", support.sizes(small=61, whole=7))
def test_a_look_while_a_backward_updates_is_of_the_last_step_or_refused(
    every: int, tmp_path: Path
) -> None:
    """It discards the updates, as every look at the state does: step() says so."""
    expected, _ = moments()[0]
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    ssdtrain.offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="256KiB")
    seen, refused = [], []

    def look() -> None:
        try:
            seen.append(state_of(optimizer.state_dict()))
        except UnsupportedError as error:
            refused.append(str(error))

    with BetweenLines(look, every=every):
        loss_of(model, 0).backward()
    assert seen
    assert all(equal(one, expected) for one in seen)
    assert refused
    assert all("set a flag there" in one for one in refused)
    optimizer.zero_grad()
    step(model, optimizer, 0)
    assert equal(state_of(optimizer.state_dict()), moments()[1][0])


@pytest.mark.parametrize("every", support.sizes(small=499, whole=97))
def test_a_checkpoint_in_a_handler_is_of_one_moment_or_refused(every: int, tmp_path: Path) -> None:
    expected = moments()
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    largest_bytes = 4 * WIDTH * WIDTH
    ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes=largest_bytes)
    ssdtrain.offload_optimizer(optimizer, tmp_path, buffer_bytes="256KiB")
    saved, refused = [], []

    def save() -> None:
        try:
            ssdtrain.save(tmp_path / "checkpoint", model, optimizer)
        except UnsupportedError as error:
            refused.append(str(error))
            return
        other = layers()
        other_optimizer = torch.optim.AdamW(other.parameters())
        ssdtrain.load(tmp_path / "checkpoint", other, other_optimizer)
        state = state_of(other_optimizer.state_dict())
        saved.append((state, [one.detach().clone() for one in other.parameters()]))

    with BetweenLines(save, every=every):
        for number in range(STEPS_COUNT):
            step(model, optimizer, number)
    for state, weights in saved:
        assert any(equal(state, one) and equal(weights, other) for one, other in expected)
    assert saved
    assert refused
    assert equal(state_of(optimizer.state_dict()), expected[-1][0])
    assert equal(list(model.parameters()), expected[-1][1])
