"""What a session counted, for machines: a flat dict, and what happened since an earlier look."""

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain import Stats, offload_optimizer
from ssdtrain.optimizer.whole_state import OptimizerStats
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.sharing import Figures
from ssdtrain.stats import with_tenants
from support import Rig, chain

WAIT_S = 0.05
"""Longer than all hooks of a step take."""


def looks_at(rig: Rig) -> tuple[Stats, Stats]:
    """Train two steps; return what was counted after each."""
    looks = []
    x = torch.randn(100_000, requires_grad=True)
    with rig.context():
        for _ in range(2):
            loss = chain(x).sum()
            rig.flush()
            loss.backward()
            del loss
            looks.append(rig.stats)
    return looks[0], looks[1]


def test_a_snapshot_is_a_flat_dict(tmp_path: Path) -> None:
    _, stats = looks_at(Rig(tmp_path))
    values = stats.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert all(type(value) in (int, float, str) for value in values.values())
    fields = {field.name for field in dataclasses.fields(stats)}
    assert values.keys() == fields - {"classes"} | {"hidden_s", "limit"}
    assert values["bytes_offloaded"] == stats.bytes_offloaded > 0
    assert values["engines"] == f"psync in {tmp_path}"


def test_the_report_begins_with_what_was_gained_and_lost(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=900_000)
    nothing = "ssdtrain: no saved tensor was taken here, so nothing was gained"
    assert str(rig.stats).splitlines()[0] == nothing
    told = str(dataclasses.replace(rig.stats, reason="of others")).splitlines()
    assert told[0] == f"{nothing}; the last line tells why"
    assert told[-1] == "  because    of others"
    _, stats = looks_at(rig)
    # Four of 400,000 bytes are alive at the end of the forward, and two are in memory.
    assert stats.saved_bytes_peak >= 1_600_000 > stats.resident_bytes_peak > 0
    assert 0 < stats.hooks_s < stats.elapsed_s
    large = dataclasses.replace(
        stats,
        saved_bytes_peak=600 << 20,
        saved_resident_bytes_peak=200 << 20,
        process_bytes_peak=1 << 30,
        hooks_s=0.25,
        stall_s=0.75,
        elapsed_s=10.0,
        has_settled=True,
        resident_bound_bytes=0,
    )
    costs = "hooks and waits took 1.000 s of 10.000 s (10.0%)"
    first = str(large).splitlines()[0]
    assert first == (
        "ssdtrain: saved tensors took 200 MiB of memory at the peak, and would take 600 MiB "
        f"without ssdtrain; {costs}"
    )
    dear = dataclasses.replace(large, hooks_s=2.0, rematerialize_s=0.5)
    first = str(dear).splitlines()[0]
    assert first.endswith(
        "hooks and waits took 3.250 s of 10.000 s (32.5%), but only 28.1% of the memory was freed: "
        "leave the block out, unless the step does not fit without it"
    )
    for wanted in ({"elapsed_s": 12.0}, {"resident_bound_bytes": 1 << 30}):
        assert "leave the block out" not in str(dataclasses.replace(dear, **wanted))
    little = dataclasses.replace(large, saved_bytes_peak=210 << 20)
    first, second, *_ = str(little).splitlines()
    assert first.startswith("ssdtrain: hardly anything was gained: saved tensors took 200 MiB of")
    assert first.endswith(
        f"{costs}; leave the block out, or raise min_bytes so that it takes less time"
    )
    assert second == f"  disks      psync in {tmp_path}"
    young = dataclasses.replace(little, has_settled=False)
    assert "the first three steps of a kind measure and prove" in str(young).splitlines()[0]
    cheap = dataclasses.replace(little, hooks_s=0.01, stall_s=0.0)
    assert str(cheap).splitlines()[0].endswith("; leave the block out")
    refused = dataclasses.replace(little, write_refused_count=6)
    assert (
        str(refused)
        .splitlines()[0]
        .endswith("; raise max_disk_bytes, into which 6 writes did not fit")
    )
    with_state = with_tenants(little, {"optimizer state": Figures()}, Figures)
    assert "hardly anything" not in str(with_state)
    assert str(with_state).startswith("ssdtrain: activations alone took 200 MiB of memory at the")
    first = str(dataclasses.replace(little, blocks_recomputed=1)).splitlines()[0]
    assert "hardly anything" not in first
    assert "would take at least 210 MiB" in first
    on_gpu = dataclasses.replace(
        large, pinned_bytes=1, away_bytes_peak=300 << 20, device_bytes_peak=1 << 30
    )
    first = str(on_gpu).splitlines()[0]
    assert first.startswith("ssdtrain: without ssdtrain GPUs would hold up to 300 MiB more; hooks")
    assert "took 0.750 s of" in first, "a GPU computes on while hooks run"


