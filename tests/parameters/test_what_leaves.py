"""Each rule of when a weight may leave memory, and of what backward may take, by itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import support
from ssdtrain.away.known import in_use
from ssdtrain.parameters.weight import Weight
from ssdtrain.parameters.weights import weight_of
from weights_away import away, is_away, layers, leave, offloaded, squared, unique, use

NAME = "2.weight"


def one_here(directory: Path) -> tuple[Tensor, Weight]:
    """Return a weight that is in memory, and may leave."""
    model = offloaded(layers(), directory)
    param = model.get_parameter(NAME)
    use(param)
    assert not is_away(param)
    weight = weight_of(param)
    assert weight is not None
    return param, weight


def assert_leaves(param: Tensor, weight: Weight) -> None:
    assert weight.leave()
    assert is_away(param)
    assert torch.equal(param, layers().get_parameter(NAME))


@pytest.mark.defends("no weight leaves that others have")
def test_no_weight_leaves_that_others_have(tmp_path: Path) -> None:
    param, weight = one_here(tmp_path)
    held = param.detach()
    assert not weight.leave()
    assert held.data_ptr() == param.data_ptr()
    del held
    assert_leaves(param, weight)


@pytest.mark.defends("no weight leaves that is used")
def test_no_weight_leaves_that_is_used(tmp_path: Path) -> None:
    param, weight = one_here(tmp_path)
    with in_use([param]):
        assert not weight.leave()
    assert_leaves(param, weight)


@pytest.mark.defends("no weight leaves beside busy threads")
def test_no_weight_leaves_beside_a_busy_thread(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        while not over.is_set():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        begun.wait()
        with torch.no_grad():
            squared(model, 1)
        assert not away(model), "all were used, and none could leave"
    finally:
        over.set()
        thread.join()
    with torch.no_grad():
        squared(model, 1)
    assert away(model)


@pytest.mark.defends("version of a saved weight")
def test_a_weight_that_a_graph_needs_is_not_changed(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    loss = squared(model, 1)
    with torch.no_grad():
        model.get_parameter(NAME).mul_(2)
    with pytest.raises(RuntimeError, match=support.IN_PLACE):
        loss.backward()


@pytest.mark.defends("other memory of a saved weight")
def test_a_weight_that_a_graph_needs_is_not_given_other_memory(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    loss = squared(model, 1)
    param = model.get_parameter(NAME)
    param.data = torch.zeros(param.shape)
    with pytest.raises(RuntimeError, match="was given other memory"):
        loss.backward()


@pytest.mark.defends("a changed weight is written again")
def test_a_change_that_no_counter_tells_is_kept(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    expected = layers().get_parameter(NAME) * 2
    weight = leave(model, NAME)
    weight.data.mul_(2)
    use(weight)
    assert torch.equal(leave(model, NAME), expected)


@pytest.mark.defends("weights on memory of others stay")
def test_a_weight_on_memory_of_numpy_stays_there(tmp_path: Path) -> None:
    model: nn.Module = offloaded(layers(), tmp_path)
    param: Any = model.get_parameter(NAME)
    array = np.zeros(param.shape, np.float32)
    param.data = torch.from_numpy(array)
    for number in range(3):
        with torch.no_grad():
            squared(model, number)
    assert set(unique(model)) - set(away(model)) >= {NAME}
    array[:] = 5
    assert torch.equal(param, torch.full(param.shape, 5.0))
