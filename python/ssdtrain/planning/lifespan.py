"""Estimates how long drives live under offloading, by SSDTrain's model with its assumptions.

The source is *SSDTrain* (arXiv 2408.10013, figures 5 and 8). A drive is worn
out when the endurance it is rated for has been written. The paper multiplies that twice: by 2.5,
since ratings count with random writes that the drive amplifies (JESD218 and JESD219) and large
sequential writes are not amplified; and by 86, since flash that has to keep data for a day instead
of three years bears so many more cycles. No maker warrants either, so both are left out unless they
are asked for. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ssdtrain.errors import ConfigError

__all__ = [
    "PAPER",
    "RATED_AMPLIFICATION",
    "RETENTION_GAIN",
    "Transformer",
    "Wear",
]

SECONDS_PER_DAY = 86_400.0
DAYS_PER_YEAR = 365.0
RATED_AMPLIFICATION = 2.5
"""The write amplification that the paper takes ratings to count with."""
RETENTION_GAIN = 86.0
"""The paper's factor for retention relaxed from three years to one day."""


def _check_positive(figures: object) -> None:
    for field in fields(figures):  # type: ignore[arg-type]
        value = getattr(figures, field.name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{field.name} must be a finite number above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Writes to drives, and their rated endurance. Raises ``ConfigError`` if not above 0."""

    rated_bytes: float
    """The bytes that all drives together are rated to have written."""
    written_bytes_per_s: float
    """Bytes written to all of them together, on average over the time they are in use."""
    rated_amplification: float = RATED_AMPLIFICATION
    """Bytes that flash takes for each byte written, in the workload behind the rating."""
    own_amplification: float = 1.0
    """The same for the workload of offloading."""
    retention_gain: float = RETENTION_GAIN
    """The factor by which flash bears more cycles if it keeps data only for a step."""

    def __post_init__(self) -> None:
        """Check the figures."""
        _check_positive(self)

    def rated_days(self) -> float:
        """Return the life by the rating alone, in days."""
        return self.rated_bytes / self.written_bytes_per_s / SECONDS_PER_DAY

    def sequential_days(self) -> float:
        """Return the life if only the amplification differs from the rating's, in days."""
        return self.rated_days() * self.rated_amplification / self.own_amplification

    def relaxed_days(self) -> float:
        """Return the life if retention is relaxed as well, in days: the paper's claim."""
        return self.sequential_days() * self.retention_gain

    def budget_bytes_per_day(self, years: float) -> float:
        """Return the bytes that may be written each day so that the rating lasts for some years."""
        if not (math.isfinite(years) and years > 0):
            raise ConfigError(f"years must be a finite number above 0, not {years!r}")
        return self.rated_bytes / (years * DAYS_PER_YEAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a transformer's step on each of the GPUs that share its tensors.

    Raises ``ConfigError`` if not above 0.
    """

    batch: int
    sequence: int
    hidden: int
    layers: int
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Check the figures."""
        _check_positive(self)

    def activation_bytes(self) -> float:
        """Return the bytes that forward saves on each GPU, in 16 bits and with flash attention.

        They are s·b·h·(10 + 24/t) for each layer (Korthikanti et al., arXiv 2205.05198, without
        the s² values of attention), and give table III of SSDTrain.
        """
        per_layer = self.sequence * self.batch * self.hidden * (10 + 24 / self.tensor_parallel)
        return per_layer * self.layers

    def step_flops(self) -> float:
        """Return the floating point operations of forward and backward on each GPU.

        Forward is 24·b·s·h² + 4·b·s²·h for each layer, and backward twice that.
        """
        tokens = self.batch * self.sequence
        forward = 24 * tokens * self.hidden**2 + 4 * tokens * self.sequence * self.hidden
        return 3 * forward * self.layers / self.tensor_parallel


PAPER = Wear(rated_bytes=4 * 1200e12, written_bytes_per_s=12.1e9)
"""The paper's case: four Samsung 980 PRO of 2 TB, and the rate of its largest configuration."""
