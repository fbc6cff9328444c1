"""The programs of docs/examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.stem)
def test_an_example_ends_well_and_offloads(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ssdtrain: " in done.stdout
    assert " written (" in done.stdout
    assert " 0 bytes written" not in done.stdout
    assert not list(tmp_path.iterdir())
