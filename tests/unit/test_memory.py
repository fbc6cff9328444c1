"""Where torch's tensors lie after ``import ssdtrain``: on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

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
        if not name.startswith(("THP_MEM", "LD_PRELOAD"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_tensors_lie_on_pages_of_their_own() -> None:
    assert run(ADDRESS) == 0


def test_the_users_choice_of_pages_stands() -> None:
    assert run(ADDRESS, THP_MEM_ALLOC_ENABLE="0") != 0
