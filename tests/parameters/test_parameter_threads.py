"""Threads that use the weights of one model at once: never other bytes, no hang, no crash.

A weight does not leave while another thread runs. So the readers here wait for work in a queue, in
which weights leave, and get it in the midst of forwards and backwards.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
import support
from stores import SlowStore
from support import sizes, wait_until
from weights_away import (
    WIDTH,
    Training,
    adamw,
    away,
    layers,
    leave,
    numbered,
    offloaded,
    plain_step,
    squared,
    unique,
)

pytestmark = [
    pytest.mark.timeout(120),
    # Of `torch.tensor(weight)`, which is tried on purpose.
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]
STEPS = sizes(small=20, whole=150)


@pytest.fixture(autouse=True)
def _often_another_thread() -> Iterator[None]:
    """Have Python change threads much more often than it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def by_tensor(weight: Tensor) -> bytes | None:
    """Return the bytes by a way that goes past Python, or nothing if that is refused."""
    try:
        return torch.tensor(weight.tolist(), dtype=weight.dtype).numpy().tobytes()
    except RuntimeError as error:
        assert "ssdtrain.offload_parameters" in str(error)  # noqa: PT017 - or it is right
        return None


def copied(weight: Tensor) -> bytes | None:
    try:
        return bytes(torch.tensor(weight).detach().numpy().tobytes())
    except RuntimeError as error:
        assert "ssdtrain.offload_parameters" in str(error)  # noqa: PT017 - or it is right
        return None


READS: dict[str, Callable[[Any], bytes | None]] = {
    "product": lambda weight: (weight.detach() * 1).numpy().tobytes(),
    "numpy": lambda weight: weight.detach().numpy().tobytes(),
    "list": by_tensor,
    "tensor": copied,
}


