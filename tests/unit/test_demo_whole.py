"""``demo --whole``: its training on the disk, its group, what it expects, and what it says."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import support
from checkout import BENCHES
from ssdtrain.demo import memory_group, whole, whole_plan, whole_process, whole_report
from ssdtrain.demo.gpt import ByteGPT
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.text import ByteBatches
from ssdtrain.demo.whole_options import (
    DiskRates,
    MemoryClass,
    WholeEnd,
    WholeMode,
    WholeOptions,
    WholeRun,
)
from ssdtrain.demo.whole_options import WholeStep as Step

sys.path.insert(0, str(BENCHES / "training"))
import parameters_step

MIB = 1 << 20
SMALL = TrainingOptions(layers=4, hidden=128, sequence=32, batch=2, steps=2)
OPTIONS = WholeOptions(
    training=SMALL, given_bytes=400 * MIB, activations_bytes=32 * MIB, buffer_bytes=1 * MIB
)
DISK = DiskRates(read_bytes_per_s=1e9, write_bytes_per_s=1e9)


# The training


def trained(kind: type[whole_process.Plain], options: WholeOptions) -> tuple[Any, list[float]]:
    batches = ByteBatches(bytes(range(256)) * 8, batch=2, sequence=32, seed=0)
    with ExitStack() as stack:
        process = kind(options, stack)
        losses = [process.warm_up(batches.at(0)), *(process.step(batches.at(n)) for n in (1, 2))]
        found = {one.name: one for one in process.memory()}
        digest = whole_process.weights_digest(process.parameters)
        return (digest, found, process.traffic()), losses


def test_training_with_all_on_the_disk_has_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    options = replace(OPTIONS, training=replace(SMALL, directory=str(tmp_path)))
    (plain_digest, plain, _), plain_losses = trained(whole_process.Plain, options)
    (digest, found, traffic), losses = trained(whole_process.Whole, options)
    assert losses == plain_losses
    assert digest == plain_digest
    assert len(set(losses)) == 3
    # Of weights the three largest fit, of gradients those of one block; all else was on the disk.
    block_bytes = 4 * whole_plan.block_parameters_count(SMALL.hidden)
    assert found["gradients"].in_memory_bytes == block_bytes
    assert found["weights"].in_memory_bytes < found["weights"].all_bytes / 2
    assert found["weights"].all_bytes == plain["weights"].all_bytes
    assert traffic.written_bytes > found["weights"].all_bytes + found["AdamW state"].all_bytes
    assert traffic.read_bytes > found["AdamW state"].all_bytes


def test_a_parameter_that_was_not_updated_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(OPTIONS, training=replace(SMALL, directory=str(tmp_path)))
    updated = whole_process.Whole._update_in_backward

    def without_head(self: Any, group: list[torch.nn.Parameter]) -> None:
        updated(self, [one for one in group if one is not self.model.head.weight])

    monkeypatch.setattr(whole_process.Whole, "_update_in_backward", without_head)
    with pytest.raises(AssertionError, match="a gradient is left"):
        trained(whole_process.Whole, options)


# The group


@pytest.fixture
def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Stand-ins for the two versions' file systems, in plain folders."""

    def made(kind: str, options: str) -> Path:
        root = tmp_path / kind
        root.mkdir()
        (root / "cgroup.subtree_control").write_text("cpu memory\n")
        mounts = tmp_path / "mounts"
        mounts.write_text(f"group {root} {kind} {options} 0 0\n")
        monkeypatch.setattr(memory_group, "MOUNTS", mounts)
        monkeypatch.setattr(memory_group.os, "geteuid", lambda: 0)
        return root

    return made


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [("cgroup2", "rw", "memory.max"), ("cgroup", "rw,memory", "memory.limit_in_bytes")],
)
def test_a_group_is_limited_by_either_version(
    control_groups: Callable[..., Path], kind: str, options: str, limit: str
) -> None:
    root = control_groups(kind, options)
    with memory_group.MemoryGroup(64 * MIB) as group:
        (path,) = (one for one in root.iterdir() if one.is_dir())
        assert (path / limit).read_text() == str(64 * MIB)
        group.take(123)
        assert (path / "cgroup.procs").read_text() == "123"
        assert group.peak_bytes() is None
        for file in path.iterdir():
            file.unlink()
    assert not path.exists()