def test_the_peak_that_is_compared_has_no_reservations(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_resident_bytes=16 << 20)
    budget = rig.budget("optimizer state")
    room = budget.reserve(8 << 20, 8 << 20, lambda: "a test")
    _, stats = looks_at(rig)
    room.end()
    assert stats.resident_bytes_peak >= 8 << 20
    assert 0 < stats.saved_resident_bytes_peak <= stats.saved_bytes_peak + 4 * 8192 < 8 << 20
    rig.forget_peak()
    assert rig.stats.saved_resident_bytes_peak == 0


def test_the_time_of_hooks_has_no_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, max_resident_bytes=900_000, backend="simulated", faults={"seed": 1})
    wait_for_room = rig.writeback.wait_for_room

    forward = threading.Event()

    def slowly() -> bool:
        threading.Event().wait(WAIT_S)
        rig.disk.resume()
        waited = wait_for_room()
        # In backward a read may wait for room, too, if a write is late: the disk goes on.
        if forward.is_set():
            rig.disk.pause()
        return waited

    monkeypatch.setattr(rig.writeback, "wait_for_room", slowly)
    looks = []
    x = torch.randn(100_000, requires_grad=True)
    with rig.context():
        for _ in range(2):
            forward.set()
            rig.disk.pause()
            loss = chain(x).sum()
            forward.clear()
            rig.disk.resume()
            loss.backward()
            del loss
            looks.append(rig.stats)
    first, second = looks
    assert second.stall_s > first.stall_s > 2 * WAIT_S
    assert 0 < second.hooks_s <= second.elapsed_s - second.stall_s
    assert second.since(first).hooks_s > 0


def test_the_report_tells_a_rate_of_what_was_moved_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert "  drive      0 bytes written, 0 bytes read\n" in str(rig.stats)
    _, stats = looks_at(rig)
    assert re.search(r"drive      \S+ [KM]iB written \(\S+ [MG]iB/s\), \S+ [KM]iB", str(stats))


def test_the_limit_is_the_busiest_link_that_was_waited_for(tmp_path: Path) -> None:
    known = {"elapsed_s": 10.0, "bytes_eligible": 100, "bytes_offloaded": 95, "stall_s": 0.0}
    known["pinned_bytes"] = 1
    links = {"write_busy_s": 9.0, "read_busy_s": 2.0, "from_gpu_s": 1.0, "to_gpu_s": 1.5}
    stats = dataclasses.replace(Rig(tmp_path).stats, **known, **links)
    # Nearly all left, and nobody waited: a faster disk would change nothing.
    assert stats.limit == "compute"
    for name, link in (
        ("write_busy_s", "the disk's writes"),
        ("read_busy_s", "the disk's reads"),
        ("from_gpu_s", "the PCIe copies to the host"),
        ("to_gpu_s", "the PCIe copies to the GPU"),
    ):
        busiest = dataclasses.replace(stats, **{name: 9.5})
        assert busiest.limit == "compute"
        assert dataclasses.replace(busiest, stall_s=0.2).limit == link
        assert dataclasses.replace(busiest, bytes_offloaded=50).limit == link
    # By GPUDirect Storage the copies are those on the GPU.
    direct = dataclasses.replace(stats, pinned_bytes=0, from_gpu_s=9.5, stall_s=0.2)
    assert direct.limit == "the disk's writes"


