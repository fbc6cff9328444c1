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
EXAMPLES = sorted({*RESUME.parent.glob("*.py")} - {RESUME})


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


@pytest.mark.long
def test_an_example_that_is_killed_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    places = [tmp_path / "whole", tmp_path / "killed"]
    for place in places:
        place.mkdir()
    command = [sys.executable, "-u", RESUME]
    # Small as it is, it gains nothing from threads, and loses on a busy machine.
    how: Any = {"stdout": subprocess.PIPE, "text": True}
    how["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run([*command, places[0]], check=True, **how)
    losses = whole.stdout.splitlines()
    assert len(losses) == 20
    with subprocess.Popen([*command, places[1]], **how) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline().strip() for _ in range(8)]
        process.kill()
    assert begun == losses[:8]
    rest = subprocess.run([*command, places[1]], check=True, **how)
    said, *others = rest.stdout.splitlines()
    # It may have come further than what was read of it.
    begin = int(said.removeprefix("goes on after step "))
    assert begin % 5 == 0
    assert others == losses[begin:]
    assert [one.name for one in places[1].iterdir()] == ["checkpoint"]
