"""The replay of plans on G10's traces: on a trace of our own always, on theirs where they are."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from checkout import BENCHES

TIMEOUT_S = 290
DATA = "SSDTRAIN_G10"
"""The variable that names the folder with G10's `graphs/` and `plans/`."""

GB = 10**9
BUS, DRIVE = 15.754, 3.15
"""Rates of the replay's machine, in gigabytes a second."""


def g10(*arguments: str | Path, timeout_s: int = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHES / "g10.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two kernels of a second, and a global and a local that do not fit at once."""
    folder = tmp_path / "graphs" / "Tiny"
    folder.mkdir(parents=True)
    # The global, 30 GB, is used by kernel 0, the local, 20 GB, by kernel 1.
    (folder / "1.tensors.tsv").write_text(
        "#tensor\traw_bytes\tbytes\tglobal\tbirth\tdeath\n"
        f"0\t{30 * GB}\t{30 * GB}\t1\t-2\t-2\n"
        f"1\t{20 * GB}\t{20 * GB}\t0\t1\t2\n"
    )
    (folder / "1.kernels.tsv").write_text(
        "#kernel\tname\tcycles\tinput_pf_cycles\tpf_cycles\tworkspace_tensor\tinputs\toutputs\n"
        "0\tfirst\t1200000000\t0\t0\t-1\t0\t\n"
        "1\tsecond\t1200000000\t0\t0\t-1\t\t1\n"
    )
    return tmp_path


def write(folder: Path, kind: str, moves: list[dict[str, Any]], **changed: Any) -> Path:
    plan = {"format": "g10-plan-1", "model": "Tiny", "batch": 1, "class": kind, "moves": moves}
    path = folder / f"Tiny-1-{kind}.json"
    path.write_text(json.dumps(plan | changed))
    return path


def replayed(data: Path, *plans: Path) -> list[float]:
    done = g10("replay", "--data", data, *plans)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def test_a_replay_gives_the_scores_worked_out_by_hand(tiny: Path) -> None:
    # Without moves the global goes away and comes back while nothing else happens: by way of the
    # host at the bus's rate, else at the drives'.
    plans = [write(tiny, "host+ssd", []), write(tiny, "ssd", [])]
    by_host, by_drives = replayed(tiny, *plans)
    assert by_host == pytest.approx(2 / (2 + 60 / BUS), abs=1e-6)
    assert by_drives == pytest.approx(2 / (2 + 60 / DRIVE), abs=1e-6)
    # The way to the drives although the host has room.
    evict = {"tensor": 0, "move": "evict", "to": "ssd", "after": 0, "priority": -1.5}
    fetch = {"tensor": 0, "move": "fetch", "after": 1}
    (chosen,) = replayed(tiny, write(tiny, "host+ssd", [evict, fetch]))
    assert chosen == pytest.approx(by_drives, abs=1e-6)


def test_plans_are_written_and_replay_to_the_scores_that_were_printed(tiny: Path) -> None:
    out = tiny / "plans-made"
    done = g10("plan", "--data", tiny, "--out", out, "--tries", "3")
    assert done.returncode == 0, done.stderr
    printed = dict(line.split()[:2] for line in done.stdout.splitlines()[:2])
    for kind, rate in (("host+ssd", BUS), ("ssd", DRIVE)):
        (score,) = replayed(tiny, out / f"Tiny-1-{kind}.json")
        assert score == pytest.approx(float(printed[f"Tiny-1-{kind}"]), abs=2e-6)
        # Not behind the plan without moves, and not ahead of what the channel can carry.
        assert 2 / (2 + 60 / rate) - 1e-6 <= score <= 2 / (60 / rate)


@pytest.fixture(scope="session")
def data() -> Path:
    """G10's traces, which are not part of this tree."""
    if DATA not in os.environ:
        pytest.skip(f"{DATA} does not name a folder with G10's traces")
    return Path(os.environ[DATA])


@pytest.mark.long
def test_the_replay_gives_every_known_score(data: Path) -> None:
    done = g10("check", "--data", data)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 70 scores differ" in done.stdout


CONTEST_S = 1800
LEAST = {"host+ssd": (0.994, 0.96, 0.990), "ssd": (0.990, 0.97, 0.988)}
"""Of each class: the mean share of the bound, the least one, the mean of the main five points."""
NOISE_COST_MAX = 0.015


@pytest.mark.long
@pytest.mark.timeout(2 * CONTEST_S)
def test_plans_for_every_trace_come_close_to_what_no_plan_can_beat(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHES / "planning"))
    known = importlib.import_module("g10_known")
    points = [(*point, kind) for point, kinds in known.KNOWN.items() for kind in kinds]
    names = ["-".join(map(str, point)) for point in points]
    done = g10("plan", "--data", data, "--out", tmp_path, *names, timeout_s=CONTEST_S)
    assert done.returncode == 0, done.stderr
    scores = {
        line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[: len(names)]
    }
    plans = [tmp_path / f"{name}.json" for name in names]
    noisy = dict.fromkeys(names, 0.0)
    for seed in range(1, 6):
        replay = g10("replay", "--data", data, "--seed", str(seed), *plans, timeout_s=CONTEST_S)
        assert replay.returncode == 0, replay.stderr
        for line in replay.stdout.splitlines():
            noisy[line.split()[0]] += float(line.split()[1]) / 5
    for kind, (mean_least, share_least, main_least) in LEAST.items():
        shares = {
            point: scores["-".join(map(str, point))] / known.KNOWN[point[:2]][kind].no_plan_can_beat
            for point in points
            if point[2] == kind
        }
        main = [shares[*point, kind] for point in known.MAIN]
        assert fmean(shares.values()) >= mean_least, shares
        assert min(shares.values()) >= share_least, shares
        assert fmean(main) >= main_least, shares
        cost = 1 - fmean(noisy[name] for name in names if name.endswith(f"-{kind}")) / fmean(
            scores[name] for name in names if name.endswith(f"-{kind}")
        )
        assert cost <= NOISE_COST_MAX, f"{kind}: noise costs {cost:.4f}"
