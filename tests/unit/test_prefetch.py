"""Whether reads are begun before autograd asks; the order and the window are tested in Rust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain._core import SavedTensor
from support import Rig


def watching(rig: Rig, foreseen: list[bool]) -> saved_tensors_hooks:
    """Return hooks that note for each tensor that is asked for whether its read was begun."""
    pair: Any = rig.context()

    def unpack(packed: object) -> torch.Tensor:
        if isinstance(packed, SavedTensor):
            foreseen.append(packed.is_ahead)
        tensor: torch.Tensor = pair.unpack_hook(packed)
        return tensor

    return saved_tensors_hooks(pair.pack_hook, unpack)


@pytest.mark.parametrize("step_count", [1, 3])
def test_a_real_backward_is_foreseen(tmp_path: Path, step_count: int) -> None:
    rig = Rig(tmp_path)
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, *[torch.nn.Linear(64, 64), torch.nn.GELU()] * 3)
    for _ in range(step_count):
        foreseen: list[bool] = []
        with watching(rig, foreseen):
            loss = model(torch.randn(8, 64, requires_grad=True)).square().sum()
            rig.flush()
            loss.backward()
        assert len(foreseen) >= 8
        assert all(foreseen[1:]), foreseen


def test_a_gradient_penalty_is_foreseen_the_second_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.Tanh()] * 3)
    misses = []
    for _ in range(3):
        foreseen: list[bool] = []
        with watching(rig, foreseen):
            x = torch.randn(4, 32, requires_grad=True)
            out = model(x).sum()
            rig.flush()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            loss = out + slope.square().sum()
            rig.flush()
            loss.backward()
        misses.append(foreseen.count(False))
    assert misses[-1] <= misses[0]
    assert len(foreseen) > 10
    assert foreseen.count(True) > foreseen.count(False)
