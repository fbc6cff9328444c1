"""What `compare.py` measures: the cases, the plan that orders them, and the rows they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

Direction = Literal["write", "read"]
Pages = Literal["huge", "4 KiB"]

GIB = 1 << 30
TENSOR_BYTES = (64 << 20, 16 << 20, 4 << 20, 1 << 20, 64 << 10)
DEFAULT_DEPTH = 16
"""Pieces in flight in the public store; `ssdtrain_core::Tuning` has it."""
PIECE_BYTES = 4 << 20
OTHER_DEPTHS = (4, 32)
DEPTH_TENSOR_BYTES = (64 << 20, 64 << 10)
"""Depths are compared with the greatest size and the smallest."""
SMALL_PAGE_TENSOR_BYTES = (64 << 20, 1 << 20)
VERIFY_TENSOR_BYTES = 4 << 20
PEER_TENSOR_BYTES = (64 << 20, 1 << 20)
QUICK_PASS_BYTES = 16 << 20
QUICK_DIVISOR = 16
"""A quick run divides the sizes of tensors: it shows that everything runs, not how fast."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a store is opened: what all its cases share."""

    engine: Literal["io_uring", "psync"] = "io_uring"
    depth: int | None = None
    """Pieces in flight, through the internal store; None is the public store as it comes."""
    directory_count: int = 1
    verify: bool = False

    @property
    def label(self) -> str:
        """Name the setting in a table."""
        api = "TensorStore" if self.depth is None else "_core.Store"
        return f"ssdtrain {api}" + (", verify=True" if self.verify else "")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table before it is measured."""

    label: str
    engine: str
    depth: int | None
    directory_count: int
    tensor_bytes: int
    direction: Direction
    pages: Pages = "huge"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed pass."""

    total_bytes: int
    seconds: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.total_bytes / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        """What the processor had to do for it."""
        return self.cpu_s / (self.total_bytes / GIB)


@dataclass
class Row:
    """One case with its samples, each beside the sample of fio that was its neighbour in time."""

    case: Case
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    reason: str | None = None
    """Why there are no samples."""
    note: str | None = None

    def ratio(self) -> float:
        """Return the median of the ratios to fio, each taken between neighbours in time."""
        return median(ours.bytes_per_s / fio.bytes_per_s for ours, fio in self.pairs)

    def ratios(self) -> tuple[float, float]:
        """Return the least and the greatest ratio: how noisy the machine was."""
        every = [ours.bytes_per_s / fio.bytes_per_s for ours, fio in self.pairs]
        return min(every), max(every)

    def bytes_per_s(self) -> float:
        """Return the median rate."""
        return median(ours.bytes_per_s for ours, _ in self.pairs)

    def cpu_s_per_gib(self) -> float:
        """Return the median of the CPU seconds per GiB."""
        return median(ours.cpu_s_per_gib for ours, _ in self.pairs)

    def fio_cpu_s_per_gib(self) -> float:
        """Return the median of what the neighbours of fio used."""
        return median(fio.cpu_s_per_gib for _, fio in self.pairs)

    def as_json(self) -> dict[str, Any]:
        """Return the figures: medians, and the least and the greatest ratio."""
        found: dict[str, Any] = {**asdict(self.case), "reason": self.reason, "note": self.note}
        if self.pairs:
            found |= {
                "bytes_per_s": self.bytes_per_s(),
                "ratio_to_fio": self.ratio(),
                "ratio_range": self.ratios(),
                "cpu_s_per_gib": self.cpu_s_per_gib(),
                "fio_cpu_s_per_gib": self.fio_cpu_s_per_gib(),
            }
        return found


def settings() -> list[Setting]:
    """Return every way in which ssdtrain's store is opened."""
    return [
        Setting(),
        Setting(engine="psync"),
        Setting(directory_count=2),
        *(Setting(depth=depth) for depth in (OTHER_DEPTHS[0], DEFAULT_DEPTH, OTHER_DEPTHS[1])),
        Setting(verify=True),
    ]


def cases(setting: Setting) -> list[Case]:
    """Return the cases of one setting, in the order in which they are measured."""
    sizes: Sequence[int] = TENSOR_BYTES
    if setting.depth is not None:
        sizes = DEPTH_TENSOR_BYTES
    elif setting.verify:
        sizes = (VERIFY_TENSOR_BYTES,)
    found = []
    for tensor_bytes in sizes:
        write = Case(
            label=setting.label,
            engine=setting.engine,
            depth=setting.depth or DEFAULT_DEPTH,
            directory_count=setting.directory_count,
            tensor_bytes=tensor_bytes,
            direction="write",
        )
        found += [write, replace(write, direction="read")]
        if setting == Setting() and tensor_bytes in SMALL_PAGE_TENSOR_BYTES:
            found.append(replace(write, pages="4 KiB"))
    return found


def peer_cases(label: str, engine: str) -> list[Case]:
    """Return the cases of one peer."""
    directions: tuple[Direction, ...] = ("write", "read")
    return [
        Case(
            label=label,
            engine=engine,
            depth=None,
            directory_count=1,
            tensor_bytes=tensor_bytes,
            direction=direction,
            pages="4 KiB",
        )
        for tensor_bytes in PEER_TENSOR_BYTES
        for direction in directions
    ]


def shown(count_bytes: int) -> str:
    """Write a size with the greatest unit that keeps it whole."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count_bytes >= unit and count_bytes % unit == 0:
            return f"{count_bytes // unit} {name}"
    return f"{count_bytes} B"
