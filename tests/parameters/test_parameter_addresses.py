"""Addresses of weights and gradients, which programs ask for first and read at later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ssdtrain
from weights_away import LEAVING_BYTES_MIN, away, layers, numbered, offloaded, squared, unique

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "only asked": lambda tensor: tensor,
    "computed before": lambda tensor: tensor.isnan().any(),
    "looked at through data": lambda tensor: tensor.data.norm(),
}
ALL = "a quarter of the weights", "the default bound"


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().data)


@pytest.mark.defends("looks let none leave that was in memory")
@pytest.mark.parametrize("bound", ALL)
def test_a_file_of_named_parameters_has_the_bytes_of_each(bound: str, tmp_path: Path) -> None:
    """safetensors asks for the addresses of all tensors, and reads there afterwards."""
    expected = {name: one.detach().clone() for name, one in layers().named_parameters()}
    model = layers()
    if bound == ALL[0]:
        offloaded(model, tmp_path)
    else:
        ssdtrain.offload_parameters(model, tmp_path)
    save_file(dict(model.named_parameters()), tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    with torch.no_grad():
        model(numbered(1, 4, model[0].in_features))
    stats = ssdtrain.parameter_stats(model)
    assert stats.resident_bytes < stats.total_bytes, "the next forward lets them leave"


@pytest.mark.parametrize("way", WAYS)
def test_each_address_is_of_its_own_weight_until_the_next_forward(way: str, tmp_path: Path) -> None:
    model = layers()
    expected = {name: as_bytes(one) for name, one in unique(model).items()}
    offloaded(model, tmp_path)
    found = {}
    for name, one in unique(model).items():
        WAYS[way](one)
        found[name] = one.data_ptr()
    assert len(set(found.values())) == len(found), "two weights have one address"
    # As clipping does: a look at many.
    torch._foreach_norm(list(model.parameters()))
    for name, address in found.items():
        assert bytes_at(address, len(expected[name])) == expected[name], name


def test_storages_of_weights_that_are_not_tied_lie_apart(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    found = [one.untyped_storage().data_ptr() for one in unique(model).values()]
    assert len(set(found)) == len(found)


@pytest.mark.defends("looks let none leave that was in memory")
def test_a_file_of_gradients_has_the_bytes_of_each(tmp_path: Path) -> None:
    def trained(model: nn.Module) -> dict[str, Tensor]:
        for number in range(2):
            squared(model, number).backward()
        return {
            name: one.grad
            for name, one in model.named_parameters()
            if one.grad is not None and one.nbytes >= LEAVING_BYTES_MIN
        }

    expected = trained(layers())
    model = layers()
    optimizer = torch.optim.SGD(model.parameters())
    largest_bytes = max(one.nbytes for one in model.parameters())
    ssdtrain.offload_optimizer(optimizer, tmp_path, max_gradient_bytes=2 * largest_bytes)
    save_file(trained(model), tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_looks_by_computing_take_the_memory_of_one_weight_more(tmp_path: Path) -> None:
    """Norms, histograms, averages: the weights leave again, whatever was used."""
    model = offloaded(layers(), tmp_path)
    bound = ssdtrain.parameter_stats(model).resident_bytes
    largest_bytes = max(one.nbytes for one in model.parameters())

    def looks() -> Iterator[object]:
        for one in model.parameters():
            yield one.norm().item()
            yield one.detach().clone()
            yield one.data.abs().max()
            yield one.float().std()

    for _ in looks():
        assert ssdtrain.parameter_stats(model).resident_bytes <= bound + largest_bytes
    assert away(model)
