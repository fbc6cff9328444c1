"""What every test shares."""

import fcntl
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings

from checkout import FAKE_DEVICE, SCRATCH, SUPPORT
from disks import mounted, small_disk

__all__ = ["mounted", "small_disk"]

SLOWEST_FILES_COUNT = 12
POLLS_PER_COLLECTION = 100
"""A collection of garbage takes longer than many looks at the threads."""

BEFORE = pytest.StashKey[tuple[int, int]]()
"""How many tests had failed, and how many threads stores had, when a test began."""

LEFT_OUT = pytest.StashKey[int]()
"""How many modules had been imported when the collector of garbage was last told of them."""
NEW_MODULES_COUNT = 20


if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(SCRATCH)

# Each worker of `pytest -n` has a core to itself: torch's threads would take the others'.
if "PYTEST_XDIST_WORKER" in os.environ:
    assert "torch" not in sys.modules, "torch has already counted the cores"
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Child processes import what the tests share too.
paths = (str(SUPPORT), str(FAKE_DEVICE), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# A shell has what it starts in the background ignore Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What `ssdtrain bench` once found on this machine must not decide what the tests run with.
os.environ["XDG_CACHE_HOME"] = str(SCRATCH / "cache-of-tests")

# `pytest -m long --hypothesis-profile=long` looks for longer, and somewhere else each time.
settings.register_profile("gate", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=50_000, deadline=None, print_blob=True)
settings.load_profile("gate")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Keep the tests of other workers out while one is marked ``alone``.

    Each test holds a lock that is shared, and one marked ``alone`` the same lock for itself. Who
    waits for it stands in the door, so that no new test overtakes one that wants to be alone.
    """
    wanted = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (SCRATCH / "door").open("w") as door, (SCRATCH / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, wanted)
        fcntl.flock(door, fcntl.LOCK_UN)
        leave_out_what_was_imported(item.config)
        item.stash[BEFORE] = item.session.testsfailed, store_thread_count()
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Say which test leaves a store alive: one that comes later would fail for it.

    What a test had in its hands that failed stays alive until pytest has told of it.
    """
    yield
    failed_before, threads_before = item.stash[BEFORE]
    if store_thread_count() > threads_before and failed_before == item.session.testsfailed:
        polls = count()

        def have_ended() -> bool:
            # What a thread still uses at one look is garbage only at a later one.
            if next(polls) % POLLS_PER_COLLECTION == 0:
                gc.collect()
            return store_thread_count() <= threads_before

        sys.modules["support"].wait_until(have_ended, "the end of the store's threads")


def store_thread_count() -> int:
    """Count the threads of stores; whoever has one has imported what the tests share."""
    support = sys.modules.get("support")
    return len(support.store_threads()) if support is not None else 0


def pytest_collection_finish(session: pytest.Session) -> None:
    leave_out_what_was_imported(session.config)


def leave_out_what_was_imported(config: pytest.Config) -> None:
    """Have the collector of garbage leave out what was imported, which stays until the end.

    It is half a million objects, and every other test collects. What tests
    import themselves, torch's compiler before all, is left out before the next one; so is what a
    fixture of a module has just then, which is no garbage as long as that goes on.
    """
    count = len(sys.modules)
    if count >= config.stash.get(LEFT_OUT, 0) + NEW_MODULES_COUNT:
        config.stash[LEFT_OUT] = count
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Have it look at everything once more: libraries tell of what is left at the end."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what takes the time, so that it does not grow unseen."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for one in reports:
            if isinstance(one, pytest.TestReport):
                seconds[one.nodeid.partition("::")[0]] += one.duration
    terminalreporter.section("slowest files")
    for name, spent in seconds.most_common(SLOWEST_FILES_COUNT):
        terminalreporter.line(f"{spent:7.1f} s  {name}")
    terminalreporter.line(f"{seconds.total():7.1f} s  all {len(seconds)} files")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Have torch forget what a test compiled: updates beside the forward ask for it (Deferred)."""
    yield
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None and compiler.FRAME_COUNTER > 0:
        import torch  # noqa: PLC0415 - as below

        torch._dynamo.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as those of tests gain nothing from threads, and lose on a busy machine."""
    import torch  # noqa: PLC0415 - tests without it start sooner

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
