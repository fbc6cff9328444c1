"""Where torch's tensors lie after ``import ssdtrain``: on huge pages, in a heap that stays warm."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS_OF_TEMPORARIES = """
import resource
import ssdtrain
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
# Below the size that is mapped on its own: they leave 60 MiB of free heap behind.
pair = [torch.ones(30 << 20, dtype=torch.uint8) for _ in range(2)]
del pair
for _ in range(3):
    torch.ones(40 << 20, dtype=torch.uint8)
before = faults()
for _ in range(20):
    torch.ones(40 << 20, dtype=torch.uint8)
print(faults() - before)
"""
ADDRESS = """
import ssdtrain
import torch
print(torch.empty(8 << 20, dtype=torch.uint8).data_ptr() % 4096)
"""


def run(code: str, **environment: str) -> int:
    """Run code in a fresh interpreter; return the number it prints."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "THP_MEM", "GLIBC_TUNABLES", "LD_PRELOAD"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's heap")
def test_short_lived_tensors_reuse_the_heap() -> None:
    assert run(FAULTS_OF_TEMPORARIES) < 100


@pytest.mark.parametrize(
    "setting", [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}]
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's heap")
def test_a_heap_that_the_user_tuned_is_left_alone(setting: dict[str, str]) -> None:
    # Each of the 20 tensors is mapped and cleared anew.
    assert run(FAULTS_OF_TEMPORARIES, **setting) > 20


def test_tensors_lie_on_pages_of_their_own() -> None:
    assert run(ADDRESS) == 0


def test_the_users_choice_of_pages_stands() -> None:
    assert run(ADDRESS, THP_MEM_ALLOC_ENABLE="0") != 0
