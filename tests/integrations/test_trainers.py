"""The tests with other people's trainers, each file of them in a process of its own.

They import half a gigabyte, which would slow every process of pytest that only looks for tests, and
each collection of garbage after it; and Lightning takes Ctrl-C away for good. One file alone:
``pytest tests/integrations/with_lightning.py``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from checkout import ROOT
from children import forked_python

# The locks of tests/conftest.py are held by the test that waits for these.
PROGRAM = """
import sys, pytest
sys.exit(pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "trainer",
    [
        "transformers",
        pytest.param("lightning", marks=pytest.mark.long),
        pytest.param(
            "trl",
            marks=pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
        ),
        pytest.param("launchers", marks=pytest.mark.long),
    ],
)
def test_trainers(trainer: str, tmp_path: Path) -> None:
    file = Path(__file__).with_name(f"with_{trainer}.py")
    done = forked_python(
        PROGRAM, str(file), f"--basetemp={tmp_path / 'tests'}", f"--rootdir={ROOT}", cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
