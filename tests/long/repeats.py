"""A plugin of pytest: runs each test so many times as ``REPEATS`` of the environment says.

Each run is a case of its own, named ``run0``, ``run1`` and so on, in the same process.
"""

from __future__ import annotations

import os

import pytest

REPEATS = "SSDTRAIN_TEST_REPEATS"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case of each run."""
    runs = [f"run{run}" for run in range(int(os.environ[REPEATS]))]
    metafunc.fixturenames.append("run_name")
    metafunc.parametrize("run_name", runs, ids=runs)


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """Return which run this is."""
    name: str = request.param
    return name
