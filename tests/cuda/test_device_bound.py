"""`max_device_bytes`: what torch has allocated on a GPU at the peak of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ssdtrain
from checkout import SCRATCH
from fake_device import FakeDevice
from offloading import made
from on_devices import Device, on_each_device
from on_fake import on_fake_device
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.planning.policy import Policy
from ssdtrain.transfer.device_bound import LEARN_COUNT
from support import Patient

ELEMENTS = 256 << 10
UNIT = ELEMENTS * 4
STEPS = 10


@contextmanager
def bounded(
    bound: Any, policy: Policy | None = None, *, has_disk: bool, **options: Any
) -> Iterator[ssdtrain.Session]:
    store = StoreConfig(
        dirs=(str(SCRATCH),) if has_disk else (),
        **({"direct_io": "optional", "backend": "psync"} if has_disk else {}),
    )
    given = {"min_bytes": 512, "gds": "disabled", "pinned_bytes": 32 * UNIT} | options
    config = OffloadConfig(store=store, max_device_bytes=bound, **given)
    session = ssdtrain.Session(config, policy or Patient(options.get("max_host_bytes", 0)))
    try:
        with session.context():
            yield session
    finally:
        session.close()


def gated(leaf: Tensor) -> Tensor:
    """Return a sum over a chain of gated products, with sums that no recipe makes between."""
    x = leaf.cumsum(0)
    for _ in range(6):
        gate = (x * 0.01).cumsum(0)
        x = F.silu(gate) * torch.cos(gate)
    return x.square().sum()


def logged() -> Callable[[], list[tuple[int, str]]]:
    """Return a function that tells the level and text of all that ssdtrain logs from now on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("ssdtrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lambda: [(record.levelno, record.getMessage()) for record in records]


def step(leaf: Tensor) -> tuple[Tensor, int]:
    leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    gated(leaf).backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    assert leaf.grad is not None
    return leaf.grad.cpu(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("way", ["made again", "pinned", "disk"])
@on_each_device()
def test_the_peak_stays_below_the_bound(device: Device, way: str) -> None:
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    options: dict[str, Any] = {
        "made again": {"has_disk": False},
        "pinned": {"has_disk": False, "max_host_bytes": 64 * UNIT, "rematerialize": "never"},
        "disk": {"has_disk": True, "rematerialize": "never"},
    }[way]
    bound = whole_bytes - 6 * UNIT
    peaks = []
    with bounded(bound, **options) as session:
        for _ in range(STEPS):
            gradient, peak_bytes = step(leaf)
            assert torch.equal(gradient, expected)
            peaks.append(peak_bytes)
    assert peaks[-1] <= bound
    # A recipe has to be proved; all that moves leaves in the first step, too.
    assert (peaks[0] == whole_bytes) == (way == "made again")
    assert session.stats.device_excess_bytes == 0
    assert session.stats.device_bound_bytes == bound
    assert "kept by the last step" in str(session)


@on_each_device()
def test_a_bound_that_cannot_be_met_lets_the_step_end_and_tells_by_how_much(
    device: Device,
) -> None:
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    bound = whole_bytes - 6 * UNIT
    with bounded(bound, has_disk=False, rematerialize="never") as session:
        for _ in range(4):
            gradient, peak_bytes = step(leaf)
            assert torch.equal(gradient, expected)
            assert peak_bytes == whole_bytes
            assert session.stats.device_excess_bytes == whole_bytes - bound
    assert "missed by 6 MiB at the peak of the last step" in str(session)


@pytest.mark.parametrize("host_count", [0, 64])
@on_fake_device()
def test_the_first_step_lets_go_of_all_that_can_leave(fake: FakeDevice, host_count: int) -> None:
    """Pinned memory grows for tensors that no plan has, and a gate waits for no batch."""
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    options = {
        "has_disk": not host_count,
        "max_host_bytes": host_count * UNIT or None,
        "rematerialize": "never",
        # A gate opens for 16 of these.
        "min_bytes": UNIT,
    }
    with bounded(whole_bytes // 2, Patient(host_count * UNIT), **options) as session:
        gradient, peak_bytes = step(leaf)
        assert torch.equal(gradient, expected)
        # The work of an operation takes some tensors of this size.
        assert peak_bytes <= whole_bytes // 2 + 3 * UNIT
        assert session.stats.device_excess_bytes == max(0, peak_bytes - whole_bytes // 2)
        assert (session.stats.staying_bytes > 0) == (host_count > 0)


@on_fake_device()
def test_what_leaves_without_a_plan_leaves_in_order(fake: FakeDevice) -> None:
    """A fake that lags reports each use of memory whose copy has not ended."""
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    for seed in range(4):
        host_bytes = 64 * UNIT * (seed % 2)
        options = {"has_disk": not host_bytes, "max_host_bytes": host_bytes or None}
        with bounded(whole_bytes // 2, Patient(host_bytes), **options):
            fake.lag(2000, seed=seed)
            for _ in range(2):
                gradient, _ = step(leaf)
                assert torch.equal(gradient, expected)
            fake.lag(0)


@on_fake_device()
def test_with_other_ranks_no_memory_is_pinned_within_a_step(fake: FakeDevice) -> None:
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    options = {"has_disk": False, "max_host_bytes": 64 * UNIT, "rematerialize": "never"}
    with (
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        bounded(whole_bytes // 2, **options) as session,
    ):
        gradient, peak_bytes = step(leaf)
        assert torch.equal(gradient, expected)
        assert peak_bytes == whole_bytes
        step(leaf)
        assert session.stats.staying_bytes > 0, "the first plan has it pinned between steps"


@on_fake_device()
def test_memory_that_the_program_takes_between_steps_counts_in_the_next(fake: FakeDevice) -> None:
    """As the state of an optimizer, which its first step makes."""
    leaf = made(0, ELEMENTS)
    expected, whole_bytes = step(leaf)
    bound = whole_bytes - 6 * UNIT
    with bounded(bound, has_disk=True, rematerialize="never") as session:
        for _ in range(6):
            step(leaf)
        assert session._hooks is not None
        assert session._hooks._device is not None
        room_bytes = session._hooks._device.room_bytes
        state = torch.zeros(3 * ELEMENTS, device="cuda")
        leaf.grad = None
        loss = gated(leaf)
        assert session._hooks._device.room_bytes == room_bytes - 3 * UNIT
        loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad.cpu(), expected)  # type: ignore[union-attr]
    assert state.sum() == 0


@on_fake_device()
def test_steps_that_miss_the_bound_as_before_are_learned_from_no_more(fake: FakeDevice) -> None:
    leaf = made(0, ELEMENTS)
    _, whole_bytes = step(leaf)
    policy = Policy()
    with bounded(whole_bytes - 6 * UNIT, policy, has_disk=False, rematerialize="never") as session:
        assert session._hooks is not None
        device = session._hooks._device
        assert device is not None
        for _ in range(LEARN_COUNT):
            step(leaf)
            assert device.is_learning
        step(leaf)
        assert not device.is_learning
        assert session.stats.device_excess_bytes == 6 * UNIT
        step(leaf)
        made_count = policy.made_count
        for _ in range(3):
            step(leaf)
        assert policy.made_count == made_count
        # Another peak is learned from.
        beside = torch.zeros(ELEMENTS, device="cuda")
        step(leaf)
        assert device.is_learning
        assert session.stats.device_excess_bytes == 7 * UNIT
        del beside


@pytest.mark.parametrize("use", ["backward", "look"])
@on_fake_device()
def test_the_miss_is_told_of_a_graph_that_is_used_twice(fake: FakeDevice, use: str) -> None:
    leaf = made(0, ELEMENTS)

    def train() -> int:
        leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = gated(leaf)
        if use == "backward":
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        else:
            node: Any = loss.grad_fn
            assert node.next_functions[0][0]._saved_self is not None
        loss.backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    bound = train() - 6 * UNIT
    with bounded(bound, has_disk=False, rematerialize="never") as session:
        for _ in range(3):
            peak_bytes = train()
            assert session.stats.device_excess_bytes == peak_bytes - bound > 0


@on_fake_device()
def test_a_bound_below_what_the_program_holds_is_told_before_the_first_step(
    fake: FakeDevice,
) -> None:
    leaf = made(0, ELEMENTS)
    expected, _ = step(leaf)
    told = logged()
    with bounded(UNIT, has_disk=False):
        loss = gated(leaf)
        (text,) = [text for level, text in told() if level == logging.WARNING]
        assert "max_device_bytes (1 MiB) cannot be met: the program holds" in text
        leaf.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad.cpu(), expected)  # type: ignore[union-attr]


@on_fake_device()
def test_the_peak_is_never_reset(fake: FakeDevice) -> None:
    """Steps below an earlier peak count with what was known of all else."""
    leaf = made(0, ELEMENTS)
    _, whole_bytes = step(leaf)
    with bounded(whole_bytes - 6 * UNIT, has_disk=True, rematerialize="never") as session:
        for _ in range(4):
            gated(leaf).backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.max_memory_allocated() == whole_bytes
    assert session.stats.device_excess_bytes == 0
    assert session.stats.bytes_offloaded > 0


@on_fake_device()
def test_products_are_made_again_if_the_bound_needs_it(fake: FakeDevice) -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(16)]).cuda()
    x = torch.randn(512, 256).cuda()

    def train() -> tuple[list[Tensor], int]:
        layers.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        y = x
        for layer in layers:
            y = torch.sin(layer(y))
        y.square().sum().backward()
        torch.cuda.synchronize()
        gradients = [weight.grad.cpu() for weight in layers.parameters() if weight.grad is not None]
        return gradients, torch.cuda.max_memory_allocated()

    expected, whole_bytes = train()
    seen: set[str] = set()
    with bounded(whole_bytes - 5 * UNIT, has_disk=False) as session:
        assert session._hooks is not None
        rematerializer = session._hooks.rematerializer
        assert rematerializer is not None
        make = rematerializer.rematerialize

        def noted(saved: Any, use: Any, unpack: Any) -> Tensor:
            seen.update(use.recipe.operations)
            return make(saved, use, unpack)

        rematerializer.rematerialize = noted  # type: ignore[method-assign]
        peaks = []
        for number in range(STEPS):
            gradients, peak_bytes = train()
            assert all(map(torch.equal, gradients, expected))
            peaks.append(peak_bytes)
            # The first plan is short, so the second and the third step prove them.
            assert ("addmm" in seen) == (number >= 3)
    assert peaks[-1] <= whole_bytes - 5 * UNIT < peaks[0]


@on_fake_device()
def test_auto_is_what_the_process_can_have(fake: FakeDevice) -> None:
    leaf = made(0, ELEMENTS)
    free_bytes, _ = torch.cuda.mem_get_info()
    expected_bytes = (free_bytes + torch.cuda.memory_reserved()) * 15 // 16
    logs = logged()
    with bounded("auto", has_disk=False) as session:
        loss = gated(leaf)
        told = [text for _, text in logs()]
        loss.backward()  # type: ignore[no-untyped-call]
    assert session.stats.device_bound_bytes == expected_bytes
    assert session.stats.device_excess_bytes == 0
    assert any("before its first saved tensor" in text for text in told), "not before the step ends"


@on_fake_device()
def test_options_are_refused(fake: FakeDevice) -> None:
    with pytest.raises(ssdtrain.ConfigError, match="exclude each other"):
        ssdtrain.offload(SCRATCH, max_device_bytes="1GiB", max_resident_bytes="1GiB")
    for wrong in (0, -1, "much"):
        with pytest.raises(ssdtrain.ConfigError, match="unless it is 'auto', must be a positive"):
            ssdtrain.offload(max_device_bytes=wrong)
    assert "max_device_bytes='auto'" in repr(ssdtrain.offload(max_device_bytes="auto"))


def test_without_a_gpu_the_bound_is_refused(tmp_path: Path) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(ssdtrain.ConfigError, match="torch sees none here"),
    ):
        ssdtrain.offload(tmp_path, max_device_bytes="1GiB")


@on_fake_device()
def test_torchs_own_error_gets_a_note(fake: FakeDevice) -> None:
    leaf = made(0, ELEMENTS)

    def within(block: ssdtrain.offload, function: Callable[[], None]) -> None:
        with block:
            function()

    def fail() -> None:
        gated(leaf)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        within(ssdtrain.offload(SCRATCH, min_bytes=1), fail)
    (note,) = raised.value.__notes__
    assert "saved tensors take" in note
    for option in ("max_device_bytes='auto'", "max_host_bytes", "directory"):
        assert option in note
    bound = ssdtrain.offload(SCRATCH, max_device_bytes="auto", min_bytes=1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        bound(fail)()
    (note,) = raised.value.__notes__
    assert "max_device_bytes" not in note
    assert "max_host_bytes" in note


@on_fake_device()
def test_a_recipe_without_memory_is_run_again_once_all_else_has_let_go(fake: FakeDevice) -> None:
    leaf, failed = made(0, ELEMENTS), []
    expected, _ = step(leaf)
    with (
        mock.patch.object(torch.cuda, "empty_cache") as empty_cache,
        bounded(1 << 40, has_disk=False, rematerialize="always") as session,
    ):
        assert session._hooks is not None
        rematerializer = session._hooks.rematerializer
        assert rematerializer is not None
        make = rematerializer.rematerialize

        def full(*arguments: Any) -> Tensor:
            if not failed:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(*arguments)

        rematerializer.rematerialize = full  # type: ignore[method-assign]
        gradient, _ = step(leaf)
    assert torch.equal(gradient, expected)
    assert (len(failed), empty_cache.call_count) == (1, 1)
