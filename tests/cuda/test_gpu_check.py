"""`make gpu-check` and `benches/gpu_step.py` on the fake device, so before somebody has a GPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fake_build
from checkout import BENCHES, FAKE_DEVICE
from fake_cufile import VARIABLE
from hardware import STAND_IN
from on_fake import environment_of
from ssdtrain.machine import cufile

sys.path.insert(0, str(BENCHES))
sys.path.insert(0, str(BENCHES / "gpu"))

from gpu_steps import Runner, Step, steps

AS_GPU = str(FAKE_DEVICE / "as_gpu.py")
STEP_SECONDS = 120
"""The fake runs on a machine that may be busy; on a GPU the whole check takes eight minutes."""
REFUSED = {VARIABLE: "cuFileDriverOpen:5001"}
"""What has cuFile work neither directly nor through the CPU."""


def fake_environment(cufile: str = "fake") -> dict[str, str]:
    try:
        return {**os.environ, **environment_of({"cufile": cufile}), STAND_IN: "1"}
    except fake_build.UnavailableError as reason:
        pytest.skip(f"no fake device: {reason}")


def run(*words: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.mark.long
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = ("--dir", tmp_path, "--json", told)
    done = run(BENCHES / "gpu_check.py", *words, environment=hidden)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("no GPU that PyTorch can use, so nothing was checked: ")
    document = json.loads(told.read_text())
    assert document["has_gpu"] is False
    assert document["why"] in done.stdout
    step = run(BENCHES / "gpu_step.py", "--dir", tmp_path, environment=hidden)
    assert step.returncode == 3, step.stderr
    assert step.stderr == "there is no GPU that PyTorch can use; `ssdtrain doctor DIR` says more\n"
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    words = ("--dir", tmp_path, "--only", "nothing")
    unknown = run(BENCHES / "gpu_check.py", *words, environment={**os.environ})
    assert (unknown.returncode, "there is no step" in unknown.stderr) == (2, True)


SCRIPTS = {
    "well": "tell({'figures': {'a': 1}, 'rows': [['a', '1']], 'failures': []})",
    "fails": "tell({'figures': {}, 'rows': [], 'failures': ['it broke']})",
    "dies": "print('last words'); os.abort()",
    "tells and dies": "tell({'figures': {}, 'rows': [], 'failures': []}); sys.exit(3)",
    "says nothing": "pass",
    "hangs": "os.fork(); signal.pause()",
}
HEAD = (
    "import json, os, pathlib, signal, sys\n"
    "told = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
    "def tell(found): told.write_text(json.dumps(found))\n"
)


def test_each_end_of_a_step_is_told(tmp_path: Path) -> None:
    runner = Runner([sys.executable], tmp_path, is_tiny=True)
    seen = {}
    for name, body in SCRIPTS.items():
        script = tmp_path / "script.py"
        script.write_text(HEAD + body)
        limit_s = 1 if name == "hangs" else 60
        seen[name] = runner.run(Step(name, (str(script),), limit_s), limit_s)
    assert (seen["well"].state, seen["well"].figures) == ("passed", {"a": 1})
    assert (seen["fails"].state, seen["fails"].failures) == ("failed", ["it broke"])
    assert seen["dies"].state == "failed"
    assert "last words" in seen["dies"].last_words
    assert seen["tells and dies"].failures == ["it ended with the code 3"]
    assert seen["says nothing"].state == "failed"
    assert "did not tell" in seen["says nothing"].failures[0]
    assert (seen["hangs"].state, seen["hangs"].failures) == (
        "took too long",
        ["it was ended after 1 s"],
    )
    script.write_text(HEAD + SCRIPTS["hangs"])
    cut = runner.run(Step("hangs", (str(script),), 60), 1)
    assert cut.state == "cut off"
    assert cut.failures == ["it was ended after 1 s, and not after 60 s, for lack of time"]


@pytest.mark.parametrize(
    ("kind", "changes", "answer"),
    [
        pytest.param("fake", {}, "native", marks=pytest.mark.long),
        pytest.param("fake", REFUSED, "absent", marks=pytest.mark.long),
    ],
)
def test_the_state_of_cufile_is_told(
    tmp_path: Path, kind: str, changes: dict[str, str], answer: str
) -> None:
    if kind == "real" and cufile.find_library() is None:
        pytest.skip("PyTorch came without cuFile")
    told = tmp_path / "told.json"
    words = ("--dir", tmp_path, "--json", told)
    environment = fake_environment(kind) | changes
    done = run(AS_GPU, BENCHES / "gpu" / "gpu_cufile.py", *words, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(told.read_text())["figures"]
    assert figures["cufile"] == answer, figures
    assert f"{answer}: " in done.stdout or f"{answer} (" in done.stdout
    if answer != "native":
        assert "cuFileDriverOpen of libcufile failed with 5001" in done.stdout
    assert (figures["nvidia_fs"], "counts nothing here" in done.stdout) == (None, True)


@pytest.mark.long
def test_without_gpudirect_storage_a_line_says_why(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    words = ("--tiny", "--dir", tmp_path, "--json", told, "--ways", "disk", "gds")
    environment = fake_environment() | REFUSED
    done = run(AS_GPU, BENCHES / "gpu_step.py", *words, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(told.read_text())["figures"]["modes"]
    reason = "no GPUDirect Storage here: cuFileDriverOpen of libcufile failed with 5001"
    assert figures["gds"]["left_out"].startswith(reason)
    assert "stats" in figures["disk"]


def check_ways(modes: dict[str, Any]) -> None:
    """Check that the ways of ssdtrain did what they are for, by a plan, and with equal bits."""
    for name in modes.keys() & {"rematerialize", "host", "both", "bound", "low bound", "disk"}:
        way = modes[name]
        done, in_last = way["per_step"], way["away_in_these"]
        assert (done["bytes_rematerialized"] > 0) == (name != "host"), name
        assert (done["staying_bytes"] > 0) == (name != "rematerialize"), name
        assert way["gradients_bit_equal"], name
        assert sum(in_last.values()) > 0, name
        assert 0 < way["new_plan_step"] <= way["step_count"], name
        columns, *rows = (row.split() for row in way["steps"])
        assert len(rows) > way["step_count"], "the steps with compared gradients are missing"
        assert all(len(row) == len(columns) for row in rows)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_step_of_the_check_runs_on_the_fake(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    python = shlex.join([sys.executable, AS_GPU])
    words = ["--tiny", "--dir", tmp_path, "--json", told, "--python", python]
    words += ["--seconds", str(STEP_SECONDS * len(steps([], is_tiny=True)))]
    done = run(BENCHES / "gpu_check.py", *words, environment=fake_environment())
    assert told.exists(), done.stdout + done.stderr
    document: dict[str, Any] = json.loads(told.read_text())
    assert document["failures"] == [], done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    states = {one["name"]: one["state"] for one in document["steps"]}
    assert states == {step.name: "passed" for step in steps([], is_tiny=True)}
    assert all(one["figures"] for one in document["steps"])
    contract = next(one for one in document["steps"] if one["name"] == "contract")
    assert contract["figures"]["passed"] > 0
    equal = next(one for one in document["steps"] if one["name"] == "equal")
    assert all(kind["bit_equal"] for kind in equal["figures"].values())
    assert all(kind["again_bit_equal"] for kind in equal["figures"].values())
    trained = [one for one in document["steps"] if one["name"].startswith("step, ")]
    for modes in (one["figures"]["modes"] for one in trained):
        check_ways(modes)
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]
