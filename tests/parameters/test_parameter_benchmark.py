"""The benchmark of steps whose weights are on the disk runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import BENCHES


@pytest.mark.long
def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--layers", "3", "--hidden", "256", "--sequence", "32", "--rounds", "1")
    options = ("--optimizer", "adamw", "--buffer-bytes", "1MiB", "--json", figures)
    bench = BENCHES / "training" / "parameters_step.py"
    done = subprocess.run(
        [sys.executable, bench, "--dir", tmp_path, *sizes, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "0.25 of the weights" in done.stdout
    rows = json.loads(figures.read_text())["rows"]
    quarter = rows["0.25 of the weights"]
    assert 0 < quarter["peak_resident_bytes"] <= quarter["weight_bytes"] / 4
    assert quarter["weights"] == rows["plain"]["weights"]
    assert quarter["over_longer"] > 0
