"""The demo: its pieces that can be wrong without looking wrong, and the whole of it, small."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import support
from checkout import BENCHES
from ssdtrain.demo import machine, modes, report, runner, summary, text, without
from ssdtrain.demo.counting import Sampler, SavedStorageCounter, is_weight
from ssdtrain.demo.options import MemoryRecord, Mode, ModeRun, StepKind, StepRecord, TrainingOptions
from ssdtrain.machine import process_memory

SMALL = TrainingOptions(layers=4, hidden=64, sequence=64, batch=2)
FLOAT_BYTES = 4
PAGE_BYTES = 4096
MIB = 2**20


# Text


def test_batches_are_pieces_of_the_text_and_depend_on_seed_and_step_only() -> None:
    source = bytes(range(256)) * 8

    def batches(seed: int) -> text.ByteBatches:
        return text.ByteBatches(source, batch=3, sequence=16, seed=seed)

    state = torch.get_rng_state()
    batch = batches(1).at(2)
    assert torch.equal(torch.get_rng_state(), state), "drawing a batch must not move dropout"
    assert batch.shape == (3, 17)
    assert batch.dtype == torch.int64
    assert all(bytes(row.tolist()) in source for row in batch)
    assert torch.equal(batch, batches(1).at(2))
    assert not torch.equal(batch, batches(1).at(3))
    assert not torch.equal(batch, batches(2).at(2))


def test_every_position_of_the_text_can_be_drawn() -> None:
    batches = text.ByteBatches(b"abcd", batch=64, sequence=2, seed=0)
    assert {bytes(row.tolist()) for row in batches.at(0)} == {b"abc", b"bcd"}


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 65"):
        text.ByteBatches(b"x" * 64, batch=1, sequence=64, seed=0)


# Counting


def test_the_counter_counts_each_storage_once_and_no_parameter() -> None:
    # Linear saves its input and its weight (as a view), relu its output; the second Linear saves
    # that same output, as its input, and its own weight.
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    counter = SavedStorageCounter(model.parameters())
    x = torch.randn(4, 16)
    with counter.measure():
        y = model(x)
        assert counter.resident_bytes == (4 * 16 + 4 * 32) * FLOAT_BYTES
        y.sum().backward()
        assert counter.resident_bytes == 4 * 16 * FLOAT_BYTES, "the input is still ours"
    assert counter.resident_bytes_peak == (4 * 16 + 4 * 32) * FLOAT_BYTES
    del x
    assert counter.resident_bytes == 0


def test_the_counter_does_not_keep_a_dropped_graph_alive() -> None:
    counter = SavedStorageCounter([])
    x = torch.randn(64, requires_grad=True)
    with counter.measure():
        y = x.exp().sin().sum()
    # What exp saves as its output is what sin saves as its input.
    assert counter.resident_bytes == 64 * FLOAT_BYTES
    del y
    gc.collect()
    assert counter.resident_bytes == 0


def test_the_counter_counts_whole_storages_behind_views() -> None:
    counter = SavedStorageCounter([])
    base = torch.randn(4, 100)
    weight = torch.randn(10, requires_grad=True)
    with counter.measure():
        loss = (base[0, :10] * weight + base[3, 90:] * weight).sum()
    # The two slices share one storage, and hold all of it.
    assert counter.resident_bytes == 400 * FLOAT_BYTES
    loss.backward()


def test_copies_that_autocast_makes_of_weights_are_weights() -> None:
    linear = nn.Linear(64, 64, bias=False)
    counter = SavedStorageCounter(linear.parameters())
    with counter.measure(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(torch.randn(2, 64))
    assert counter.resident_bytes == 2 * 64 * 2, "the bfloat16 copy of the input, not the weight's"
    y.sum().backward()


def test_what_is_a_weight() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    assert is_weight(parameter)
    assert is_weight(parameter.t())
    assert is_weight(parameter.bfloat16().t())
    assert not is_weight(parameter.exp())
    assert not is_weight(torch.randn(4, 4))
    assert not is_weight(torch.randn(4, 4, requires_grad=True).t())


def test_recomputed_tensors_are_counted_and_gradients_stay_the_same() -> None:
    def gradients(*, recompute: bool, counted: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.5), nn.Linear(256, 64))
            for _ in range(4)
        ]
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        counter = SavedStorageCounter(parameters)

        def run() -> None:
            stream = torch.ones(8, 64, requires_grad=True)
            for block in blocks:
                stream = (
                    checkpoint(
                        block, stream, use_reentrant=False, context_fn=counter.checkpoint_contexts
                    )
                    if recompute
                    else block(stream)
                )
            stream.sum().backward()

        if counted:
            with counter.measure():
                run()
        else:
            run()
        return [parameter.grad for parameter in parameters], counter.resident_bytes_peak

    expected, _ = gradients(recompute=False, counted=False)
    kept, keep_peak = gradients(recompute=False, counted=True)
    plain, none = gradients(recompute=True, counted=False)
    counted, recompute_peak = gradients(recompute=True, counted=True)
    for other in (kept, plain, counted):
        assert all(map(torch.equal, expected, other))
    assert none == 0, "nothing is counted while the counter is closed"
    inputs = 4 * 8 * 64 * FLOAT_BYTES
    one_block = (keep_peak - inputs) // 4
    # The inputs of the blocks, and what one block saves beside its input: not less, not more.
    assert inputs < recompute_peak <= inputs + one_block
    assert recompute_peak > inputs + one_block // 2


def test_the_sampler_takes_the_ends_and_drops_level_stretches() -> None:
    values = iter([0, 5, 5, 5, 5, 3])
    sampler = Sampler(lambda: next(values))
    sampler._start = 0.0
    for _ in range(6):
        sampler._sample()
    assert [size for _, size in sampler.samples] == [0, 5, 5, 3]


# The models


EVERY_MODEL = list(
    itertools.product(["gpt", "gpt2", "bert", "t5", "llama"], ["float32", "bfloat16"])
)
FEW_MODELS = [("gpt", "float32")]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*one, marks=() if one in FEW_MODELS else pytest.mark.long)
        for one in EVERY_MODEL
    ],
)
def test_recomputing_a_model_changes_no_bit_and_needs_less_memory(model: Any, dtype: Any) -> None:
    if model != "gpt":
        pytest.importorskip("transformers")
    options = replace(SMALL, model=model, dtype=dtype, dropout=0.1, steps=1)
    digests: dict[str, list[str]] = {}
    peaks: dict[str, int] = {}
    names: tuple[Mode, ...] = ("keep", "recompute")
    for mode in names:
        events: list[dict[str, Any]] = []
        modes.run_mode(
            mode,
            options,
            measured=True,
            emit=lambda event, _events=events, **fields: _events.append({"event": event, **fields}),
        )
        steps = [event for event in events if event["event"] == "step"]
        assert [step["kind"] for step in steps] == ["warm-up", "timed", "measured"]
        digests[mode] = [step["loss"] + step["gradients_digest"] for step in steps]
        (peak,) = [e["activation_bytes_peak"] for e in events if e["event"] == "memory"]
        peaks[mode] = peak
    assert digests["keep"] == digests["recompute"]
    assert len(set(digests["keep"])) == 3, "each step has other data, so other gradients"
    assert 0 < peaks["recompute"] < 0.75 * peaks["keep"]


def test_the_digest_sees_one_flipped_bit_and_a_missing_gradient() -> None:
    parameters = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2, 3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = modes.gradients_digest(parameters)
    assert modes.gradients_digest(parameters) == before
    # -0.0 equals 0.0 and NaN equals nothing: bytes are compared, not numbers.
    parameters[1].grad = torch.ones(2, 3).fill_(-0.0)
    negative = modes.gradients_digest(parameters)
    parameters[1].grad = torch.zeros(2, 3)
    zero = modes.gradients_digest(parameters)
    parameters[1].grad = None
    missing = modes.gradients_digest(parameters)
    assert len({before, negative, zero, missing}) == 4


# The figures


def run_of(
    mode: Mode, repeat: int, seconds: list[float], *, activation_bytes: int = 100
) -> ModeRun:
    kinds: list[StepKind] = ["warm-up", *(["timed"] * len(seconds))]  # type: ignore[list-item]
    steps = [
        StepRecord(
            kind=kind,
            seconds=second,
            loss=float(index).hex(),
            gradients_digest=f"digest {index}",
            bytes_written=10,
            bytes_read=8,
            stall_s=0.5,
            foreign_cpu_s=second / 4,
        )
        for index, (kind, second) in enumerate(zip(kinds, [99.0, *seconds], strict=True))
    ]
    recorded = MemoryRecord(
        activation_bytes_peak=activation_bytes,
        rss_bytes_before=1000,
        rss_bytes_high=1000 + 2 * activation_bytes,
        rss_note=None,
        curve=[(0.0, 0), (0.5, activation_bytes), (1.0, 0)],
    )
    return ModeRun(mode=mode, repeat=repeat, parameters_count=7, steps=steps, memory=recorded)


def all_runs() -> list[ModeRun]:
    # The machine is twice as slow in the second repeat: the ratio must not see it.
    return [
        run_of("plain", 1, [0.5, 0.5, 0.5], activation_bytes=120),
        run_of("keep", 1, [1.0, 1.0, 5.0]),
        run_of("recompute", 1, [1.5, 1.5, 1.5], activation_bytes=20),
        run_of("offload", 1, [1.1, 1.1, 1.1], activation_bytes=15),
        run_of("plain", 2, [1.0, 1.0, 1.0], activation_bytes=120),
        run_of("keep", 2, [2.0, 2.0, 2.0]),
        run_of("recompute", 2, [3.0, 3.0, 3.0], activation_bytes=20),
        run_of("offload", 2, [2.2, 2.2, 2.2], activation_bytes=15),
    ]


def with_step(run: ModeRun, index: int, **changes: Any) -> ModeRun:
    steps = list(run.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(run, steps=steps)


def test_ratios_are_medians_of_the_ratios_within_the_repeats() -> None:
    offload = summary.summarise(all_runs(), "offload", tokens_per_step=33)
    assert offload.ratio_to_keep.step_s == pytest.approx(1.1)
    assert offload.ratio_to_keep.activation_bytes_peak == pytest.approx(0.15)
    assert offload.ratio_to_keep.rss_bytes_peak == pytest.approx(0.15)
    assert offload.ratio_to_plain.step_s == pytest.approx(2.2)
    assert offload.ratio_to_plain.rss_bytes_peak == pytest.approx(0.125)
    assert offload.step_s_median == pytest.approx(1.65)
    assert offload.tokens_per_s == pytest.approx(20)
    assert (offload.bytes_written_per_step, offload.bytes_read_per_step) == (10, 8)
    assert offload.stall_s == 0.5
    assert offload.foreign_cores == pytest.approx(0.25)
    assert offload.losses == [0.0, 1.0, 2.0, 3.0]
    assert offload.step_s == [[1.1, 1.1, 1.1], [2.2, 2.2, 2.2]]


def test_equal_bits_are_seen_as_equal() -> None:
    found = summary.compare(all_runs())
    assert found == summary.Comparison(reference="plain", bit_identical=True, notes=[])


@pytest.mark.parametrize("changed", range(1, 8))
@pytest.mark.parametrize(
    ("changes", "what"),
    [({"gradients_digest": "flipped"}, "gradients"), ({"loss": (1.5).hex()}, "loss")],
)
def test_one_differing_step_in_any_run_is_seen(
    changed: int, changes: dict[str, str], what: str
) -> None:
    runs = all_runs()
    runs[changed] = with_step(runs[changed], 2, **changes)
    comparison = summary.compare(runs)
    assert comparison.bit_identical is False
    (note,) = comparison.notes
    assert note == (
        f"{runs[changed].mode}, repeat {runs[changed].repeat}: {what} "
        "differ from plain's from step 3 on"
    )


def test_without_plain_and_keep_nothing_is_compared_and_it_is_said() -> None:
    alone = [run for run in all_runs() if run.mode == "offload"]
    comparison = summary.compare(alone)
    assert comparison.bit_identical is None
    assert "keep was not run" in comparison.notes[0]
    killed = ModeRun(mode="plain", repeat=1, failure="killed")
    assert "plain failed" in summary.compare([killed, *alone]).notes[0]
    only_keep = [run for run in all_runs() if run.mode == "keep"]
    assert summary.compare(only_keep).bit_identical is None
    assert summary.compare([*only_keep, *alone]).reference == "keep"


def report_of(runs: list[ModeRun]) -> report.Report:
    names: tuple[Mode, ...] = ("plain", "keep", "recompute", "offload")
    return report.Report(
        options=SMALL,
        repeats=2,
        machine=machine.machine_facts(Path.cwd()),
        runs=runs,
        summaries=[summary.summarise(runs, mode, SMALL.tokens_per_step) for mode in names],
        comparison=summary.compare(runs),
    )


def test_a_failed_mode_is_told_and_fails_the_demo_but_not_its_report() -> None:
    runs = [run for run in all_runs() if run.mode != "plain"]
    runs.append(ModeRun(mode="plain", repeat=1, failure="its process was killed"))
    result = report_of(runs)
    assert not result.succeeded
    rendered = report.render(result)
    assert "plain FAILED: its process was killed" in rendered
    assert "bit-identical to plain: not compared" in rendered
    assert report_of(all_runs()).succeeded
    assert "bit-identical to plain: yes" in report.render(report_of(all_runs()))


def test_differing_bits_fail_the_demo() -> None:
    runs = all_runs()
    runs[2] = with_step(runs[2], 1, gradients_digest="flipped")
    result = report_of(runs)
    assert not result.succeeded
    assert "bit-identical to plain: NO" in report.render(result)


def test_the_table_has_both_ratios() -> None:
    times, over_keep = [
        line
        for line in report.render(report_of(all_runs())).splitlines()
        if line.startswith(("step time", "  over keep"))
    ][:2]
    assert times.split()[3:] == [
        "0.75",
        "1.000x",
        "1.50",
        "2.000x",
        "2.25",
        "3.000x",
        "1.65",
        "2.200x",
    ]
    assert over_keep.split()[2:] == ["0.500x", "1.000x", "1.500x", "1.100x"]


# The machine and the processes


def test_the_high_water_mark_starts_again_and_sees_the_next_peak() -> None:
    size = 64 << 20
    # More than an earlier peak of this process could hide.
    held = torch.ones(size, dtype=torch.uint8)
    del held
    before = process_memory.reset_high_water_mark()
    assert process_memory.status_bytes("VmHWM") - before < size // 2
    held = torch.ones(size, dtype=torch.uint8)
    del held
    assert process_memory.status_bytes("VmHWM") - before > size // 2


PAGES = """
import os
import sys
import torch
import ssdtrain.demo.models
tensor = torch.ones(64 << 20, dtype=torch.uint8)
with open("/proc/self/smaps_rollup") as rollup:
    (huge,) = (line.split()[1] for line in rollup if line.startswith("AnonHugePages"))
