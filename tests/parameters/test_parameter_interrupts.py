"""An interrupt (Ctrl-C) at any moment ends what goes on, and no weight is lost or changed by it."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from moments import AtCall, AtLoop, interrupt
from ssdtrain import TensorStore
from stores import SlowStore
from support import sizes, wait_until
from weights_away import (
    WIDTH,
    away,
    layers,
    leave,
    numbered,
    offloaded,
    return_everything,
    squared,
    unique,
)

COUNT = 5
BOUND_BYTES = 2 * WIDTH * WIDTH * 4
MOMENTS = [(AtCall, 400), (AtLoop, 20)]
"""With how many of them there are in a step at least."""
EVERY = sizes(small=101, whole=3)
"""Of how many moments one is tried."""


def step(model: Any, values: list[Tensor]) -> dict[str, Tensor]:
    """Change some weights, use all, and look at some: the same each time, however it began."""
    model.zero_grad()
    with torch.no_grad():
        model[1].weight.copy_(values[0])
    model[3].weight.data = values[1].clone()
    loss = squared(model, 1)
    loss.backward()
    found = support.gradients(model)
    held = model[0].weight.detach()
    with torch.no_grad():
        model[1].weight.copy_(values[1])
        found["out"] = model(numbered(2, 3, WIDTH))
    return {**found, "loss": loss.detach(), "first": held.clone()}


def assert_consistent(model: nn.Module) -> None:
    """The figures say what there is: no weight is counted twice, or not at all."""
    stats = ssdtrain.parameter_stats(model)
    attached = set(unique(model)) - set(away(model))
    in_memory_bytes = sum(model.get_parameter(name).nbytes for name in attached)
    assert in_memory_bytes <= stats.resident_bytes <= stats.total_bytes
    assert stats.on_disk_bytes + stats.resident_bytes == stats.total_bytes


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("at", "least_count"), MOMENTS)
def test_an_interrupt_at_any_moment(
    at: type[AtCall | AtLoop], least_count: int, every: int, tmp_path: Path
) -> None:
    values = [numbered(number, WIDTH, WIDTH) / WIDTH for number in range(2)]
    plain = layers(COUNT)
    expected = step(plain, values)
    assert step(plain, values).keys() == expected.keys()
    with TensorStore(tmp_path, verify=True) as store:
        for number in itertools.count(step=every):
            model = offloaded(layers(COUNT), store, BOUND_BYTES)
            try:
                with at(number, interrupt) as signalled:
                    found = step(model, values)
            except KeyboardInterrupt:
                found = None
            # Lost would be: it came, and the step went on to its end.
            assert signalled.came == (found is None), f"the interrupt at {number} was lost"
            for _ in range(2):
                support.assert_equal_bits(step(model, values), expected)
                assert_consistent(model)
            support.assert_nothing_is_on()
            assert ssdtrain.parameter_stats(model).resident_bytes <= BOUND_BYTES
            del model
            if found is not None:
                break
        return_everything(store)
    assert number > least_count
    support.assert_equal_bits(found, expected)


@pytest.mark.parametrize("every", EVERY)
def test_an_interrupt_in_the_call_leaves_a_model_that_works(every: int, tmp_path: Path) -> None:
    expected = squared(layers(COUNT), 1)
    with TensorStore(tmp_path) as store:
        for number in itertools.count(step=every):
            model = layers(COUNT)
            try:
                with AtCall(number, interrupt) as signalled:
                    ssdtrain.offload_parameters(model, store, max_resident_bytes=BOUND_BYTES)
            except KeyboardInterrupt:
                assert not away(model), "it is as it was"
                assert torch.equal(squared(model, 1), expected)
                offloaded(model, store, BOUND_BYTES)
            assert torch.equal(squared(model, 1), expected)
            assert torch.equal(squared(model, 1), expected)
            del model
            if not signalled.came:
                break
        return_everything(store)
    assert number > 50


def test_an_interrupt_while_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    main = threading.get_ident()
    with SlowStore(tmp_path) as store:
        model = offloaded(layers(), store)
        expected = layers()
        weight = leave(model, "2.weight")
        store.disk.pause()

        def press() -> None:
            wait_until(
                lambda: bool({"end", "result"} & support.functions_of(main)), "a wait for the disk"
            )
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            weight.sum()
        presser.join()
        store.disk.resume()
        for number in range(3):
            assert torch.equal(squared(model, number), squared(expected, number))
        assert_consistent(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["pre", "in", "after", "inside"])
def test_an_error_in_the_midst_of_a_forward(place: str, error: Any, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise error("of the user")

    model: Any = offloaded(layers(), tmp_path)
    expected = layers()
    handle = None
    if place == "pre":
        handle = model[5].register_forward_pre_hook(fail)
    elif place == "after":
        handle = model[5].register_forward_hook(fail)
    else:
        model[5].forward = fail if place == "in" else lambda x: fail(model[6](x))
    with pytest.raises(error, match="of the user"):
        squared(model, 1)
    if handle is not None:
        handle.remove()
    else:
        del model[5].forward
    # What is made outside of modules does not care, and the next forward takes all off.
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    for number in range(2):
        loss, plainly = squared(model, number), squared(expected, number)
        loss.backward()
        plainly.backward()
        support.assert_equal_bits(support.gradients(model), support.gradients(expected))
    support.assert_nothing_is_on()
    with torch.no_grad():
        squared(model, 1)
    gc.collect()
    assert_consistent(model)
    assert ssdtrain.parameter_stats(model).resident_bytes <= BOUND_BYTES


class Catching(nn.Module):
    """A parent that catches what goes wrong in a child, and goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers()
        self.own = nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            try:
                x = part(x if number % 3 else x[:, :5])
            except RuntimeError:
                x = torch.tanh(x @ self.own)
        return x


def test_an_error_that_a_parent_catches(tmp_path: Path) -> None:
    expected, model = Catching(), offloaded(Catching(), tmp_path)
    for number in range(3):
        for one in (expected, model):
            one.zero_grad()
            squared(one, number).backward()
        support.assert_equal_bits(support.gradients(model), support.gradients(expected))
    support.assert_nothing_is_on()


def test_a_backward_that_is_given_up(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of the user")

    with TensorStore(tmp_path) as store:
        model: Any = offloaded(layers(), store)
        expected = layers()
        handle = model[3].register_full_backward_hook(fail)
        loss = squared(model, 1)
        with pytest.raises(ValueError, match="of the user"):
            loss.backward()
        handle.remove()
        del loss
        loss = squared(model, 1)
        del loss
        model.zero_grad()
        for number in range(2):
            squared(model, number).backward()
            squared(expected, number).backward()
        support.assert_equal_bits(support.gradients(model), support.gradients(expected))
        support.assert_nothing_is_on()
        assert ssdtrain.parameter_stats(model).resident_bytes <= BOUND_BYTES
        del model, handle
        return_everything(store)
