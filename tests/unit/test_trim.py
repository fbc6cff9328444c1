"""``TensorStore.trim``: space goes back to the disk, and what is stored stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from disks import MIB, free_bytes, needs_root
from ssdtrain import NoSpaceError, TensorStore
from ssdtrain.errors import ClosedError
from support import open_files, wait_until

BACKENDS = pytest.mark.parametrize("backend", ["auto", "psync"])


def disk_bytes(place: Path) -> int:
    """Return the bytes of blocks behind this process's files in ``place``."""
    paths = [one.split()[0] for one in open_files() if f" {place}/" in one]
    return sum(os.fstat(int(one)).st_blocks * 512 for one in paths)


def reserved(store: TensorStore) -> int:
    nbytes: int = store.stats()["disk_reserved_bytes"]
    return nbytes


@BACKENDS
def test_space_goes_back_and_live_tensors_stay(tmp_path: Path, backend: Any) -> None:
    with TensorStore(tmp_path, backend=backend, direct_io="optional") as store:
        first = torch.randn(MIB)
        live = store.write(first)
        live.wait()
        others = [store.write(torch.randn(MIB)) for _ in range(40)]
        for one in others:
            one.wait()
        before = disk_bytes(tmp_path)
        assert before >= 41 * 4 * MIB
        assert reserved(store) >= 41 * 4 * MIB
        del one, others
        given_back = store.trim()
        assert given_back >= 40 * 4 * MIB
        # Within a block that the file system needs for its own lists.
        assert abs(disk_bytes(tmp_path) - (before - given_back)) <= MIB
        assert 4 * MIB <= reserved(store) <= 5 * MIB
        assert store.trim() == 0
        assert torch.equal(store.read(live).result(), first)
        again = store.write(first + 1)
        assert torch.equal(store.read(again).result(), first + 1)
        assert torch.equal(store.read(live).result(), first)
        store.release(live)
        store.release(again)
        wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the release")
        store.trim()
        assert (disk_bytes(tmp_path), reserved(store)) == (0, 0)


@BACKENDS
def test_trimming_while_threads_write_and_read(tmp_path: Path, backend: Any) -> None:
    failures: list[BaseException] = []
    with TensorStore(tmp_path, backend=backend, direct_io="optional") as store:

        def work(seed: int) -> None:
            try:
                generator = torch.Generator().manual_seed(seed)
                for _ in range(25):
                    sizes = torch.randint(1, MIB, (4,), generator=generator).tolist()
                    sources = [torch.randn(size, generator=generator) for size in sizes]
                    stored = [store.write(one) for one in sources]
                    for one, source in zip(stored, sources, strict=True):
                        assert torch.equal(store.read(one).result(), source)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for one in threads:
            one.start()
        trimmed = 0
        while any(one.is_alive() for one in threads):
            trimmed += store.trim() > 0
        for one in threads:
            one.join()
        assert not failures
        assert trimmed > 0
        wait_until(lambda: store.stats()["disk_used_bytes"] == 0, "the release")
        store.trim()
        assert (disk_bytes(tmp_path), reserved(store)) == (0, 0)


def test_trimmed_space_counts_for_the_bound_again(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with TensorStore(places, max_disk_bytes=16 * MIB, direct_io="optional") as store:
        # Two files share the bound; the space of one is of no use to the other until it is trimmed.
        a = store.write(torch.zeros(3 * MIB))
        a.wait()
        with pytest.raises(NoSpaceError, match="max_disk_bytes"):
            store.write(torch.zeros(3 * MIB))
        del a
        assert store.trim() >= 12 * MIB
        assert reserved(store) == 0
        store.write(torch.zeros(3 * MIB)).wait()


def test_a_closed_store_trims_nothing(tmp_path: Path) -> None:
    with TensorStore(tmp_path, direct_io="optional") as store:
        pass
    with pytest.raises(ClosedError, match="open a new one"):
        store.trim()


@needs_root
def test_the_disk_sees_the_space(small_disk: Path) -> None:
    before = free_bytes(small_disk)
    with TensorStore(small_disk) as store:
        stored = [store.write(torch.randn(MIB)) for _ in range(8)]
        for one in stored:
            one.wait()
        assert free_bytes(small_disk) <= before - 32 * MIB
        del one, stored
        store.trim()
        assert free_bytes(small_disk) >= before - MIB
