"""Small disks that a test fills, breaks and takes away; they need root."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
NOBODY = 65_534
"""A user without rights."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set this place up")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount what a test asks for, and take it away again."""
    places: list[Path] = []

    def mount(*arguments: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        command = ["mount", *arguments, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    # The error that a test looked at holds the test's variables until the next collection.
    gc.collect()
    failures = []
    for place in reversed(places):
        done = subprocess.run(["umount", str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
            failures.append(done.stderr)
    assert not failures, "a file is open on a store's disk after its end"


def make_image(image: Path, nbytes: int, kind: str = "ext4", *options: str) -> Path:
    """Make a file system of ``nbytes`` in a file."""
    name = f"mkfs.{kind}"
    maker = shutil.which(name, path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
    if maker is None:
        pytest.skip(f"there is no {name} to make a small disk with")
    with image.open("wb") as file:
        file.truncate(nbytes)
    options = options or (("-m", "0") if kind == "ext4" else ())
    subprocess.run([maker, "-q", *options, str(image)], check=True, capture_output=True)
    return image


@pytest.fixture
def small_disk(tmp_path: Path, mounted: Callable[..., Path]) -> Path:
    """Mount an ext4 file system of 96 MiB."""
    return mounted("-o", "loop", str(make_image(tmp_path / "image", 96 * MIB)))


def free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def fill(place: Path, leave: int) -> Path:
    """Take all the space of a disk but ``leave`` bytes; return the file that does."""
    ballast = place / "ballast"
    with ballast.open("ab") as file:
        have = ballast.stat().st_size
        try:
            os.posix_fallocate(file.fileno(), have, max(1, free_bytes(place) - leave))
        except OSError as error:
            # Lists of blocks need room too, and somebody else may write. A reservation that failed
            # has taken all there was.
            if leave or error.errno != errno.ENOSPC:
                raise
    return ballast
