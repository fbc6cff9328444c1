"""What the tests with other people's trainers share: a plugin of pytest for those files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import assert_nothing_is_on, nothing_leaks


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Threads that have to be woken for each small operation take longer than one alone."""
    threads_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads_count)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory; afterwards nothing may be on, and no store open."""
    (tmp_path / "spill").mkdir()
    with nothing_leaks():
        yield tmp_path
        assert_nothing_is_on()
