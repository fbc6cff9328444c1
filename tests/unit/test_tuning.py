"""What is kept about a drive is used, bounded and distrusted; the search finds the best setting."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain import open_store as opening
from ssdtrain.commands.search import Rates, find_best, sweep
from ssdtrain.config import StoreConfig
from ssdtrain.machine import tuning
from ssdtrain.machine.drive import drive_of, mount_of
from ssdtrain.machine.tuning import DEFAULT, SavedTuning, Tuning
from ssdtrain.notices import Notices

MIB = 1 << 20
OTHER = Tuning(engine="io_uring", queue_depth=8, piece_bytes=2 * MIB)
THREADS = Tuning(engine="psync", queue_depth=16, piece_bytes=8 * MIB)
SETTINGS = [
    Tuning(engine="io_uring", queue_depth=depth, piece_bytes=piece * MIB)
    for depth in (4, 8, 16, 32)
    for piece in (1, 2, 4, 8)
]


def kept(setting: Tuning = OTHER) -> SavedTuning:
    return SavedTuning(
        tuning=setting, measured="2026-11-20", write_bytes_per_s=3e9, read_bytes_per_s=5.5e9
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and let it say again what was said before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches" / "own"))
    monkeypatch.setattr(tuning, "PROCESS", Notices())
    monkeypatch.setattr(opening, "PROCESS", Notices())
    return tmp_path / "caches" / "own" / "ssdtrain"


# The cache


@pytest.mark.parametrize("umask", [0o22, 0o777])
def test_a_kept_setting_comes_back(tmp_path: Path, cache: Path, umask: int) -> None:
    place = str(tmp_path)
    assert tuning.load(place) is None
    before = os.umask(umask)
    try:
        path = tuning.save(place, kept(DEFAULT))
        assert tuning.save(place, kept()) == path
    finally:
        os.umask(before)
    assert tuning.load(place) == kept()
    assert list(cache.iterdir()) == [path], "a temporary file is left behind"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (cache, cache.parent, cache.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "deeper").mkdir()
    assert tuning.load(str(tmp_path / "deeper")) == kept(), "it is of the drive, not the directory"
    assert tuning.forget(place) == path
    assert tuning.load(place) is None
    assert tuning.forget(place) is None


def test_another_kernel_is_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.save(str(tmp_path), kept())
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="99.0"))
    assert tuning.load(str(tmp_path)) is None


def test_a_cache_of_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.cache_file(str(tmp_path)).is_relative_to(tmp_path / "home" / ".cache")


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuning.save(str(tmp_path), kept())

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        tuning.save(str(tmp_path), kept(DEFAULT))
    assert list(cache.iterdir()) == [path]
    assert tuning.load(str(tmp_path)) == kept()


def changed(**fields: Any) -> Callable[[dict[str, Any]], str]:
    def change(document: dict[str, Any]) -> str:
        for name, value in fields.items():
            inner = document["tuning"] if name in document["tuning"] else document
            inner[name] = value
        return json.dumps(document)

    return change


BROKEN: dict[str, Callable[[dict[str, Any]], str]] = {
    "cut off": lambda document: json.dumps(document)[:100],
    "a list": lambda _: "[]",
    "no rates": lambda document: json.dumps({**document, "read_bytes_per_s": None}),
    "another format": changed(format=2),
    "another drive": changed(drive={}),
    "another engine": changed(engine="aio"),
    "no depth": changed(queue_depth=0),
    "a depth that is a word": changed(queue_depth="16"),
    "small pieces": changed(piece_bytes=4096),
    "a rate that is none": changed(read_bytes_per_s=math.nan),
}


def assert_ignored(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is ignored, said once, and a store opens."""
    for _ in range(2):
        assert tuning.load(str(place)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is ignored: " in record.message
    assert f"`ssdtrain bench {place}`" in record.message
    with ssdtrain.TensorStore(place, direct_io="optional") as store:
        store.write(torch.ones(10)).wait()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_ignored(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuning.save(str(tmp_path), kept())
    path.write_text(BROKEN[name](json.loads(path.read_text())))
    assert_ignored(tmp_path, caplog)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "bytes"])