def test_without_root_or_a_controller_there_is_no_group(
    control_groups: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    control_groups("cgroup", "rw,cpu")
    with pytest.raises(memory_group.NoGroupError, match="no control group here limits memory"):
        memory_group.MemoryGroup(MIB)
    monkeypatch.setattr(memory_group.os, "geteuid", lambda: 1000)
    with pytest.raises(memory_group.NoGroupError, match="only root"):
        memory_group.MemoryGroup(MIB)


def test_a_process_that_takes_more_than_its_group_has_is_killed() -> None:
    program = "import sys; sys.stdin.read(); print(len(b'1' * (256 << 20)))"
    try:
        group = memory_group.MemoryGroup(64 * MIB)
    except memory_group.NoGroupError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    with group:
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        group.take(child.pid)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        peak = group.peak_bytes()
        assert peak is None or 32 * MIB < peak <= 64 * MIB


# What is expected


def step(seconds: float, loss: float = 1.0, kind: Any = "timed", **more: int) -> Step:
    traffic = {"read_bytes": 0, "written_bytes": 0, **more}
    return Step(
        kind=kind,
        seconds=seconds,
        loss=loss.hex(),
        stall_s=0.5,
        foreign_cpu_s=0.0,
        **traffic,
    )


def run_of(mode: WholeMode, layers: int, **more: Any) -> WholeRun:
    memory = [
        MemoryClass(name=name, all_bytes=100 * MIB, in_memory_bytes=10 * MIB)
        for name in ("weights", "gradients", "AdamW state", "activations")
    ]
    end = WholeEnd(weights_digest=str(layers), memory=memory)
    steps = [step(9.0, kind="warm-up"), step(2.0), step(3.0), step(2.5)]
    fields = {"steps": steps, "end": end, "peak_bytes": 300 * MIB, **more}
    return WholeRun(mode=mode, layers=layers, **fields)


def test_the_parameters_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = ByteGPT(layers=3, hidden=192, sequence=40, dropout=0.0)
    shape = TrainingOptions(layers=3, hidden=192, sequence=40)
    assert whole_plan.parameters_count(shape) == sum(one.numel() for one in model.parameters())


def test_a_step_is_expected_to_take_the_longer_of_computing_and_the_disk() -> None:
    fits = run_of("fits", 1)
    found = whole_plan.expected(OPTIONS, fits, DISK)
    count = whole_plan.parameters_count(SMALL)
    assert found.plain_s == 4 * 2.5
    assert found.all_bytes == 16 * count + 400 * MIB
    assert found.written_bytes == 12 * count + 400 * MIB
    three = 3 * 4 * SMALL.hidden**2 * 4
    assert found.read_bytes == 16 * count - 2 * three + 400 * MIB
    assert found.disk_s == pytest.approx((found.read_bytes + found.written_bytes) / 1e9)
    assert found.step_s == found.plain_s > found.disk_s
    assert found.written_bytes_per_day == pytest.approx(found.written_bytes / 10 * 86_400)
    assert found.life_days == pytest.approx(1200e12 / found.written_bytes_per_day)
    later = whole_plan.expected(OPTIONS, fits, replace(DISK, read_bytes_per_s=1e6))
    assert later.step_s == later.disk_s > later.plain_s


# What is said


def report_of(*runs: WholeRun) -> whole_report.WholeReport:
    return whole_report.WholeReport(
        options=OPTIONS,
        machine=machine_facts(None),
        disk=DISK,
        expected=whole_plan.expected(OPTIONS, runs[0], DISK),
        runs=runs,
        is_limited=True,
        notes=[],
    )


def test_runs_with_the_same_bits_succeed_and_the_table_tells_their_figures(tmp_path: Path) -> None:
    ours = [step(9.0, kind="warm-up"), *(step(4.0, read_bytes=2 * 10**9),) * 3]
    report = report_of(run_of("fits", 1), run_of("whole", 4, steps=ours), run_of("plain", 4))
    assert report.succeeded
    said = whole_report.render(report)
    assert "bit-identical to the plain run: yes" in said
    assert "given: 400 MiB (limited by a control group), of which training needs 1.0 times" in said
    whole_report.write_json(report, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bit_identical"] is True
    figures = found["figures"]
    assert figures["over_plain"] == 4.0 / 2.5
    assert figures["over_scaled_plain"] == 4.0 / 10
    assert figures["disk_s"] == 2.0
    assert (figures["exposed_s"], figures["hidden_s"]) == (0.5, 1.5)


def other_loss(run: WholeRun) -> WholeRun:
    return replace(run, steps=[*run.steps[:-1], step(2.5, loss=1.5)])


def other_weights(run: WholeRun) -> WholeRun:
    assert run.end is not None
    return replace(run, end=replace(run.end, weights_digest="other"))


def too_large(run: WholeRun) -> WholeRun:
    return replace(run, peak_bytes=401 * MIB)


def failed(run: WholeRun) -> WholeRun:
    return replace(run, end=None, failure="its process was killed")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (other_loss, "bit-identical to the plain run: NO"),
        (other_weights, "bit-identical to the plain run: NO"),
        (too_large, "IT TOOK MORE MEMORY THAN IT WAS GIVEN"),
        (failed, "whole FAILED: its process was killed"),
    ],
)
def test_whatever_went_wrong_is_said_and_is_no_success(
    changed: Callable[[WholeRun], WholeRun], words: str
) -> None:
    report = report_of(run_of("fits", 1), changed(run_of("whole", 4)), run_of("plain", 4))
    assert not report.succeeded
    assert words in whole_report.render(report)


