"""The programs of docs/examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT
from support import shared_out

RESUME = ROOT / "docs" / "examples" / "resume.py"
LARGER = RESUME.with_stem("larger_than_memory")
EXAMPLES = sorted({*RESUME.parent.glob("*.py")} - {RESUME, LARGER})
QUICK = [RESUME.with_stem(stem) for stem in ("one_bound",)]


@pytest.mark.parametrize("example", shared_out(EXAMPLES, quick=QUICK))
def test_an_example_ends_well_and_offloads(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ssdtrain: " in done.stdout
    assert " written (" in done.stdout
    assert " 0 bytes written" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("example", "steps", "killed_after", "save_every"),
    [
        pytest.param(RESUME, 20, 8, 5, marks=pytest.mark.long),
        pytest.param(LARGER, 6, 3, 2, marks=pytest.mark.long),
    ],
    ids=["resume", "larger"],
)
def test_an_example_that_is_killed_goes_on_with_the_same_losses(
    example: Path, steps: int, killed_after: int, save_every: int, tmp_path: Path
) -> None:
    places = [tmp_path / "whole", tmp_path / "killed"]
    for place in places:
        place.mkdir()
    command = [sys.executable, "-u", example]
    # Small as it is, it gains nothing from threads, and loses on a busy machine.
    how: Any = {"stdout": subprocess.PIPE, "text": True}
    how["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run([*command, places[0]], check=True, **how)
    losses = [line for line in whole.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == steps
    with subprocess.Popen([*command, places[1]], **how) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline().strip() for _ in range(killed_after)]
        process.kill()
    assert begun == losses[:killed_after]
    rest = subprocess.run([*command, places[1]], check=True, **how)
    said, *others = rest.stdout.splitlines()
    # It may have come further than what was read of it.
    begin = int(said.removeprefix("goes on after step "))
    assert begin % save_every == 0
    assert [line for line in others if line.startswith("step ")] == losses[begin:]
    assert [one.name for one in places[1].iterdir()] == ["checkpoint"]
