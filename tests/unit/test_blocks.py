"""Blocks that are entered and left in every order and thread leave nothing on."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import logging
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu

import ssdtrain
from ssdtrain import ConfigError
from ssdtrain.machine.torch_internals import top_hooks
from ssdtrain.notices import PROCESS
from support import assert_nothing_is_on, bits, nothing_leaks, sizes

PACKAGE = Path(ssdtrain.__file__).parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory; afterwards nothing may be on, and no store open."""
    monkeypatch.setattr(PROCESS, "_topics", set())
    with nothing_leaks():
        yield tmp_path
        assert_nothing_is_on()


def block(place: Path) -> ssdtrain.offload:
    return ssdtrain.offload(place, min_bytes=1, direct_io="optional")


def count(session: ssdtrain.Session) -> int:
    """Return how many saved tensors a session has counted."""
    stats = session.stats
    return stats.tensors_offloaded + stats.tensors_forwarded + stats.tensors_kept


def step() -> None:
    x = torch.ones(1000, requires_grad=True)
    (x * 2).exp().sum().backward()
    assert x.grad is not None
    assert bits(x.grad) == bits(torch.full((1000,), 2.0).exp() * 2)


def test_active_is_the_inner_session_of_this_thread(place: Path) -> None:
    assert ssdtrain.active() is None
    tool = block(place)

    @tool
    def decorated() -> ssdtrain.Session | None:
        return ssdtrain.active()

    with block(place) as outer:
        assert ssdtrain.active() is outer
        with block(place) as inner:
            assert ssdtrain.active() is inner
        assert ssdtrain.active() is outer
        assert decorated() is tool.session is not outer
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ssdtrain.active).result() is None


