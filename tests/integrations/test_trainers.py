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
        pytest.param("transformers", marks=pytest.mark.long),
        pytest.param("lightning", marks=pytest.mark.long),
        pytest.param("fabric", marks=pytest.mark.long),
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


def test_the_callback_of_transformers_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them in this process, which has imported that library for other tests already."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import with_transformers  # noqa: PLC0415 - as above

    (tmp_path / "spill").mkdir()
    with_transformers.test_not_one_bit_differs(tmp_path, {})
