"""Handlers of signals, ``__del__`` and callbacks of weak references that look at weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import support
from moments import BetweenLines
from ssdtrain.errors import UnsupportedError
from weights_away import layers, numbered, offloaded, squared


@pytest.mark.parametrize("every", support.sizes(small=41, whole=7))
def test_a_look_within_a_step_sees_a_weight_before_or_after_it(every: int, tmp_path: Path) -> None:
    def trained(model: nn.Module) -> list[dict[str, Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = [copies(model)]
        for number in range(2):
            squared(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(copies(model))
        return found

    expected = trained(layers(4))
    model = offloaded(layers(4), tmp_path)

    def look() -> None:
        for name, one in model.named_parameters():
            seen = one.detach()
            assert any(torch.equal(seen, moment[name]) for moment in expected), name

    with BetweenLines(look, every=every) as between:
        found = trained(model)
    assert between.call_count > 10
    for one, other in zip(found, expected, strict=True):
        support.assert_equal_bits(one, other)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_a_handler_that_changes_a_weight_on_its_way_is_refused(tmp_path: Path) -> None:
    model = offloaded(layers(4), tmp_path)
    refused = []

    def change() -> None:
        with torch.no_grad():
            for one in model.parameters():
                try:
                    one.mul_(1)
                except UnsupportedError as error:
                    refused.append(str(error))

    with BetweenLines(change, every=3), torch.no_grad():
        model(numbered(1, 4, model[0].in_features))
    assert "set a flag there" in refused[0]


@pytest.mark.parametrize("every", support.sizes(small=41, whole=7))
def test_a_forward_between_any_two_lines_runs_or_is_refused(every: int, tmp_path: Path) -> None:
    def trained(model: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            squared(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return copies(model)

    plain = layers(4)
    expected = trained(plain)
    model = offloaded(layers(4), tmp_path)
    outcomes = []

    def forward() -> None:
        try:
            with torch.no_grad():
                squared(model, 7)
        except UnsupportedError as error:
            outcomes.append("refused" if "set a flag there" in str(error) else str(error))
        else:
            outcomes.append("served")

    with BetweenLines(forward, every=every):
        found = trained(model)
    assert set(outcomes) == {"refused", "served"}
    support.assert_equal_bits(found, expected)
    assert torch.equal(squared(model, 7), squared(plain, 7))
