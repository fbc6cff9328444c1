"""Disks that fail under the state of an optimizer: nothing is lost that the disk did not lose."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer

import support
from children import forked_python
from ssdtrain import ConfigError, CorruptError, StorageError, offload_optimizer
from ssdtrain.optimizer.offloaded import Offloaded
from stores import SlowStore
from trained import STEPS, WIDTH, everything, model, plain_step, train


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters())


def steps_on(store: SlowStore, *, look: bool = True) -> tuple[list[Any], Any]:
    """Train as `train` does, on a store that is open."""
    module = model()
    optimizer: Any = offload_optimizer(adamw(module), store, buffer_bytes="1MiB")
    generator = torch.Generator().manual_seed(1)
    after = []
    for _ in range(STEPS):
        plain_step(module, optimizer, torch.randn(8, WIDTH, generator=generator))
        optimizer._disk.flush()
        if look:
            after.append(everything(module, optimizer))
    return after, optimizer


on_failing_disks = pytest.mark.parametrize(
    "faults",
    [
        {"space_error_rate": 0.3},
        {"io_error_rate": 0.02, "short_rate": 0.3, "late_rate": 0.2},
        {"capacity_bytes": 600 << 10},
        {"space_error_rate": 1.0},
    ],
    ids=["some space", "errors", "full", "none"],
)


@on_failing_disks
def test_a_failed_write_keeps_its_tensor(
    faults: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(adamw, None)
    with caplog.at_level(logging.WARNING), SlowStore(tmp_path, **faults) as store:
        actual, optimizer = steps_on(store)
        for one, other in zip(actual, expected, strict=True):
            support.assert_equal_bits(one, other)
        said = [record for record in caplog.records if "stays in memory" in record.message]
        failed_count = optimizer.offload_stats.write_failed_count
        assert len(said) == min(failed_count, 1), "said once"
        if "short_rate" not in faults:
            assert failed_count > 0


@pytest.mark.parametrize(
    ("bound", "on_disk_mib"), [("3200KiB", 3), ("5200KiB", 4)], ids=["a part", "one more than all"]
)
def test_a_tight_bound_on_the_disk_holds_as_much_in_every_step(
    bound: str, on_disk_mib: int, tmp_path: Path
) -> None:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        return module, adamw(module)

    plain, optimizer = build()
    ours, offloaded = build()
    offload_optimizer(offloaded, tmp_path, buffer_bytes="1MiB", max_disk_bytes=bound)
    for _ in range(3):
        x = torch.randn(8, 512)
        plain_step(plain, optimizer, x)
        plain_step(ours, offloaded, x)
        offloaded._disk.flush()
        # Older bytes of tensors that were refused do not take the place of others.
        stats = offloaded.offload_stats
        assert stats.on_disk_bytes == on_disk_mib << 20
        assert (stats.write_failed_count == 0) == (on_disk_mib == 4)
    support.assert_equal_bits(everything(ours, offloaded), everything(plain, optimizer))


def test_a_tight_bound_on_the_disk_beside_compiled_code(tmp_path: Path) -> None:
    """Where the compiler looks at each frame, Python keeps a call's arguments until it ends."""
    before = eval_frame.set_eval_frame(False)
    try:
        test_a_tight_bound_on_the_disk_holds_as_much_in_every_step("3200KiB", 3, tmp_path)
    finally:
        eval_frame.set_eval_frame(before)


