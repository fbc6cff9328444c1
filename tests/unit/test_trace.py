"""Files of traces: what was written comes back, and what is no trace is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.planning import trace
from ssdtrain.planning.trace import Kernel, Phase, Trace, TracedTensor

STEP = Trace(
    name="two layers",
    kernels=(
        Kernel(0.5, (0, 2), name="linear", flops=3e9),
        Kernel(0.0, (1, 2)),
        Kernel(0.25, (0, 1, 2)),
    ),
    tensors=(
        TracedTensor(100, name="query", part="layers.0", storage=7, recompute_seconds=0.5),
        TracedTensor(300, name="fused", storage=7, recompute_seconds=0.25),
        TracedTensor(50, kind="weight", lives_across_steps=True, is_fixed=True),
    ),
    phases=(Phase("forward", 0), Phase("backward", 2)),
    origin="a test",
)


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    trace.save(STEP, path)
    assert trace.load(path) == STEP
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain.json"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode, "whoever reads other files reads it"


def test_the_example_of_the_documentation_is_a_trace(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "internals" / "planning.md"
    text = page.read_text().split("```json\n")[1].split("```")[0]
    example = Trace.of_document(json.loads(text), "docs/internals/planning.md")
    assert example.tensors[1].lives_across_steps
    assert [one.uses for one in example.kernels] == [(0, 1), (1,), (0, 1)]


def test_tensors_on_one_storage_count_once() -> None:
    merged, places = STEP.on_storages()
    assert places == (0, 0, 1)
    assert [one.nbytes for one in merged.tensors] == [300, 50]
    assert [one.uses for one in merged.kernels] == [(0, 1), (0, 1), (0, 1)]
    assert merged.tensors[0].recompute_seconds == 0.75
    assert merged.tensors[0].part == "layers.0"
    alone = replace(STEP, tensors=tuple(replace(one, storage=None) for one in STEP.tensors))
    assert alone.on_storages() == (alone, (0, 1, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": ()}, "has no kernel"),
        ({"kernels": (Kernel(-1.0, ()),)}, "kernel 0 takes -1.0 s"),
        ({"kernels": (Kernel(1.0, (0, 0)),)}, "names a tensor twice"),
        ({"kernels": (Kernel(1.0, (3,)),)}, "uses tensor 3, but there are 3"),
        ({"tensors": (TracedTensor(-1),) * 3}, "tensor 0 has -1 bytes"),
        ({"tensors": (TracedTensor(1, kind="cache"),) * 3}, "of class 'cache'"),  # type: ignore[arg-type]
        ({"tensors": (TracedTensor(1, recompute_seconds=-2.0),) * 3}, "takes -2.0 s to compute"),
        ({"phases": (Phase("a", 2), Phase("b", 1))}, "begin at the kernels"),
        ({"phases": (Phase("a", 3),)}, "begin at the kernels"),
    ],
)
def test_an_invalid_step_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(STEP, **change)  # type: ignore[arg-type]


def of_tensors(rows: str) -> str:
    head = '{"format": "ssdtrain-trace-1", "kernels": [{"seconds": 1, "uses": []}], "tensors": ['
    return f"{head}{rows}]}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is not JSON"),
        (of_tensors('{"bytes": 1e999}'), "is not a valid trace"),
        (of_tensors('{"bytes": 100.9}'), "100.9 is no whole number"),
        ("[]", "is not a trace of the format"),
        ('{"format": "ssdtrain-trace-2"}', "is not a trace of the format"),
        ('{"format": "ssdtrain-trace-1", "kernels": []}', "tensors"),
        ('{"format": "ssdtrain-trace-1", "tensors": [], "kernels": [7]}', "is not a valid trace"),
        (of_tensors('{"bytes": 1, "fixed": "false"}'), "of a tensor is 'false', not true or false"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        trace.load(path)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "trace.json"
    with pytest.raises(FileNotFoundError, match=r"save_trace\(FILE\) writes one: .*trace\.json"):
        trace.load(missing)
    one = Trace("one", (Kernel(1.0, ()),), ())
    with pytest.raises(FileNotFoundError, match=r"make it first: .*none"):
        trace.save(one, missing)
