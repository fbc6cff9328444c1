"""Training on a disk of 100 MB/s: tensors that the disk cannot hide are kept.

Each run is a process of its own in a control group that throttles the disk (root only).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain import Stats
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.planning.policy import Policy
from ssdtrain.session import Session

pytestmark = pytest.mark.alone

RATE = 100 * 1000 * 1000
"""Bytes per second, for writes and for reads."""
LAYERS, HIDDEN, HEADS, BATCH, SEQUENCE = 8, 256, 8, 4, 512
LEARNING_STEPS = 4
"""Steps in which the policy may still learn; left out of what is compared."""


# --- the child ----------------------------------------------------------------


class Block(nn.Module):
    """A transformer's block, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.before(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Trainer:
    """A model that takes the same step twice: kept and offloaded."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.batch = torch.randn(BATCH, SEQUENCE, HIDDEN)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradients(self) -> tuple[float, list[Tensor]]:
        """Return the step's loss and its gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.model(self.batch) - self.batch.roll(1, 1)).square().mean()
        loss.backward()
        return loss.item(), [one.grad for one in self.model.parameters()]


def difference(after: Stats, before: Stats) -> dict[str, float]:
    names = ("bytes_written", "bytes_read", "bytes_kept")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def train(place: str, steps: int) -> dict[str, Any]:
    """Take each step kept and then offloaded, and compare every bit."""
    trainer = Trainer()
    session = Session(OffloadConfig(store=StoreConfig(dirs=(place,))), Policy())
    told: dict[str, Any] = {"steps": [], "losses": []}
    for _ in range(steps):
        keep_loss, expected = trainer.gradients()
        before = session.stats
        with session.context():
            loss, actual = trainer.gradients()
        told["steps"].append(difference(session.stats, before))
        assert loss == keep_loss
        assert all(map(torch.equal, actual, expected)), "a gradient differs"
        trainer.optimizer.step()
        told["losses"].append(loss)
    return told


def child(group: str, place: str, steps: str) -> None:
    # Before the first thread starts: the group of a thread is the group of its parent.
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    sys.stdout.write(json.dumps(train(place, int(steps))) + "\n")


# --- the tests ----------------------------------------------------------------


def disk_of(place: Path) -> str | None:
    """Return MAJOR:MINOR of the whole disk behind a directory."""
    device = os.stat(place).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        return None
    entry = entry.resolve()
    whole = entry.parent if (entry / "partition").exists() else entry
    return (whole / "dev").read_text().strip()


def mounts(kind: str) -> Iterator[tuple[Path, list[str]]]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, found, options, *_ = line.split()
        if found == kind:
            yield Path(place), options.split(",")


def make_slow_group(name: str, disk: str) -> Path | None:
    """Make a group whose members reach the disk at ``RATE``, by either version of cgroups."""
    for root, options in mounts("cgroup"):
        if "blkio" in options:
            group = root / name
            group.mkdir()
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{disk} {RATE}")
            return group
    for root, _ in mounts("cgroup2"):
        if "io" in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text("+io")
            group = root / name
            group.mkdir()
            (group / "io.max").write_text(f"{disk} rbps={RATE} wbps={RATE}")
            return group
    return None


@pytest.fixture(scope="module")
def slow_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can throttle a disk")
    disk = disk_of(tmp_path_factory.getbasetemp())
    if disk is None:
        pytest.skip("the test folder is on no block device that could be throttled")
    try:
        group = make_slow_group(f"ssdtrain-slow-{os.getpid()}", disk)
    except OSError as error:
        pytest.skip(f"the kernel does not let this process throttle {disk}: {error}")
    if group is None:
        pytest.skip("no control group for block I/O (cgroup v1 blkio, cgroup v2 io) is mounted")
    yield group
    group.rmdir()


def run(group: Path | None, place: Path, steps: int) -> dict[str, Any]:
    arguments = [str(group or ""), str(place), str(steps)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def settled(told: dict[str, Any], name: str) -> float:
    """Return the median over the steps after the policy has learned."""
    return statistics.median(step[name] for step in told["steps"][LEARNING_STEPS:])


@pytest.mark.long
def test_a_slow_disk_gets_less_and_the_rest_is_kept(slow_group: Path, tmp_path: Path) -> None:
    fast = run(None, tmp_path, steps=LEARNING_STEPS + 1)
    slow = run(slow_group, tmp_path, steps=LEARNING_STEPS + 5)
    assert settled(slow, "bytes_written") < settled(fast, "bytes_written")
    assert settled(slow, "bytes_kept") > settled(fast, "bytes_kept")
    assert settled(slow, "bytes_written") > 0
    # What is read is what was written: nothing is read twice, nothing is written in vain.
    assert settled(slow, "bytes_read") <= 1.1 * settled(slow, "bytes_written")
    assert slow["losses"][-1] < slow["losses"][0]
    assert slow["losses"][: len(fast["losses"])] == fast["losses"]


if __name__ == "__main__":
    child(*sys.argv[1:])
