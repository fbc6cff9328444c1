"""One thread: on tensors this small, several wait for each other longer than they compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody keep an interrupt that comes while Python tells of a gradient that is gone.

    Python ignores it there, and pytest would keep it, with all that its traceback has seen.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