own = [name for name in ("ssdtrain._core", "ssdtrain.session") if sys.modules.get(name)]
switch = os.environ.get("THP_MEM_ALLOC_ENABLE")
print(tensor.data_ptr() % 4096, int(huge) >> 10, own, switch, sys.argv[1:])
"""


def test_the_plain_program_has_nothing_of_our_import(tmp_path: Path) -> None:
    script = tmp_path / "pages.py"
    script.write_text(PAGES)

    def said(command: list[str], environment: dict[str, str] | None) -> str:
        return subprocess.check_output([*command, "word"], env=environment, text=True).strip()

    never_imports = PAGES.replace("import ssdtrain.demo.models\n", "")
    plain = said([sys.executable, "-P", "-c", never_imports], without.environment())
    assert plain.endswith("[] None ['word']")
    assert said(without.command(str(script)), without.environment()) == plain
    assert said([sys.executable, "-P", str(script)], without.environment()) != plain


def test_steps_of_the_plain_program_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHES / "training"))
    plain_steps = importlib.import_module("plain_steps")
    program = plain_steps.Program(SMALL)
    program.take()
    program.take()
    program.close()
    assert len(program.seconds) == 2
    assert min(program.seconds) > 0


def test_a_killed_mode_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Mode, int]] = []

    def run_process(mode: Mode, repeat: int, *_: object) -> ModeRun:
        started.append((mode, repeat))
        return ModeRun(mode=mode, repeat=repeat, failure="killed" if mode == "keep" else None)

    monkeypatch.setattr(runner, "run_process", run_process)
    with open(os.devnull, "w") as nowhere:
        progress = runner.Progress(nowhere, repeats=2, timed_count=1)
        runner.run_all(SMALL, ["keep", "offload"], repeats=2, progress=progress)
    assert started == [("keep", 1), ("offload", 1), ("offload", 2)]


def demo(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    small = ["--layers", "2", "--hidden", "64", "--sequence", "64", "--steps", "2"]
    return subprocess.run(
        [sys.executable, "-m", "ssdtrain", "demo", *small, *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_the_demo_from_end_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    # Large enough for tensors that are worth a write.
    larger = ["--layers", "4", "--hidden", "512", "--sequence", "256"]
    done = demo(tmp_path, "--repeats", "1", *larger)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["bit_identical"] is True
    plain, keep, recompute, offload = (
        document["modes"][mode] for mode in ("plain", "keep", "recompute", "offload")
    )
    assert len(keep["losses"]) == 4, "warm-up, two timed, measured"
    assert [len(times) for times in keep["step_s"]] == [2]
    assert offload["losses"] == recompute["losses"] == keep["losses"] == plain["losses"]
    assert plain["activation_bytes_peak"] == keep["activation_bytes_peak"]
    assert 0 < recompute["activation_bytes_peak"] < keep["activation_bytes_peak"]
    # What comes back lies in whole pages, one more for each tensor, which has 1 MiB at least. So a
    # run that kept all but a few, as on a slow disk, may hold that much more than keep.
    pages_bytes = keep["activation_bytes_peak"] // MIB * PAGE_BYTES
    assert offload["activation_bytes_peak"] <= keep["activation_bytes_peak"] + pages_bytes
    assert document["without_ssdtrain"] == ["plain", "recompute"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dir", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--hidden", "65"], "--hidden must be a multiple of 64"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--data", "/nowhere/text"], "--data /nowhere/text"),
        (["--json", "/nowhere/demo.json"], "--json /nowhere/demo.json"),
        (["--modes", "keep,nothing"], "'nothing': choose from plain, keep, recompute, offload"),
    ],
)
def test_a_bad_argument_is_refused_at_once_with_a_way_out(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in support.refusal(["demo", *arguments], tmp_path)
