"""Whether a session does what its controller says: varies the amount, and leaves bounds alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.machine import process_memory
from ssdtrain.planning.controller import (
    CAMPAIGN_COUNT,
    CAMPAIGN_COUNT_MAX,
    PROBE_INTERVAL_OFF,
    SETTLED_COUNT,
    is_reference,
)
from ssdtrain.planning.policy import Item, Plan, Policy, Rates
from support import Rig

STEPS = SETTLED_COUNT + CAMPAIGN_COUNT


class PlansAll(Policy):
    """A policy whose plans write everything, so that the price alone keeps something."""

    def learn(
        self, signature: int, items: Sequence[Item], rates: Rates, stall_share: float
    ) -> None:
        nbytes = sum(item.nbytes for item in items)
        self.plans[signature] = Plan(written_bytes=nbytes)
        self._planned.update(item.key for item in items)


def offloaded(rig: Rig, steps: int) -> list[int]:
    """Return the bytes that each step offloaded; its gradients are those of a plain one."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    amounts = []
    for _ in range(steps):
        x = torch.randn(256, 64)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        before = rig.stats.bytes_offloaded
        with rig.context():
            loss = model(x).square().sum()
            rig.flush()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        loss = loss.detach()
        assert all(map(torch.equal, gradients, expected))
        amounts.append(rig.stats.bytes_offloaded - before)
    return amounts


def test_the_first_steps_offload_all_and_nothing_by_turns(tmp_path: Path) -> None:
    rig = Rig(tmp_path, policy=PlansAll(0.02))
    amounts = offloaded(rig, STEPS + 1)
    # In the first one, what the caller holds as well is written in vain.
    assert len(set(amounts[1 : SETTLED_COUNT + 1])) == 1
    for turn in range(CAMPAIGN_COUNT):
        if is_reference(turn):
            assert amounts[SETTLED_COUNT + turn] == 0
    stats = rig.stats
    assert amounts[1] > 0
    assert stats.price_pair_count > 0
    assert stats.planned_bytes == pytest.approx(amounts[1], rel=0.2)
    assert "s per GiB" in str(rig.session)
    assert stats.as_dict()["price_pair_count"] == stats.price_pair_count


@pytest.mark.parametrize(
    ("policy", "bound"), [(None, None), (0.02, 1 << 30)], ids=["no limit", "a bound wins"]
)
def test_without_a_limit_every_step_offloads_alike(
    policy: float | None, bound: int | None, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, policy=PlansAll(policy), max_resident_bytes=bound)
    amounts = offloaded(rig, STEPS)
    assert len(set(amounts[1:])) == 1
    assert amounts[1] > 0
    assert rig.stats.price_pair_count == 0


def test_a_bound_beside_which_slowdown_max_does_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ssdtrain.offload(tmp_path, max_resident_bytes="1GiB", slowdown_max=0.02):
        pass
    (told,) = (one for one in caplog.records if "slowdown_max has no effect" in one.message)
    assert told.levelname == "WARNING"


def test_steps_too_short_for_hooks_are_left_alone(tmp_path: Path) -> None:
    # Hooks take some microseconds, and these steps hardly more for each tensor.
    rig = Rig(tmp_path, policy=PlansAll(1e-6))
    amounts = offloaded(rig, SETTLED_COUNT + CAMPAIGN_COUNT_MAX + PROBE_INTERVAL_OFF)
    assert max(amounts[-PROBE_INTERVAL_OFF:]) == 0
    eligible = rig.stats.bytes_eligible
    assert eligible % len(amounts) == 0, "those that nobody followed are counted as well"
    text = str(rig.session)
    assert "ms longer; to follow what it saves takes" in text
    assert "a larger slowdown_max" in text
    current = rig.prefetcher.rounds.current
    assert current is not None
    assert current.is_skimmed


@pytest.mark.parametrize("given", [0, -0.1, 2, float("nan"), float("inf"), "2 %", True])
def test_what_is_no_share_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ssdtrain.ConfigError, match="slowdown_max must be a share above 0"):
        ssdtrain.offload(tmp_path, slowdown_max=given)


def test_a_control_group_counts_as_the_machine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    own, group = tmp_path / "own", tmp_path / "groups" / "a" / "b"
    own.write_text("0::/a/b\n5:memory:/c\n2:cpu:/\n")
    group.mkdir(parents=True)
    monkeypatch.setattr(process_memory, "MEMORY_INFORMATION", tmp_path / "meminfo")
    monkeypatch.setattr(process_memory, "OWN_GROUPS", own)
    monkeypatch.setattr(process_memory, "GROUPS", tmp_path / "groups")
    assert process_memory.available_bytes() == 8000 << 10
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert process_memory.available_bytes() == 8000 << 10
    # A group around its own one has a limit, and one of version 1 a smaller one.
    (group.parent / "memory.max").write_text("3000000\n")
    (group.parent / "memory.current").write_text("1000000\n")
    assert process_memory.available_bytes() == 2_000_000
    older = tmp_path / "groups" / "memory" / "c"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("900\n")
    (older / "memory.usage_in_bytes").write_text("1000\n")
    assert process_memory.available_bytes() == 0
