"""Sizes as people write and read them, and that every option takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ssdtrain
from ssdtrain.sizes import SIZE_MAX, in_bytes, shown_bytes, shown_count
from support import batch, mlp


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        ("1", 1),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1_000", 1000),
        ("256KiB", 256 << 10),
        ("256 KiB", 256 << 10),
        (" 8GiB ", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("9007199254740993", 9007199254740993),
        (SIZE_MAX, SIZE_MAX),
    ],
)
def test_the_meaning_of_a_size(given: int | str, nbytes: int) -> None:
    assert in_bytes("min_bytes", given) == nbytes


@pytest.mark.parametrize(
    "given",
    [0, -1, 1.5, True, None, b"8GiB", "", "GiB", "-1", "1__0", "1.5", "8.0 B", "8G", "7 bits"],
)
def test_an_invalid_size(given: object) -> None:
    with pytest.raises(ssdtrain.ConfigError, match="cap must be a positive whole number"):
        in_bytes("cap", given)


def test_more_than_a_file_can_have() -> None:
    for given in (SIZE_MAX + 1, "9999999TiB"):
        with pytest.raises(ssdtrain.ConfigError, match="cap must be at most 9223372036854775807"):
            in_bytes("cap", given)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_a_size_as_text(nbytes: int, shown: str) -> None:
    assert shown_bytes(nbytes) == shown
    if shown.endswith("iB"):
        assert abs(in_bytes("size", shown) - nbytes) <= nbytes / 1000


@pytest.mark.parametrize(
    ("count", "words", "shown"),
    [
        (0, ["tensor"], "0 tensors"),
        (1, ["tensor"], "1 tensor"),
        (2, ["tensor"], "2 tensors"),
        (1, ["write was", "writes were"], "1 write was"),
        (3, ["write was", "writes were"], "3 writes were"),
    ],
)
def test_a_count_as_text(count: int, words: list[str], shown: str) -> None:
    assert shown_count(count, *words) == shown


def test_every_size_of_a_session_and_a_store_is_taken_as_text(tmp_path: Path) -> None:
    options = {"min_bytes": "1 KiB", "max_resident_bytes": "8MiB", "max_disk_bytes": "1GB"}
    with ssdtrain.offload(tmp_path, **options) as session:
        loss = mlp()(batch()).sum()
        session.flush()
        loss.backward()
    assert session.stats.bytes_offloaded > 0
    with (
        ssdtrain.TensorStore(tmp_path, max_disk_bytes="1MiB") as store,
        pytest.raises(ssdtrain.NoSpaceError, match="max_disk_bytes"),
    ):
        store.write(torch.zeros(1 << 20)).wait()


def test_more_pinned_memory_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    match = "are more than the .* of this machine, and pinned memory cannot be swapped"
    with pytest.raises(ssdtrain.ConfigError, match=rf"pinned_bytes=1024 TiB {match}"):
        ssdtrain.offload(tmp_path, pinned_bytes="1024TiB")
    match = rf"pinned_bytes=2 GiB and max_host_bytes=1024 TiB {match}"
    with pytest.raises(ssdtrain.ConfigError, match=match):
        ssdtrain.offload(tmp_path, max_host_bytes="1024TiB")