def test_other_kinds_of_files_are_ignored(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuning.save(str(tmp_path), kept())
    path.rename(tmp_path / "moved")
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff\xfe")
    assert_ignored(tmp_path, caplog)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(tuning.save(str(tmp_path), kept()), 65_534, 65_534)
    assert_ignored(tmp_path, caplog)


# The store


def opened_with(monkeypatch: pytest.MonkeyPatch, *dirs: Path, **options: Any) -> tuple[Any, ...]:
    """Return the engine and the tunings that the core is asked for."""
    seen: list[tuple[Any, ...]] = []

    def store(places: list[tuple[str, Any]], *, backend: str, **_: Any) -> SimpleNamespace:
        seen.append((backend, *(one for _, one in places)))
        return SimpleNamespace(notes=list)

    monkeypatch.setattr(opening, "Store", store)
    opening.open_store(StoreConfig(dirs=tuple(map(str, dirs)), **options))
    (only,) = seen
    return only


@pytest.mark.parametrize(
    ("options", "setting", "expected"),
    [
        ({}, OTHER, ("auto", (8, 2 * MIB))),
        ({}, THREADS, ("psync", (16, 8 * MIB))),
        ({"backend": "io_uring"}, OTHER, ("io_uring", (8, 2 * MIB))),
        ({"backend": "io_uring"}, THREADS, ("io_uring", None)),
        ({"backend": "psync"}, OTHER, ("psync", None)),
        ({"backend": "psync"}, THREADS, ("psync", (16, 8 * MIB))),
        ({"backend": "simulated"}, OTHER, ("simulated", None)),
        ({"direct_io": "disabled"}, OTHER, ("auto", None)),
        ({"direct_io": "optional"}, OTHER, ("auto", (8, 2 * MIB))),
    ],
)
def test_a_store_takes_what_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    setting: Tuning,
    expected: tuple[Any, ...],
) -> None:
    tuning.save(str(tmp_path), kept(setting))
    assert opened_with(monkeypatch, tmp_path, **options) == expected


def test_each_directory_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ring": kept(), "threads": kept(THREADS), "nothing": None}
    monkeypatch.setattr(tuning, "load", lambda place: found[Path(place).name])
    places = [tmp_path / name for name in found]
    # One engine serves all directories: what was measured with another one does not hold.
    assert opened_with(monkeypatch, *places) == ("auto", (8, 2 * MIB), None, None)
    assert opened_with(monkeypatch, places[1], places[2]) == ("auto", None, None)
    assert opened_with(monkeypatch, places[1]) == ("psync", (16, 8 * MIB))


def test_a_tuned_store_works_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.save(str(tmp_path), kept(THREADS))
    caplog.set_level(logging.INFO, "ssdtrain")
    x = torch.randn(5 * MIB)
    for _ in range(2):
        with ssdtrain.TensorStore(tmp_path, direct_io="optional") as store:
            assert torch.equal(store.read(store.write(x)).result(), x)
            assert store.stats()["engines"] == [(tmp_path, "psync")]
    assert [one.message for one in caplog.records] == [
        f"{tmp_path} is used as `ssdtrain bench` found best: psync, 16 pieces of 8 MiB in flight"
    ]


# The drive


