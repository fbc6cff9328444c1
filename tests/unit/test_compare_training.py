"""The benchmark of training against peers, small: ours is exact, and who is missing says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import BENCHES

TIMEOUT_S = 280
SIZES = ("--layers", "6", "--width", "256", "--tokens", "16", "--turns", "2", "--warm-up", "2")


@pytest.mark.long
def test_a_small_run(tmp_path: Path) -> None:
    place, figures = tmp_path / "disk", tmp_path / "figures.json"
    place.mkdir()
    program = BENCHES / "compare" / "compare_training.py"
    words = ("--only", "ssdtrain", "ssdtrain-backward", "torchao", "--dir", place)
    done = subprocess.run(
        [sys.executable, program, *words, *SIZES, "--json", figures],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "bit-identical to plain: yes" in done.stdout
    assert list(place.iterdir()) == []
    ways = json.loads(figures.read_text())["ways"]
    assert ways["plain"]["disk_bytes"] == 0
    assert "error" in ways["torchao"], "it is not installed, and needs a GPU"
    for name in ("ssdtrain", "ssdtrain-backward"):
        way = ways[name]
        assert way["losses"] == ways["plain"]["losses"]
        assert way["ratio"] > 0
        assert way["disk_bytes"] > 6 * 8 * 256**2 * 8, "weights, masters and state of all blocks"
        assert way["left_bytes"] == 0
        if os.geteuid() == 0:
            assert "losses" in way["full_disk"] or "ends" in way["full_disk"]
            assert "other losses" not in way["full_disk"]
