"""Where torch's tensors lie after ``import ssdtrain``, and that what they leave is given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from checkout import BENCHES
from ssdtrain.activations import prefetch, writeback
from ssdtrain.machine import process_memory
from ssdtrain.planning.policy import SETTLED_COUNT, Policy
from support import Rig, batch, mlp

ADDRESS = """
import ssdtrain
import torch
print(torch.empty(8 << 20, dtype=torch.uint8).data_ptr() % 4096)
"""


TOO_LATE = """
import sys
import torch
torch.zeros(3)
import ssdtrain
for _ in range(2):
    with ssdtrain.offload(sys.argv[1], direct_io="optional") as session:
        pass
print(session)
"""
HOLES = """
import torch
from ssdtrain.machine.process_memory import release_free_memory, status_bytes
torch.empty(31 << 20, dtype=torch.uint8)  # freed, glibc takes smaller ones from its heap
large, small = [], []
for _ in range(100):
    large.append(torch.ones(1 << 20, dtype=torch.uint8))
    small.append(torch.ones(100_000, dtype=torch.uint8))  # fits into no hole that imports left
full = status_bytes("VmRSS")
large.clear()
freed = status_bytes("VmRSS")
release_free_memory()
print((full - freed) >> 20, (full - status_bytes("VmRSS")) >> 20)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("THP_MEM", "LD_PRELOAD"))
    }
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_tensors_lie_on_pages_of_their_own() -> None:
    assert int(run(ADDRESS).stdout) == 0


@pytest.mark.long
def test_the_users_choice_of_pages_stands() -> None:
    assert int(run(ADDRESS, THP_MEM_ALLOC_ENABLE="0").stdout) != 0


@pytest.mark.long
def test_an_import_that_came_too_late_is_said_once_and_in_the_report(tmp_path: Path) -> None:
    done = run(TOO_LATE, str(tmp_path))
    # Nobody has set logging up, so the line names the package itself.
    (said,) = done.stderr.splitlines()
    assert said.startswith("ssdtrain: tensors are not on huge pages, because one was made before ")
    remedy = "start with `ssdtrain run --dir DIR script.py`, import ssdtrain first, or set "
    assert remedy in said
    assert f"  pages      small, because ssdtrain was imported too late; {remedy}" in done.stdout


@pytest.mark.long
def test_memory_between_blocks_in_use_goes_back_to_the_system() -> None:
    kept, given = map(int, run(HOLES).stdout.split())
    assert kept < 20, "glibc gave it back by itself: nothing was tried"
    assert given > 80


def test_the_high_water_mark_starts_again_and_sees_the_next_peak() -> None:
    size = 64 << 20
    # More than an earlier peak of this process could hide.
    held = torch.ones(size, dtype=torch.uint8)
    del held
    before = process_memory.reset_high_water_mark()
    assert process_memory.status_bytes("VmHWM") - before < size // 2
    held = torch.ones(size, dtype=torch.uint8)
    del held
    assert process_memory.status_bytes("VmHWM") - before > size // 2


def test_a_session_gives_freed_memory_back_if_its_process_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    resident_bytes = iter(range(0, 1 << 50, 2 * process_memory.GROWTH_BYTES))
    monkeypatch.setattr(process_memory, "known_bytes", lambda _: next(resident_bytes))
    monkeypatch.setattr(process_memory, "release_free_memory", lambda: given_back.append(1))
    monkeypatch.setattr(writeback, "GIVE_BACK_BYTES", 3 * 32 * 64 * 4)
    rig = Rig(tmp_path)
    with rig.context():
        for _ in range(3):
            loss = mlp(layers=6)(batch()).sum()
            rig.flush()
            loss.backward()
    assert 3 <= len(given_back) <= rig.stats.bytes_offloaded // writeback.GIVE_BACK_BYTES


def test_what_the_first_rounds_took_goes_back_once_their_plan_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    rig = Rig(tmp_path, policy=Policy())
    with rig.context():
        for number in range(2 * SETTLED_COUNT):
            monkeypatch.setattr(prefetch, "release_free_memory", partial(given_back.append, number))
            mlp(layers=6 if number else 12)(batch()).sum().backward()
            if number == 0:
                first_bytes = rig.stats.saved_bytes_peak
                assert not rig.stats.has_settled
    # The first pack of a round learns from the last. The kind of the first step had one only.
    assert given_back == [1 + SETTLED_COUNT]
    assert rig.stats.has_settled
    assert 0 < rig.stats.saved_bytes_peak < first_bytes


def test_a_process_that_does_not_grow_gives_memory_back_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted, given_back = [0], [0]
    resident_bytes = 10 * process_memory.GROWTH_BYTES
    monkeypatch.setattr(process_memory, "known_bytes", lambda _: resident_bytes)
    monkeypatch.setattr(
        process_memory, "release_free_memory", lambda: given_back.append(len(noted))
    )
    memory = process_memory.GrownMemory()
    for _ in range(20):
        memory.note_freed(1)
        noted.append(0)
    assert given_back[1:] == [1, 2, 4, 8, 16]
    resident_bytes += process_memory.GROWTH_BYTES + 1
    for _ in range(10):
        memory.note_freed(1)
        noted.append(0)
    assert given_back[6:] == [21, 22, 24, 28]


FAULTS = """
import resource, sys, torch, ssdtrain
from ssdtrain.machine.process_memory import status_bytes
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(24 << 20, dtype=torch.uint8) for _ in range(8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with ssdtrain.offload():
    # Small objects may lie where the first tensors were, so a few calls may need new memory.
    least = min(faults() for _ in range(8))
    inside = status_bytes("VmRSS")
faults()
print(least, inside - status_bytes("VmRSS"))
"""


def test_a_session_uses_the_memory_of_large_tensors_again() -> None:
    """glibc would otherwise map each anew, or give the end of its heap back.

    After the session it does so again.
    """
    huge_pages = {"THP_MEM_ALLOC_ENABLE": "1"}
    users_own = huge_pages | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    least, given_back = map(int, run(FAULTS, **huge_pages).stdout.split())
    least_of_users, _ = map(int, run(FAULTS, **users_own).stdout.split())
    assert least < least_of_users / 16
    assert given_back > 64 << 20


def test_under_a_bound_freed_memory_is_given_back_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(writeback, "GIVE_BACK_BYTES", 3 * 32 * 64 * 4)
    rig = Rig(tmp_path, max_resident_bytes=1 << 30)
    monkeypatch.setattr(
        writeback, "release_free_memory", lambda: freed.append(rig.stats.bytes_written)
    )
    with rig.context():
        for _ in range(3):
            loss = mlp(layers=6)(batch()).sum()
            rig.flush()
            loss.backward()
    del loss
    count = rig.stats.bytes_offloaded // writeback.GIVE_BACK_BYTES
    assert count // 2 <= len(freed) <= count
    assert count >= 3
    rig.assert_empty()


@pytest.mark.long
def test_the_benchmark_of_pages_runs_small(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    bench = BENCHES / "training" / "pages_step.py"
    sizes = ("--layers", "2", "--hidden", "256", "--batch", "4", "--steps", "2", "--threads", "1")
    words = [sys.executable, bench, "--dir", tmp_path, *sizes, "--json", figures]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "losses: all equal" in done.stdout
    rows = json.loads(figures.read_text())["rows"]
    assert {"plain", "imported", "offloaded"} <= set(rows)
