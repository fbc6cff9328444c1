"""Steps that go by with the hooks of a block off: bits, and when they leave and come back."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import optimizer as of_torch

import ssdtrain
from children import forked_python
from ssdtrain.activations import aside
from ssdtrain.machine.torch_internals import top_hooks
from ssdtrain.planning.controller import QUIET_COUNT_MIN, SETTLED_COUNT, UNSEEN_MAX
from ssdtrain.planning.policy import Item, Plan, Policy, Rates
from support import KeepsAll, skimming

STEPS = QUIET_COUNT_MIN + 2 * (UNSEEN_MAX + 1)
Way = Literal["loop", "decorated", "blocks"]


class KeepsSome(KeepsAll):
    """To which nothing is worth its price but in rounds that begin with so many bytes."""

    def __init__(self, worth: Callable[[int], bool]) -> None:
        super().__init__()
        self.openings: list[int] = []
        self._worth = worth

    def skims(self, opening: int) -> Literal["plan", "price"] | None:
        if opening not in self.openings:
            self.openings.append(opening)
        return None if self._worth(self.openings.index(opening)) else "price"


def block_of(directory: Path, **options: Any) -> Any:
    """Return a block to whose sessions nothing is worth its price."""
    block = ssdtrain.offload(directory, min_bytes=1, slowdown_max=0.02, **options)
    block._policy = skimming()
    return block


def model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))


class Training:
    """Notes of each step whether the hooks were off after its forward."""

    def __init__(self, *, micro_batches: int = 1, width: int = 16) -> None:
        self.module = model(width)
        self._width = width
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.lengths = [8] * micro_batches
        self.are_off: list[bool] = []
        self._random = torch.Generator().manual_seed(1)

    def forward(self, length: int = 8) -> Tensor:
        x = torch.randn(length, self._width, generator=self._random, requires_grad=True)
        # The first tensor is saved outside of the layers, as an embedding saves it.
        loss: Tensor = self.module(x.sin().cos()).square().sum()
        return loss

    def settle(self) -> None:
        """Take so many steps of which nothing is offered that the next one goes by unseen."""
        for _ in range(QUIET_COUNT_MIN):
            self.step()

    def step(self) -> None:
        for length in self.lengths:
            loss = self.forward(length)
            self.are_off.append(top_hooks(True) is None)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[Tensor]:
        return [one.detach().clone() for one in self.module.parameters()]


def bits_of_plain(steps: int, **options: int) -> list[Tensor]:
    plain = Training(**options)
    for _ in range(steps):
        plain.step()
    return plain.bits()


def take(block: Any, training: Training, steps: int, way: Way) -> int:
    """Take steps; return of how many the block says that they went by without its hooks."""
    if way == "loop":
        with block as session:
            for _ in range(steps):
                training.step()
        return int(session.stats.steps_without_hooks)
    if way == "decorated":
        step = block(training.step)
        for _ in range(steps):
            step()
        return int(block.session.stats.steps_without_hooks)
    count = 0
    for _ in range(steps):
        with block as session:
            training.step()
        count += session.stats.steps_without_hooks
    return count


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Begin as after some step; see that no hooks are left behind, and torch tells us once."""
    aside._here.is_between_steps = True
    yield
    assert top_hooks(True) is None
    assert aside._here.away is None
    assert not aside._here.pairs
    assert len(of_torch._global_optimizer_post_hooks) == 1


