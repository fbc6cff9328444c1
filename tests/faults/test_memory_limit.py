"""Where a plain run is killed for memory, an offloaded one ends with the very same losses.

Each run is a process of its own in a memory control group (root only).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain

MIB = 1 << 20
LAYERS, WIDTH, ROWS = 24, 256, 8192
BOUND_BYTES = 100 * MIB
"""Saved bytes in memory when offloaded; a plain run keeps four times as much."""
STEPS = 2


# --- the child ----------------------------------------------------------------


def train(batch: torch.Tensor) -> list[float]:
    torch.manual_seed(0)
    layers = [one for _ in range(LAYERS) for one in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def child(mode: str, group: str, place: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch = torch.randn(ROWS, WIDTH)
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    if mode == "keep":
        told: dict[str, Any] = {"losses": train(batch)}
    else:
        with ssdtrain.offload(place, max_resident_bytes=BOUND_BYTES) as session:
            told = {"losses": train(batch)}
        told["resident_bytes_peak"] = session.stats.resident_bytes_peak
        told["bytes_written"] = session.stats.bytes_written
    sys.stdout.write(json.dumps(told) + "\n")


# --- the tests ----------------------------------------------------------------


class Group:
    """A memory control group, by either version of cgroups."""

    def __init__(self, root: Path, version: int) -> None:
        self.path = root / f"ssdtrain-memory-{os.getpid()}"
        self.version = version
        self.path.mkdir()

    def limit(self, nbytes: int | None) -> None:
        """Kill members that need more than ``nbytes``; swap does not help them."""
        if self.version == 2:
            (self.path / "memory.max").write_text("max" if nbytes is None else str(nbytes))
            swap = self.path / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
            return
        # Memory and swap together are never less than memory: raise them first, lower them last.
        names = ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]
        value = "-1" if nbytes is None else str(nbytes)
        for name in names if nbytes is None else reversed(names):
            if (self.path / name).exists():
                (self.path / name).write_text(value)

    def take_peak(self) -> int:
        """Return the most memory that was used since the last call."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        peak = self.path / name
        if not peak.exists():
            pytest.skip(f"this kernel has no {name} to choose a limit from")
        nbytes = int(peak.read_text())
        if self.version == 1:
            peak.write_text("0")
        return nbytes


def controllers() -> Iterator[tuple[Path, int]]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        root = Path(place)
        if kind == "cgroup" and "memory" in options.split(","):
            yield root, 1
        elif kind == "cgroup2" and "memory" in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
            yield root, 2


@pytest.fixture
def group() -> Iterator[Group]:
    if os.geteuid() != 0:
        pytest.skip("only root can limit memory by a control group")
    try:
        found = next(controllers(), None)
        made = None if found is None else Group(*found)
    except OSError as error:
        pytest.skip(f"the kernel does not let this process limit memory: {error}")
    if made is None:
        pytest.skip("no memory control group (cgroup v1 or v2) is mounted")
    yield made
    made.path.rmdir()


def run(mode: str, group: Path, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, mode, str(group), str(place)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.long
def test_offload_ends_where_keep_is_killed(group: Group, tmp_path: Path) -> None:
    # What files are read for the first time is counted into the group that does it.
    told(run("offload", group.path.parent, tmp_path))
    # Offload first: where the kernel cannot reset the peak, the larger one still shows.
    free = told(run("offload", group.path, tmp_path))
    offload_peak = group.take_peak()
    expected = told(run("keep", group.path, tmp_path))
    keep_peak = group.take_peak()
    assert free["losses"] == expected["losses"]
    assert offload_peak < 0.6 * keep_peak

    group.limit((offload_peak + keep_peak) // 2)
    killed = run("keep", group.path, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout == ""

    fits = told(run("offload", group.path, tmp_path))
    assert fits["losses"] == expected["losses"]
    assert len(set(expected["losses"])) == STEPS
    assert fits["resident_bytes_peak"] <= BOUND_BYTES
    assert fits["bytes_written"] > BOUND_BYTES
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    child(*sys.argv[1:])
