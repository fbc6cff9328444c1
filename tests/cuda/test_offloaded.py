"""Training on GPUs with everything on its way to the disk gives the bits of a plain run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from torch import nn

from offloading import chain, check, made, offloaded
from on_devices import Device, on_each_device
from on_fake import SkippedError
from ssdtrain.activations.hooks import Hooks
from test_training import CASES, LAG_US, train

SMALL_RING, LARGE_RING = 256 << 10, 64 << 20
"""One that is full most of the time, and hides missing waits; and one that never is."""
TRIALS = int(os.environ.get("SSDTRAIN_TRIALS", "40"))
"""As many as fit into `make test-long`, half of them with lags; more of them by hand."""
TRIALS_OF_A_CHILD = 40


def same_as_plain(device: Device, case: str, trials: Iterable[int]) -> None:
    if case == "two devices" and torch.cuda.device_count() < 2:
        raise SkippedError("it needs two GPUs")
    plain = train(case)
    assert device.is_exact or all(map(torch.equal, plain, train(case))), "a plain run varies here"
    for trial in trials:
        device.lag(LAG_US if trial % 4 < 2 else 0, seed=trial + 1)
        ring = SMALL_RING if trial % 2 else LARGE_RING
        with offloaded(pinned_bytes=ring) as session:
            seen = train(case)
        device.lag(0)
        assert all(map(torch.equal, plain, seen)), f"trial {trial}"
        assert device.races() == [], f"trial {trial}"
        assert not device.waits_with_gil(), f"trial {trial}: {device.waits_with_gil()}"
        stats = session.stats
        assert stats.bytes_offloaded + stats.bytes_forwarded > 0


@pytest.mark.parametrize("case", ["mlp", "two streams", "two devices", "reentrant checkpoint"])
@on_each_device(devices=2)
def test_every_case_gives_the_bits_of_a_plain_run(device: Device, case: str) -> None:
    same_as_plain(device, case, range(4))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(TRIALS // TRIALS_OF_A_CHILD))
@pytest.mark.parametrize("case", CASES)
@on_each_device(devices=2)
def test_every_case_gives_the_bits_of_a_plain_run_often(
    device: Device, case: str, part: int
) -> None:
    same_as_plain(device, case, range(part * TRIALS_OF_A_CHILD, (part + 1) * TRIALS_OF_A_CHILD))


@on_each_device()
def test_a_graph_may_die_while_an_exception_is_on_its_way(device: Device) -> None:
    leaf = made(0)
    before = torch.cuda.memory_allocated()
    with offloaded() as session:
        for _ in range(3):
            with pytest.raises(ValueError, match="of the program"):
                torch.add(chain(leaf, 6).sum(), refused())
            session.flush()
    assert torch.cuda.memory_allocated() == before


def refused() -> None:
    raise ValueError("of the program")


@on_each_device()
def test_a_bound_counts_what_is_loaded_to_a_gpu(device: Device) -> None:
    leaf = made(0)
    bound = 8 * leaf.nbytes
    with offloaded(max_resident_bytes=bound) as session:
        for _ in range(3):
            chain(leaf, 30).sum().backward()
        torch.cuda.synchronize()
        assert leaf.nbytes < session.stats.resident_bytes_peak <= bound


@on_each_device()
def test_small_tensors_of_a_gpu_are_kept_without_python(device: Device) -> None:
    leaf = made(0, 64)
    with offloaded(), mock.patch.object(Hooks, "keep", side_effect=AssertionError):
        chain(leaf, 8).sum().backward()
    check(leaf, 8)


@on_each_device()
def test_frozen_weights_of_a_gpu_are_not_written(device: Device) -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda().requires_grad_(False)
    x = made(0, 64 * 8).view(8, 64).detach().requires_grad_()
    with offloaded(min_bytes=4096) as session:
        layers(x).sum().backward()
        torch.cuda.synchronize()
        assert session.stats.bytes_written == 0
        assert session.stats.resident_bytes_peak < layers[0].weight.nbytes
