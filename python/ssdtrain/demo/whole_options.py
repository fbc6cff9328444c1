"""What a run of `demo --whole` is asked to do, and what it reports back: plain data, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from ssdtrain.demo.options import TrainingOptions

WholeMode = Literal["fits", "plain", "whole"]
"""`fits` is the plain run of a model with fewer layers, which is measured beforehand."""

STATE_BYTES_PER_PARAMETER = 8
PARAMETER_BYTES = 4
BYTES_PER_PARAMETER = 16
"""Of training with AdamW in float32: weight, gradient, and two numbers of state."""


@dataclass(frozen=True, kw_only=True)
class WholeOptions:
    """What all processes of one demo are given."""

    training: TrainingOptions
    given_bytes: int
    """Memory for training, above what the libraries take."""
    activations_bytes: int
    """Bound on saved tensors in memory."""
    buffer_bytes: int
    """Memory for the state that is read, updated and written at the same time."""

    def to_json(self) -> str:
        """Write the options for a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WholeOptions:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "training": TrainingOptions(**fields["training"])})


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """One step; the traffic of all classes together."""

    kind: Literal["warm-up", "timed"]
    seconds: float
    loss: str
    """As `float.hex` writes it, so that no bit is lost."""
    read_bytes: int
    written_bytes: int
    stall_s: float
    """Time in which computing waited for the disk."""
    foreign_cpu_s: float | None
    """CPU time that other processes of the machine took meanwhile."""


@dataclass(frozen=True, kw_only=True)
class MemoryClass:
    """What training needs of one kind, and how much of it was in memory."""

    name: str
    all_bytes: int
    in_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class WholeEnd:
    """What a process says at its end."""

    weights_digest: str
    """Hash over the bytes of all weights after the last step."""
    memory: list[MemoryClass]


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """How fast the disk reads and writes through the store while nothing computes."""

    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(kw_only=True)
class WholeRun:
    """What one process of the demo told."""

    mode: WholeMode
    layers: int
    parameters_count: int = 0
    libraries_bytes: int = 0
    """Resident before anything of the training was made."""
    steps: list[WholeStep] = field(default_factory=list)
    end: WholeEnd | None = None
    peak_bytes: int | None = None
    """The most memory that training took: of the group, or resident above the libraries."""
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since training began, bytes resident above the libraries)."""
    failure: str | None = None

    @property
    def timed(self) -> list[WholeStep]:
        """The steps that count for the times."""
        return [step for step in self.steps if step.kind == "timed"]
