"""Makes plans for a trace and a device, under rules of tensors that may move, and budgets.

The compiled planner (`rust/plan`) decides; this module translates between it and options. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Final, Literal, get_args

from ssdtrain._core import PlanMachine, Planner, StepPlan
from ssdtrain.errors import ConfigError
from ssdtrain.planning.trace import CLASSES, TensorClass, Trace, TracedTensor
from ssdtrain.sizes import shown_bytes

__all__ = ["PLACES", "Device", "Move", "Place", "Step", "only", "plan_document"]

FORMAT: Final = "ssdtrain-plan-1"

Place = Literal["keep", "ssd", "host", "any"]
"""The place of an unused tensor: ``any`` is the drives or the host's memory."""

PLACES: Final[tuple[Place, ...]] = get_args(Place)

NO_RATE = 1.0
"""The bytes per second of drives to which no tensor goes."""
ZERO_S = 1e-9
"""The seconds that a kernel without time counts."""
TRIES_KERNELS: Final = 1500
"""Up to so many kernels the look-ahead follows the first plan; beyond, it takes seconds."""
TRIES: Final = 6
DRAFTS: Final = 4
"""First plans that are made, each from the course of the best plan so far."""

HALVINGS: Final = 8
"""Halvings of the range in which the largest memory is searched that keeps all budgets."""

Move = tuple[int, str, int, float]
"""A tensor; ``ssd``, ``host`` or ``fetch``; the kernel at whose end the move is asked for; and its
priority: lower numbers go first."""