def test_bits_are_compared_with_the_model_that_fits_if_there_is_no_other() -> None:
    report = report_of(run_of("fits", 1), run_of("whole", 4), run_of("whole", 1))
    assert report.succeeded
    assert whole_report.figures(report, report.runs[1])["over_plain"] is None
    other = report_of(run_of("fits", 1), run_of("whole", 4), other_weights(run_of("whole", 1)))
    assert other.bit_identical is False


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt2"], "--whole trains gpt in float32"),
        (["--dtype", "bfloat16"], "--whole trains gpt in float32"),
        (["--modes", "offload"], "--whole trains gpt in float32"),
        (["--memory", "100MiB"], "that a step needs at once; give more"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def run(mode: WholeMode, options: WholeOptions, group: object, told: object) -> WholeRun:
        assert mode == "fits", "no other may begin"
        return run_of("fits", options.training.layers)

    monkeypatch.setattr(whole, "_run", run)
    assert message in support.refusal(["demo", "--whole", *arguments], tmp_path)


@pytest.mark.parametrize("is_free", [True, False])
def test_where_memory_is_short_the_smaller_model_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_free: bool
) -> None:
    begun: list[tuple[str, int]] = []

    def run(mode: WholeMode, options: WholeOptions, group: object, told: object) -> WholeRun:
        begun.append((mode, options.training.layers))
        return run_of(mode, options.training.layers)

    monkeypatch.setattr(whole, "_run", run)
    monkeypatch.setattr(whole, "available_bytes", lambda: 1 << 40 if is_free else MIB)
    training = replace(SMALL, layers=8, directory=str(tmp_path))
    report = whole.run_whole(whole.options_of(training, 400 * MIB), io.StringIO())
    assert begun == [("fits", 1), ("whole", 8), ("plain", 8) if is_free else ("whole", 1)]
    assert report.succeeded
    assert ("is scaled from there" in whole_report.render(report)) is not is_free


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_demo_trains_in_a_quarter_of_the_memory_and_less(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ssdtrain", "demo", "--whole", "--steps", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "demo-whole.json").read_text())
    assert found["bit_identical"] is True
    assert found["figures"]["over_given"] >= 4
    assert found["figures"]["over_taken"] >= 4
    names = ["demo-whole.json", "demo-whole.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


# The benchmark of such steps


def test_the_benchmark_fails_where_nothing_is_on_the_disk() -> None:
    plain = {"weights": "same", "weight_bytes": 100}
    good = {
        **plain,
        "bound_bytes": 50,
        "staying_bytes": 10,
        "read_bytes_per_step": 40,
        "written_bytes_per_step": 40,
        "peak_resident_bytes": 50,
        "write_failed_count": 0,
    }
    found = {"losses_equal": True}
    parameters_step.refuse_nothing({"plain": plain, "half": good}, found)
    bad = [
        ({"read_bytes_per_step": 39}, "moved less"),
        ({"written_bytes_per_step": 0}, "moved less"),
        ({"staying_bytes": 50}, "moved less"),
        ({"peak_resident_bytes": 51}, "more weights were in memory"),
        ({"write_failed_count": 1}, "refused weights"),
        ({"weights": "other"}, "differ"),
    ]
    for change, words in bad:
        with pytest.raises(AssertionError, match=words):
            parameters_step.refuse_nothing({"plain": plain, "half": {**good, **change}}, found)
    with pytest.raises(AssertionError, match="differ"):
        parameters_step.refuse_nothing({"plain": plain, "half": good}, {"losses_equal": False})


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_benchmark_runs_small(tmp_path: Path, optimizer: str) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--layers", "3", "--hidden", "256", "--sequence", "32", "--rounds", "1")
    options = ("--optimizer", optimizer, "--buffer-bytes", "1MiB", "--json", figures)
    bench = BENCHES / "training" / "parameters_step.py"
    done = subprocess.run(
        [sys.executable, bench, "--dir", tmp_path, *sizes, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "0.25 of the weights" in done.stdout
    rows = json.loads(figures.read_text())["rows"]
    quarter = rows["0.25 of the weights"]
    assert 0 < quarter["peak_resident_bytes"] <= quarter["weight_bytes"] / 4
    assert quarter["weights"] == rows["plain"]["weights"]
    assert quarter["over_longer"] > 0
