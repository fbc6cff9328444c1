"""The benchmark of steps whose weights are on the disk: it runs, and fails if nothing is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import BENCHES

sys.path.insert(0, str(BENCHES / "training"))
import parameters_step


def test_the_benchmark_fails_where_nothing_is_on_the_disk() -> None:
    plain = {"weights": "same", "weight_bytes": 100}
    good = {
        **plain,
        "bound_bytes": 50,
        "staying_bytes": 10,
        "read_bytes_per_step": 40,
        "written_bytes_per_step": 40,
        "peak_resident_bytes": 50,
        "write_failed_count": 0,
    }
    found = {"losses_equal": True}
    parameters_step.refuse_nothing({"plain": plain, "half": good}, found)
    bad = [
        ({"read_bytes_per_step": 39}, "moved less"),
        ({"written_bytes_per_step": 0}, "moved less"),
        ({"staying_bytes": 50}, "moved less"),
        ({"peak_resident_bytes": 51}, "more weights were in memory"),
        ({"write_failed_count": 1}, "refused weights"),
        ({"weights": "other"}, "differ"),
    ]
    for change, words in bad:
        with pytest.raises(AssertionError, match=words):
            parameters_step.refuse_nothing({"plain": plain, "half": {**good, **change}}, found)
    with pytest.raises(AssertionError, match="differ"):
        parameters_step.refuse_nothing({"plain": plain, "half": good}, {"losses_equal": False})


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_benchmark_runs_small(tmp_path: Path, optimizer: str) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--layers", "3", "--hidden", "256", "--sequence", "32", "--rounds", "1")
    options = ("--optimizer", optimizer, "--buffer-bytes", "1MiB", "--json", figures)
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