class Readers:
    """Threads that read when they are told to, and keep what they saw."""

    def __init__(self, count: int, read: Callable[[], object]) -> None:
        self._read = read
        # Its `get` waits in Python's library, where ssdtrain sees that a thread uses nothing.
        self._work: Queue[bool] = Queue()
        self.seen: list[Any] = []
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._serve) for _ in range(count)]

    def _serve(self) -> None:
        while self._work.get():
            try:
                self.seen.append(self._read())
            except BaseException as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)

    def ask(self, *_: object) -> None:
        """Have one of them read, unless all are behind."""
        if self._work.qsize() < 2:
            self._work.put(True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            for _ in self._threads:
                self._work.put(False)
            for thread in self._threads:
                thread.join()
        if self.errors:
            raise self.errors[0]


def asked_in_every_layer(model: Any, readers: Readers) -> None:
    for part in model:
        part.register_forward_pre_hook(readers.ask)
        part.register_full_backward_hook(lambda *_: readers.ask())


@pytest.mark.parametrize("steps_count", STEPS)
@pytest.mark.parametrize("way", READS)
def test_readers_beside_forwards_and_backwards(way: str, steps_count: int, tmp_path: Path) -> None:
    """The weights do not change, so there is one right answer for each."""
    model, expected = offloaded(layers(), tmp_path), layers()
    right = {name: one.detach().numpy().tobytes() for name, one in unique(expected).items()}
    params = unique(model)
    chance = random.Random(0)

    def read() -> tuple[str, bytes | None]:
        name = chance.choice(list(params))
        return name, READS[way](params[name])

    readers = Readers(2, read)
    asked_in_every_layer(model, readers)
    with readers.reading():
        for number in range(steps_count):
            model.zero_grad()
            expected.zero_grad()
            x = numbered(number, 4, WIDTH).requires_grad_()
            model(x).square().mean().backward()
            squared(expected, number).backward()
            support.assert_equal_bits(support.gradients(model), support.gradients(expected))
    assert len(readers.seen) > steps_count
    wrong = {name for name, found in readers.seen if found not in (None, right[name])}
    assert not wrong
    if way != "tensor":
        assert all(found is not None for _, found in readers.seen)
    assert ssdtrain.parameter_stats(model).read_bytes > 0
    with torch.no_grad():
        squared(model, 1)
    leave(model, "2.weight")


@pytest.mark.parametrize("steps_count", STEPS)
def test_readers_see_a_version_that_the_weight_had(steps_count: int, tmp_path: Path) -> None:
    """Each step changes all weights at once, as far as those see it who wait for its end."""
    model, expected = offloaded(layers(), tmp_path), layers()
    optimizer, plainly = adamw(model.parameters()), adamw(expected.parameters())
    params = unique(model)
    versions = {name: {one.detach().numpy().tobytes()} for name, one in unique(expected).items()}
    chance = random.Random(0)
    step = threading.Condition()

    def read() -> tuple[str, bytes | None]:
        name = chance.choice(list(params))
        way = chance.choice(list(READS))
        with step:
            return name, READS[way](params[name])

    readers = Readers(2, read)
    asked_in_every_layer(model, readers)
    with readers.reading():
        for number in range(steps_count):
            for one, its in ((model, optimizer), (expected, plainly)):
                its.zero_grad()
                x = numbered(number, 4, WIDTH).requires_grad_()
                one(x).square().mean().backward()
            plainly.step()
            for name, one in unique(expected).items():
                versions[name].add(one.detach().numpy().tobytes())
            with step:
                optimizer.step()
    assert len(readers.seen) > steps_count
    assert not {name for name, seen in readers.seen if seen and seen not in versions[name]}
    support.assert_equal_bits(
        {name: one.detach() for name, one in model.named_parameters()},
        dict(expected.named_parameters()),
    )


@pytest.mark.parametrize("steps_count", STEPS)
def test_evaluation_in_other_threads(steps_count: int, tmp_path: Path) -> None:
    model, expected = offloaded(layers(), tmp_path), layers()
    with torch.no_grad():
        right = [squared(expected, number).item() for number in range(4)]

    def evaluate(number: int) -> float:
        torch.set_num_threads(1)
        with torch.no_grad():
            return squared(model, number % 4).item()

    with ThreadPoolExecutor(3) as pool:
        for round_number in range(max(1, steps_count // 10)):
            found = list(pool.map(evaluate, range(16)))
            assert found == right * 4, round_number
            squared(model, 1).backward()
    support.assert_nothing_is_on()


def test_models_in_threads_of_their_own(tmp_path: Path) -> None:
    """Two are trained at once, on one store."""
    with ssdtrain.TensorStore(tmp_path) as store:

        def train(model: nn.Module) -> list[dict[str, Tensor]]:
            torch.set_num_threads(1)
            training = Training(model, adamw(model.parameters()), squared)
            for number in range(5):
                # Seeds and the random state belong to the process, so not to one of two threads.
                training.seen.append({})
                plain_step(training, number)
                training.note_weights()
            return training.seen

        expected = train(layers())
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(train, [offloaded(layers(), store) for _ in range(4)]):
                for one, other in zip(found, expected, strict=True):
                    support.assert_equal_bits(one, other)


def test_a_backward_in_another_thread(tmp_path: Path) -> None:
    model, expected = offloaded(layers(), tmp_path), layers()
    for number in range(3):
        loss = squared(model, number)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        squared(expected, number).backward()
    support.assert_equal_bits(support.gradients(model), support.gradients(expected))


def test_two_wait_for_one_slow_disk(tmp_path: Path) -> None:
    """A reader and a forward want weights that do not come; then they come for both."""
    with SlowStore(tmp_path) as store:
        model = offloaded(layers(), store)
        expected = layers()
        leave(model, "2.weight")
        found: list[Any] = []
        store.disk.pause()
        threads = [
            threading.Thread(target=lambda: found.append(squared(model, 1).item())),
            threading.Thread(
                target=lambda: found.append(model.get_parameter("2.weight").sum().item())
            ),
        ]
        for thread in threads:
            thread.start()
        wait_until(
            lambda: any(
                {"wait", "result"} & support.functions_of(thread.ident or 0) for thread in threads
            ),
            "a wait for the disk",
        )
        assert len(found) < 2
        store.disk.resume()
        for thread in threads:
            thread.join()
    right = [squared(expected, 1).item(), expected.get_parameter("2.weight").sum().item()]
    assert sorted(found) == sorted(right)


def test_a_thread_that_always_runs_keeps_all_in_memory_and_is_right(tmp_path: Path) -> None:
    """Nobody can tell whether it is inside an operation that reads a weight."""
    model, expected = offloaded(layers(), tmp_path), layers()
    stop = threading.Event()

    def run() -> None:
        x = torch.ones(8)
        while not stop.is_set():
            x = x * 1.0

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for number in range(3):
            squared(model, number).backward()
            squared(expected, number).backward()
    finally:
        stop.set()
        thread.join()
    support.assert_equal_bits(support.gradients(model), support.gradients(expected))
    with torch.no_grad():
        squared(model, 1)
    assert away(model), "and they leave once it has ended"


def test_a_model_that_is_dropped_by_another_thread(tmp_path: Path) -> None:
    with support.nothing_leaks():
        models: list[nn.Module] = [offloaded(layers(), tmp_path)]
        squared(models[0], 1).backward()
        thread = threading.Thread(target=models.clear)
        thread.start()
        thread.join()
        assert not models
