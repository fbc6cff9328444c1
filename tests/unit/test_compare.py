"""The benchmark against fio and peers: its arithmetic, its refusals, and the whole of it, small."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checkout import BENCHES, ROOT

NO_FIO = "fio is not installed; sudo apt-get install fio"
TIMEOUT_S = 280


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES / "compare"))
    return importlib.import_module


def compare(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHES / "compare" / "compare.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        **options,
    )


def sample(cases: ModuleType, rate: float) -> Any:
    return cases.Sample(total_bytes=cases.GIB, seconds=cases.GIB / rate, cpu_s=0.5)


def test_the_ratio_is_the_median_of_neighbours_not_the_ratio_of_medians(load: Any) -> None:
    cases = load("compare_cases")
    row = cases.Row(cases.cases(cases.Setting())[0])
    # The disk is at 1, then at 10, then at 4: only neighbours saw the same disk.
    for ours, fio in ((0.5, 1.0), (20.0, 10.0), (3.0, 4.0)):
        row.pairs.append((sample(cases, ours), sample(cases, fio)))
    assert row.bytes_per_s() == pytest.approx(3.0)
    assert row.ratio() == pytest.approx(0.75)
    assert row.ratios() == pytest.approx((0.5, 2.0))
    assert row.cpu_s_per_gib() == pytest.approx(0.5)


def test_the_default_depth_is_that_of_the_store(load: Any) -> None:
    cases = load("compare_cases")
    text = (ROOT / "rust/core/src/config.rs").read_text()
    mebibytes = cases.PIECE_BYTES >> 20
    assert f"queue_depth: {cases.DEFAULT_DEPTH}, piece_bytes: {mebibytes} << 20" in text


@pytest.mark.skipif(shutil.which("fio") is None, reason=NO_FIO)
def test_a_quick_run_has_every_row(load: Any, tmp_path: Path) -> None:
    cases, peers = load("compare_cases"), load("compare_peers")
    place = tmp_path / "disk"
    place.mkdir()
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    done = compare(
        *("--quick", "--dir", str(place), "--json", str(figures), "--markdown", str(page))
    )
    if done.returncode == 2 and "io_uring" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == [], "a file is left behind"
    assert page.read_text().strip() == done.stdout.strip()

    result = json.loads(figures.read_text())
    expected = [case for setting in cases.settings() for case in cases.cases(setting)]
    for label, engines in peers.LIBRARIES.values():
        expected += [case for engine in engines for case in cases.peer_cases(label, engine)]
    found = [{name: row[name] for name in vars(expected[0])} for row in result["rows"]]
    assert found == [vars(case) for case in expected]
    for row in result["rows"]:
        if row["reason"] is not None:
            assert not row["label"].startswith("ssdtrain"), row["reason"]
            assert row["label"] != peers.LIBRARIES["torch.save"][0], row["reason"]
            continue
        assert row["bytes_per_s"] > 0
        assert row["ratio_to_fio"] > 0
        assert row["cpu_s_per_gib"] >= 0
    written = result["written_bytes"]
    assert written["total"] == written["ssdtrain"] + written["fio"] + written["peers"]
    assert min(written.values()) > 0
    assert {"cpu", "kernel", "file_system", "huge_pages", "torch", "fio"} <= set(result["machine"])
    assert result["quick"] is True
    assert str(tmp_path) not in figures.read_text(), "a path of this machine is in the figures"
