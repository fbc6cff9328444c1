"""``TensorStore.overwrite`` and ``read_into``: the old bytes or the new, and none beside."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssdtrain import ConfigError, NoSpaceError, TensorStore
from stores import SlowStore, assert_same
from support import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore(tmp_path) as opened:
        yield opened


OVERWRITTEN = [
    torch.arange(5.0),
    torch.arange(100_003, dtype=torch.int16),
    torch.randn(40, 60).t(),
    torch.randn(3, 1, 700),
    torch.empty(0, 3),
    np.arange(70_001, dtype=np.complex64),
    np.asfortranarray(np.arange(600.0).reshape(20, 30)),
    np.empty((0,), np.uint8),
]


@pytest.mark.parametrize("first", OVERWRITTEN, ids=lambda one: f"{type(one).__name__}{one.shape}")
def test_an_overwrite_gives_other_bytes_of_the_same_form(first: Any, store: TensorStore) -> None:
    stored = store.write(first)
    stored.wait()
    for factor in (2, 3):
        second = first * factor
        store.overwrite(stored, second)
        pending = store.read(stored)
        assert_same(pending.result(), second)
        assert stored.done()
    assert store.stats()["disk_used_bytes"] <= first.nbytes * 2 + 8192


def test_an_overwrite_needs_the_same_form(store: TensorStore) -> None:
    stored = store.write(torch.zeros(20, 30))
    stored.wait()
    others = [torch.zeros(30, 20), torch.zeros(20, 30).int(), torch.zeros(30, 20).t()]
    for other in others:
        for use in (store.overwrite, store.read_into):
            with pytest.raises(ConfigError, match="give the same type, shape and strides"):
                use(stored, other)
    with pytest.raises(ConfigError, match=r"a tensor was written.* by a numpy array"):
        store.overwrite(stored, np.zeros((20, 30), np.float32))  # type: ignore[arg-type]
    assert_same(store.read(stored).result(), torch.zeros(20, 30))


def test_a_failed_overwrite_is_raised_once_and_the_old_bytes_are_there(tmp_path: Path) -> None:
    with SlowStore(tmp_path, capacity_bytes=6000) as store:
        stored = store.write(torch.full((1000,), 1.0))
        stored.wait()
        for ask in (stored.wait, lambda: store.read(stored).result()):
            store.overwrite(stored, torch.full((1000,), 2.0))
            with pytest.raises(NoSpaceError):
                ask()
            assert torch.equal(store.read(stored).result(), torch.full((1000,), 1.0))
        store.overwrite(stored, torch.full((1000,), 2.0))
        wait_until(stored.done, "the overwrite ends")
        with pytest.raises(NoSpaceError):
            store.overwrite(stored, torch.full((1000,), 3.0))


@pytest.mark.parametrize("first", OVERWRITTEN, ids=lambda one: f"{type(one).__name__}{one.shape}")
def test_read_into_fills_the_memory_that_is_given(first: Any, tmp_path: Path) -> None:
    with TensorStore(tmp_path, verify=True) as store:
        stored = store.write(first)
        # In the middle of something larger, of which nothing else may change.
        nbytes = first.nbytes
        for distance in (0, 64, first.itemsize):
            around = np.full(nbytes + 3 * 4096, 0xEE, np.uint8)
            start = -around.ctypes.data % 4096 + distance
            inside = around[start : start + nbytes]
            if isinstance(first, np.ndarray):
                order: Any = "C" if first.flags.c_contiguous else "F"
                given: Any = np.ndarray(first.shape, first.dtype, inside, 0, None, order)
            else:
                flat = torch.from_numpy(inside).view(first.dtype)
                given = flat.as_strided(first.size(), first.stride())
            pending = store.read_into(stored, given)
            assert pending.result() is given
            assert_same(given, first)
            inside[:] = 0xEE
            assert (around == 0xEE).all(), "a byte around the target was written"


def test_read_into_tells_autograd(store: TensorStore) -> None:
    stored = store.write(torch.full((1000,), 2.0))
    weight = torch.ones(1000, requires_grad=True)
    target = torch.zeros(1000)
    loss = (weight * target).sum()
    assert torch.equal(store.read_into(stored, target).result(), torch.full((1000,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ConfigError, match=r"under torch\.no_grad"):
        store.read_into(stored, weight)
    with torch.no_grad():
        store.read_into(stored, weight).result()
    assert weight.sum() == 2000


def test_memory_that_cannot_take_bytes_is_refused(store: TensorStore) -> None:
    holes = torch.zeros(20, 30)[:, :20]
    stored = store.write(holes)
    with pytest.raises(ConfigError, match="with holes cannot be read into"):
        store.read_into(stored, holes)
    repeated = torch.zeros(2, 1).expand(2, 2)
    with pytest.raises(ConfigError, match="with holes cannot be read into"):
        store.read_into(store.write(repeated), repeated)
    conjugated = torch.zeros(20, dtype=torch.complex64).conj()
    with pytest.raises(ConfigError, match="conjugated"):
        store.read_into(store.write(conjugated), conjugated)
    array = np.zeros(100)
    array.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        store.read_into(store.write(array), array)
    strided = np.zeros(100)[::2]
    with pytest.raises(ConfigError, match="with holes cannot be read into"):
        store.read_into(store.write(strided), strided)


def test_a_dropped_read_holds_its_memory_until_it_has_ended(tmp_path: Path) -> None:
    with SlowStore(tmp_path) as store:
        stored = store.write(torch.ones(1 << 20))
        stored.wait()
        store.disk.pause()
        target = torch.zeros(1 << 20)
        alive = weakref.ref(target.untyped_storage())
        pending = store.read_into(stored, target)
        wait_until(lambda: store.stats()["read_operation_count"] > 0, "the read begins")
        del pending, target
        gc.collect()
        assert alive() is not None
        store.disk.resume()

        wait_until(lambda: bool(store.stats()) and alive() is None, "the return of its memory")


def test_rates_are_told_when_enough_has_moved(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        assert store._store.rates() == (None, None)
        source = torch.zeros(16 << 20, dtype=torch.uint8)
        for _ in range(6):
            store.read(store.write(source)).result()
        rates = store._store.rates()
        assert all(rate is not None and 1e6 < rate < 1e12 for rate in rates)


def test_the_target_of_a_read_keeps_its_memory(tmp_path: Path) -> None:
    """Whatever becomes of its tensor: nobody else may get memory that the disk writes into."""
    store = SlowStore(tmp_path)
    count = 1 << 20
    stored = store.write(torch.full((count,), 7.0))
    target = torch.zeros(count)
    pending = store.read_into(stored, target)
    address = target.data_ptr()
    target.data = torch.zeros(1)
    others = [torch.zeros(count) for _ in range(4)]
    assert address not in [one.data_ptr() for one in others]
    store.disk.resume()
    pending.result()
    assert not any(one.any() for one in others)
    store.close()


def test_an_overwrite_is_not_lost_to_who_waits_for_the_one_before(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.resume()
    stored = store.write(torch.zeros(1000))
    stored.wait()
    store.overwrite(stored, torch.ones(1000))

    class Later:
        """Ends as the first overwrite does; meanwhile another thread begins the next one."""

        def __init__(self, first: Any) -> None:
            self.first = first
            self.is_next_begun = False

        def wait(self) -> None:
            self.first.wait()
            if not self.is_next_begun:
                self.is_next_begun = True
                store.disk.pause()
                store.overwrite(stored, torch.full((1000,), 2.0))

        def done(self) -> bool:
            done: bool = self.first.done()
            return done

    stored._overwrite = Later(stored._overwrite)  # type: ignore[assignment]
    stored.wait()
    store.disk.resume()
    assert store.read(stored).result()[0] == 2.0
    store.close()


def test_arguments_that_write_did_not_return_are_refused(store: TensorStore) -> None:
    x: Any = torch.zeros(10)
    for use in (store.read, store.release, lambda one: store.overwrite(one, x)):
        with pytest.raises(ConfigError, match="takes a result of write, not"):
            use(x)
    with pytest.raises(ConfigError, match="read_into takes a result of write"):
        store.read_into(x, x)