def said_of_blocks(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the levels of what was said of blocks in blocks; other notices are of other tests."""
    return [one.levelno for one in caplog.records if "ssdtrain.leave_all()" in one.message]


def test_a_block_within_itself_is_left_as_often(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = block(place)
    with tool as outer:
        with tool as inner:
            assert ssdtrain.active() is inner is not outer
            step()
        assert count(inner)
        assert ssdtrain.active() is outer
        step()
    assert count(outer)
    assert said_of_blocks(caplog) == [logging.WARNING]


def test_a_block_inside_another_is_said_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with block(place) as outer, block(place) as inner:
        step()
        with block(place):
            pass
    assert count(inner)
    assert not count(outer)
    assert said_of_blocks(caplog) == [logging.WARNING]


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "and hooks of others"])
def test_the_outer_one_is_left_first(
    foreign: bool, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outer, inner, other = block(place), block(place), save_on_cpu()
    outer_session = outer.__enter__()
    if foreign:
        other.__enter__()
    inner_session = inner.__enter__()
    caplog.clear()
    outer.__exit__(None, None, None)
    assert ssdtrain.active() is inner_session
    step()
    assert count(inner_session)
    assert not count(outer_session)
    inner.__exit__(None, None, None)
    assert sum("left before a block that" in one.message for one in caplog.records) == 1
    if foreign:
        assert top_hooks(True) is not None, "the hooks of others were taken off"
        other.__exit__()


def test_forbidden_hooks_are_an_error_and_nothing_stays_on(place: Path) -> None:
    with disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"), block(place):
            pass
        assert_nothing_is_on()
    with block(place) as session:
        with pytest.raises(RuntimeError, match="not here"), disable_saved_tensors_hooks("not here"):
            pass
        step()
    assert count(session)


def test_others_who_take_our_hooks_off_leave_nothing_behind(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, ours = save_on_cpu(), block(place)
    other.__enter__()
    ours.__enter__()
    other.__exit__()
    ours.__exit__(None, None, None)
    assert "took ssdtrain's hooks off" in caplog.text


def test_tasks_that_take_turns_leave_nothing_on(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def both() -> list[ssdtrain.Session]:
        entered, entered_inside, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> ssdtrain.Session:
            with block(place) as session:
                entered.set()
                await entered_inside.wait()
            left.set()
            return session

        async def second() -> ssdtrain.Session:
            await entered.wait()
            with block(place) as session:
                entered_inside.set()
                await left.wait()
                assert ssdtrain.active() is session
                step()
            return session

        return await asyncio.gather(first(), second())

    first, second = asyncio.run(both())
    assert count(second)
    assert not count(first)
    assert "left before a block that" in caplog.text


def test_another_thread_cannot_leave(place: Path) -> None:
    tool = block(place)
    with tool as session, ThreadPoolExecutor(1, thread_name_prefix="helper") as pool:
        leaves = pool.submit(tool.__exit__, None, None, None)
        with pytest.raises(ConfigError, match=r"in thread 'MainThread'.*not in.*'helper_0'"):
            leaves.result()
        assert ssdtrain.active() is session
        step()
        assert count(session)


def test_a_block_of_an_ended_thread_is_closed_from_any_thread(place: Path) -> None:
    tool = block(place)
    thread = threading.Thread(target=tool.__enter__)
    thread.start()
    thread.join()
    tool.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="has not entered the block that it leaves, or has left"):
        tool.__exit__(None, None, None)


def test_several_threads_enter_one_object(place: Path) -> None:
    tool = block(place)
    together = threading.Barrier(2)

    def train() -> ssdtrain.Session:
        with tool as session:
            together.wait()
            step()
            assert ssdtrain.active() is session
        assert_nothing_is_on()
        return session

    with ThreadPoolExecutor(2) as pool:
        sessions = [one.result() for one in [pool.submit(train) for _ in range(2)]]
    assert all(map(count, sessions))


def test_everything_is_left_at_once(place: Path) -> None:
    tool = block(place)
    other = save_on_cpu()

    @block(place)
    def decorated() -> list[ssdtrain.Session]:
        return ssdtrain.leave_all()

    outer = block(place).__enter__()
    other.__enter__()
    with tool as inner:
        left = decorated()
        assert ssdtrain.active() is None
    assert [one for one in left if one in (outer, inner)] == [inner, outer]
    assert len(left) == 3
    other.__exit__()
    assert ssdtrain.leave_all() == []
    # The end of the `with` was the one that was left early; there is no other.
    with pytest.raises(ConfigError, match="has left it already"):
        tool.__exit__(None, None, None)
    with tool:
        step()


def test_a_generator_that_is_dropped_leaves(place: Path) -> None:
    def batches() -> Iterator[int]:
        with block(place):
            yield from range(3)

    made = batches()
    next(made)
    assert ssdtrain.active() is not None
    del made


@pytest.mark.parametrize(
    ("directories", "options", "shown"),
    [
        ("/a", {}, "ssdtrain.offload('/a')"),
        (["/a", "/b"], {"verify": False}, "ssdtrain.offload(['/a', '/b'])"),
        (
            "/a",
            {"max_resident_bytes": "8KiB", "min_bytes": 1, "backend": "psync", "verify": True},
            (
                "ssdtrain.offload('/a', min_bytes=1, max_resident_bytes=8192, backend='psync', "
                "verify=True)"
            ),
        ),
        (
            "/a",
            {"max_disk_bytes": "1GB", "direct_io": "optional"},
            "ssdtrain.offload('/a', max_disk_bytes=1000000000, direct_io='optional')",
        ),
    ],
)
def test_it_shows_where_it_writes_and_what_is_set(
    directories: Any, options: dict[str, Any], shown: str
) -> None:
    made = ssdtrain.offload(directories, **options)
    assert repr(made) == shown
    # What is shown makes another one like it.
    assert eval(shown).__getstate__() == made.__getstate__()


def unpickled(made: object) -> Any:
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("again", [unpickled, copy.deepcopy])
def test_a_copy_has_the_options_and_nothing_that_is_on(
    again: Callable[[Any], Any], place: Path
) -> None:
    tool = ssdtrain.offload(place, min_bytes=7, max_disk_bytes=1 << 30, direct_io="optional")
    with tool as session:
        made = again(tool)
        assert made._config == tool._config
        assert made.session is None
        with pytest.raises(ConfigError, match="has not entered"):
            made.__exit__(None, None, None)
        assert ssdtrain.active() is session
    with made as other:
        step()
        assert count(other)


class Interrupts:
    """Sends one Ctrl-C: at the n-th moment in the package at which Python looks for one.

    That is where a function of Python begins, and where one of C has returned.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        # What is raised in a generator that ends is nobody's to catch.
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if event in ("call", "c_return") and PACKAGE in Path(frame.f_code.co_filename).parents:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("every", sizes(small=4, whole=1))
def test_ctrl_c_at_any_moment_leaves_what_leave_all_mends(every: int, place: Path) -> None:
    """While a block is entered or left: it is off then, or ``leave_all`` takes it off."""
    tool = block(place)
    stayed_on = []
    for number in itertools.count(1, every):
        interrupts = Interrupts(number)
        sys.setprofile(interrupts)
        try:
            with tool:
                pass
        except KeyboardInterrupt as interrupt:
            sys.setprofile(None)
            if ssdtrain.active() is not None or top_hooks(True) is not None:
                stayed_on.append(traceback.extract_tb(interrupt.__traceback__)[-2].name)
            ssdtrain.leave_all()
            assert_nothing_is_on()
        finally:
            sys.setprofile(None)
        if interrupts.left > 0:
            break
    assert number > 50, "the calls of the package were not seen"
    # Before its first line nothing can be done about it. The moment may be missed, as the number
    # of calls is not the same each time.
    assert stayed_on in ([], ["__exit__"])
