"""Steps derived from shapes, and `ssdtrain plan`, which says what fits and what it costs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from checkout import ROOT
from ssdtrain.__main__ import main
from ssdtrain._core import StepPlan
from ssdtrain.errors import ConfigError
from ssdtrain.notices import Notices
from ssdtrain.planning import derive as deriving
from ssdtrain.planning import trace as traces
from ssdtrain.planning.derive import Optimizer, Roofline, derive
from ssdtrain.planning.layers import cut_layers
from ssdtrain.planning.models import MODELS, builder
from ssdtrain.planning.solve import Device, Step, only, plan_document
from ssdtrain.planning.trace import Kernel, Trace, TracedTensor

ROOFLINE = Roofline(tensor_flops=1e12, single_flops=1e12, memory_bytes_per_s=1e11, launch_s=1e-6)
ADAMW = Optimizer(states=2, state_bytes=None)
Built = tuple[nn.Module, Callable[[], torch.Tensor]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()  # type: ignore[no-any-return]


def stack(layers: int, width: int = 64) -> Callable[[], Built]:
    def build() -> Built:
        model = Stack(layers, width)
        return model, lambda: model(torch.zeros(32, width))

    return build


def test_a_layer_that_is_repeated_stands_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = derive("stack", stack(11), ROOFLINE, ADAMW)
    monkeypatch.setattr(deriving, "LAYERS_RUN", 1000)
    whole = derive("stack", stack(11), ROOFLINE, ADAMW)
    assert len(repeated.kernels) == len(whole.kernels)
    assert [one.name for one in repeated.kernels] == [one.name for one in whole.kernels]
    assert [one.seconds for one in repeated.kernels[:-50]] == [
        one.seconds for one in whole.kernels[:-50]
    ]
    # Not only each operation: what lives while each of them runs is the same.
    assert Step(repeated).live_bytes()[:-50] == Step(whole).live_bytes()[:-50]
    for kind in traces.CLASSES:
        of_both = [
            sorted(one.nbytes for one in trace.tensors if one.kind == kind)
            for trace in (repeated, whole)
        ]
        assert of_both[0] == of_both[1], kind


def test_a_derived_step_has_what_autograd_saves_and_the_optimizer_keeps() -> None:
    width, rows = 64, 32
    trace = derive("stack", stack(2, width), ROOFLINE, ADAMW)
    total = {
        kind: sum(one.nbytes for one in trace.tensors if one.kind == kind)
        for kind in traces.CLASSES
    }
    model, _ = stack(2, width)()
    weights = sum(one.numel() * 4 for one in model.parameters())
    assert total["weight"] == weights
    assert total["gradient"] == weights
    assert total["optimizer_state"] == 2 * weights
    saved: dict[int, int] = {}

    def pack(one: torch.Tensor) -> torch.Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    data = torch.zeros(rows, width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = model(data)
    kept = sum(nbytes for where, nbytes in saved.items() if where not in own)
    # Backward also reads the gradient of the loss, which nobody saved.
    assert total["activation"] == pytest.approx(kept, abs=8)
    loss.backward()
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "update"]
    assert sum(one.flops for one in trace.kernels) > 6 * rows * weights / 4 * 0.9
    parts = {one.part for one in trace.tensors if one.kind == "activation"}
    assert any(part.startswith("layers.1") for part in parts), parts


def test_classes_add_up_to_the_peak() -> None:
    trace = derive("stack", stack(6), ROOFLINE, ADAMW)
    step = Step(trace)
    assert sum(step.bytes_at_peak().values()) == max(step.live_bytes())
    idle = replace(trace.tensors[0], nbytes=1 << 20, lives_across_steps=True, storage=None)
    step = Step(replace(trace, tensors=(*trace.tensors, idle)))
    assert sum(step.bytes_at_peak().values()) == max(step.live_bytes())


def test_micro_batches_share_weights_and_gradients() -> None:
    one = derive("stack", stack(2), ROOFLINE, ADAMW)
    three = derive("stack", stack(2), ROOFLINE, ADAMW, accumulate=3)
    updates = sum(kernel.name == "update" for kernel in one.kernels)
    assert len(three.kernels) - updates == 3 * (len(one.kernels) - updates)
    for kind, times in (("weight", 1), ("gradient", 1), ("activation", 3)):
        sizes = [
            sum(tensor.nbytes for tensor in trace.tensors if tensor.kind == kind)
            for trace in (one, three)
        ]
        assert sizes[1] == times * sizes[0], kind


def there_and_back(count: int = 10) -> Trace:
    order = [*range(count), *reversed(range(count))]
    return Trace(
        "steps",
        tuple(Kernel(1.0, (one,)) for one in order),
        tuple(TracedTensor(100 << 20, part=f"layers.{one}") for one in range(count)),
    )


def device(mib: int, rate: float = 100 << 20) -> Device:
    return Device(
        memory_bytes=mib << 20, write_bytes_per_s=rate, read_bytes_per_s=rate, bus_bytes_per_s=1e12
    )


class Between(Stack):
    """Computes between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).sum()  # type: ignore[no-any-return]


