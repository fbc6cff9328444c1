"""What a session records of its steps: traces for the planner, and a picture of tensors' ways."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.planning.policy import Item
from ssdtrain.planning.recording import Recording, trace_of
from ssdtrain.planning.timeline import events_of, save_timeline
from ssdtrain.planning.trace import load
from support import Rig


def test_the_stretches_between_events_are_the_kernels() -> None:
    # Two tensors, saved at 1 and 3 s, needed at 6 and 10 s, the later one first.
    items = [Item(1, 100, 1.0, 10.0), Item(2, 200, 3.0, 6.0)]
    trace = trace_of(Recording(items, 1.0, 10.0), name="a", origin="b")
    assert [one.seconds for one in trace.kernels] == [0, 2, 3, 4, 0]
    assert [one.uses for one in trace.kernels] == [(0,), (1,), (), (1,), (0,)]
    assert [one.nbytes for one in trace.tensors] == [100, 200]
    assert [(one.name, one.first_kernel) for one in trace.phases] == [
        ("forward", 0),
        ("backward", 3),
    ]


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])


def test_two_lengths_are_two_traces(tmp_path: Path) -> None:
    layers = model()
    with ssdtrain.offload(tmp_path, min_bytes=1, direct_io="optional") as session:
        assert session.traces == ()
        with pytest.raises(ssdtrain.ConfigError, match="once a backward has ended"):
            session.save_trace(tmp_path / "none.json")
        for length in (8, 16, 8, 16):
            layers(torch.randn(length, 64)).sum().backward()
        short, long = sorted(session.traces, key=lambda one: one.tensors[0].nbytes)
        session.save_trace(tmp_path / "trace.json")
    assert session.traces == (short, long)
    assert len(short.tensors) == len(long.tensors) >= 8
    for one, other in zip(short.tensors, long.tensors, strict=True):
        assert other.nbytes == 2 * one.nbytes
    assert load(tmp_path / "trace.json") == long
    for trace in (short, long):
        assert [phase.name for phase in trace.phases] == ["forward", "backward"]
        backward = trace.phases[1].first_kernel
        for tensor in range(len(trace.tensors)):
            first, last = (number for number, one in enumerate(trace.kernels) if tensor in one.uses)
            assert first < backward <= last


def test_a_block_around_each_step_teaches_the_next_one(tmp_path: Path) -> None:
    layers, block = model(), ssdtrain.offload(tmp_path, min_bytes=1)
    for number in range(1, 4):
        with block as session:
            layers(torch.randn(8, 64)).sum().backward()
        assert len(session.traces) == 1
        assert [basis.plan_count for basis in block._policy._basis.values()] == [number]


def test_a_backward_after_the_block_is_not_taken_for_its_end(tmp_path: Path) -> None:
    block = ssdtrain.offload(tmp_path, min_bytes=1)
    with block as session:
        loss = model()(torch.randn(8, 64)).sum()
    assert session.traces == ()
    loss.backward()


def test_a_reason_is_said_once_of_blocks_around_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, block = torch.randn(256, 64), ssdtrain.offload(tmp_path, min_bytes="1GiB")
    with caplog.at_level(logging.INFO, "ssdtrain"):
        for length in (64, 128, 256):
            with block:
                model()(x[:length]).sum().backward()
    said = [one.message for one in caplog.records if "little or nothing" in one.message]
    assert len(said) == 1
    assert "below min_bytes" in said[0]


def test_bars_follow_each_other_and_do_not_overlap_in_a_row() -> None:
    lives = [
        (7, 1 << 20, [1000, 2000, 3000, 4000, 5000, 6000]),
        # Its write was cancelled; it begins as the first one has ended, in the same row.
        (8, 1 << 20, [6000, 0, 0, 0, 7000, 8000]),
        # Forwarded: written, but still in memory when it was needed.
        (9, 1 << 20, [5000, 5500, 0, 0, 7000, 9000]),
    ]
    bars = [one for one in events_of(lives, 1000) if one["ph"] == "X"]
    told = [(one["tid"], one["name"], one["ts"], one["dur"]) for one in bars]
    assert told == [
        (0, "in memory", 0, 1),
        (0, "on its way to the disk", 1, 1),
        (0, "on the disk", 2, 1),
        (0, "back", 3, 2),
        (1, "in memory", 4, 0.5),
        (1, "on its way to the disk", 4.5, 3.5),
        (0, "in memory", 5, 2),
    ]


def test_nothing_is_noted_unless_somebody_asks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with rig.context():
        model()(torch.randn(8, 64)).sum().backward()
    assert rig.writeback.timeline.lives() == []
    with pytest.raises(ssdtrain.ConfigError, match="start_timeline"):
        rig.session.save_timeline(tmp_path / "none.json")


# torch 2.11 says this of each profile; one cycle is all that is asked for.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_picture_beside_a_profile_has_the_clock_of_that(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.session.start_timeline()
    layers = model()
    with torch.profiler.profile() as profile, rig.context():
        loss = layers(torch.randn(8, 64)).sum()
        rig.flush()
        loss.backward()
    del loss
    profiled, picture = tmp_path / "profile.json", tmp_path / "picture.json"
    profile.export_chrome_trace(str(profiled))
    rig.session.save_timeline(picture, beside=profiled)
    events: list[dict[str, Any]] = json.loads(picture.read_text())["traceEvents"]
    bars = [one for one in events if one.get("cat") is None and one["ph"] == "X"]
    ours = [one for one in bars if one["name"] in ("in memory", "on the disk", "back")]
    operations = [one for one in events if one.get("cat") == "cpu_op"]
    assert {one["name"] for one in ours} == {"in memory", "on the disk", "back"}
    first, last = (edge(one["ts"] for one in operations) for edge in (min, max))
    # To the clock of the profiler, which is not that of our hooks, belongs a little tolerance.
    assert all(first - 1e6 <= one["ts"] <= last + 1e6 for one in ours)


def test_an_invalid_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "base.json").write_text('{"traceEvents": [], "baseTimeNanoseconds": "now"}')
    for name, why in (
        ("text.json", "is not JSON"),
        ("list.json", "is no Chrome trace"),
        ("base.json", "its baseTimeNanoseconds is 'now', not a whole number"),
    ):
        with pytest.raises(ssdtrain.ConfigError, match=why):
            save_timeline(tmp_path / "out.json", [], tmp_path / name)
