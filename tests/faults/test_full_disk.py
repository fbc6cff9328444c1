"""A disk that fills up while training goes on, by whatever limit, and has room again later."""

from __future__ import annotations

import errno
import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from disks import MIB, fill, free_bytes, needs_root
from seccomp import refuse
from ssdtrain import NoSpaceError, TensorStore
from support import NO_SECCOMP, Flush, Rig, in_child, nothing, say, shared_out

BACKENDS = pytest.mark.parametrize("backend", ["auto", "psync"])
LAYERS = 8
SAVED_BYTES = 4 * MIB
BLOCK_BYTES = 4096
"""Bytes that each layer saves."""


class Steps:
    """A model that takes the same step again and again; a step may be disturbed at a layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.batch = torch.randn(SAVED_BYTES // 1024, 256)
        self.expected = self.gradients()

    def gradients(self, flush: Flush = nothing) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        loss = (self.model(self.batch) - self.batch).square().mean()
        flush()
        loss.backward()
        return [one.grad for one in self.model.parameters() if one.grad is not None]

    def check(self, flush: Flush = nothing) -> None:
        assert all(map(torch.equal, self.gradients(flush), self.expected)), "a gradient differs"

    @contextmanager
    def at_layer(self, index: int, act: Callable[[], object], *, backward: bool) -> Iterator[None]:
        """Do ``act`` in the middle of each step: when a layer is passed, on either way."""
        layer = self.model[index]
        hook = (
            layer.register_full_backward_hook(lambda *_: act() and None)
            if backward
            else layer.register_forward_hook(lambda *_: act() and None)
        )
        yield
        hook.remove()


def warnings_of(records: list[logging.LogRecord]) -> list[str]:
    return [one.message for one in records if one.levelno >= logging.WARNING]


@needs_root
@pytest.mark.parametrize("backend", shared_out(["auto", "psync"], quick=["auto"]))
def test_training_over_a_disk_that_fills_and_empties(
    small_disk: Path, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    steps = Steps()
    rig = Rig(small_disk, backend=backend, direct_io="required")
    ballast = small_disk / "ballast"

    def take_all() -> None:
        if not ballast.exists():
            rig.flush()
            rig.store.trim()
            fill(small_disk, leave=0)

    def give_back() -> None:
        ballast.unlink(missing_ok=True)

    def written(disturbed: bool = False) -> int:
        before = rig.stats.bytes_written
        steps.check(rig.flush)
        now = rig.stats.bytes_written - before
        assert disturbed or now >= LAYERS * SAVED_BYTES, "offloading has not resumed"
        return now

    with rig.context():
        whole = written()
        for way in (False, True):
            # Full before the step; full from the middle of it; room again from the middle of it.
            take_all()
            assert written(disturbed=True) == 0
            give_back()
            written()
            with steps.at_layer(LAYERS // 2, take_all, backward=way):
                # Memory that begins in the middle of a block makes its tensor a block longer.
                assert written(disturbed=True) <= whole + LAYERS * BLOCK_BYTES
            with steps.at_layer(LAYERS // 2, give_back, backward=way):
                written(disturbed=True)
            written()
    assert rig.stats.write_failed_count > 0
    (said,) = warnings_of(caplog.records)
    assert "keeping tensors in memory" in said
    assert "free some space there" in said
    rig.assert_empty()
    rig.session.close()


@pytest.mark.long
@needs_root
def test_training_while_another_thread_fills_and_empties_the_disk(small_disk: Path) -> None:
    steps, stop = Steps(), threading.Event()
    rounds = 0

    def disturb() -> None:
        nonlocal rounds
        while not stop.is_set():
            fill(small_disk, leave=0)
            (small_disk / "ballast").unlink()
            rounds += 1

    thread = threading.Thread(target=disturb)
    rig = Rig(small_disk, backend="auto", direct_io="required")
    with rig.context():
        thread.start()
        try:
            for _ in range(10):
                steps.check()
                rig.store.trim()
        finally:
            stop.set()
            thread.join()
        before = rig.stats.bytes_written
        steps.check(rig.flush)
    assert rounds > 0
    assert rig.stats.bytes_written > before
    rig.assert_empty()
    rig.session.close()


@needs_root
@BACKENDS
def test_a_failed_growth_takes_no_room_from_others(small_disk: Path, backend: Any) -> None:
    with TensorStore(small_disk, backend=backend) as store:
        fill(small_disk, leave=20 * MIB)
        before = free_bytes(small_disk)
        stored = store.write(torch.zeros(6 * MIB))
        with pytest.raises(NoSpaceError, match="free some space there") as caught:
            stored.wait()
        assert caught.value.errno == errno.ENOSPC
        assert free_bytes(small_disk) >= before - MIB
        # What failed keeps its place in the file as long as somebody holds it, an error too.
        store.release(stored)
        del caught
        small = store.write(torch.ones(2 * MIB))
        assert torch.equal(store.read(small).result(), torch.ones(2 * MIB))


@needs_root
@BACKENDS
def test_no_more_is_told_to_be_on_the_disk_than_there_is(small_disk: Path, backend: Any) -> None:
    room = free_bytes(small_disk)
    with TensorStore(small_disk, backend=backend) as store:
        # The second needs more than there is, and a file that grows asks for more than is needed.
        first, second = (store.write(torch.zeros(12 * MIB)) for _ in range(2))
        first.wait()
        with pytest.raises(NoSpaceError):
            second.wait()
        told = store.stats()["disk_reserved_bytes"]
        assert 48 * MIB <= told <= room


def train_within(place: str) -> None:
    """Train offloaded under whatever limit was set up; print what was said and what failed."""
    steps = Steps()
    with ssdtrain.offload(place, direct_io="optional") as session:
        for _ in range(3):
            steps.check()
    say(session.stats.write_failed_count > 0, session.stats.bytes_kept > 0)


def with_a_quota(place: str) -> None:
    # A file system with quotas answers this when the user has no blocks left.
    if not refuse("fallocate", errno=errno.EDQUOT):
        say(NO_SECCOMP)
        return
    train_within(place)
    with TensorStore(place, direct_io="optional") as store:
        try:
            store.write(torch.zeros(MIB)).wait()
        except NoSpaceError as error:
            say(error.errno == errno.EDQUOT, error)


@pytest.mark.long
def test_a_disk_quota_is_a_full_disk(tmp_path: Path) -> None:
    warning, at_the_end, counts, refusal = in_child(with_a_quota, tmp_path)
    assert warning.startswith("WARNING keeping tensors in memory: cannot reserve ")
    assert warning.endswith(
        f" MiB in {tmp_path}; free some space there: Disk quota exceeded (os error {errno.EDQUOT})"
    )
    assert "writes failed or were refused, the last one with: cannot reserve " in at_the_end
    assert counts == "True True"
    assert refusal.startswith("True cannot reserve ")


def with_a_file_size_limit(place: str, action: str) -> None:
    # Python ignores the signal, other programs die of it unless they say otherwise.
    signal.signal(signal.SIGXFSZ, getattr(signal, action))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
    train_within(place)


@pytest.mark.parametrize("action", shared_out(["SIG_IGN", "SIG_DFL"], quick=["SIG_DFL"]))
def test_a_file_size_limit_is_a_full_disk_and_no_death(tmp_path: Path, action: str) -> None:
    warning, counts = in_child(with_a_file_size_limit, tmp_path, action)
    assert warning.startswith("WARNING keeping tensors in memory: cannot reserve ")
    assert warning.endswith(
        f" MiB in {tmp_path}; raise `ulimit -f`: File too large (os error {errno.EFBIG})"
    )
    assert counts == "True True"


def save_with_a_file_size_limit(place: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        ssdtrain.save(Path(place) / "saved", nn.Linear(1024, 1024))
    except ssdtrain.NoSpaceError as error:
        say(error)


def test_a_save_beyond_a_file_size_limit(tmp_path: Path) -> None:
    (refusal,) = in_child(save_with_a_file_size_limit, tmp_path)
    assert f"[Errno {errno.EFBIG}]" in refusal
    assert refusal.endswith("; raise `ulimit -f` and try again")


@needs_root
def test_the_product_policy_offloads_again_when_there_is_room(small_disk: Path) -> None:
    steps = Steps()
    with ssdtrain.offload(small_disk) as session:
        fill(small_disk, leave=0)
        for _ in range(4):
            steps.check()
        assert session.stats.bytes_written == 0
        assert session.stats.write_failed_count > 0
        (small_disk / "ballast").unlink()
        # How soon is the policy's business, that it happens is ours.
        for _ in range(50):
            steps.check()
            if session.stats.bytes_written > 0:
                break
        assert session.stats.bytes_written > 0
