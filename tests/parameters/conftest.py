"""One thread: on tensors this small, several wait for each other longer than they compute."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Spares the collections in the tests all that was imported.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


NOT_MENDED = {
    "test_models[gradient in forward": "weights of a graph made in forward stay until a later use",
    "test_updates_in_backward_are_made_in_step[shared]": "its updates leave no weight on the disk",
    "test_evaluation_in_between[checkpoint, not reentrant]": "an extent outlives the model",
}
"""Known defects of memory and space, none of bits; the tests say when one is gone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in NOT_MENDED.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.xfail(reason=reason, raises=AssertionError))
