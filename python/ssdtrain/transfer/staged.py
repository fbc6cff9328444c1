"""Memory of GPUs: the calls into torch for the compiled part.

Only this file and `device_bound.py` call `torch.cuda`. Streams are handles (`cuda_stream`), GPUs
are torch's numbers.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, UntypedStorage, distributed

from ssdtrain._core import Gpus, Store
from ssdtrain.machine.torch_internals import current_stream
from ssdtrain.planning.policy import PAGE_BYTES, Copies
from ssdtrain.transfer.direct import DirectWay

__all__ = ["OnGpus", "copy_rates", "gpus_of", "on_gpus", "use_here"]

DOWN_SHARE = 0.75
"""Share of the pinned memory for writes: they wait for the disk, and a load only for the GPU."""


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """The figures of all GPUs of a session; sizes in bytes, times in seconds."""

    pinned_bytes: int = 0
    staying_bytes: int = 0
    from_gpu_bytes: int = 0
    to_gpu_bytes: int = 0
    from_gpu_s: float = 0.0
    to_gpu_s: float = 0.0
    full_gpu_wait_s: float = 0.0
    full_disk_wait_s: float = 0.0
    full_stayed_count: int = 0
    away_bytes_peak: int = 0
    device_bytes_peak: int = 0
    device_bound_bytes: int = 0
    device_excess_bytes: int = 0
    ring_bytes: int = 0
    direct_written_bytes: int = 0
    direct_read_bytes: int = 0


def on_gpus(gpus: Gpus | None, direct: DirectWay) -> OnGpus:
    """Return the figures of all GPUs under the names of `Stats`."""
    if gpus is None:
        return OnGpus()
    from_gpu_bytes, to_gpu_bytes = gpus.copied_bytes()
    from_gpu_s, to_gpu_s = gpus.copy_seconds()
    direct_written_bytes, direct_read_bytes = direct.direct_bytes()
    full_gpu_wait_s, full_disk_wait_s, full_stayed_count = gpus.full_ring()
    peaks = gpus.away_bytes_peaks()
    return OnGpus(
        pinned_bytes=gpus.pinned_bytes()[0],
        staying_bytes=gpus.staying_bytes(),
        from_gpu_bytes=from_gpu_bytes,
        to_gpu_bytes=to_gpu_bytes,
        from_gpu_s=from_gpu_s,
        to_gpu_s=to_gpu_s,
        full_gpu_wait_s=full_gpu_wait_s,
        full_disk_wait_s=full_disk_wait_s,
        full_stayed_count=full_stayed_count,
        away_bytes_peak=sum(nbytes for _, nbytes in peaks),
        device_bytes_peak=sum(torch.cuda.max_memory_allocated(gpu) for gpu, _ in peaks),
        ring_bytes=gpus.ring_bytes()[0],
        direct_written_bytes=direct_written_bytes,
        direct_read_bytes=direct_read_bytes,
    )


def use_here(tensor: Tensor) -> None:
    """Tell torch's allocator that the stream which is current here uses a tensor of a GPU."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def copy_rates(gpus: Gpus | None) -> dict[int, Copies]:
    """Return the recent rates of copies of each GPU; an unknown rate is infinite."""
    rates = [] if gpus is None else gpus.copy_rates()
    return {
        gpu: Copies(down or math.inf, up or math.inf, longest_bytes)
        for gpu, down, up, longest_bytes in rates
    }


def gpus_of(
    store: Store,
    pinned_bytes: int,
    tier_bytes_max: int,
    lock: threading.RLock,
    direct: DirectWay,
) -> Gpus | None:
    """Return the GPUs of a session, or ``None`` where torch was built without CUDA.

    A thread that waits for a GPU lets go of the session's ``lock`` meanwhile.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return None
    down_bytes = int(pinned_bytes * DOWN_SHARE)
    up_bytes = pinned_bytes - down_bytes
    gpus = Gpus(
        store,
        lock=lock,
        down_bytes=down_bytes,
        up_bytes=up_bytes,
        # A GPU's memory is scarce, and its drive is not behind a second copy. So the longest tensor
        # is that of pinned memory.
        ring_bytes=up_bytes,
        # Whole pages are pinned.
        tier_bytes_max=tier_bytes_max // PAGE_BYTES * PAGE_BYTES,
        choose_direct=direct.choose,
        direct_refused=direct.refuse,
        current_stream=current_stream,
        stream_object=_stream,
        allocate=_allocate,
        out_of_memory=torch.OutOfMemoryError,
        may_pin_now=_may_pin_now,
    )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Else at the first tensor: to ask would initialise a GPU that the program may not use.
        direct.expect(torch.cuda.current_device())
    return gpus


def _may_pin_now() -> bool:
    """Return whether memory may be pinned within a step: it may wait for collectives of others."""
    return not (distributed.is_available() and distributed.is_initialized())


@cache
def _device(gpu: int) -> torch.device:
    return torch.device("cuda", gpu)


@cache
def _stream(gpu: int, handle: int) -> torch.cuda.Stream:
    if handle == 0:
        # For this number, ExternalStream of torch 2.11 is a stream of its own.
        return torch.cuda.default_stream(gpu)
    return torch.cuda.ExternalStream(handle, device=gpu)  # type: ignore[no-untyped-call]


def _allocate(gpu: int, handle: int, nbytes: int) -> UntypedStorage:
    """Allocate memory for a stream that need not be the current one."""
    if current_stream(gpu) == handle:
        return UntypedStorage(nbytes, device=_device(gpu))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(_stream(gpu, handle)):
        return UntypedStorage(nbytes, device=_device(gpu))  # type: ignore[no-untyped-call]
