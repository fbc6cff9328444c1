"""Direct I/O is promised only where the kernel does it, also if a file system accepts the flag."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ssdtrain
from disks import MIB, make_image, needs_root
from ssdtrain import ConfigError, TensorStore
from ssdtrain.commands.checks import Examination

Mounted = Callable[..., Path]

TRIES_MAX = 100
"""A disk that is busy for a moment refuses a request that may not wait, too."""


def spill_file(place: Path) -> int:
    """Return the descriptor of the one spill file in a directory."""
    (found,) = [
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if os.path.islink(entry) and os.readlink(entry).startswith(f"{place}/")
    ]
    return found


def overwrites_directly(file: int) -> bool:
    """Whether a block that was written before is overwritten without a wait.

    That is direct I/O: a write which goes through the page cache after all has to wait.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as block:
        for _ in range(TRIES_MAX):
            # One that may wait goes first: it fills the kernel's caches of where the block lies.
            os.pwrite(file, block, 0)
            try:
                return os.pwritev(file, [block], 0, os.RWF_NOWAIT) == len(block)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
    return False


@pytest.fixture
def btrfs(tmp_path: Path, mounted: Mounted) -> Path:
    return mounted("-o", "loop", str(make_image(tmp_path / "image", 256 * MIB, "btrfs")))


@pytest.fixture
def journaled(tmp_path: Path, mounted: Mounted) -> Path:
    image = make_image(tmp_path / "image", 256 * MIB, "ext4", "-O", "has_journal")
    return mounted("-o", "loop,data=journal", str(image))


@needs_root
@pytest.mark.parametrize("backend", ["psync", "auto"])
def test_btrfs_is_written_past_the_page_cache(btrfs: Path, backend: str) -> None:
    source = torch.randn(MIB)
    with TensorStore(btrfs, backend=backend) as store:  # type: ignore[arg-type]
        stored = store.write(source)
        assert torch.equal(store.read(stored).result(), source)
        assert overwrites_directly(spill_file(btrfs))
        del stored
    del store


@needs_root
def test_doctor_accepts_btrfs(btrfs: Path) -> None:
    checks = {check.name: check for check in Examination(str(btrfs)).checks()}
    assert checks["direct_io"].state == "OK"
    assert checks["write_and_read"].state == "OK"


@needs_root
def test_a_journal_of_data_is_no_direct_io(
    journaled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = (
        f"{journaled} accepts direct I/O (O_DIRECT) but writes through the page cache, as ext4 "
        "does when mounted with data=journal; use a local file system without that, or "
        "direct_io='optional'"
    )
    with pytest.raises(ConfigError) as caught:
        TensorStore(journaled)
    assert str(caught.value) == refused
    with pytest.raises(ConfigError) as caught:
        ssdtrain.offload(journaled).__enter__()
    assert str(caught.value) == refused
    source = torch.randn(MIB)
    with TensorStore(journaled, direct_io="optional") as store:
        assert torch.equal(store.read(store.write(source)).result(), source)
    assert f"buffered I/O in {journaled}: {refused}" in caplog.text
    del store


@needs_root
def test_doctor_says_that_a_journal_of_data_is_no_direct_io(journaled: Path) -> None:
    checks = {check.name: check for check in Examination(str(journaled)).checks()}
    assert checks["direct_io"].state == "FAIL"
    assert "writes through the page cache" in checks["direct_io"].finding
    assert "direct_io='optional'" in checks["direct_io"].remedy
