"""A GPU without memory left: reads ahead give way, and what remains is torch's own error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from unittest import mock

import pytest
import torch

import ssdtrain
from fake_device import FakeDevice
from offloading import chain, check, let_backward_go, made, offloaded, refuse, settle
from on_fake import on_fake_device
from ssdtrain.transfer import staged

ELEMENTS = 1 << 20
"""4 MiB in float32: torch's allocator takes 20 MiB at once for such tensors."""
LARGE_RING = 256 << 20
COUNT = 20


def leave(nbytes: int) -> None:
    """Let torch take so many bytes of the GPU beyond what it has."""
    torch.cuda.empty_cache()
    allowed_bytes = torch.cuda.memory_reserved() + nbytes
    # A little more, for the rounding of the fraction.
    torch.cuda.set_per_process_memory_fraction(
        (allowed_bytes + 4096) / torch.cuda.get_device_properties(0).total_memory
    )


def rest_of_memory() -> Iterator[torch.Tensor]:
    """Take what torch has left."""
    with suppress(torch.OutOfMemoryError):
        while True:
            yield torch.empty(ELEMENTS, device="cuda")


def on_disk(session: ssdtrain.Session, leaf: torch.Tensor) -> torch.Tensor:
    saved = chain(leaf, COUNT)
    settle(session)
    return saved


@on_fake_device()
def test_a_read_ahead_that_finds_no_memory_comes_later(fake: FakeDevice) -> None:
    leaf, asked_count, allocate = made(0), 0, staged._allocate

    def allocated(gpu: int, handle: int, nbytes: int) -> torch.UntypedStorage:
        nonlocal asked_count
        asked_count += 1
        # The first is for what is needed, the next ones are for what is read ahead of it.
        if asked_count == 4:
            raise torch.OutOfMemoryError("no memory is left for this")
        return allocate(gpu, handle, nbytes)

    with (
        mock.patch.object(staged, "_allocate", allocated),
        offloaded(pinned_bytes=LARGE_RING) as session,
    ):
        saved = on_disk(session, leaf)
        saved.sum().backward()
        # Two had been read ahead, and were given up; nothing was asked for twice in a row.
        assert asked_count == COUNT + 3
        torch.cuda.synchronize()
        # The next backward reads ahead again.
        saved = on_disk(session, leaf)
        leaf.grad = None
        saved.sum().backward()
        assert asked_count == 2 * COUNT + 3
    check(leaf, COUNT)


@on_fake_device()
def test_a_needed_tensor_takes_the_memory_of_reads_ahead(fake: FakeDevice) -> None:
    leaf, other = made(0, ELEMENTS), made(0, ELEMENTS)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        first, second = chain(leaf, COUNT), chain(other, COUNT)
        middle = chain(first, 1)
        middle.register_hook(refuse)
        fails, works = torch.sin(middle).sum(), second.sum()
        del first, second, middle
        settle(session)
        with pytest.raises(RuntimeError, match="given up here"):
            fails.backward()
        # What its thread frees later would be room that nothing here counts with.
        let_backward_go()
        # All that could be left is held by what was read ahead of the first one.
        leave(0)
        held = list(rest_of_memory())
        ooms_count = torch.cuda.memory_stats()["num_ooms"]
        works.backward()
        assert torch.cuda.memory_stats()["num_ooms"] > ooms_count
        del held
        torch.cuda.set_per_process_memory_fraction(1.0)
    check(other, COUNT)


@on_fake_device()
def test_without_any_memory_the_error_is_torchs_own(fake: FakeDevice) -> None:
    leaf = made(0, ELEMENTS)
    with offloaded(pinned_bytes=LARGE_RING) as session:
        total = on_disk(session, leaf).sum()
        leave(0)
        held = list(rest_of_memory())
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            total.backward()
        del held
        torch.cuda.set_per_process_memory_fraction(1.0)
        # The next step works.
        chain(leaf, COUNT).sum().backward()
    check(leaf, COUNT)
