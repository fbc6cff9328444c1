"""CUDA graphs: a stream that captures only takes note, and its graph does it when launched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fake_device import FakeDevice
from on_fake import on_fake_device


@on_fake_device()
def test_training_step_as_a_graph(fake: FakeDevice) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
    inputs = torch.zeros(4, 8, device="cuda")

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(inputs).square().sum(), list(model.parameters())))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    inputs.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, gradients()))


@on_fake_device()
def test_graph_among_other_work(fake: FakeDevice) -> None:
    """What a graph touches takes part in the order of things."""
    tensor, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    torch.cuda.synchronize()
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.mul_(2)
    (race,) = fake.races()
    assert race.startswith("aten::mul_ writes bytes that aten::add_ writes, and nothing orders")


@pytest.mark.parametrize("forbidden", ["stream", "device", "query"])
@on_fake_device()
def test_forbidden_calls_in_a_capture(fake: FakeDevice, forbidden: str) -> None:
    function = {
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "device": torch.cuda.synchronize,
        "query": lambda: torch.cuda.current_stream().query(),
    }[forbidden]
    tensor, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(RuntimeError, match="CAPTURE_UNSUPPORTED"):
                function()

    with pytest.raises(RuntimeError, match="CAPTURE_INVALIDATED"):
        capture()
    assert tensor.add(1).cpu().eq(2).all()
