"""Arguments of a step, a scaler that a step is given, and hooks on steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import support
from ssdtrain import offload_optimizer
from stepped import OVERLAPS, backward, trained
from trained import everything, model


class Scaled(torch.optim.SGD):
    """Takes more than a closure, at any place."""

    def step(self, scale: float = 1.0, *, sign: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * scale * sign
        return super().step()


def test_a_step_takes_what_its_own_takes(tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer: Any = Scaled(module.parameters(), lr=0.1, momentum=0.9)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path)
        for given, named in [
            ((), {}),
            ((0.5,), {}),
            ((0.25,), {"sign": -1.0}),
            ((), {"scale": 2.0}),
        ]:
            backward(module, 0)
            optimizer.step(*given, **named)
            optimizer.zero_grad()
        found.append(everything(module, optimizer))
        with pytest.raises(TypeError, match="positional argument"):
            optimizer.step(1.0, 2.0)
    support.assert_equal_bits(found[1], found[0])


class Unscaling(torch.optim.SGD):
    """Has a scaler given, and unscales by itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        scale = 1.0 if grad_scaler is None else grad_scaler.get_scale()
        for group in self.param_groups:
            group["lr"] = 0.1 / scale
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_a_scaler_gives_itself_to_a_step_that_takes_it(tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = Unscaling(module.parameters(), lr=0.1, momentum=0.9)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for seed in range(3):
            x = torch.randn(8, 160, generator=torch.Generator().manual_seed(seed))
            scaler.scale(module(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(1024.0)
            optimizer.zero_grad()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


class Calling(torch.optim.SGD):
    """Calls the step of a class in which torch has put its hooks, once one of it was made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_hooks_run_once_where_a_step_calls_that_of_its_base(overlap: Any, tmp_path: Path) -> None:
    torch.optim.SGD(model().parameters(), lr=0.1)
    calls = list[object]()
    module = model()
    optimizer = Calling(module.parameters(), lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, overlap=overlap, buffer_bytes="1MiB", per_parameter=True)
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    trained(module, optimizer, steps=2)
    assert len(calls) == 4
