"""What every test shares."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from disks import mounted, small_disk

__all__ = ["mounted", "small_disk"]

ROOT = Path(__file__).resolve().parents[1]

# /tmp is memory on many machines, and a store refuses memory: test folders lie in the checkout.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    folder = ROOT / "target" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)

# A shell has what it starts in the background ignore Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What `ssdtrain bench` once found on this machine must not decide what the tests run with.
os.environ["XDG_CACHE_HOME"] = str(ROOT / "target" / "tmp" / "cache-of-tests")

# `pytest --hypothesis-profile=long` looks for longer, and somewhere else each time.
settings.register_profile("gate", max_examples=700, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=50_000, deadline=None, print_blob=True)
settings.load_profile("gate")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as those of tests gain nothing from threads, and lose on a busy machine."""
    import torch  # noqa: PLC0415 - tests without it start sooner

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
