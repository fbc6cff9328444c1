"""Some seconds of `make stress` and of `make soak`, in every test run."""

from __future__ import annotations

import re
import subprocess
import sys

from checkout import LONG


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(LONG / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_training_leaves_nothing() -> None:
    said = run("stress_kill.py", "--kills", "8", "--seed", "3")
    assert re.fullmatch(r"8 kills, [1-8] of them .*; left: 0 names, 0 bytes\n", said)


def test_training_over_failing_disks_for_a_while() -> None:
    said = run("soak.py", "--minutes", "0.33", "--seed", "3")
    counts = dict(re.findall(r"  (.*): (\d+)", said))
    assert int(counts["steps equal bit for bit"]) > 0
    assert int(counts["failed writes"]) > 0
    flipped = "bits flipped on purpose"
    assert int(counts[flipped]) == int(counts[f"{flipped} and found"]) > 0
