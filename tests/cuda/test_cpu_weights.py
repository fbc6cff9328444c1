"""Weights of the CPU on the disk, in a session whose activations are those of a GPU, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ssdtrain
from offloading import ELEMENTS, chain, made, offloaded, settle
from on_devices import Device, on_each_device

WIDTH = 128
WEIGHT_BYTES = WIDTH * WIDTH * 4
STEPS = 3


class Training:
    """A chain of operations on the GPU, and layers on the CPU behind it."""

    def __init__(self) -> None:
        self.leaf = made(0)
        torch.manual_seed(1)
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def forward(self) -> Tensor:
        x = chain(self.leaf, 8).cpu().view(ELEMENTS // WIDTH, WIDTH)
        return self.module(x).square().mean()

    def now(self) -> list[Tensor]:
        assert self.leaf.grad is not None
        params = list(self.module.parameters())
        states = [self.optimizer.state[param]["exp_avg"] for param in params]
        return [self.leaf.grad.cpu(), *(one.detach().clone() for one in [*params, *states])]


@on_each_device()
def test_weights_and_state_of_the_cpu_beside_activations_of_a_gpu(device: Device) -> None:
    plain, training = Training(), Training()
    for _ in range(STEPS):
        plain.forward().backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    with offloaded(max_resident_bytes=1 << 20) as session:
        ssdtrain.offload_parameters(training.module, session, max_resident_bytes=2 * WEIGHT_BYTES)
        ssdtrain.offload_optimizer(training.optimizer, session, buffer_bytes="256KiB")
        for _ in range(STEPS):
            loss = training.forward()
            settle(session)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        found = {one.name: one for one in session.stats.classes}
        assert list(found) == ["activations", "weights", "optimizer state"]
        assert all(one.bytes_read > 0 for one in found.values())
        assert found["weights"].on_disk_bytes >= 6 * WEIGHT_BYTES
        assert session.stats.resident_bytes_peak <= 1 << 20
        assert found["activations"].bytes_read >= STEPS * 8 * ELEMENTS * 4
    assert all(map(torch.equal, training.now(), plain.now()))
