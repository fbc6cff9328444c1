"""The options of a training, and the record that a process of the demo sends to its parent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from ssdtrain.errors import ConfigError

Mode = Literal["plain", "keep", "recompute", "offload", "whole"]
ModelName = Literal["gpt", "gpt2", "bert", "t5", "llama"]
DtypeName = Literal["float32", "bfloat16"]
StepKind = Literal["warm-up", "timed", "measured"]

MODES: tuple[Mode, ...] = ("plain", "keep", "recompute", "offload")
WHOLE_MODES: tuple[Mode, ...] = ("plain", "whole")
"""The modes of ``--whole``."""
WITHOUT_SSDTRAIN: frozenset[Mode] = frozenset({"plain", "recompute"})
"""Modes whose processes never import ssdtrain; `keep` is `plain` in a process that does."""
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)

OTHER_BYTES = 384 << 20
"""With ``--whole``, memory besides tensors: code that is loaded late, threads, the allocator."""
HEAD_WIDTH = 64
"""Width of an attention head; the hidden width is a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of a training: equal in all processes of a demo."""

    model: ModelName = "gpt"
    layers: int = 8
    """Transformer blocks, of each stack where a model has an encoder and a decoder."""
    hidden: int = 1024
    sequence: int = 512
    """Tokens (bytes of text) in a sequence."""
    batch: int = 2
    dtype: DtypeName = "float32"
    """`bfloat16` computes under autocast; the weights stay float32."""
    dropout: float | None = None
    """A probability; None is 0 for `gpt` and 0.1 for the Hugging Face models."""
    steps: int = 3
    """Timed steps; warm-up steps come before them, and a measured step after them."""
    seed: int = 0
    """Seeds the weights, the dropout and the choice of the text."""
    data: str | None = None
    """Path of the text to train on; None is the sources of Python's standard library."""
    directory: str | None = None
    """Directory on the SSD."""
    given_bytes: int | None = None
    """Memory for the training with ``--whole``, above that of the libraries; None without."""

    def __post_init__(self) -> None:
        """Refuse sizes that no model can be built from, before any process is started."""
        for name in ("layers", "hidden", "sequence", "batch", "steps"):
            # A sequence of a single token has no next token to predict.
            value, least = getattr(self, name), 2 if name == "sequence" else 1
            if value < least:
                raise ConfigError(f"--{name} must be at least {least}, it is {value}")
        if self.hidden % HEAD_WIDTH:
            raise ConfigError(
                f"--hidden must be a multiple of {HEAD_WIDTH} (the width of an attention head), "
                f"it is {self.hidden}; the next is {(self.hidden // HEAD_WIDTH + 1) * HEAD_WIDTH}"
            )

    @property
    def dropout_probability(self) -> float:
        """Dropout probability that is used."""
        if self.dropout is not None:
            return self.dropout
        return 0.0 if self.model == "gpt" else 0.1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on."""
        return self.batch * self.sequence

    def to_json(self) -> str:
        """Write the options for a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingOptions:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a mode; only `timed` steps count for the times."""

    kind: StepKind
    seconds: float
    """Time of forward, backward and optimizer."""
    loss: str
    """The loss as `float.hex` writes it, so that no bit is lost."""
    gradients_digest: str
    """Hash over the bytes of every gradient; ``--whole`` has freed them all."""
    bytes_written: int
    bytes_read: int
    stall_s: float
    """Time in which the step waited for the disk."""


@dataclass(kw_only=True)
class Run:
    """A fresh process of a mode; without figures if it failed."""

    mode: Mode
    repeat: int = 1
    failure: str | None = None
    """Why the process did not finish; None if it did."""
    parameters_count: int = 0
    steps: list[Step] = field(default_factory=list)
    weights_digest: str = ""
    """Hash over the bytes of every weight after the last step."""
    activation_bytes_peak: int = 0
    """Largest sum of the bytes of saved tensors in memory, parameters excluded."""
    rss_bytes_peak: int | None = None
    """Peak of the resident set in the timed steps above weights, gradients and libraries, with
    ``--whole`` above the libraries only; None where the system does not tell."""
    curve: list[tuple[float, int]] = field(default_factory=list)
    """Memory over the measured step, as (seconds, bytes): saved tensors; with ``--whole`` all that
    is resident above the libraries."""

    @property
    def timed(self) -> list[Step]:
        """The steps whose time counts."""
        return [step for step in self.steps if step.kind == "timed"]
