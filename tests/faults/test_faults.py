"""Disks that fail under the real engines: an error, or the tensor in memory; never wrong bytes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disks import MIB, make_image, needs_root
from seccomp import refuse
from ssdtrain import CorruptError, StorageError, TensorStore, _core
from support import NO_SECCOMP, Rig, chain, in_child, say, shared_out

BACKENDS = pytest.mark.parametrize("backend", ["auto", "psync"])


class LostDisk:
    """A mounted disk that can lose all but its first part, as if its cable came off."""

    def __init__(self, image: Path, mounted: Callable[..., Path]) -> None:
        self.image = make_image(image, 96 * MIB)
        self.place = mounted("-o", "loop", str(self.image))
        found = subprocess.run(
            ["losetup", "--associated", str(self.image), "--noheadings", "--output", "NAME"],
            check=True,
            capture_output=True,
            text=True,
        )
        self.device = found.stdout.strip()

    def lose(self) -> None:
        os.truncate(self.image, MIB)
        subprocess.run(["losetup", "--set-capacity", self.device], check=True)


@pytest.fixture
def lost_disk(tmp_path: Path, mounted: Callable[..., Path]) -> LostDisk:
    return LostDisk(tmp_path / "image", mounted)


@needs_root
@BACKENDS
def test_a_lost_disk_is_an_error_with_its_place(lost_disk: LostDisk, backend: Any) -> None:
    with TensorStore(lost_disk.place, backend=backend) as store:
        stored = [store.write(torch.randn(MIB)) for _ in range(4)]
        for one in stored:
            one.wait()
        lost_disk.lose()
        for one in stored:
            with pytest.raises(StorageError, match=r"read of \d+ bytes at file offset") as caught:
                store.read(one).result()
            assert caught.value.errno == errno.EIO
        later = store.write(torch.randn(MIB))
        with pytest.raises(StorageError):
            later.wait()
        assert store.stats()["read_failed_count"] >= 4


@needs_root
@BACKENDS
def test_training_when_the_disk_is_lost(lost_disk: LostDisk, backend: str) -> None:
    rig = Rig(lost_disk.place, backend=backend, direct_io="required")
    x = torch.randn(MIB // 4, requires_grad=True)
    with rig.context():
        chain(x).sum().backward()
        expected, x.grad = x.grad, None
        loss = chain(x).sum()
        rig.flush()
        lost_disk.lose()
        # What was on the disk is lost, and with it this step: it says so and makes no gradient.
        with pytest.raises(StorageError) as caught:
            loss.backward()
        (note,) = caught.value.__notes__
        assert "could not bring back a saved tensor ([float32 [262144]])" in note
        assert x.grad is None
        del loss, caught
        # From now on tensors stay in memory.
        loss = chain(x).sum()
        rig.flush()
        loss.backward()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert rig.stats.write_failed_count > 0
    rig.session.close()


def with_failing_writes(place: str) -> None:
    rig = Rig(Path(place))
    x = torch.randn(MIB // 4, requires_grad=True)
    chain(x).sum().backward()
    expected, x.grad = x.grad, None
    if not refuse("write", errno=errno.EIO):
        say(NO_SECCOMP)
        return
    with rig.context():
        for _ in range(3):
            x.grad = None
            loss = chain(x).sum()
            rig.flush()
            loss.backward()
            assert expected is not None
            assert x.grad is not None
            assert torch.equal(x.grad, expected)
    say(rig.stats.write_failed_count > 0, rig.stats.bytes_written)


def test_failing_writes_keep_tensors(tmp_path: Path) -> None:
    warning, given_up, counts = in_child(with_failing_writes, tmp_path)
    assert "is out of use after several failed writes in a row" in given_up
    words = r"WARNING keeping tensors in memory: write of \d+ bytes at file offset \d+ failed.*"
    assert re.fullmatch(words + r"Input/output error \(os error 5\)", warning)
    assert counts == "True 0"


def with_failing_reads(place: str) -> None:
    rig = Rig(Path(place))
    x = torch.randn(MIB // 4, requires_grad=True)
    with rig.context():
        loss = chain(x).sum()
        rig.flush()
        if not refuse("read", errno=errno.EIO):
            say(NO_SECCOMP)
            return
        try:
            loss.backward()
        except StorageError as error:
            say(error.errno, x.grad, *error.__notes__)
            say(error)


def test_failing_reads_name_tensor_and_place(tmp_path: Path) -> None:
    note, message = in_child(with_failing_reads, tmp_path)
    assert note == (
        f"{errno.EIO} None ssdtrain could not bring back a saved tensor ([float32 [262144]]); no "
        "gradient was computed from it"
    )
    assert re.search(r"read of \d+ bytes at file offset \d+ failed.*Input/output error", message)


def with_unending_retries(place: str, number: str) -> None:
    with TensorStore(place, backend="psync", direct_io="optional") as store:
        source = torch.randn(MIB)
        stored = store.write(source)
        stored.wait()
        if not refuse("read", errno=int(number)):
            say(NO_SECCOMP)
            return
        try:
            store.read(stored).result()
        except StorageError as error:
            say(error)


@pytest.mark.parametrize("number", shared_out([errno.EAGAIN, errno.EINTR], quick=[errno.EAGAIN]))
def test_a_disk_that_never_answers_is_given_up(tmp_path: Path, number: int) -> None:
    (said,) = in_child(with_unending_retries, tmp_path, number)
    assert re.search(r"read of \d+ bytes at file offset \d+ made no progress", said)


@BACKENDS
@pytest.mark.parametrize("depth", [1, 64])
def test_more_answers_than_the_ring_holds(tmp_path: Path, backend: str, depth: int) -> None:
    """The ring's answers cannot overflow: never more pieces are in flight than it has places."""
    store = _core.Store(
        [(str(tmp_path), (depth, 4096))],
        backend=backend,
        direct_io="optional",
        max_disk_bytes=None,
        verify=True,
    )
    sources = [torch.randn(256 * (1 + index % 9)) for index in range(400)]
    stored = [store.write(one.data_ptr(), one.nbytes, one) for one in sources]
    for one in stored:
        one.wait()
    pending = [store.read(one) for one in stored]
    for one, source in zip(pending, sources, strict=True):
        assert torch.equal(torch.frombuffer(one.wait(), dtype=torch.float32), source)
    store.close()


@pytest.mark.parametrize("nbytes", [1, 4097, MIB + 1])
@BACKENDS
def test_a_tail_that_fills_no_block(tmp_path: Path, backend: Any, nbytes: int) -> None:
    """The kernel refuses (EINVAL) direct I/O of such a length; the blocks around it are moved."""
    with TensorStore(tmp_path, backend=backend, direct_io="optional", verify=True) as store:
        for start in (0, 1, 64):
            source = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)[start:]
            assert torch.equal(store.read(store.write(source)).result(), source)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    for seed in range(40):
        store = _core.Store(
            [(str(tmp_path), None)],
            backend="simulated",
            direct_io="optional",
            max_disk_bytes=None,
            verify=True,
            simulated_disk=_core.SimulatedDisk(seed=seed, bit_flip_rate=1.0),
        )
        # Whole pages: a bit beside the tensor, in the blocks around it, is nobody's.
        source = torch.randn(8 * MIB // 4 + 1024)
        skip = -source.data_ptr() % 4096 // 4
        source = source[skip : skip + 2 * MIB - 1024]
        stored = store.write(source.data_ptr(), source.nbytes // 4096 * 4096, source)
        stored.wait()
        with pytest.raises(CorruptError, match="came back changed"):
            store.read(stored).wait()
        store.close()
