"""Each step of ssdtrain in `benches/gpu_step.py`: its plan, and what a step did by it."""

from __future__ import annotations

from typing import Any

import ssdtrain
from ssdtrain.planning.policy import Plan

MIB = 1 << 20
COLUMNS = (
    "step seconds peak_mib plans caution planned_again_mib planned_host_mib planned_disk_mib "
    "again_mib released_mib host_mib written_mib kept_mib again_s stall_s gpu_stall_s"
)
"""``plans`` and the next four columns are of the end of the step: how many plans were made, and the
last of them. ``released`` left the GPU's memory by a copy, and ``host`` of these
bytes stayed in the CPU's. ``gpu_stall_s`` is that of the rounds that the step learned from: mostly
the round before. The last five rows are the steps whose gradients were compared."""
SUMMED = (
    "bytes_rematerialized",
    "rematerialize_s",
    "bytes_offloaded",
    "from_gpu_bytes",
    "staying_bytes",
    "bytes_written",
    "bytes_kept",
    "stall_s",
    "gpu_stall_s",
)
"""The figures of a session of which means of the timed steps are told."""


class StepLog:
    """Reads the plan and the counts of ssdtrain after each step."""

    def __init__(self, tool: ssdtrain.offload) -> None:
        self._tool = tool
        self._choice: object = None
        self._stats: list[ssdtrain.Stats] = []
        self.rows = [COLUMNS]
        """A line of numbers for each step, below one of their names."""
        self.new_plan_step = 0
        """The last step that ended with another plan than the step before it."""

    def note(self, seconds: float, peak_bytes: int) -> None:
        """Note a step that has ended, also on the GPU."""
        session = self._tool.session
        assert session is not None, "the step has not entered the session"
        stats = session.stats
        done = stats.since(self._stats[-1]) if self._stats else stats
        self._stats.append(stats)
        policy = self._tool._policy  # noqa: SLF001 - plans have no public name
        plan, caution = Plan(), 0.0
        if policy.plans:
            # Training repeats one kind of step; the last of the dictionary is the newest kind.
            signature, plan = list(policy.plans.items())[-1]
            basis = policy.basis(signature)
            caution = 0.0 if basis is None else basis[1]
        if (choice := (plan.keep, plan.pinned, plan.rematerialized)) != self._choice:
            self._choice, self.new_plan_step = choice, len(self._stats)
        sizes = (
            plan.rematerialized_bytes,
            plan.pinned_bytes,
            plan.written_bytes,
            done.bytes_rematerialized,
            done.bytes_offloaded,
            done.staying_bytes,
            done.bytes_written,
            done.bytes_kept,
        )
        times = (done.rematerialize_s, done.stall_s, done.gpu_stall_s)
        self.rows.append(
            f"{len(self._stats)} {seconds:.5f} {peak_bytes / MIB:.1f} {policy.made_count} "
            f"{caution:.3f} {' '.join(f'{size / MIB:.1f}' for size in sizes)} "
            f"{' '.join(f'{time:.5f}' for time in times)}"
        )

    def means(self, count: int) -> dict[str, float]:
        """Return the means of the last ``count`` steps."""
        done = self._stats[-1]
        if count < len(self._stats):
            done = done.since(self._stats[-count - 1])
        return {name: getattr(done, name) / count for name in SUMMED}

    def report(self) -> str:
        """Return the report of the session."""
        return str(self._tool.session)

    def stats(self) -> dict[str, Any]:
        """Return all figures of the session."""
        return dict(self._stats[-1].as_dict())
