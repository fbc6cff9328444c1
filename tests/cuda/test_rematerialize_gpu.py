"""Tensors of a GPU that are made again from others, on a device whose order is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from offloading import All, Everything, made, offloaded, use_memory
from on_devices import Device, on_each_device
from support import Patient

STEPS = 16


def gated(leaf: Tensor) -> Tensor:
    """Return the sum of a chain of gated products."""
    x = torch.sin(leaf)
    for _ in range(6):
        gate = torch.sin(x * 1.01)
        x = torch.cos(gate) * gate
    return x.square().sum()


def gradient(loss_of: Callable[[], Tensor], leaf: Tensor) -> Tensor:
    leaf.grad = None
    loss_of().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad.cpu()


@on_each_device()
def test_all_that_can_be_is_made_again_from_the_first_step(device: Device) -> None:
    leaf = made(0)
    expected = gradient(lambda: gated(leaf), leaf)
    with offloaded(rematerialize="always") as session:
        for _ in range(3):
            assert torch.equal(gradient(lambda: gated(leaf), leaf), expected)
            use_memory(leaf, 4)
    torch.cuda.synchronize()
    assert session.stats.bytes_rematerialized > 0


@on_each_device()
def test_recipes_are_proved_and_used_in_rounds_that_are_followed_in_parts(device: Device) -> None:
    leaf = made(0)
    expected = gradient(lambda: gated(leaf), leaf)
    seen = []
    with offloaded(Patient(), rematerialize="auto") as session:
        for _ in range(STEPS):
            assert torch.equal(gradient(lambda: gated(leaf), leaf), expected)
            torch.cuda.synchronize()
            seen.append(session.stats.bytes_rematerialized)
    assert seen[0] == 0, "a recipe was used unproved"
    assert seen[-1] > seen[-2] > seen[-3], "rounds that are followed in parts use no recipe"


class Rounded(torch.autograd.Function):
    """Makes numbers narrow; no recipe can repeat a function of the user."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.float()


def widened(leaf: Tensor) -> Tensor:
    """Return the sum of a chain of casts, whose sources nobody saves."""
    x = leaf
    for _ in range(4):
        x = torch.sin(Rounded.apply(x).float())
    return x.square().sum()


@on_each_device()
def test_casts_are_made_from_narrow_copies(device: Device) -> None:
    leaf = made(0)
    expected = gradient(lambda: widened(leaf), leaf)
    seen = []
    with offloaded(Patient(), rematerialize="auto") as session:
        for _ in range(STEPS):
            assert torch.equal(gradient(lambda: widened(leaf), leaf), expected)
            use_memory(leaf, 4)
            torch.cuda.synchronize()
            seen.append(session.stats.bytes_rematerialized)
    assert seen[0] == 0, "a recipe was used unproved"
    # `square` saves a result of `sin`, which is made from the last cast.
    made_bytes = 4 * leaf.nbytes
    assert seen[-1] - seen[-2] >= made_bytes
    assert session.stats.recipes_differing_count == 0


def train_beside(device: Device, loss_of: Callable[..., Tensor], *, held: int) -> None:
    """Train while the main stream (0) or the side stream (1) is held in backward."""
    leaf = made(0)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]

    def loss() -> Tensor:
        return loss_of(leaf, *streams)

    expected = gradient(loss, leaf)
    policy = Everything()
    policy.keep = All()
    with offloaded(policy, rematerialize="always") as session:
        for _ in range(3):
            leaf.grad = None
            found = loss()
            device.hold(streams[held])
            found.backward()  # type: ignore[no-untyped-call]
            use_memory(leaf, 8)
            device.release()
            del found
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.cpu(), expected)
        torch.cuda.synchronize()
    assert session.stats.bytes_rematerialized > 0


@pytest.mark.defends("bytes that are made on another stream")
@on_each_device()
def test_a_second_stream_makes_its_own(device: Device) -> None:
    def loss_of(leaf: Tensor, main: torch.cuda.Stream, side: torch.cuda.Stream) -> Tensor:
        gate = torch.sin(leaf)
        both = torch.cos(gate) * gate
        first = torch.sin(both)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            on_side = torch.cos(both)
        # Its backward comes first, and makes the tensor on the main stream.
        last = torch.exp(both) * both
        main.wait_stream(side)
        on_side.record_stream(main)
        return (first + on_side + last).sum()

    train_beside(device, loss_of, held=0)


@pytest.mark.defends("sources that another stream uses")
@on_each_device()
def test_a_source_is_not_used_again_while_another_stream_makes_a_tensor_from_it(
    device: Device,
) -> None:
    def loss_of(leaf: Tensor, main: torch.cuda.Stream, side: torch.cuda.Stream) -> Tensor:
        source = leaf.cumsum(0)  # It has no recipe.
        twice = source * 2
        # The backward of these nodes allocates memory once that of the next has let the source go.
        beside = leaf
        for _ in range(6):
            beside = torch.sin(beside * 1.01)
        on_main = torch.sin(source)
        del source
        side.wait_stream(main)
        with torch.cuda.stream(side):
            on_side = torch.cos(twice)
        twice.record_stream(side)
        del twice
        main.wait_stream(side)
        on_side.record_stream(main)
        return on_main.sum() + on_side.sum() + beside.sum()

    train_beside(device, loss_of, held=1)
