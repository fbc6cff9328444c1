"""What fails on hardware too: the disk, room on it, memory, the GPU. Equal bits, or an error."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import ssdtrain
from checkout import SCRATCH
from offloading import Everything, chain, made, offloaded, settle
from on_devices import Device, on_each_device
from ssdtrain._core import SimulatedDisk
from ssdtrain.config import OffloadConfig, StoreConfig

COUNT = 12
RING = 4 << 20


def gradient(leaf: Tensor, session: ssdtrain.Session | None = None) -> Tensor:
    """One step, whose tensors leave the GPU before its backward as far as they can."""
    leaf.grad = None
    saved = chain(leaf, COUNT)
    if session is not None:
        session.flush()
    saved.sum().backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()


def session_on(
    store: StoreConfig, pinned_bytes: int = RING, gds: Literal["optional", "disabled"] = "optional"
) -> ssdtrain.Session:
    config = OffloadConfig(store=store, min_bytes=512, pinned_bytes=pinned_bytes, gds=gds)
    return ssdtrain.Session(config, Everything())


def simulated(**faults: float) -> StoreConfig:
    disk = SimulatedDisk(seed=1, **faults)
    return StoreConfig(dirs=(str(SCRATCH),), backend="simulated", simulated_disk=disk, verify=True)


@on_each_device()
def test_a_disk_that_takes_nothing(device: Device) -> None:
    leaf, plain = made(0), gradient(made(0))
    session = session_on(simulated(io_error_rate=1.0))
    with session.context():
        for _ in range(2):
            assert torch.equal(gradient(leaf, session), plain)
            assert session.stats.bytes_written == 0
    session.close()


@on_each_device()
def test_a_disk_that_changes_bits(device: Device) -> None:
    leaf, plain = made(0), gradient(made(0))
    session = session_on(simulated(bit_flip_rate=1.0))
    with session.context():
        for _ in range(2):
            saved = chain(leaf, COUNT)
            settle(session)
            with pytest.raises(ssdtrain.CorruptError):
                saved.sum().backward()
            del saved
    session.close()
    assert torch.equal(gradient(leaf), plain)


@on_each_device()
def test_a_disk_without_room(device: Device) -> None:
    leaf, plain = made(0), gradient(made(0))
    store = StoreConfig(dirs=(str(SCRATCH),), direct_io="optional", max_disk_bytes=3 * leaf.nbytes)
    session = session_on(store)
    with session.context():
        for _ in range(2):
            assert torch.equal(gradient(leaf, session), plain)
            assert session.stats.disk_reserved_bytes <= 3 * leaf.nbytes
    session.close()


@on_each_device()
def test_writes_beyond_the_bound_on_the_disk_are_counted(device: Device) -> None:
    leaf, plain = made(0), made(0)
    chain(plain, 5).sum().backward()
    store = StoreConfig(dirs=(str(SCRATCH),), direct_io="optional", max_disk_bytes=4096)
    # Room for three tensors on their way down, and each of them stays there for good.
    session = session_on(store, pinned_bytes=4 * leaf.nbytes, gds="disabled")
    with session.context():
        saved = chain(leaf, 3)
        session.flush()
        # Each call of the driver gives the worker its turn.
        while session.stats.write_refused_count < 3:
            torch.cuda.synchronize()
        # The rest finds no pinned memory, for the same reason.
        saved = chain(saved, 2)
        session.flush()
        assert session.stats.write_refused_count == 5
        saved.sum().backward()
        torch.cuda.synchronize()
        stats = session.stats
    session.close()
    assert stats.write_failed_count == 0
    assert "  bound      5 writes beyond max_disk_bytes not made" in str(stats)
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad)


@on_each_device()
def test_failed_writes_from_pinned_memory_are_counted(device: Device) -> None:
    leaf = made(0)
    session = session_on(simulated(io_error_rate=1.0))
    with session.context():
        saved = chain(leaf, 3)
        session.flush()
        while session.stats.write_failed_count < 3:
            torch.cuda.synchronize()
        saved.sum().backward()
    session.close()
    assert session.stats.write_refused_count == 0


@on_each_device()
def test_a_tensor_that_is_larger_than_the_pinned_memory(device: Device) -> None:
    leaf, plain = made(0), gradient(made(0))
    with offloaded(pinned_bytes=leaf.nbytes) as session:
        assert torch.equal(gradient(leaf, session), plain)
        assert session.stats.from_gpu_bytes == 0


@pytest.mark.defends("a source waits for its last part")
@on_each_device()
def test_a_tensor_that_is_larger_than_the_slots_of_its_way_back(device: Device) -> None:
    # Of several parts, with an event each: copies share one up to 8 MiB.
    leaf, plain = made(0, 6 << 20), made(0, 6 << 20)
    chain(plain, 8).sum().backward()
    assert plain.grad is not None
    with offloaded(pinned_bytes=2 * leaf.nbytes) as session:
        for seed in range(4):
            device.lag(2000 * (seed % 2), seed=seed)
            before = session.stats
            saved = chain(leaf, 8)
            # One after the other: a second finds no room.
            settle(session)
            leaf.grad = None
            saved.sum().backward()
            del saved
            device.lag(0)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.cpu(), plain.grad.cpu())
            assert session.stats.since(before).to_gpu_bytes >= leaf.nbytes
    assert device.races() == []


@on_each_device()
def test_a_gpu_without_memory_for_a_load(device: Device) -> None:
    leaf, plain = made(0), gradient(made(0))
    with offloaded(pinned_bytes=RING) as session:
        saved = chain(leaf, COUNT)
        settle(session)
        torch.cuda.empty_cache()
        # What is free in the allocator's own memory is taken, and it gets no more.
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(reserved / total_bytes())
        taken = take_all(leaf.nbytes)
        with pytest.raises(torch.OutOfMemoryError):
            saved.sum().backward()
        del saved, taken
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(gradient(leaf, session), plain)


def total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def take_all(nbytes: int) -> list[Tensor]:
    """Allocate until there is no more."""
    taken: list[Tensor] = []
    for size in (nbytes, 512):
        while True:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return taken


@on_each_device()
def test_a_kernel_that_fails(device: Device) -> None:
    leaf = made(0)
    table = torch.ones(4, 4, device="cuda")
    with offloaded() as session:
        saved = chain(leaf, COUNT)
        session.flush()
        torch.embedding(table, torch.tensor([1 << 20], device="cuda"))
        # The error lasts: nothing can be computed on this GPU any more, and nothing hangs.
        with pytest.raises((ssdtrain.CudaError, torch.AcceleratorError)):
            backward_of(saved)
        del saved


def backward_of(saved: Tensor) -> None:
    saved.sum().backward()
    torch.cuda.synchronize()
