"""Weights and gradients on memory that torch has from somebody else, who changes it past torch.

Such are arrays of numpy, DLPack, and memory that processes share. What changes there before
``step()`` counts, as in the plain run, and what is looked at after it is the updated weight.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter

import support
from ssdtrain import UnsupportedError, offload_optimizer
from trained import WIDTH, everything, model

Array = NDArray[np.float32]
SCHEDULES = ["step", "backward"]
STEPS = 4


def offloaded(params: Any, place: Path | None, overlap: str, **options: Any) -> Any:
    """Return an optimizer of these, offloaded if there is a place."""
    optimizer = torch.optim.AdamW(params, weight_decay=0.1, **options)
    if place is not None:
        offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
    return optimizer


def backward(module: nn.Module, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()


def by_numpy(array: Array) -> Tensor:
    return torch.from_numpy(array)


def by_dlpack(array: Array) -> Tensor:
    return torch.from_dlpack(array)


def with_gradients_in_arrays(
    place: Path | None, overlap: str, given: Callable[[Array], Tensor]
) -> dict[str, Tensor]:
    """Train with gradients in arrays, that are clipped there and used again."""
    module = model()
    optimizer = offloaded(module.parameters(), place, overlap)
    arrays = {one: np.zeros(tuple(one.shape), np.float32) for one in module.parameters()}
    for seed in range(STEPS):
        for param, array in arrays.items():
            param.grad = given(array)
        backward(module, seed)
        for array in arrays.values():
            np.clip(array, -1e-4, 1e-4, out=array)
        optimizer.step()
        for array in arrays.values():
            array.fill(0)
    return everything(module, optimizer)


@pytest.mark.defends("gradients on memory of others are used in step()")
@pytest.mark.parametrize("given", [by_numpy, by_dlpack])
@pytest.mark.parametrize("overlap", SCHEDULES)
def test_gradients_in_arrays(
    overlap: str, given: Callable[[Array], Tensor], tmp_path: Path
) -> None:
    expected = with_gradients_in_arrays(None, overlap, given)
    support.assert_equal_bits(with_gradients_in_arrays(tmp_path, overlap, given), expected)


class InArray(torch.autograd.Function):
    """Gives autograd a gradient that lies in an array."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, array: Array) -> Tensor:
        ctx.array = array
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.array[...] = gradient.numpy()
        return torch.from_numpy(ctx.array), None


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_gradients_that_a_node_gives_in_arrays(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        torch.manual_seed(0)
        weights = [Parameter(torch.randn(512, 512)) for _ in range(4)]
        arrays = [np.zeros((512, 512), np.float32) for _ in weights]
        optimizer = offloaded(weights, place, overlap)
        for _ in range(STEPS):
            loss = sum(
                InArray.apply(weight, array).square().sum()  # type: ignore[no-untyped-call]
                for weight, array in zip(weights, arrays, strict=True)
            )
            loss.backward()
            for array in arrays:
                np.multiply(array, 0.5, out=array)
            optimizer.step()
            optimizer.zero_grad()
        told.append({str(number): one.detach().clone() for number, one in enumerate(weights)})
    support.assert_equal_bits(*told)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_gradients_that_another_process_changes(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        optimizer = offloaded(module.parameters(), place, overlap)
        for seed in range(STEPS):
            for param in module.parameters():
                param.grad = torch.zeros_like(param).share_memory_()
            begin, begun = os.pipe()
            child = os.fork()
            if not child:
                # In this process nobody but the parameters has the gradients.
                os.read(begin, 1)
                for param in module.parameters():
                    assert param.grad is not None
                    array = param.grad.numpy()
                    np.clip(array, -1e-4, 1e-4, out=array)
                os._exit(0)
            backward(module, seed)
            os.write(begun, b"1")
            assert os.waitpid(child, 0)[1] == 0
            os.close(begin)
            os.close(begun)
            optimizer.step()
            optimizer.zero_grad()
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_weights_in_arrays_that_are_read_and_changed_after_a_step(
    overlap: str, tmp_path: Path
) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        arrays = {}
        for name, param in module.named_parameters():
            arrays[name] = param.detach().numpy().copy()
            param.data = torch.from_numpy(arrays[name])
        optimizer = offloaded(module.parameters(), place, overlap)
        seen = {}
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            for name, array in arrays.items():
                seen[f"{name} {seed}"] = torch.from_numpy(array.copy())
                np.multiply(array, 0.99, out=array)
            optimizer.zero_grad()
        told.append(everything(module, optimizer) | seen)
    support.assert_equal_bits(*told)


@pytest.mark.parametrize(
    ("overlap", "offset"), [("step", 0), ("step", 200), ("step", 700), ("backward", 700)]
)
def test_weights_that_are_windows_of_one_array(overlap: str, offset: int, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        array = np.random.default_rng(0).standard_normal((1600, 400), np.float32)
        rows = 600
        weights = [
            Parameter(torch.from_numpy(array[first : first + rows])) for first in (0, offset)
        ]
        weights.append(Parameter(torch.from_numpy(array[1400:])))
        optimizer = offloaded(weights, place, overlap)
        seen = {}
        for number in range(STEPS):
            sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            seen[str(number)] = weights[0].detach().clone()
            optimizer.zero_grad()
        told.append({"array": torch.from_numpy(array.copy()), **seen})
    support.assert_equal_bits(*told)


def beta_in_place(group: dict[str, Any]) -> None:
    group["betas"][0].fill_(0.5)


def nested_in_place(group: dict[str, Any]) -> None:
    group["extra"]["list"][0][0] *= 0.5


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_options_that_are_arrays(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model()
        betas: Any = np.array([0.9, 0.99])
        optimizer = offloaded(module.parameters(), place, overlap, betas=betas)
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            optimizer.zero_grad()
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


def with_options(place: Path | None, overlap: str) -> tuple[nn.Module, Any]:
    module = model()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = torch.optim.AdamW(module.parameters(), betas=betas, foreach=False)  # type: ignore[arg-type]
    optimizer.param_groups[0]["extra"] = {"list": [[1.0]], "tensor": torch.ones(2)}
    if place is not None:
        offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
    return module, optimizer


@pytest.mark.parametrize("change", [beta_in_place, nested_in_place])
def test_options_in_containers_that_change_after_backward_raise(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    module, optimizer = with_options(tmp_path, "backward")
    backward(module, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(module, 1)
    change(optimizer.param_groups[0])
    with pytest.raises(UnsupportedError, match=r"param_groups\[0\]\['(betas|extra)'\] was changed"):
        optimizer.step()
    optimizer.zero_grad()
    backward(module, 1)
    optimizer.step()


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_options_in_containers_that_change_after_a_step(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module, optimizer = with_options(place, overlap)
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            optimizer.param_groups[0]["betas"][0].mul_(0.9)
            optimizer.zero_grad()
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_gradients_of_another_dtype(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        module = model().to(torch.bfloat16)
        for param in module.parameters():
            if not hasattr(param, "grad_dtype"):
                pytest.skip("this torch gives each gradient the dtype of its parameter")
            param.grad_dtype = torch.float32
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap, buffer_bytes="1MiB")  # type: ignore[arg-type]
        for seed in range(STEPS):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            module(x.bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        told.append(everything(module, optimizer))
    support.assert_equal_bits(*told)


@pytest.mark.parametrize("overlap", SCHEDULES)
def test_backwards_of_several_threads(overlap: str, tmp_path: Path) -> None:
    told = []
    for place in (None, tmp_path):
        modules = [model() for _ in range(3)]
        params = [one for module in modules for one in module.parameters()]
        optimizer = offloaded(params, place, overlap)
        for seed in range(STEPS):
            threads = [
                threading.Thread(target=backward, args=(module, seed + number))
                for number, module in enumerate(modules)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        told.append(
            {
                f"{number} {name}": one
                for number, module in enumerate(modules)
                for name, one in module.state_dict().items()
            }
        )
    support.assert_equal_bits(*told)