def fake_drive(tmp_path: Path) -> Path:
    """Make a sysfs in which the device of ``tmp_path`` is the second partition of an NVMe drive."""
    number = os.stat(tmp_path).st_dev
    disk = tmp_path / "sys" / "devices" / "nvme3n1"
    partition = disk / "nvme3n1p2"
    for path, content in (
        (disk / "dev", "259:0\n"),
        (disk / "size", "1000000\n"),
        (disk / "queue" / "rotational", "0\n"),
        (disk / "device" / "model", "Fast Drive            \n"),
        (disk / "device" / "serial", "S1\n"),
        (partition / "partition", "2\n"),
        (partition / "size", "10\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    block = tmp_path / "sys" / "dev" / "block"
    block.mkdir(parents=True)
    (block / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    return tmp_path / "sys"


def test_a_partition_is_part_of_its_drive(tmp_path: Path) -> None:
    drive = drive_of(tmp_path, fake_drive(tmp_path))
    assert drive is not None
    assert (drive.number, drive.name, drive.model, drive.serial, drive.size_bytes) == (
        "259:0",
        "nvme3n1",
        "Fast Drive",
        "S1",
        512_000_000,
    )
    assert not drive.rotational
    assert str(drive) == "nvme3n1 (Fast Drive, 0.512 GB)"


def test_a_virtual_drive_does_not_know_whether_it_turns(tmp_path: Path) -> None:
    sysfs = fake_drive(tmp_path)
    disk = tmp_path / "sys" / "devices" / "nvme3n1"
    (disk / "queue" / "rotational").write_text("1\n")
    drive = drive_of(tmp_path, sysfs)
    assert drive is not None
    assert drive.rotational
    (disk / "device" / "vendor").write_text("QEMU    \n")
    drive = drive_of(tmp_path, sysfs)
    assert drive is not None
    assert not drive.rotational
    # A virtio drive has a number for its vendor, and the name of its driver.
    (disk / "device" / "vendor").write_text("0x1af4\n")
    driver = tmp_path / "sys" / "bus" / "virtio" / "drivers" / "virtio_blk"
    driver.mkdir(parents=True)
    (disk / "device" / "driver").symlink_to(driver)
    drive = drive_of(tmp_path, sysfs)
    assert drive is not None
    assert not drive.rotational


def test_a_path_on_no_drive(tmp_path: Path) -> None:
    assert drive_of("/proc") is None
    assert drive_of(tmp_path / "missing") is None
    mount = mount_of("/proc")
    assert mount is not None
    assert (mount.kind, mount.point) == ("proc", "/proc")


# The search


class Disk:
    """A made-up drive: rates that rise with the bytes in flight, noise, drift, and a clock."""

    def __init__(self, seed: int, *, noise: float, drift: float = 0.0) -> None:
        self._random = random.Random(seed)
        knee = self._random.choice([4, 8, 16, 32, 64, 128]) * MIB
        self.truth = {
            one: 1e9 * math.sqrt(min(1.0, one.queue_depth * one.piece_bytes / knee))
            for one in SETTINGS
        }
        self._noise, self._drift, self._level = noise, drift, 0.0
        self.now = 0.0
        self.asked: list[Tuning] = []

    def measure(self, setting: Tuning, seconds: float) -> Rates:
        self.now += 2 * seconds
        self.asked.append(setting)
        self._level = 0.98 * self._level + self._random.gauss(0, self._drift)
        write, read = (
            self.truth[setting] * math.exp(self._level + self._random.gauss(0, self._noise))
            for _ in range(2)
        )
        return Rates(write=write, read=read)

    def behind_best(self, setting: Tuning) -> float:
        return 1 - self.truth[setting] / max(self.truth.values())

    def find_best(self, seconds: float = 8.0) -> Any:
        return find_best(SETTINGS, DEFAULT, self.measure, seconds=seconds, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("noise", "drift", "good_min"), [(0.0, 0.0, 100), (0.02, 0.01, 100), (0.1, 0.02, 95)]
)
def test_the_choice_is_within_three_percent_of_the_best(
    noise: float, drift: float, good_min: int
) -> None:
    good = 0
    for seed in range(100):
        disk = Disk(seed, noise=noise, drift=drift)
        choice = disk.find_best().choice
        good += disk.behind_best(choice) <= 0.03
        if disk.behind_best(DEFAULT) == 0 and noise < 0.1:
            assert choice == DEFAULT, "noise chose among equals"
    assert good >= good_min


def test_the_time_is_kept() -> None:
    for seconds in (1.0, 10.0, 100.0):
        disk = Disk(1, noise=0.05)
        assert disk.find_best(seconds).complete
        assert seconds * 0.9 < disk.now < seconds * 1.05


def test_passes_take_turns_and_the_default_stays() -> None:
    disk = Disk(3, noise=0.05)
    outcome = disk.find_best()
    assert disk.asked[: len(SETTINGS)] == SETTINGS
    finalists = [one for one, count in outcome.sample_counts.items() if count >= 3]
    assert 3 <= len(finalists) <= 4
    assert DEFAULT in finalists
    # There and back, so that drift meets all alike: the default stays if it is not among the best.
    second = disk.asked[len(SETTINGS) :]
    assert any(second[:size] == second[size : 2 * size][::-1] for size in (8, 9))
    assert list(outcome.rates)[: len(finalists)] == sorted(
        finalists, key=lambda one: -outcome.rates[one].both
    )
    assert set(outcome.rates) == set(SETTINGS)


def test_a_disk_that_is_too_slow_to_tell() -> None:
    disk = Disk(1, noise=0.0)

    def slow(setting: Tuning, seconds: float) -> Rates:
        disk.now += 1
        return disk.measure(setting, seconds)

    outcome = find_best(SETTINGS, DEFAULT, slow, seconds=5.0, clock=lambda: disk.now)
    assert outcome.choice == DEFAULT
    assert not outcome.complete
    assert disk.now < 7, "it went on after the time was over"


def test_a_sweep_measures_all_equally() -> None:
    disk = Disk(5, noise=0.1)
    swept = sweep(SETTINGS, disk.measure, pass_count=5, sample_s=0.1)
    assert set(swept) == set(SETTINGS)
    assert all(disk.asked.count(one) == 5 for one in SETTINGS)


def test_both_directions_count() -> None:
    assert Rates(write=2.0, read=2.0).both == 1.0
    assert Rates(write=1.0, read=1e9).both == pytest.approx(1.0)
