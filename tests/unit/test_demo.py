"""The demo: its pieces that can be wrong without looking wrong, and the whole of it, small."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import support
from checkout import BENCHES
from ssdtrain.demo import process, report, runner, text, without
from ssdtrain.demo.counting import SavedStorageCounter, is_weight
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.options import (
    MODES,
    OTHER_BYTES,
    Mode,
    Run,
    Step,
    StepKind,
    TrainingOptions,
)

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
    keep, recompute = process.train("keep", options), process.train("recompute", options)
    digests = [step.loss + step.gradients_digest for step in keep.steps]
    kinds = [*["warm-up"] * process.WARM_UP_COUNT, "timed", "measured"]
    assert [step.kind for step in keep.steps] == kinds
    assert digests == [step.loss + step.gradients_digest for step in recompute.steps]
    assert len(set(digests)) == len(kinds), "each step has other data, so other gradients"
    assert 0 < recompute.activation_bytes_peak < 0.75 * keep.activation_bytes_peak


def test_the_digest_sees_one_flipped_bit_and_a_missing_gradient() -> None:
    parameters = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2, 3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = process.gradients_digest(parameters)
    assert process.gradients_digest(parameters) == before
    # -0.0 equals 0.0 and NaN equals nothing: bytes are compared, not numbers.
    parameters[1].grad = torch.ones(2, 3).fill_(-0.0)
    negative = process.gradients_digest(parameters)
    parameters[1].grad = torch.zeros(2, 3)
    zero = process.gradients_digest(parameters)
    parameters[1].grad = None
    missing = process.gradients_digest(parameters)
    assert len({before, negative, zero, missing}) == 4


# The figures


def run_of(mode: Mode, repeat: int, seconds: float, *, activation_bytes: int = 100) -> Run:
    kinds: tuple[StepKind, ...] = ("warm-up", "timed", "timed", "timed")
    steps = [
        Step(
            kind=kind,
            seconds=99.0 if kind == "warm-up" else seconds,
            loss=float(index).hex(),
            gradients_digest=f"digest {index}",
            bytes_written=10,
            bytes_read=8,
            stall_s=0.5,
        )
        for index, kind in enumerate(kinds)
    ]
    return Run(
        mode=mode,
        repeat=repeat,
        parameters_count=7,
        steps=steps,
        weights_digest="weights",
        activation_bytes_peak=activation_bytes,
        rss_bytes_peak=2 * activation_bytes,
    )


def all_runs() -> list[Run]:
    # The machine is twice as slow in the second repeat: the ratio must not see it.
    return [
        run_of("plain", 1, 0.5, activation_bytes=120),
        run_of("keep", 1, 1.0),
        run_of("recompute", 1, 1.5, activation_bytes=20),
        run_of("offload", 1, 1.1, activation_bytes=15),
        run_of("plain", 2, 1.0, activation_bytes=120),
        run_of("keep", 2, 2.0),
        run_of("recompute", 2, 3.0, activation_bytes=20),
        run_of("offload", 2, 2.2, activation_bytes=15),
    ]


def document_of(runs: list[Run], **options: Any) -> dict[str, Any]:
    modes = list(dict.fromkeys(run.mode for run in runs))
    facts = machine_facts(Path.cwd())
    return report.document(replace(SMALL, **options), modes, 2, facts, runs)


def test_ratios_are_medians_of_the_ratios_within_the_repeats() -> None:
    offload = report.summarise(all_runs(), "offload", tokens_per_step=33)
    assert offload["ratio_to_keep"] == pytest.approx(
        {"step_s_median": 1.1, "activation_bytes_peak": 0.15, "rss_bytes_peak": 0.15}
    )
    assert offload["ratio_to_plain"] == pytest.approx(
        {"step_s_median": 2.2, "activation_bytes_peak": 0.125, "rss_bytes_peak": 0.125}
    )
    assert offload["step_s_median"] == pytest.approx(1.65)
    assert offload["tokens_per_s"] == pytest.approx(20)
    assert (offload["bytes_written_per_step"], offload["bytes_read_per_step"]) == (10, 8)
    assert offload["stall_s"] == 0.5
    assert offload["losses"] == [0.0, 1.0, 2.0, 3.0]
    assert offload["step_s"] == [[1.1, 1.1, 1.1], [2.2, 2.2, 2.2]]


def test_equal_bits_are_seen_as_equal() -> None:
    assert report.compare(all_runs()) == (True, [])
    found = document_of(all_runs())
    assert report.succeeded(found)
    assert "bit-identical to plain: yes" in report.render(found)


def other_loss(run: Run) -> Run:
    return replace(run, steps=[*run.steps[:2], replace(run.steps[2], loss="0x1p+9"), run.steps[3]])


def other_gradients(run: Run) -> Run:
    changed = replace(run.steps[2], gradients_digest="flipped")
    return replace(run, steps=[*run.steps[:2], changed, run.steps[3]])


def other_weights(run: Run) -> Run:
    return replace(run, weights_digest="other")


@pytest.mark.parametrize("changed", range(1, 8))
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_loss, "loss of step 3 differs from plain's"),
        (other_gradients, "gradients of step 3 differ from plain's"),
        (other_weights, "weights differ from plain's"),
    ],
)
def test_a_differing_bit_in_any_run_is_seen_and_fails_the_demo(
    changed: int, change: Callable[[Run], Run], words: str
) -> None:
    runs = all_runs()
    runs[changed] = change(runs[changed])
    found = document_of(runs)
    assert found["comparison_notes"] == [
        f"{runs[changed].mode}, repeat {runs[changed].repeat}: {words}"
    ]
    assert not report.succeeded(found)
    assert "bit-identical to plain: NO" in report.render(found)


def test_without_plain_nothing_is_compared_and_it_is_said() -> None:
    alone = [run for run in all_runs() if run.mode == "offload"]
    only_plain = [run for run in all_runs() if run.mode == "plain"]
    killed = Run(mode="plain", failure="its process was killed")
    for runs, lacking in (
        (only_plain, "no other mode has finished"),
        ([killed, *alone], "plain has not finished"),
    ):
        bit_identical, (note,) = report.compare(runs)
        assert bit_identical is None
        assert lacking in note
    found = document_of([killed, *alone])
    assert not report.succeeded(found)
    assert "plain FAILED: its process was killed" in report.render(found)


def test_the_table_has_both_ratios() -> None:
    lines = report.render(document_of(all_runs())).splitlines()
    times, over_keep = [line for line in lines if line.startswith(("step time", "  over keep"))][:2]
    cells = "0.75 1.000x 1.50 2.000x 2.25 3.000x 1.65 2.200x"
    assert times.split()[3:] == cells.split()
    assert over_keep.split()[2:] == ["0.500x", "1.000x", "1.500x", "1.100x"]


def test_whole_fails_where_it_takes_more_than_it_was_given() -> None:
    runs = [run_of("plain", 1, 1.0, activation_bytes=400), run_of("whole", 1, 2.0)]
    enough = document_of(runs, given_bytes=200)
    # Four numbers of four bytes for each of seven parameters, and the activations of plain.
    assert enough["figures"]["all_bytes"] == 7 * 16 + 400
    assert enough["figures"]["over_given"] == enough["figures"]["over_taken"] == 512 / 200
    assert report.succeeded(enough)
    little = document_of(runs, given_bytes=199)
    assert not report.succeeded(little)
    assert "WHOLE TOOK MORE MEMORY THAN IT WAS GIVEN" in report.render(little)


# The processes


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
    def run_process(mode: Mode, _: TrainingOptions) -> Run:
        return Run(mode=mode, failure="killed" if mode == "keep" else None)

    monkeypatch.setattr(runner, "run_process", run_process)
    runs = runner.run_all(SMALL, ["keep", "offload"], repeats=2)
    started = [(run.mode, run.repeat) for run in runs]
    assert started == [("keep", 1), ("offload", 1), ("offload", 2)]


def test_training_with_all_on_the_disk_has_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    given_bytes = OTHER_BYTES + 8 * MIB
    options = replace(SMALL, hidden=128, steps=1, directory=str(tmp_path), given_bytes=given_bytes)
    plain, whole = process.train("plain", options), process.train("whole", options)
    assert [step.loss for step in whole.steps] == [step.loss for step in plain.steps]
    assert whole.weights_digest == plain.weights_digest
    # AdamW's state is twice the weights, which move as well.
    assert whole.steps[-1].bytes_written > 2 * 4 * whole.parameters_count
    assert whole.steps[-1].bytes_read > 2 * 4 * whole.parameters_count
    assert plain.steps[-1].bytes_written == 0


def demo(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ssdtrain", "demo", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_demo_from_end_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    # Large enough for tensors that are worth a write.
    sizes = ("--layers", "4", "--hidden", "512", "--sequence", "256", "--steps", "1")
    done = demo(tmp_path, "--repeats", "1", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["bit_identical"] is True
    plain, *others = (found["modes"][mode] for mode in MODES)
    assert len(plain["losses"]) == process.WARM_UP_COUNT + 2, "warm-up, timed, measured"
    assert [len(times) for times in plain["step_s"]] == [1]
    assert all(mode["losses"] == plain["losses"] for mode in others)
    for mode in others:
        if mode["mode"] in ("keep", "recompute"):
            is_equal = mode["activation_bytes_peak"] == plain["activation_bytes_peak"]
            assert is_equal is (mode["mode"] == "keep")
    # A slot of what comes back has whole pages, one more for each tensor, which has 1 MiB at least.
    # So a run that kept all but a few, as on a slow disk, may hold that much more than plain.
    pages_bytes = plain["activation_bytes_peak"] // MIB * PAGE_BYTES
    assert others[-1]["activation_bytes_peak"] <= plain["activation_bytes_peak"] + pages_bytes
    assert found["without_ssdtrain"] == ["plain", "recompute"]
    published = json.loads((BENCHES / "results" / "demo.json").read_text())
    assert published.keys() <= found.keys()
    dropped = {"foreign_cores", "rss_bytes_high"}  # figures of an earlier demo that no page quotes
    assert published["modes"]["offload"].keys() - dropped <= others[-1].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_whole_trains_in_a_quarter_of_the_memory_and_less(tmp_path: Path) -> None:
    done = demo(tmp_path, "--whole", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "demo-whole.json").read_text())
    assert found["bit_identical"] is True
    assert found["figures"]["over_given"] >= 4
    assert found["figures"]["over_taken"] >= 4
    names = ["demo-whole.json", "demo-whole.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dir", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--hidden", "65"], "--hidden must be a multiple of 64"),
        (["--sequence", "1"], "--sequence must be at least 2"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--data", "/nowhere/text"], "--data /nowhere/text"),
        (["--whole", "--model", "gpt2"], "--whole trains gpt in float32"),
        (["--whole", "--dtype", "bfloat16"], "--whole trains gpt in float32"),
        (["--whole", "--memory", "100MiB"], "are for code and threads"),
    ],
)
def test_a_bad_argument_is_refused_at_once_with_a_way_out(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in support.refusal(["demo", *arguments], tmp_path)
