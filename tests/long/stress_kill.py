"""Kills training at random moments, hundreds of times, and looks for what is left on the disk.

    stress_kill.py --kills 200 --seed 1 [--dir DIRECTORY]

A child trains in a loop; after a random time it gets SIGKILL. Nothing of it may stay: no name, and
no block. Root gets a small disk of its own, whose free space tells; others look at names only.
Ends with 0 if nothing was left. ``tests/faults/test_stress.py`` runs a few kills in every test run.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import nn

import ssdtrain
from checkout import SCRATCH

MIB = 1 << 20
IMAGE_BYTES = 512 * MIB
DELAY_S_MAX = 1.5
"""A step of the child takes a fraction of it."""
SETTLE_S = 30.0
"""A file system may free the blocks of a dead process a moment later."""


def train(place: Path) -> None:
    """Train for ever, with a new file every few steps."""
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model, batch = nn.Sequential(*layers), torch.randn(2048, 256)
    while True:
        with ssdtrain.offload(place, direct_io="optional", min_bytes=1):
            for _ in range(8):
                model(batch).square().mean().backward()
                model.zero_grad()


@dataclass
class Outcome:
    """What the kills left."""

    kills: int = 0
    names: int = 0
    bytes_left: int = 0
    seen_open: int = 0
    """Kills that met the child with its file open and blocks in it: the others prove less."""

    def is_clean(self) -> bool:
        return self.names == 0 and self.bytes_left <= 0 and self.seen_open > 0


@contextmanager
def private_disk() -> Iterator[Path | None]:
    """Mount a small disk that nobody else writes to, or give ``None`` where that cannot be."""
    image = Path(tempfile.mkstemp(prefix="ssdtrain-stress-", suffix=".img", dir=SCRATCH)[1])
    place = Path(tempfile.mkdtemp(prefix="ssdtrain-stress-", dir=SCRATCH))
    os.truncate(image, IMAGE_BYTES)
    made = False
    try:
        make = ["mkfs.ext4", "-q", "-m", "0", str(image)]
        mount = ["mount", "-o", "loop", str(image), str(place)]
        try:
            made = all(
                subprocess.run(one, capture_output=True, check=False).returncode == 0
                for one in (make, mount)
            )
        except FileNotFoundError:
            made = False
        yield place if made else None
    finally:
        if made:
            subprocess.run(["umount", str(place)], check=True)
        image.unlink()
        place.rmdir()


def free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bfree * facts.f_frsize


def spilled_bytes(process: int, place: Path) -> int:
    """Return the bytes of blocks of the child's unnamed files."""
    total = 0
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if os.readlink(entry).startswith(f"{place}/"):
                total += entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def kill_once(place: Path, delay_s: float) -> int:
    """Let a child train for ``delay_s`` and kill it; return the bytes that it had spilled."""
    # Forked from here, where torch is imported and unused: the child trains at once.
    child = os.fork()
    if child == 0:
        try:
            train(place)
        finally:
            traceback.print_exc()
            os._exit(1)
    watched = os.pidfd_open(child)
    ended, _, _ = select.select([watched], [], [], delay_s)
    os.close(watched)
    assert not ended, f"the child ended by itself: {os.waitpid(child, 0)}"
    spilled = spilled_bytes(child, place)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    return spilled


def stress(place: Path, kills: int, seed: int, *, is_private: bool) -> Outcome:
    chance = random.Random(seed)
    outcome = Outcome()
    before = free_bytes(place)
    for _ in range(kills):
        outcome.seen_open += kill_once(place, chance.uniform(0, DELAY_S_MAX)) > 0
        outcome.kills += 1
        outcome.names += sum(one != "lost+found" for one in os.listdir(place))
        if is_private:
            left = before - free_bytes(place)
            deadline_s = monotonic() + SETTLE_S
            while left > 0 and monotonic() < deadline_s:
                os.sync()
                left = before - free_bytes(place)
            outcome.bytes_left += max(0, left)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill training at random moments.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="an empty directory; default: a disk of its own")
    options = parser.parse_args()
    with private_disk() as disk:
        place = options.dir or disk
        if place is None:
            sys.stderr.write("no private disk (not root?), so blocks are not looked at\n")
            with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
                outcome = stress(Path(folder), options.kills, options.seed, is_private=False)
        else:
            is_private = options.dir is None
            outcome = stress(place, options.kills, options.seed, is_private=is_private)
    sys.stdout.write(
        f"{outcome.kills} kills, {outcome.seen_open} of them with blocks on the disk; left: "
        f"{outcome.names} names, {outcome.bytes_left} bytes\n"
    )
    return 0 if outcome.is_clean() else 1


if __name__ == "__main__":
    sys.exit(main())
