"""Who holds a weight's memory keeps it there, live; what is dropped gives memory and disk back."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from ssdtrain import TensorStore
from weights_away import (
    WIDTH,
    Training,
    adamw,
    is_away,
    layers,
    leave,
    numbered,
    offloaded,
    plain_step,
    quarter,
    return_everything,
    squared,
    unique,
)

NAME = "2.weight"
HOLDS: dict[str, Callable[[Any], Any]] = {
    "detached": lambda weight: weight.detach(),
    "turned": lambda weight: weight.detach().t()[1:9],
    "numpy": lambda weight: weight.detach().numpy(),
    "its storage": lambda weight: weight.untyped_storage(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "a view in a graph": lambda weight: weight.view(-1),
}


def seen_of(held: Any, weight: Tensor) -> bool:
    """Whether what is held has the weight's bytes of now."""
    if isinstance(held, torch.UntypedStorage):
        return held.data_ptr() == weight.data_ptr()
    tensor = held if isinstance(held, Tensor) else torch.from_numpy(np.asarray(held))
    start = weight.data_ptr()
    return start <= tensor.data_ptr() < start + weight.nbytes


@pytest.mark.parametrize("hold", HOLDS)
def test_held_memory_stays_and_is_live(hold: str, tmp_path: Path) -> None:
    model, expected = offloaded(layers(), tmp_path), layers()
    held = HOLDS[hold](leave(model, NAME))
    plainly = HOLDS[hold](expected.get_parameter(NAME))
    weight = model.get_parameter(NAME)
    training = Training(model, adamw(model.parameters()), squared)
    plain = Training(expected, adamw(expected.parameters()), squared)
    for number in range(2):
        steps_of(number, training, plain)
        assert not is_away(weight), "somebody has its memory"
        assert seen_of(held, weight), "it is the weight's own memory, as in a plain model"
        assert raw(held) == raw(plainly)
    del held
    for number in range(2, 4):
        steps_of(number, training, plain)
    leave(model, NAME)
    support.assert_equal_bits(
        {name: one.detach().clone() for name, one in model.named_parameters()},
        dict(expected.named_parameters()),
    )


def steps_of(number: int, *trainings: Training) -> None:
    for training in trainings:
        training.seen.append({})
        plain_step(training, number)


def raw(held: Any) -> bytes:
    if isinstance(held, Tensor):
        return support.bits(held)
    return bytes(held) if isinstance(held, torch.UntypedStorage) else np.asarray(held).tobytes()