def test_each_class_has_its_share_of_the_hidden_time(tmp_path: Path) -> None:
    known = {"write_busy_s": 8.0, "read_busy_s": 2.0, "stall_s": 1.0}
    stats = dataclasses.replace(Rig(tmp_path).stats, **known)
    alone = with_tenants(stats, {}, Figures)
    assert (alone.classes, alone.exposed_s, alone.hidden_s) == ((), 1.0, 9.0)
    state = Figures(bytes_written=300, bytes_read=50, stall_s=0.5)
    saved = Figures(bytes_written=100, bytes_read=150, stall_s=1.0)
    both = with_tenants(stats, {"optimizer state": state}, lambda: saved)
    assert (both.exposed_s, both.hidden_s) == (1.5, 8.5)
    # Three quarters of the writes' time and one of the reads', without what was waited for.
    assert [one.hidden_s for one in both.classes] == [2.0 + 1.5 - 1.0, 6.0 + 0.5 - 0.5]
    idle = with_tenants(stats, {"optimizer state": Figures(stall_s=1.0)}, Figures)
    assert [one.hidden_s for one in idle.classes] == [0.0, 0.0]


def test_a_difference_tells_the_second_step_alone(tmp_path: Path) -> None:
    first, second = looks_at(Rig(tmp_path))
    done = second.since(first)
    assert done.bytes_offloaded == first.bytes_offloaded > 0
    assert done.tensors_offloaded == first.tensors_offloaded > 0
    for name in ("bytes_written", "bytes_read", "write_busy_s", "read_busy_s"):
        assert getattr(done, name) == getattr(second, name) - getattr(first, name) > 0, name
    # These are no sums, so what they were before says nothing about what they are.
    assert done.resident_bytes_peak == second.resident_bytes_peak > 0
    assert done.disk_reserved_bytes == second.disk_reserved_bytes
    assert done.engines == second.engines


def test_an_optimizer_prints_one_line() -> None:
    stats = OptimizerStats(
        on_disk_bytes=3 << 20,
        resident_bytes=1 << 20,
        written_bytes=5 << 20,
        read_bytes=6 << 20,
        step_count=1,
        step_s=0.25,
        stall_s=0.125,
        write_failed_count=0,
    )
    assert str(stats) == (
        "state: 1 MiB in memory and 3 MiB on disk, 5 MiB written, 6 MiB read; "
        "1 step in 0.250 s; updates waited 0.125 s for the disk"
    )
    more = dataclasses.replace(stats, gradient_peak_bytes=2 << 20, write_failed_count=2)
    assert str(more) == (
        f"{stats}; gradients: 0 bytes on disk, at most 2 MiB in memory, 0 bytes written, "
        "0 bytes read, 0.000 s stalled; 2 writes failed or were refused"
    )


def test_an_optimizer_without_state_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    offload_optimizer(optimizer, tmp_path)
    model(torch.zeros(1, 256)).sum().backward()
    optimizer.step()
    assert str(optimizer.offload_stats).endswith("on disk only: the optimizer keeps none")


def test_an_optimizer_says_why_nothing_is_on_the_disk(tmp_path: Path) -> None:
    for buffer_bytes in ("256MiB", "64KiB"):
        model = torch.nn.Linear(256, 256)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        offload_optimizer(optimizer, tmp_path, buffer_bytes=buffer_bytes)
        model(torch.zeros(1, 256)).sum().backward()
        assert optimizer.offload_stats.reason is None, "there is no state yet"
        optimizer.step()
        stats = optimizer.offload_stats
        assert (stats.on_disk_bytes > 0) == (buffer_bytes == "64KiB")
        is_told = "state that fits in a quarter of buffer_bytes" in str(stats)
        assert is_told == (buffer_bytes != "64KiB")


def test_weights_print_one_line() -> None:
    stats = ParameterStats(
        total_bytes=4 << 20,
        resident_bytes=1 << 20,
        peak_resident_bytes=2 << 20,
        on_disk_bytes=3 << 20,
        staying_bytes=1 << 10,
        read_bytes=6 << 20,
        written_bytes=5 << 20,
        stall_s=0.5,
        write_failed_count=1,
    )
    assert str(stats) == (
        "of 4 MiB of weights 1 MiB in memory (peak 2 MiB) and 3 MiB on disk, 1 KiB more never "
        "leave; 5 MiB written, 6 MiB read, 0.500 s stalled, 1 write failed"
    )