Sizes = tuple[tuple[int, float], tuple[int, float], tuple[int, float], tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Capacities in bytes and rates in bytes per second of a GPU, its host and its drives."""

    memory_bytes: int
    host_bytes: int = 0
    """Memory of the host that may be used."""
    write_bytes_per_s: float
    """The rate of all drives together, as ``read_bytes_per_s``."""
    read_bytes_per_s: float
    bus_bytes_per_s: float
    """The rate that drives and host share, in each direction."""
    latency_s: float = 100e-6
    duplex_share: float = 1.0
    """The share of its rate that each direction of the drives keeps while both are busy."""
    sizes: Sizes = ((0, 1.0), (0, 1.0), (0, 1.0), (0, 1.0))
    """The share of their rate that the drives reach for transfers of so many bytes."""
    price_s_per_byte: float = 0.0
    """Seconds of computing that are lost for each byte that moves."""
    in_flight_bytes: int | None = None
    """Bytes of writes that a session gives to the disk at once: pieces in flight times their size.
    With it moves are played as sessions make them (``rust/plan``, ``Writeback``): a write that was
    given to the disk ends, and a tensor that is needed meanwhile is used from memory. ``None``
    stands for the plain rules."""

    def machine(self, memory_bytes: int | None = None) -> PlanMachine:
        """Return the device for the planner, with another memory if that is given."""
        bus = self.bus_bytes_per_s
        ssd = (min(self.write_bytes_per_s, bus), min(self.read_bytes_per_s, bus))
        # Copies of the host must not stop while drives take the whole bus.
        wide = max(bus, 1.1 * ssd[0], 1.1 * ssd[1])
        return PlanMachine(
            device_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            host_bytes=self.host_bytes,
            ssd=ssd,
            bus=(wide, wide),
            host=(bus, bus),
            latency_s=self.latency_s,
            duplex_share=self.duplex_share,
            sizes=self.sizes,
            price=(self.price_s_per_byte, self.price_s_per_byte),
            in_flight_bytes=self.in_flight_bytes,
        )


class Step:
    """A trace, and rules of the places to which its tensors may move."""

    def __init__(
        self,
        trace: Trace,
        *,
        classes: Mapping[TensorClass, Place] | None = None,
        parts: Mapping[str, Place] | None = None,
        budgets: Mapping[str, int] | None = None,
    ) -> None:
        """Take the place of each class (``any`` by default), and of parts of the model by pattern.

        A budget bounds the bytes of a class or of parts (a pattern) that are in memory at once. The
        first pattern that matches decides, and goes before the class. Raises ``ConfigError``.
        """
        self.trace, _ = trace.on_storages()
        self._check(parts or {}, budgets or {})
        used = {number for kernel in self.trace.kernels for number in kernel.uses}
        idle = [
            tensor
            for number, tensor in enumerate(self.trace.tensors)
            if tensor.lives_across_steps and number not in used
        ]
        self._idle_of_class = {
            kind: sum(tensor.nbytes for tensor in idle if tensor.kind == kind) for kind in CLASSES
        }
        self._idle_bytes = sum(self._idle_of_class.values())
        self._idle_of_budget = {
            name: sum(tensor.nbytes for tensor in idle if self._is_member(tensor, name))
            for name in budgets or {}
        }
        self._budget_names = list(budgets or {})
        rows = []
        for tensor in self.trace.tensors:
            place = (classes or {}).get(tensor.kind, "any")
            place = next(
                (
                    own
                    for pattern, own in (parts or {}).items()
                    if fnmatchcase(tensor.part, pattern)
                ),
                place,
            )
            if tensor.is_fixed:
                place = "keep"
            rows.append(
                (
                    tensor.nbytes,
                    CLASSES.index(tensor.kind),
                    tensor.lives_across_steps,
                    place in {"ssd", "any"},
                    place in {"host", "any"},
                    tensor.recompute_seconds,
                )
            )
        self._may_leave = [row[3] or row[4] for row in rows]
        self._uses_drives = any(row[3] for row in rows)
        self._budgets = [(limit, self._members(name)) for name, limit in (budgets or {}).items()]
        kernels = self.trace.kernels
        self.planner = Planner(
            [max(kernel.seconds, ZERO_S) for kernel in kernels],
            [list(kernel.uses) for kernel in kernels],
            rows,
        )
        self._tries = TRIES if len(kernels) <= TRIES_KERNELS else 0

    def _check(self, parts: Mapping[str, Place], budgets: Mapping[str, int]) -> None:
        for pattern, place in parts.items():
            if place not in PLACES:
                raise ConfigError(f"{pattern} has the place {place!r}; it is {', '.join(PLACES)}")
            if not any(fnmatchcase(tensor.part, pattern) for tensor in self.trace.tensors):
                raise ConfigError(f"no part of the model is called {pattern!r}{self._some_parts()}")
        for name, limit in budgets.items():
            if limit < 0 or not self._members(name):
                raise ConfigError(
                    f"the budget {name!r} names no class of this step ({', '.join(CLASSES)}) and "
                    f"no part of the model{self._some_parts()}"
                )

    def _some_parts(self) -> str:
        parts = list(dict.fromkeys(tensor.part for tensor in self.trace.tensors if tensor.part))
        return f"; there are {', '.join(parts[:8])}, ..." if parts else "; it names none"

    def _members(self, name: str) -> list[int]:
        return [
            number
            for number, tensor in enumerate(self.trace.tensors)
            if self._is_member(tensor, name)
        ]

    @staticmethod
    def _is_member(tensor: TracedTensor, name: str) -> bool:
        return name == tensor.kind or (name not in CLASSES and fnmatchcase(tensor.part, name))

    def ideal_seconds(self) -> float:
        """Return the time of a step that never waits."""
        return self.planner.ideal_s

    def live_bytes(self) -> list[int]:
        """Return the bytes that live while each kernel runs, if no tensor is moved."""
        return self.planner.live_bytes()

    def bytes_at_peak(self) -> dict[TensorClass, int]:
        """Return the bytes of each class that live at the peak, if no tensor is moved."""
        live_bytes = self.live_bytes()
        peak = live_bytes.index(max(live_bytes))
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, kernel in enumerate(self.trace.kernels):
            for number in kernel.uses:
                first.setdefault(number, index)
                last[number] = index
        found = dict.fromkeys(CLASSES, 0)
        for number, tensor in enumerate(self.trace.tensors):
            if tensor.lives_across_steps or (
                number in first and first[number] <= peak <= last[number]
            ):
                found[tensor.kind] += tensor.nbytes
        return found

    def _machine(self, device: Device, memory_bytes: int | None = None) -> PlanMachine:
        asked = device.memory_bytes if memory_bytes is None else memory_bytes
        if asked <= self._idle_bytes:
            raise ConfigError(
                f"the step does not fit: the device has {shown_bytes(asked)}, and "
                f"{shown_bytes(self._idle_bytes)} of tensors stay there that no kernel uses"
            )
        if not self._uses_drives:
            # The planner gives copies of the host the part of the bus that drives leave.
            device = replace(device, write_bytes_per_s=NO_RATE, read_bytes_per_s=NO_RATE)
        return device.machine(asked - self._idle_bytes)

    def judged(self, device: Device, whose: str, memory_bytes: int | None = None) -> StepPlan:
        """Judge another planner's plan: ``keep``, ``recompute``, ``ssdtrain`` or ``teraio``."""
        return self.planner.judged(self._machine(device, memory_bytes), whose)

    def judged_moves(
        self, device: Device, moves: Sequence[Move], memory_bytes: int | None = None
    ) -> StepPlan:
        """Judge moves of another planner. Raises ``ValueError`` if they are no plan."""
        return self.planner.judged_moves(self._machine(device, memory_bytes), list(moves))

    def least_step(
        self, device: Device, *, may_recompute: bool = False, drafts: int = DRAFTS
    ) -> StepPlan:
        """Return the plan with the shortest step found. Raises ``ConfigError`` if none fits.

        If no plan keeps the budgets, it is the plan that comes closest; see `exceeded`.
        """

        def found(memory_bytes: int) -> StepPlan:
            return self.planner.least_step(
                self._machine(device, memory_bytes),
                budgets=self._budgets,
                drafts=drafts,
                tries=self._tries,
                may_recompute=may_recompute,
            )

        try:
            best = found(device.memory_bytes)
        except ConfigError:
            self._check_room(device, may_recompute=may_recompute)
            raise
        # Kernels wait when the device's memory is full, but not for a budget. So if a budget is
        # exceeded, a smaller memory has to make them wait.
        low, high = self._idle_bytes, self.peak_bytes(best)
        least_bytes = self._excess_bytes(device, best)
        for _ in range(HALVINGS if least_bytes else 0):
            middle = (low + high) // 2
            try:
                plan = found(middle)
            except ConfigError:
                low = middle
                continue
            excess_bytes = self._excess_bytes(device, plan)
            if excess_bytes:
                high = middle
            else:
                low = middle
            # Among plans that keep the budgets, take the plan with the most memory.
            if excess_bytes < least_bytes or not excess_bytes:
                least_bytes, best = excess_bytes, plan
        return best

    def least_peak(self, device: Device, slowdown_max: float) -> StepPlan:
        """Return the plan with the least peak found whose step is at most so much longer."""
        return self.planner.least_peak(
            self._machine(device),
            budgets=self._budgets,
            drafts=2,
            tries=0,
            slowdown_max=slowdown_max,
        )

    def _check_room(self, device: Device, *, may_recompute: bool) -> None:
        """Raise ``ConfigError`` if tensors that may not leave and those of a kernel do not fit."""
        tensors, kernels = self.trace.tensors, self.trace.kernels
        leaves = [
            may_leave or (may_recompute and tensor.recompute_seconds is not None)
            for tensor, may_leave in zip(tensors, self._may_leave, strict=True)
        ]
        uses: dict[int, list[int]] = {}
        for index, kernel in enumerate(kernels):
            for number in kernel.uses:
                uses.setdefault(number, []).append(index)
        changes = [0] * (len(kernels) + 1)
        for number, indices in uses.items():
            tensor = tensors[number]
            stretches = [(index, index) for index in indices]
            if not leaves[number]:
                always = (0, len(kernels) - 1)
                stretches = [always if tensor.lives_across_steps else (indices[0], indices[-1])]
            for first, last in stretches:
                changes[first] += tensor.nbytes
                changes[last + 1] -= tensor.nbytes
        needs = [self._idle_bytes + nbytes for nbytes in accumulate(changes[:-1])]
        most = max(needs)
        if most > device.memory_bytes:
            index = needs.index(most)
            name = f" ({kernels[index].name})" if kernels[index].name else ""
            raise ConfigError(
                f"the step does not fit {shown_bytes(device.memory_bytes)}: the tensors that may "
                f"not leave and those of kernel {index}{name} take {shown_bytes(most)}"
            )

    def peak_bytes(self, plan: StepPlan) -> int:
        """Return the peak of a plan, with the tensors that no kernel uses."""
        return plan.peak_bytes + self._idle_bytes

    def class_peak_bytes(self, plan: StepPlan) -> dict[TensorClass, int]:
        """Return the peak of each class under a plan, with the tensors that no kernel uses."""
        peaks = zip(CLASSES, plan.class_peak_bytes, strict=True)
        return {kind: nbytes + self._idle_of_class[kind] for kind, nbytes in peaks}

    def exceeded(self, device: Device, plan: StepPlan) -> list[str]:
        """Return the budgets that a plan does not keep, each as a part of a sentence."""
        return [
            f"{name} takes {shown_bytes(peak)} at its peak in the closest plan that was found, and "
            f"its budget is {shown_bytes(limit)}"
            for name, limit, peak in self._beyond(device, plan)
        ]

    def _excess_bytes(self, device: Device, plan: StepPlan) -> int:
        return sum(peak - limit for _, limit, peak in self._beyond(device, plan))

    def _beyond(self, device: Device, plan: StepPlan) -> list[tuple[str, int, int]]:
        """Return the names of budgets that a plan does not keep, with their limits and peaks."""
        machine = device.machine(plan.device_bytes)
        peaks = self.planner.peaks_of(machine, plan, self._budgets)
        told = zip(self._budget_names, self._budgets, peaks, strict=True)
        found = [
            (name, limit, peak + self._idle_of_budget[name]) for name, (limit, _), peak in told
        ]
        return [(name, limit, peak) for name, limit, peak in found if peak > limit]


def plan_document(step: Step, device: Device, plan: StepPlan) -> dict[str, Any]:
    """Return the content of a plan's JSON file; see `docs/internals/planning.md` for the format."""
    tensors = step.trace.tensors
    moved = {number: where for number, where, _, _ in plan.moves if where != "fetch"}
    recomputed = set(plan.recomputed)

    def place(number: int) -> str:
        return "recompute" if number in recomputed else moved.get(number, "keep")

    return {
        "format": FORMAT,
        "trace": step.trace.name,
        "memory_bytes": device.memory_bytes,
        "step_seconds": plan.step_s,
        "ideal_seconds": step.ideal_seconds(),
        "bound_seconds": plan.bound_s,
        "stall_seconds": plan.stall_s,
        "recompute_seconds": plan.recompute_s,
        "peak_bytes": step.peak_bytes(plan),
        "host_peak_bytes": plan.host_peak_bytes,
        "class_peak_bytes": step.class_peak_bytes(plan),
        "written_bytes": plan.moved_bytes[0],
        "read_bytes": plan.moved_bytes[2],
        "to_host_bytes": plan.moved_bytes[1],
        "from_host_bytes": plan.moved_bytes[3],
        "places": [place(number) for number in range(len(tensors))],
        "moves": [
            {"tensor": number, "after": after, "priority": priority, **_action(where)}
            for number, where, after, priority in plan.moves
        ],
    }


def _action(where: str) -> dict[str, str]:
    return {"move": "fetch"} if where == "fetch" else {"move": "evict", "to": where}


def only(classes: tuple[TensorClass, ...], place: Place) -> dict[TensorClass, Place]:
    """Return the places of all classes, if only some classes may move."""
    return {kind: place if kind in classes else "keep" for kind in CLASSES}
