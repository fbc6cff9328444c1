"""What one run of the demo is asked to do, and what it reports back: plain data, sent as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Mode = Literal["plain", "keep", "recompute", "offload"]
ModelName = Literal["gpt", "gpt2", "bert", "t5", "llama"]
DtypeName = Literal["float32", "bfloat16"]
StepKind = Literal["warm-up", "timed", "measured"]

MODES: tuple[Mode, ...] = get_args(Mode)
WITHOUT_SSDTRAIN: frozenset[Mode] = frozenset({"plain", "recompute"})
"""Modes whose processes never import ssdtrain; `keep` is `plain` in a process that does."""
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)

HEAD_WIDTH = 64
"""Width of one attention head; the hidden width is a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What a mode computes and where it writes: equal in all processes of one demo."""

    model: ModelName = "gpt"
    """`gpt` is the demo's own plain PyTorch model, the others are Hugging Face architectures."""
    layers: int = 8
    """Number of transformer blocks (of each stack, where a model has an encoder and a decoder)."""
    hidden: int = 1024
    """Width of the residual stream; a multiple of 64."""
    sequence: int = 512
    """Tokens (bytes of text) in one sequence."""
    batch: int = 2
    """Sequences in one step."""
    dtype: DtypeName = "float32"
    """`bfloat16` computes under autocast; the weights stay float32."""
    dropout: float | None = None
    """Dropout probability; None is 0 for `gpt` and 0.1 for the Hugging Face models."""
    steps: int = 3
    """Timed steps; a warm-up step comes before them, in the first repeat a measured one after."""
    seed: int = 0
    """Seeds the weights, the dropout and the choice of the text."""
    data: str | None = None
    """Path of the text to train on; None is the sources of Python's standard library."""
    directory: str | None = None
    """Where offload writes; None where offload does not run."""
    max_resident_bytes: int | None = None
    """Handed to `ssdtrain.offload`."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from, before any process is started."""
        for name in ("layers", "hidden", "sequence", "batch", "steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, it is {value}")
        if self.hidden % HEAD_WIDTH:
            raise ValueError(
                f"--hidden must be a multiple of {HEAD_WIDTH} (the width of one attention head), "
                f"it is {self.hidden}; the next one is "
                f"{(self.hidden // HEAD_WIDTH + 1) * HEAD_WIDTH}"
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, it is {self.dropout}")
        if self.sequence < 2:
            raise ValueError("--sequence must be at least 2: one token has no next one to predict")

    @property
    def dropout_probability(self) -> float:
        """Dropout probability that is used."""
        if self.dropout is not None:
            return self.dropout
        return 0.0 if self.model == "gpt" else 0.1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on."""
        return self.batch * self.sequence

    def to_json(self) -> str:
        """Write the options for a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingOptions:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one mode."""

    kind: StepKind
    """`warm-up` and `measured` steps count for the comparison of bits, not for the times."""
    seconds: float
    """Time of forward, backward and optimizer."""
    loss: str
    """The loss as `float.hex` writes it, so that no bit is lost."""
    gradients_digest: str
    """Hash over the raw bytes of every gradient."""
    bytes_written: int
    """Bytes that offload wrote during the step."""
    bytes_read: int
    """Bytes that offload read back during the step."""
    stall_s: float
    """Time in which the step waited for I/O."""
    foreign_cpu_s: float | None
    """CPU time that other processes of the machine took meanwhile; None where it is unknown. They
    make a step longer by far more than their share, as its threads wait for the slowest one."""


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory of one mode's process. The `rss_*` fields are None where the system cannot tell."""

    activation_bytes_peak: int | None
    """Largest sum of the bytes of saved tensors in memory, parameters excluded; None where the
    process had no measured step to count it in."""
    rss_bytes_before: int | None
    """Resident before the first timed step: weights, gradients, libraries."""
    rss_bytes_high: int | None
    """High-water mark of the resident set over the timed steps."""
    rss_note: str | None
    """Why the fields above are None."""
    curve: list[tuple[float, int]]
    """Saved bytes in memory over the measured step: (seconds since its start, bytes). Empty in the
    processes that have no measured step."""

    @property
    def rss_bytes_peak(self) -> int | None:
        """What the steps needed on top of what was resident before them."""
        if self.rss_bytes_before is None or self.rss_bytes_high is None:
            return None
        return self.rss_bytes_high - self.rss_bytes_before


@dataclass(kw_only=True)
class ModeRun:
    """One fresh process of one mode."""

    mode: Mode
    repeat: int
    parameters_count: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    memory: MemoryRecord | None = None
    summary: str = ""
    """What the offload session printed about itself."""
    failure: str | None = None
    """Why the process did not finish; None when it did."""

    @property
    def timed(self) -> list[StepRecord]:
        """The steps whose time counts."""
        return [step for step in self.steps if step.kind == "timed"]

    def to_dict(self) -> dict[str, Any]:
        """Everything recorded, for the JSON report."""
        return asdict(self)
