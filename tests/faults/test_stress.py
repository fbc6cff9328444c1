"""Some of `make stress` and of `make soak`: seconds in `make test`, minutes in `make test-long`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from checkout import LONG
from support import sizes


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(LONG / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kills", sizes(small=2, whole=25))
def test_killed_training_leaves_nothing(kills: int) -> None:
    said = run("stress_kill.py", "--kills", str(kills), "--seed", "3")
    assert re.fullmatch(rf"{kills} kills, [1-9]\d* of them .*; left: 0 names, 0 bytes\n", said)


@pytest.mark.long
def test_training_over_failing_disks_for_a_while() -> None:
    said = run("soak.py", "--minutes", "1", "--seed", "3")
    counts = dict(re.findall(r"  (.*): (\d+)", said))
    assert int(counts["steps equal bit for bit"]) > 0
    assert int(counts["failed writes"]) > 0
    flipped = "bits flipped on purpose"
    assert int(counts[flipped]) == int(counts[f"{flipped} and found"]) > 0