def test_a_device_that_is_gone_ends_in_an_error_that_says_what_is_whole(tmp_path: Path) -> None:
    module = model()
    with SlowStore(tmp_path, gone_after_count=40) as store:
        optimizer = offload_optimizer(adamw(module), store, buffer_bytes="1MiB")

        def steps() -> None:
            for _ in range(100):
                plain_step(module, optimizer, torch.randn(8, WIDTH))
                optimizer._disk.flush()  # type: ignore[attr-defined]

        with pytest.raises(StorageError, match="Load the last checkpoint") as raised:
            steps()
        assert isinstance(raised.value.__cause__, StorageError)
        before = [param.detach().clone() for param in module.parameters()]
        with pytest.raises(StorageError, match="Load the last checkpoint"):
            optimizer.step()
        for param, old in zip(module.parameters(), before, strict=True):
            assert torch.equal(param, old), "a refused step changes nothing"
        # A checkpoint makes it whole again, although the disk takes nothing any more.
        plain = model()
        other = adamw(plain)
        plain_step(plain, other, torch.randn(8, WIDTH))
        checkpoint = copy.deepcopy(other.state_dict())
        module.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(checkpoint)
        x = torch.randn(8, WIDTH)
        optimizer.zero_grad()
        plain_step(module, optimizer, x)
    plain_step(plain, other, x)
    for param, same in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, same)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    with (
        SlowStore(tmp_path, verify=True, bit_flip_rate=1.0) as store,
        pytest.raises(StorageError, match="Load the last checkpoint") as raised,
    ):
        steps_on(store, look=False)
    assert isinstance(raised.value.__cause__, CorruptError)


def test_an_interrupt_where_an_update_ends_loses_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    optimizer: Any = offload_optimizer(adamw(module), tmp_path, buffer_bytes="1MiB")
    whole = optimizer.param_groups
    module(torch.randn(8, WIDTH)).square().mean().backward()
    settings: list[Any] = []

    def put(self: Any, groups: Any) -> None:
        settings.append(groups)
        if len(settings) == 2:
            raise KeyboardInterrupt
        vars(self)["param_groups"] = groups

    own = Offloaded.param_groups
    with monkeypatch.context() as patch:
        patch.setattr(Offloaded, "param_groups", own.setter(put))  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert settings[1] is whole, "it was to be put back"
    assert optimizer.param_groups is whole


def test_an_interrupt_while_a_slow_disk_holds_the_step(tmp_path: Path) -> None:
    module, plain = model(), model()
    expected = adamw(plain)
    with SlowStore(tmp_path) as store:
        optimizer: Any = offload_optimizer(adamw(module), store, buffer_bytes="1MiB")
        x = torch.randn(8, WIDTH)
        plain_step(module, optimizer, x)
        plain_step(plain, expected, x)
        own = optimizer._own_kind
        calls = []

        class Interrupted(own):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                calls.append(closure)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                return super().step(closure)

        optimizer._own_kind = Interrupted
        module(x).square().mean().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        # It came before the first update, so the same step can be made again, in whole.
        optimizer._own_kind = own
        optimizer.step()
        optimizer.zero_grad()
        plain_step(plain, expected, x)
        support.assert_equal_bits(everything(module, optimizer), everything(plain, expected))


FORK = """
import os, sys, torch, ssdtrain
from ssdtrain.errors import StorageError
torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, and a child waits for them
model = torch.nn.Linear(300, 300)
optimizer = ssdtrain.offload_optimizer(torch.optim.AdamW(model.parameters()), sys.argv[1])
model(torch.ones(2, 300)).sum().backward()
optimizer.step()
optimizer._disk.flush()
child = os.fork()
if child == 0:
    try:
        optimizer.step()
    except StorageError as error:
        assert "a forked process must open its own" in str(error), error
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert status == 0, status
optimizer.step()
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    done = forked_python(FORK, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "parent goes on\n"), done.stderr


class Wrapping(Optimizer):
    """Stands before another optimizer, as that of Accelerate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_an_optimizer_that_wraps_another_is_refused_and_left_alone(tmp_path: Path) -> None:
    module = model()
    wrapping = Wrapping(torch.optim.AdamW(module.parameters()))
    with pytest.raises(ConfigError, match="it stands before another optimizer"):
        offload_optimizer(wrapping, tmp_path)
    assert type(wrapping) is Wrapping
    offload_optimizer(wrapping.optimizer, tmp_path)
    assert isinstance(wrapping.optimizer, Offloaded)
