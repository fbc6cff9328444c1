"""Under a bound, what the model holds anyway is neither written again nor counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from disks import MIB
from ssdtrain.planning.policy import Policy
from support import Flush, Result, Rig, assert_equal_bits, gradients, nothing, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

PART_COUNT = 8
HELD_BYTES = PART_COUNT * MIB
STEP_COUNT = 5


class Buffers(nn.Module):
    """Multiplies by its buffers; each product saves the buffer and what came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.parts = [f"part_{n}" for n in range(PART_COUNT)]
        for name in self.parts:
            self.register_buffer(name, torch.randn(MIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.parts:
            x = x + (x[:8] * self.scale).sum() * getattr(self, name)
        return x * self.scale


class OneBufferInParts(nn.Module):
    """The same, of one buffer; the parts that a product saves are views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("whole", torch.randn(PART_COUNT, MIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.whole:
            x = x + (x[:8] * self.scale).sum() * part
        return x * self.scale


class DetachedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(PART_COUNT))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = linear(x, layer.weight.detach()) + x
        return x


def trained(model: nn.Module, x: Tensor, after_forward: Flush) -> Result:
    for _ in range(STEP_COUNT):
        x.grad = None
        model.zero_grad()
        loss = model(x).sum()
        after_forward()
        loss.backward()
    assert x.grad is not None
    return {"x": x.grad.clone(), **gradients(model)}


@pytest.mark.parametrize(
    ("make", "bound_bytes"),
    [
        (Buffers, HELD_BYTES),
        (Buffers, HELD_BYTES // 2),
        (OneBufferInParts, HELD_BYTES // 2),
        (DetachedWeights, HELD_BYTES // 2),
    ],
)
def test_tensors_held_by_the_model_are_written_in_the_first_step_only(
    make: Callable[[], nn.Module], bound_bytes: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    shape = (MIB // 4,) if hasattr(model, "scale") else (64, 512)
    x = torch.randn(shape, requires_grad=True)
    expected = trained(model, x, nothing)
    rig = Rig(tmp_path, min_bytes=MIB // 2, max_resident_bytes=bound_bytes, policy=Policy())
    written = [0]

    def flush() -> None:
        rig.flush()
        written.append(rig.stats.bytes_written)

    with rig.context():
        actual = trained(model, x, flush)
    assert_equal_bits(actual, expected)
    steps = [after - before for before, after in pairwise(written)]
    assert steps[0] >= HELD_BYTES // 2, "nothing was there to learn from"
    assert steps[-1] <= HELD_BYTES // 4, steps
    assert rig.stats.resident_bytes_peak <= bound_bytes
    rig.assert_empty()


def test_tensors_that_others_let_go_count_and_are_written(tmp_path: Path) -> None:
    """It was held in the first step, is saved again, and then nobody else holds it any more."""
    rig = Rig(tmp_path, max_resident_bytes=3 * MIB)
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    held = [torch.full((MIB // 4,), 1.0 + n) for n in range(4)]

    def products() -> list[Tensor]:
        return [(x * one).sum() for one in held]

    with rig.context():
        learned = sum(products())
        rig.flush()
        learned.backward()
        before = rig.stats
        losses = products()
        assert rig.stats.resident_bytes == 0, "what others hold does not count"
        assert rig.stats.bytes_written == before.bytes_written
        held.clear()
        # The next one that is packed looks.
        more = (x * torch.full((MIB // 4,), 9.0)).sum()
        assert rig.stats.resident_bytes <= 3 * MIB
        rig.flush()
        assert rig.stats.bytes_written >= before.bytes_written + 4 * MIB
        assert rig.stats.resident_bytes <= MIB
        x.grad = None
        sum([*losses, more]).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 1.0 + 2.0 + 3.0 + 4.0 + 9.0))
    del losses, more, learned
    rig.assert_empty()


def test_a_refused_write_of_a_released_tensor_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, max_resident_bytes=4 * MIB)
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    held = [torch.full((MIB // 4,), 2.0)]
    refused = []

    def refuse(_: object) -> bool:
        refused.append(True)
        return False

    def look() -> None:
        """Save another tensor: this looks at what others have let go."""
        (x[:8] * torch.ones(8)).sum()

    with rig.context():
        (x * held[0]).sum().backward()
        rig.flush()
        loss = (x * held[0]).sum()
        rig.flush()
        # The first write was given up on its way, and counts until it has ended.
        wait_until(lambda: rig.stats.resident_bytes == 0, "that only others hold it")
        before = rig.stats
        held.clear()
        with monkeypatch.context() as patch:
            patch.setattr(rig.writeback, "begin_write", refuse)
            look()
        assert refused
        assert rig.stats.resident_bytes >= MIB, "it counts from now on"
        rig.flush()
        assert rig.stats.bytes_written >= before.bytes_written + MIB
        assert rig.stats.resident_bytes == 0
        x.grad = None
        loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    del loss
    rig.assert_empty()


def test_another_tensor_in_the_place_of_a_held_one_is_bounded(tmp_path: Path) -> None:
    """Places are remembered, not only storages: in the second step they have fresh tensors."""
    rig = Rig(tmp_path, max_resident_bytes=4 * MIB, policy=Policy())
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    held = [torch.full((MIB // 4,), 1.0 + n) for n in range(12)]
    with rig.context():
        sum((x * one).sum() for one in held).backward()
        for _ in range(2):
            sum((x * one.clone()).sum() for one in held).backward()
    assert rig.stats.resident_bytes_peak <= 4 * MIB
    assert rig.stats.bytes_read >= 12 * MIB, "what nobody else held has been on the disk"
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0 * sum(range(1, 13))))
    rig.assert_empty()


def test_two_parts_of_one_storage_are_not_taken_for_others_who_hold_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=4 * MIB)
    x = torch.linspace(-1, 1, MIB // 16, requires_grad=True)
    held = [torch.arange(MIB // 4, dtype=torch.float32)]

    def products() -> list[Tensor]:
        (whole,) = held
        return [(x * part).sum() for part in (whole[: len(x)], whole[-len(x) :])]

    with rig.context():
        learned = sum(products())
        rig.flush()
        learned.backward()
        before = rig.stats.bytes_written
        losses = products()
        expected = held[0][: len(x)] + held[0][-len(x) :]
        held.clear()
        for _ in range(2):
            (x * torch.ones_like(x)).sum()
            rig.flush()
        assert rig.stats.bytes_written >= before + 2 * x.nbytes, "both are ours, and written"
        assert rig.stats.resident_bytes == 0
        x.grad = None
        sum(losses).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    del losses, learned
    rig.assert_empty()


def paused_rig(place: Path, policy: Policy) -> Rig:
    return Rig(
        place,
        max_resident_bytes=4 * MIB,
        policy=policy,
        backend="simulated",
        faults={"seed": 1, "paused": True},
    )


def square(made: Tensor) -> Tensor:
    return made * made


def product_of_parts(made: Tensor) -> Tensor:
    return made[: len(made) // 4] * made[-len(made) // 4 :]


@pytest.mark.parametrize("operation", [square, product_of_parts])
def test_a_tensor_saved_twice_by_one_node_does_not_count_as_held(
    operation: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """Its write has not ended, so both times the node gets the memory itself."""
    policy = Policy()
    rig = paused_rig(tmp_path, policy)
    x = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    with rig.context():
        loss = operation(x + 1).sum()
        rig.session.flush(wait=False)
        loss.backward()
    assert rig.stats.bytes_written == 0, "the write was under way"
    assert not policy.keep, "nobody else held it"
    del loss
    rig.disk.resume()
    rig.assert_empty()


def test_a_part_whose_write_is_under_way_is_not_taken_for_somebody_else(tmp_path: Path) -> None:
    """It has the memory of the other part too, which is on the disk by then."""
    policy = Policy()
    rig = paused_rig(tmp_path, policy)
    x = torch.linspace(-1, 1, MIB // 16, requires_grad=True)

    def products(made: Tensor) -> Iterator[Tensor]:
        for part in (made[: len(x)], made[-len(x) :]):
            yield (x * part).sum()

    with rig.context():
        rig.disk.resume()
        both = products(torch.linspace(0, 1, 4 * len(x)))
        first = next(both)
        rig.flush()
        rig.disk.pause()
        second = next(both)
        both.close()
        rig.begin_writes()
        first.backward()
    assert rig.stats.bytes_read == 0, "the other part has the memory"
    assert not policy.keep, "nobody else held it"
    del first, second
    rig.assert_empty()
