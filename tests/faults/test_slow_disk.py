"""Training on a disk of 100 MB/s: what cannot be hidden is kept, or waited for under a bound.

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
from time import perf_counter
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

    def gradients(self) -> tuple[float, float, list[Tensor]]:
        """Return the step's seconds, its loss and its gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        began_s = perf_counter()
        loss = (self.model(self.batch) - self.batch.roll(1, 1)).square().mean()
        loss.backward()
        took_s = perf_counter() - began_s
        return took_s, loss.item(), [one.grad for one in self.model.parameters()]


def open_session(place: str, **options: Any) -> Session:
    return Session(OffloadConfig(store=StoreConfig(dirs=(place,)), **options), Policy())


def difference(after: Stats, before: Stats) -> dict[str, float]:
    names = ("bytes_written", "bytes_read", "bytes_offloaded", "bytes_kept", "stall_s")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def train(place: str, steps: int, budget: int | None) -> dict[str, Any]:
    """Take each step kept and then offloaded, and compare every bit."""
    trainer = Trainer()
    session = open_session(place, max_resident_bytes=budget)
    told: dict[str, Any] = {"keep_s": [], "offload_s": [], "steps": [], "losses": []}
    for _ in range(steps):
        keep_s, keep_loss, expected = trainer.gradients()
        before = session.stats
        with session.context():
            offload_s, loss, actual = trainer.gradients()
        told["steps"].append(difference(session.stats, before))
        assert loss == keep_loss
        assert all(map(torch.equal, actual, expected)), "a gradient differs"
        trainer.optimizer.step()
        told["keep_s"].append(keep_s)
        told["offload_s"].append(offload_s)
        told["losses"].append(loss)
    told["resident_bytes_peak"] = session.stats.resident_bytes_peak
    told["report"] = str(session)
    return told


class Everything(set[int]):
    """A set that every key is in."""

    def __contains__(self, key: object) -> bool:
        return True


class KeepAll(Policy):
    """A policy under which nothing is written: what remains is the plain run, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = Everything()


def keep_peak(place: str) -> int:
    """Return the bytes that a step without any offload keeps at its peak."""
    config = OffloadConfig(store=StoreConfig(dirs=(place,)))
    session = Session(config, KeepAll())
    with session.context():
        Trainer().gradients()
    assert session.stats.bytes_written == 0
    return session.stats.resident_bytes_peak


def child(group: str, place: str, steps: str, share: str) -> None:
    # Before the first thread starts: the group of a thread is the group of its parent.
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    peak = keep_peak(place)
    budget = int(peak * float(share)) if share else None
    told = {"keep_peak": peak, "budget": budget, **train(place, int(steps), budget)}
    sys.stdout.write(json.dumps(told) + "\n")


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


def run(group: Path | None, place: Path, steps: int, share: float | None = None) -> dict[str, Any]:
    arguments = [str(group or ""), str(place), str(steps), str(share or "")]
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


def show(title: str, told: dict[str, Any]) -> None:
    keep_s = statistics.median(told["keep_s"][LEARNING_STEPS:] or told["keep_s"])
    offload_s = statistics.median(told["offload_s"][LEARNING_STEPS:] or told["offload_s"])
    rows = [f"{title}: {offload_s / keep_s:.3f} of keep's {keep_s:.3f} s (medians, interleaved)"]
    for keep, offload, step in zip(told["keep_s"], told["offload_s"], told["steps"], strict=True):
        mib = {name[6:]: step[name] >> 20 for name in step if name.startswith("bytes_")}
        stall = step["stall_s"]
        rows.append(f"  keep {keep:.3f} s, offload {offload:.3f} s, stall {stall:.3f} s, {mib} MiB")
    sys.stdout.write("\n".join([*rows, told["report"], ""]))


@pytest.mark.long
def test_a_slow_disk_gets_less_and_the_rest_is_kept(slow_group: Path, tmp_path: Path) -> None:
    fast = run(None, tmp_path, steps=LEARNING_STEPS + 1)
    slow = run(slow_group, tmp_path, steps=LEARNING_STEPS + 5)
    show("fast disk", fast)
    show("slow disk", slow)
    assert settled(slow, "bytes_written") < settled(fast, "bytes_written")
    assert settled(slow, "bytes_kept") > settled(fast, "bytes_kept")
    assert settled(slow, "bytes_written") > 0
    # What is read is what was written: nothing is read twice, nothing is written in vain.
    assert settled(slow, "bytes_read") <= 1.1 * settled(slow, "bytes_written")
    assert slow["losses"][-1] < slow["losses"][0]
    assert slow["losses"][: len(fast["losses"])] == fast["losses"]


@pytest.mark.long
def test_a_bound_holds_on_a_slow_disk(slow_group: Path, tmp_path: Path) -> None:
    told = run(slow_group, tmp_path, steps=2, share=1 / 3)
    show("slow disk, bounded", told)
    assert told["resident_bytes_peak"] <= told["budget"] < told["keep_peak"] / 2
    for step in told["steps"]:
        assert step["bytes_written"] > told["keep_peak"] / 2


if __name__ == "__main__":
    child(*sys.argv[1:])
