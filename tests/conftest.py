"""What every test shares."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from checkout import SCRATCH, SUPPORT
from disks import mounted, small_disk

__all__ = ["mounted", "small_disk"]


if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(SCRATCH)

# Child processes import what the tests share too.
paths = (str(SUPPORT), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# A shell has what it starts in the background ignore Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What `ssdtrain bench` once found on this machine must not decide what the tests run with.
os.environ["XDG_CACHE_HOME"] = str(SCRATCH / "cache-of-tests")

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