class Packed:
    """What a user's hooks put into a graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_graph_that_is_dropped_is_freed_at_once(goes_back: bool, tmp_path: Path) -> None:
    """Also one with parts to compute again: a collection of garbage sees no cycle through it."""
    model = offloaded(layers(), tmp_path)
    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        one = Packed(tensor)
        packed.append(weakref.ref(one))
        return one

    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda one: one.tensor):
            x = numbered(1, 2, WIDTH).requires_grad_()
            y = x
            for layer in model.children():
                y = checkpoint(layer, y, use_reentrant=False)
        assert any(one() is not None for one in packed)
        if goes_back:
            y.sum().backward()
        del y
        assert not any(one() is not None for one in packed)
    finally:
        gc.enable()


def test_a_state_dict_over_steps_is_live(tmp_path: Path) -> None:
    model, expected = offloaded(layers(), tmp_path), layers()
    state, plainly = model.state_dict(), expected.state_dict()
    trainings = [Training(one, adamw(one.parameters()), squared) for one in (model, expected)]
    for number in range(3):
        steps_of(number, *trainings)
        support.assert_equal_bits(state, plainly)
        for name, tensor in state.items():
            assert tensor.data_ptr() == model.get_parameter(name).data_ptr(), name
    del state
    with torch.no_grad():
        for number in range(2):
            assert torch.equal(squared(model, number), squared(expected, number))
    assert ssdtrain.parameter_stats(model).resident_bytes <= quarter(model)


def test_more_than_the_bound_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = offloaded(layers(), tmp_path)
    with caplog.at_level(logging.WARNING):
        state = model.state_dict()
        for number in range(3):
            squared(model, number)
    said = [record for record in caplog.records if "max_resident_bytes" in record.message]
    assert len(said) == 1
    assert len(state) == 16
    assert "share their memory with other tensors" in said[0].message
    assert "in use" not in said[0].message
    assert "thread" not in said[0].message


def use_together(model: nn.Module) -> None:
    """Give all weights to one function."""
    torch.cat(list(unique(model).values()))


def hold_memory(model: nn.Module) -> None:
    """Have the memory of all weights, and no tensor on it."""
    memory = [param.untyped_storage() for param in model.parameters()]
    for param in model.parameters():
        param.sum()
    assert memory


def compute_beside(model: nn.Module) -> None:
    """Use all weights while another thread computes."""
    begun, ended = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        begun.wait()
        for number in range(2):
            squared(model, number)
    finally:
        ended.set()
        thread.join()


CAUSES = {
    use_together: "in use at once",
    hold_memory: "share their memory with other tensors",
    compute_beside: "another thread",
}


@pytest.mark.parametrize("act", CAUSES, ids=lambda act: act.__name__)
def test_the_cause_of_more_than_the_bound_is_said(
    act: Callable[[nn.Module], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = offloaded(layers(), tmp_path)
    with caplog.at_level(logging.WARNING):
        act(model)
    said = [one.message for one in caplog.records if "max_resident_bytes" in one.message]
    assert len(said) == 1
    assert [text for text in CAUSES.values() if text in said[0]] == [CAUSES[act]]


@pytest.mark.parametrize("what", ["model", "copy", "graph", "optimizer", "iterator", "error"])
def test_nothing_is_left_of_a_model(what: str, tmp_path: Path) -> None:
    """Also if it is dropped while something of it is going on."""
    with support.nothing_leaks():
        model: Any = offloaded(layers(), tmp_path)
        alive = [weakref.ref(param) for param in model.parameters()]
        held = use(what, model)
        del model, held
        gc.collect()
        assert all(one() is None for one in alive)
    assert not list(tmp_path.iterdir())


def use(what: str, model: Any) -> Any:
    if what == "copy":
        twin = model.state_dict()
        return [twin, squared(model, 1)]
    if what == "graph":
        return squared(model, 1)
    if what == "optimizer":
        training = Training(model, adamw(model.parameters()), squared)
        training.run(plain_step, 2)
        return training
    if what == "iterator":
        found = model.named_parameters()
        next(found)
        return found
    if what == "error":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(3, 5))
    return None


def test_a_graph_outlives_the_model(tmp_path: Path) -> None:
    def run(directory: Path | None) -> Tensor:
        model: Any = layers()
        if directory is not None:
            offloaded(model, directory)
        x = numbered(1, 4, WIDTH).requires_grad_()
        loss = model(x).square().mean()
        del model
        gc.collect()
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(tmp_path), run(None))


def test_space_is_given_back(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        model = offloaded(layers(), store)
        used = store.stats()["disk_used_bytes"]
        assert used >= 5 * WIDTH * WIDTH * 4
        training = Training(model, adamw(model.parameters()), squared)
        training.run(plain_step, 3)
        assert store.stats()["disk_used_bytes"] <= 8 * (80 << 10), "each weight once"
        del training, model
        return_everything(store)


def test_a_weight_that_is_replaced_gives_its_space_back(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        model: Any = offloaded(layers(), store)
        leave(model, NAME)
        for part in model:
            part.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        return_everything(store)
        squared(model, 1).backward()


def test_a_layer_that_is_removed_goes_alone(tmp_path: Path) -> None:
    model: Any = offloaded(layers(), tmp_path)
    expected: Any = layers()
    del model[2], expected[2]
    for number in range(3):
        assert torch.equal(squared(model, number), squared(expected, number))
    assert ssdtrain.parameter_stats(model).total_bytes == 7 * WIDTH * WIDTH * 4


def test_a_weight_outlives_its_model(tmp_path: Path) -> None:
    model: Any = offloaded(layers(), tmp_path)
    weight = leave(model, NAME)
    del model
    gc.collect()
    assert torch.equal(weight, layers().get_parameter(NAME))


def alive_of_a_layer() -> list[Tensor]:
    return [
        one
        for one in gc.get_objects()
        if type(one) in (Tensor, nn.Parameter) and one.shape == (WIDTH, WIDTH)
    ]


def test_memory_is_freed(tmp_path: Path) -> None:
    """Tensors that are away have no storage, and no other tensor has it for them."""
    others = {id(one): one for one in alive_of_a_layer()}
    model = offloaded(layers(), tmp_path)
    with torch.no_grad():
        squared(model, 1)
    gc.collect()
    sizes = sum(
        one.untyped_storage().nbytes() for one in alive_of_a_layer() if id(one) not in others
    )
    assert sizes <= quarter(model) + WIDTH * WIDTH * 4
    assert len(unique(model)) == 8


MEMORY = """
import sys, torch, ssdtrain
from torch import nn
torch.set_num_threads(1)

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

MIB = 1 << 20
before = resident()
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))
grown = resident() - before
assert grown > 180 * MIB, grown
ssdtrain.offload_parameters(model, sys.argv[1], max_resident_bytes="16MiB")
found = [resident() - before]
x = torch.ones(4, 1024)
for _ in range(3):
    with torch.no_grad():
        model(x)
    found.append(resident() - before)
for param in model.parameters():
    param.detach().sum()
    found.append(resident() - before)
print(max(found) // MIB)
"""


@pytest.mark.alone
def test_the_process_has_the_memory_of_the_bound(tmp_path: Path) -> None:
    done = support.python(MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    # 192 MiB of weights under 16 MiB; the rest is the code's own, and the arena of the reads.
    assert int(done.stdout) < 64
