"""What a session says of a GPU: its memory, the copies, and what limits them."""

from __future__ import annotations

import re

import torch

from offloading import chain, check, made, offloaded, settle
from on_devices import Device, on_each_device
from ssdtrain.commands.gpu import gpu_checks, gpu_facts

LARGE_RING = 16 << 20
COUNT = 20


@on_each_device()
def test_the_report_tells_of_the_gpu(device: Device) -> None:
    leaf = made(0)
    chain(leaf, COUNT).sum().backward()
    plain_peak = torch.cuda.max_memory_allocated()
    leaf.grad = None
    torch.cuda.reset_peak_memory_stats()
    with offloaded(pinned_bytes=LARGE_RING) as session:
        saved = chain(leaf, COUNT)
        settle(session)
        saved.sum().backward()
        torch.cuda.synchronize()
        # The last copies are counted once the worker has seen that they have ended.
        settle(session)
        stats = session.stats
        assert stats.away_bytes_peak == COUNT * leaf.nbytes
        assert stats.device_bytes_peak == torch.cuda.max_memory_allocated()
        assert plain_peak <= stats.device_bytes_peak + stats.away_bytes_peak
        assert (stats.from_gpu_bytes, stats.to_gpu_bytes) == (COUNT * leaf.nbytes,) * 2, str(stats)
        assert stats.from_gpu_s > 0
        assert stats.to_gpu_s > 0
        assert stats.limit in str(session)
    rows = (
        r"  GPU        1.2 MiB copied from it \(\S+ [KMG]iB/s\), 1.2 MiB back \(\S+ [KMG]iB/s\), "
        r"through 16 MiB of pinned memory\n"
        r"  GPU stalls \d+\.\d{3} s of waits for tensors on their way\n"
        r"  GPU peak   \S+ [KM]iB in tensors; up to 1.2 MiB more without offload\n"
        r"  limit      (compute|the (disk|PCIe).*)"
    )
    assert re.search(rows, str(session)), str(session)


@on_each_device()
def test_a_tensor_that_is_longer_than_its_way_is_told_with_both_sizes(device: Device) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=64 << 10) as session:
        chain(leaf, 8).sum().backward()
    check(leaf, 8)
    said = "it has 64 KiB, and at most 48 KiB of one tensor go to the disk here at once"
    assert said in str(session), str(session)


@on_each_device()
def test_loaded_tensors_are_not_away(device: Device) -> None:
    leaf = made(0)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        for _ in range(3):
            saved = chain(leaf, COUNT)
            settle(session)
            saved.sum().backward()
            del saved
        # Each step's tensors come back and die: the peak is that of one step.
        assert session.stats.away_bytes_peak == COUNT * leaf.nbytes


@on_each_device()
def test_the_doctor_sees_the_gpu(device: Device) -> None:
    facts = gpu_facts()
    assert facts.driver_cuda is not None
    (first, *_) = facts.devices
    assert first.name == torch.cuda.get_device_name(0)
    assert first.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert all(check.state == "OK" for check in gpu_checks(facts))