class Numbered(Stack):
    """Takes its layers by their numbers, the last one first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in reversed(range(11)):
            x = self.layers[number](x)
        return self.head(x).sum()  # type: ignore[no-any-return]


def widen(layer: nn.Module) -> None:
    layer.float()


def gate(layer: nn.Module) -> None:
    layer.is_gated = True  # type: ignore[assignment]


class Gated(nn.Linear):
    """Computes more where an attribute says so."""

    is_gated = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x.to(self.weight.dtype))
        return out * out.sigmoid() if self.is_gated else out


class Mixed(Stack):
    """Has layers that differ from the seventh on, in something other than their shapes."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__(12, 64)
        self.layers = nn.ModuleList(Gated(64, 64, dtype=torch.bfloat16) for _ in range(12))
        for place, layer in enumerate(self.layers):
            layer.place = place
            if place > 6:
                change(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.float()).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [widen, gate])
def test_layers_that_only_look_alike_are_all_run(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Built:
        model = Mixed(change)
        return model, lambda: model(torch.zeros(32, 64))

    found = derive("mixed", build, ROOFLINE, ADAMW)
    monkeypatch.setattr(deriving, "LAYERS_RUN", 100)
    assert found == derive("mixed", build, ROOFLINE, ADAMW)


def test_layers_that_differ_by_their_place_stand_for_each_other() -> None:
    with torch.device("meta"):
        model = Mixed(lambda layer: None)
    cut = cut_layers(model, 5)
    assert cut is not None
    assert cut.left_out == 7


@pytest.mark.parametrize("kind", [Between, Numbered])
def test_a_model_that_uses_its_layers_otherwise_is_run_in_whole(
    kind: type[Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Built:
        model = kind(11, 64)
        return model, lambda: model(torch.zeros(32, 64))

    found = derive("stack", build, ROOFLINE, ADAMW)
    monkeypatch.setattr(deriving, "LAYERS_RUN", 100)
    whole = derive("stack", build, ROOFLINE, ADAMW)
    assert found == whole


def test_a_budget_that_no_plan_keeps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, trace = tmp_path / "trace.json", there_and_back()
    idle = TracedTensor(nbytes=3 << 20, kind="weight", lives_across_steps=True)
    traces.save(replace(trace, tensors=(*trace.tensors, idle)), path)
    words = ["plan", "--trace", str(path), "--memory", "8GiB", "--json"]
    assert main([*words, "--budget", "weight=1MiB"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways"]
    for way in ways.values():
        assert not way["fits"]
        if "peak_bytes" in way:
            assert way["class_peak_bytes"]["weight"] >= 3 << 20
            assert "weight takes" in way["problem"]
    assert main([*words, "--budget", "weight=8GiB"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert ways["keep"]["fits"]
    assert "problem" not in ways["keep"]


def test_places_and_budgets_are_kept() -> None:
    plan = Step(there_and_back(), parts={"layers.[0-4]": "keep"}).least_step(device(700))
    assert plan.moves
    assert all(number >= 5 for number, *_ in plan.moves)
    asked = {"layers.[0-4]": 300 << 20}
    plan = Step(there_and_back(), budgets=asked).least_step(device(5000, rate=400 << 20))
    assert plan.moves
    assert all(number < 5 for number, *_ in plan.moves)
    by_class = Step(there_and_back(), budgets={"activation": 700 << 20})
    assert by_class.least_step(device(5000)).class_peak_bytes[0] <= 700 << 20
    assert not Step(there_and_back(), classes=only((), "ssd")).least_step(device(1100)).moves
    with pytest.raises(ConfigError, match="no part of the model is called 'head'"):
        Step(there_and_back(), parts={"head": "keep"})
    with pytest.raises(
        ConfigError, match=r"the budget 'weights' names no class .*activation, weig"
    ):
        Step(there_and_back(), budgets={"weights": 5})
    with pytest.raises(ConfigError, match="has the place 'disk'"):
        Step(there_and_back(), parts={"layers.0": "disk"})  # type: ignore[dict-item]


def test_a_budget_is_kept_by_waits_or_by_computing_again() -> None:
    again = replace(
        there_and_back(),
        tensors=tuple(replace(one, recompute_seconds=0.1) for one in there_and_back().tensors),
    )
    # A tensor takes a second each way; so in two seconds a layer hardly any of it hides.
    slow = device(5000, rate=50 << 20)
    for limit in (250 << 20, 450 << 20):
        step = Step(again, budgets={"activation": limit})
        moved = step.least_step(slow)
        assert moved.class_peak_bytes[0] <= limit
        assert not step.exceeded(slow, moved)
        assert moved.stall_s > 0
        computed = step.least_step(slow, may_recompute=True)
        assert computed.class_peak_bytes[0] <= limit
        assert computed.recomputed
        assert computed.step_s < moved.step_s
    # A budget for parts is kept and told as well.
    first = Step(again, budgets={"layers.[0-4]": 150 << 20})
    assert not first.exceeded(slow, first.least_step(slow, may_recompute=True))
    (told,) = first.exceeded(slow, first.judged(slow, "keep"))
    assert told == (
        "layers.[0-4] takes 500 MiB at its peak in the closest plan that was found, and its budget "
        "is 150 MiB"
    )
    impossible = Step(again, budgets={"activation": 50 << 20})
    assert impossible.exceeded(slow, impossible.least_step(slow, may_recompute=True))


def test_a_plan_as_a_document_says_what_was_judged() -> None:
    step, machine = Step(there_and_back()), device(700)
    plan = step.least_step(machine)
    document = json.loads(json.dumps(plan_document(step, machine, plan)))
    gone = {one["tensor"] for one in document["moves"] if one["move"] == "evict"}
    assert {at for at, place in enumerate(document["places"]) if place == "ssd"} == gone
    assert document["written_bytes"] == len(gone) * (100 << 20)
    assert document["step_seconds"] == pytest.approx(20.0)
    assert document["bound_seconds"] <= document["step_seconds"]
    assert document["peak_bytes"] <= 700 << 20


def test_moves_of_others_are_judged_as_those_that_were_found() -> None:
    step, machine = Step(there_and_back()), device(700)
    plan = step.least_step(machine)
    again = step.judged_moves(machine, plan.moves)
    assert (again.step_s, again.peak_bytes) == (plan.step_s, plan.peak_bytes)
    assert again.moved_bytes == plan.moved_bytes
    # One tensor that is written and never fetched is fetched on demand, and waited for.
    lazy = step.judged_moves(device(5000), [(0, "ssd", 0, 0.0)])
    assert lazy.moved_bytes == [100 << 20, 0, 100 << 20, 0]
    assert lazy.stall_s == pytest.approx(1.0, abs=0.01)
    with pytest.raises(ValueError, match="tensor 99, but there are"):
        step.judged_moves(machine, [(99, "ssd", 0, 0.0)])
    with pytest.raises(ValueError, match='no move is called "disk"'):
        step.judged_moves(machine, [(0, "disk", 0, 0.0)])


def test_writes_that_were_given_to_the_disk_are_written_whoever_needs_them() -> None:
    step, machine = Step(there_and_back()), device(5000)
    # Each takes a second to be written from 9 s on, and the last is needed at 11 s.
    moves = [(6, "ssd", 8, 0.0), (7, "ssd", 8, 1.0), (8, "ssd", 8, 2.0)]
    one_by_one = step.judged_moves(replace(machine, in_flight_bytes=1), moves)
    assert one_by_one.moved_bytes[0] == 200 << 20
    at_once = step.judged_moves(replace(machine, in_flight_bytes=1 << 30), moves)
    assert at_once.moved_bytes[0] == 300 << 20
    assert at_once.stall_s == pytest.approx(one_by_one.stall_s)


def test_the_command_answers_for_a_recorded_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture, plan = (tmp_path / name for name in ("step.json", "page.html", "plan.json"))
    traces.save(there_and_back(), path)
    words = ["plan", "--trace", str(path), "--memory", "700MiB", "--host-memory", "1"]
    assert main([*words, "--html", str(picture), "--save-plan", str(plan)]) == 0
    told = capsys.readouterr().out
    assert "offload" in told
    assert "Weights, gradients and optimizer state are not in this step" in told
    columns, _, meanings = told.partition("above bound\n")
    for column in ("step", "stall", "again", "written", "drive life"):
        assert column in columns
        assert column in meanings, "what a column means is said below"
    assert "<polyline" in picture.read_text()
    assert "http" not in picture.read_text()
    assert json.loads(plan.read_text())["format"] == "ssdtrain-plan-1"
    assert main([*words, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert not ways["keep"]["fits"]
    assert ways["offload"]["fits"]
    assert ways["offload"]["written_bytes"] >= 300 << 20
    assert ways["offload"]["step_seconds"] == pytest.approx(20.0, rel=0.02)
    assert ways["host"]["problem"]
    assert "recompute" in ways
    assert "does not tell how long" in ways["recompute"]["problem"]
    assert "the link is that of H100 80 GB (SXM) (--gpu)" in told


def test_host_alone_does_not_depend_on_drives() -> None:
    step = Step(there_and_back(12), classes=only(("activation",), "host"))
    bus = 110 << 20

    def seconds(drives_rate: float) -> float:
        machine = device(300, drives_rate)
        return step.least_step(replace(machine, host_bytes=1 << 40, bus_bytes_per_s=bus)).step_s

    assert seconds(10 * bus) == seconds(bus) == seconds(bus / 100)


def test_best_of_all_is_never_behind_all_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the search with recomputing ends at a longer step than the one without."""
    least_step = Step.least_step

    def unlucky(step: Step, device: Device, *, may_recompute: bool) -> StepPlan:
        slow = replace(device, write_bytes_per_s=device.write_bytes_per_s / 1000)
        return least_step(step, slow if may_recompute else device, may_recompute=may_recompute)

    monkeypatch.setattr(Step, "least_step", unlucky)
    path = tmp_path / "step.json"
    traces.save(there_and_back(), path)
    words = ["plan", "--trace", str(path), "--memory", "700MiB", "--host-memory", "1", "--json"]
    assert main(words) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert ways["best of all"] == ways["all tensors"]


def test_a_step_that_fits_in_no_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    traces.save(there_and_back(), path)
    words = ["plan", "--trace", str(path), "--host-memory", "1"]
    assert main([*words, "--memory", "90MiB"]) == 1
    told = capsys.readouterr().out
    why = "the step does not fit 90 MiB: the tensors that may not leave and those of kernel 0 take"
    assert f"offload: {why}" in told
    assert main([*words, "--memory", "90MiB", "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert not any(way["fits"] for way in ways.values())
    assert "So this step does not fit: a smaller --batch" in told
    budget = ["--budget", "activation=50MiB"]
    assert main(["plan", "--trace", str(path), *budget]) == 1
    assert "fits the memory, and no way keeps each --budget" in capsys.readouterr().out


def test_a_step_that_fits_only_in_ways_that_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = TracedTensor(900 << 20, kind="weight", lives_across_steps=True)
    trace = there_and_back()
    kernels = (Kernel(1.0, (10,)), *trace.kernels)
    path = tmp_path / "step.json"
    traces.save(replace(trace, kernels=kernels, tensors=(*trace.tensors, weights)), path)
    words = ["plan", "--trace", str(path), "--memory", "950MiB"]
    assert main([*words, "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert [name for name, way in ways.items() if way["fits"]] == ["all tensors", "best of all"]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "On a GPU ssdtrain moves no weights and no optimizer state" in told
    assert "So this step fits in no way that can be run today: a smaller --batch" in told


def test_wrong_options_for_a_recorded_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    traces.save(there_and_back(), path)
    words = ["plan", "--trace", str(path)]
    assert main([*words, "--slowdown-max", "1.5"]) == 0
    for share in ("-0.1", "nan"):
        with pytest.raises(SystemExit):
            main([*words, f"--slowdown-max={share}"])
        assert f"'{share}' is not a number of 0 or more" in capsys.readouterr().err
    assert main([*words, "--place", "layers.1=ssd", "--place", "layers.1=keep"]) == 2
    assert "--place names 'layers.1' twice; give it once" in capsys.readouterr().err
    assert main([*words, "--save-trace", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder; name a file in it" in capsys.readouterr().err


def test_memory_that_a_step_takes_at_least() -> None:
    tensors = (
        TracedTensor(4 << 20, kind="weight", lives_across_steps=True),
        TracedTensor(8 << 20, part="first"),
        TracedTensor(16 << 20, part="second", recompute_seconds=1.0),
        TracedTensor(1 << 20, part="third"),
    )
    kernels = (Kernel(1.0, (0, 1)), Kernel(1.0, (2,), name="mm"), Kernel(1.0, (3,)))
    trace = Trace("a step", (*kernels, Kernel(1.0, (1, 2))), tensors)
    # All that is alive at the last kernel, and in between what stays and what one kernel uses.
    for classes, said in (
        (only(("optimizer_state",), "ssd"), r"kernel 2 take 29 MiB"),
        (only(("weight",), "ssd"), r"kernel 2 take 25 MiB"),
        (only(("activation",), "ssd"), r"kernel 3 take 28 MiB"),
    ):
        with pytest.raises(ConfigError, match=f"does not fit 15 MiB: the tensors that may.*{said}"):
            Step(trace, classes=classes).least_step(device(15))
    everything = Step(trace)
    with pytest.raises(ConfigError, match=r"kernel 3 take 24 MiB"):
        everything.least_step(device(15))
    assert everything.least_step(device(24)).step_s > 0


@pytest.mark.long
def test_the_example_of_the_guide_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "guides" / "planning-a-machine.md").read_text()
    (line,) = re.findall("^ssdtrain (plan .*)$", page, re.MULTILINE)
    assert main([*line.split(), "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert not ways["keep"]["fits"]
    assert ways["offload"]["fits"]
    assert ways["offload"]["step_seconds"] < ways["recompute"]["step_seconds"]


def test_the_command_answers_for_a_file_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own_model.py"
    file.write_text(
        "import torch\n"
        "def build(batch, sequence, dtype):\n"
        "    model = torch.nn.Linear(sequence, 4, dtype=dtype)\n"
        "    return model, lambda: model(torch.zeros(batch, sequence, dtype=dtype)).sum()\n"
    )
    saved = tmp_path / "step.json"
    words = ["plan", f"{file}:build", "--sequence", "64", "--json", "--save-trace", str(saved)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["ways"]["keep"]["fits"]
    weights = [one.nbytes for one in traces.load(saved).tensors if one.kind == "weight"]
    assert sorted(weights) == [8, 512]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a model"),
        (("llama-9",), "no model is called 'llama-9' here; there are llama-3-8b"),
        (("gpt2", "--gpu", "abacus"), "no GPU is called 'abacus' here; there are h200, h100"),
        (("gpt2", "--batch", "0"), "--batch must be 1 or more"),
        (("gpt2", "--batch", str(1 << 63)), "--batch must be 1 or more, and at most 1,000,000,000"),
        (("nowhere.py:build",), "nowhere.py is no Python file"),
        (("--trace", "nowhere.json"), "nowhere.json: there is no trace"),
        (("gpt2", "--trace", "a.json"), "gpt2 and --trace a.json are two steps; give one of them"),
        (("--trace", "a.json", "--batch", "4"), "--batch says how a model is run, and the step in"),
        (("gpt2", "--dir", "/nowhere/at/all"), "/nowhere/at/all: there is no such directory"),
    ],
)
def test_wrong_arguments_are_named(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_models_have_their_published_sizes() -> None:
    pytest.importorskip("transformers")
    # In billions of parameters, as their makers say.
    sizes = {"llama-3-8b": 8.03, "granite-8b": 8.1, "gpt2": 0.124, "bert-base": 0.110}
    assert sizes.keys() <= MODELS.keys()
    for name, billions in sizes.items():
        with torch.device("meta"):
            model, _ = builder(name, 1, 128, torch.bfloat16)()
        count = sum(one.numel() for one in model.parameters())
        assert count / 1e9 == pytest.approx(billions, rel=0.02), name


def test_positions_that_a_model_does_not_have_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("ssdtrain.planning.models.PROCESS", Notices())
    for sequence, told in ((1024, []), (2048, ["positions for 1024 tokens"])):
        with torch.device("meta"):
            builder("gpt2", 1, sequence, torch.bfloat16)()
        said = [one.message for one in caplog.records if one.name == "ssdtrain"]
        assert len(said) == len(told)
        assert all(part in one for part, one in zip(told, said, strict=True))


def test_a_function_of_other_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def build():\n    pass\n")
    with pytest.raises(ConfigError, match=r"write def build\(batch, sequence, dtype\)"):
        builder(f"{file}:build", 1, 128, torch.float32)