@pytest.mark.parametrize("way", ["loop", "decorated", "blocks"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_most_steps_go_by_without_hooks_and_with_the_bits_of_plain_ones(
    tmp_path: Path, way: Way, micro_batches: int
) -> None:
    block, training = block_of(tmp_path), Training(micro_batches=micro_batches)
    count = take(block, training, STEPS, way)
    each = training.are_off[::micro_batches]
    # The first ones are seen in whole, and then one after so many as may go by.
    period = UNSEEN_MAX + 1
    later = [number % period != UNSEEN_MAX for number in range(STEPS - QUIET_COUNT_MIN)]
    assert each == [False] * QUIET_COUNT_MIN + later
    assert count == sum(each)
    for place in range(micro_batches):
        assert training.are_off[place::micro_batches] == each
    expected = bits_of_plain(STEPS, micro_batches=micro_batches)
    assert all(map(torch.equal, training.bits(), expected))


def test_the_report_and_the_figures_tell_it(tmp_path: Path) -> None:
    training = Training()
    with block_of(tmp_path) as session:
        training.settle()
        before = session.stats
        training.step()
        training.step()
    assert session.stats.since(before).steps_without_hooks == 2
    assert session.stats.as_dict()["steps_without_hooks"] == 2
    assert "2 steps without hooks" in str(session)


def test_a_real_price_has_them_leave(tmp_path: Path) -> None:
    # Hooks take more than so small a share of a step that is so short.
    block, training = ssdtrain.offload(tmp_path, min_bytes=1, slowdown_max=1e-6), Training()
    with block as session:
        for _ in range(STEPS + SETTLED_COUNT + 64):
            training.step()
    assert session.stats.steps_without_hooks > 0
    expected = bits_of_plain(STEPS + SETTLED_COUNT + 64)
    assert all(map(torch.equal, training.bits(), expected))


def test_without_slowdown_max_they_stay(tmp_path: Path) -> None:
    block, training = ssdtrain.offload(tmp_path, min_bytes=1), Training()
    assert take(block, training, STEPS, "loop") == 0
    assert not any(training.are_off)


def test_where_no_optimizer_tells_steps_apart_they_stay(tmp_path: Path) -> None:
    training, block = Training(), block_of(tmp_path)
    for _ in range(2 * QUIET_COUNT_MIN):
        with block as session:
            for _ in range(3):
                torch.autograd.grad(training.forward(), list(training.module.parameters()))
                assert top_hooks(True) is not None
        assert session.stats.steps_without_hooks == 0


def test_an_optimizer_that_steps_within_a_backward_tells_nothing(tmp_path: Path) -> None:
    training = Training()
    each = {one: torch.optim.SGD([one], lr=0.01) for one in training.module.parameters()}
    for one, its in each.items():

        def update(_: Tensor, its: torch.optim.SGD = its) -> None:
            its.step()
            its.zero_grad()

        one.register_post_accumulate_grad_hook(update)
    with block_of(tmp_path) as session:
        for _ in range(STEPS):
            loss = training.forward()
            assert top_hooks(True) is not None
            loss.backward()  # type: ignore[no-untyped-call]
    assert session.stats.steps_without_hooks == 0


def test_the_optimizer_of_another_thread_does_not_bring_them_back(tmp_path: Path) -> None:
    training, other = Training(), Training()
    other.forward().backward()  # type: ignore[no-untyped-call]
    with block_of(tmp_path):
        training.settle()
        loss = training.forward()
        assert top_hooks(True) is None
        thread = threading.Thread(target=other.optimizer.step)
        thread.start()
        thread.join()
        assert top_hooks(True) is None
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        assert top_hooks(True) is not None


class PlansAll(Policy):
    """A policy whose plans write everything, so that the price alone keeps something."""

    def learn(
        self, signature: int, items: Sequence[Item], rates: Rates, stall_share: float
    ) -> None:
        self.plans[signature] = Plan(written_bytes=sum(item.nbytes for item in items))


@pytest.mark.parametrize("lengths", [[[8, 16]], [[8], [8, 16]], [[8], [8], [8], [8, 16]]])
def test_steps_with_a_round_that_is_worth_its_price_are_seen_in_whole(
    lengths: list[list[int]], tmp_path: Path
) -> None:
    block, training = block_of(tmp_path), Training()
    block._policy = PlansAll()
    block._policy.controller = KeepsSome(lambda place: place == 1)
    with block:
        for number in range(4 * STEPS):
            training.lengths = lengths[number % len(lengths)]
            training.step()
        assert not any(training.are_off)
        training.lengths = [8]
        training.settle()
        training.step()
        training.step()
    assert training.are_off[-2:] == [True, True]


def test_where_memory_is_short_they_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdtrain.planning.controller.SAVED_BYTES_MUCH", 1)
    monkeypatch.setattr("ssdtrain.activations.prefetch._spare_bytes", lambda _: 1)
    block, training = block_of(tmp_path), Training()
    with block as session:
        # What a step saves is known of one that was followed.
        block._policy.controller.skims = lambda _: None
        for _ in range(SETTLED_COUNT):
            training.step()
        del block._policy.controller.skims
        for _ in range(STEPS):
            training.step()
    assert not any(training.are_off)
    assert session.stats.steps_without_hooks == 0


def pack(tensor: Tensor) -> Tensor:
    return tensor * 1


def unpack(packed: Tensor) -> Tensor:
    return packed


def test_above_hooks_of_others_they_stay(tmp_path: Path) -> None:
    training = Training()
    packed: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(count, unpack):
        assert take(block_of(tmp_path), training, STEPS, "loop") == 0
    assert not packed, "others got what was ours"
    assert all(map(torch.equal, training.bits(), bits_of_plain(STEPS)))


def test_they_come_back_below_hooks_of_others_that_are_on_when_a_step_ends(tmp_path: Path) -> None:
    training = Training()
    with block_of(tmp_path) as session:
        training.settle()
        for _ in range(3):
            training.forward()
            assert top_hooks(True) is None
            with saved_tensors_hooks(pack, unpack), saved_tensors_hooks(unpack, pack):
                training.optimizer.step()
                top = top_hooks(True)
                assert top is not None
                assert top[0] is unpack
            assert top_hooks(True) is not None
    assert session.stats.steps_without_hooks == 3


@contextmanager
def left_away(block: Any) -> Iterator[Training]:
    """Give what has just lost its hooks."""
    training = Training()
    block.__enter__()
    training.settle()
    training.forward()
    assert top_hooks(True) is None
    yield training
    assert ssdtrain.active() is None


def test_a_block_that_is_left_meanwhile_says_nothing_and_brings_nothing_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = block_of(tmp_path)
    with caplog.at_level(logging.WARNING, "ssdtrain"), left_away(block) as training:
        block.__exit__(None, None, None)
        training.optimizer.step()
        assert top_hooks(True) is None
    assert not caplog.records


def test_all_blocks_are_left_meanwhile(tmp_path: Path) -> None:
    block = block_of(tmp_path)
    with left_away(block) as training:
        assert len(ssdtrain.leave_all()) == 1
        training.optimizer.step()
        assert top_hooks(True) is None
        block.__exit__(None, None, None)


def test_a_block_in_a_block_takes_all_meanwhile_and_the_outer_one_comes_back(
    tmp_path: Path,
) -> None:
    outer, inner = block_of(tmp_path), ssdtrain.offload(tmp_path, min_bytes=1)
    with left_away(outer) as training:
        with inner as session:
            training.step()
        assert session.stats.bytes_eligible
        assert top_hooks(True) is not None, "it came back below the inner one"
        outer.__exit__(None, None, None)


def test_an_error_in_such_a_step_ends_nothing(tmp_path: Path) -> None:
    training = Training()
    with block_of(tmp_path) as session:
        training.settle()
        with pytest.raises(RuntimeError, match="shape"):
            (training.forward() * training.module(torch.randn(3, 4))).backward()
        assert top_hooks(True) is None
        training.step()
        training.forward()
        assert session.stats.steps_without_hooks == 2
    training.optimizer.zero_grad()


def test_a_graph_is_used_after_they_have_come_back(tmp_path: Path) -> None:
    training, plain = Training(), Training()
    with block_of(tmp_path):
        training.settle()
        loss = training.forward()
        assert top_hooks(True) is None
        training.optimizer.zero_grad()
        training.optimizer.step()
        more = training.forward()
        (loss + more).backward()  # type: ignore[no-untyped-call]
    plain.settle()
    first = plain.forward()
    plain.optimizer.zero_grad()
    plain.optimizer.step()
    (first + plain.forward()).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(training.module.parameters(), plain.module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_are_not_compiled_anew(tmp_path: Path) -> None:
    training = Training()
    for layer in training.module:
        assert isinstance(layer, nn.Module)
        layer.compile(backend="aot_eager", dynamic=False)
    expected = copy.deepcopy(training.bits())
    with block_of(tmp_path) as session:
        training.step()
        training.step()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(STEPS):
                training.step()
    assert session.stats.steps_without_hooks > UNSEEN_MAX
    assert not all(map(torch.equal, training.bits(), expected)), "nothing was trained"


def test_weights_on_the_disk_have_the_same_bits(tmp_path: Path) -> None:
    training = Training(width=128)
    ssdtrain.offload_parameters(training.module, tmp_path, max_resident_bytes="200KiB")
    assert take(block_of(tmp_path), training, STEPS, "loop")
    expected = bits_of_plain(STEPS, width=128)
    with ssdtrain.parameters_in_memory(training.module):
        assert all(map(torch.equal, training.bits(), expected))


CHILD = """
import os, sys
from pathlib import Path
import torch
from ssdtrain.machine.torch_internals import top_hooks
sys.path.insert(0, sys.argv[2])
from test_aside import Training, block_of
torch.set_num_threads(1)
training = Training()
with block_of(Path(sys.argv[1])):
    training.step()
    training.settle()
    loss = training.forward()
    assert top_hooks(True) is None
    child = os.fork()
    training.optimizer.step()
    assert top_hooks(True) is not None
    training.forward()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    training.step()
print("both went on")
"""


def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    done = forked_python(CHILD, str(tmp_path), str(Path(__file__).parent))
    assert (done.stdout, done.returncode) == ("both went on\n", 0), done.stderr
