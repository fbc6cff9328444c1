"""The figures of a model whose weights lie on SSDs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ParameterStats"]


@dataclass(frozen=True)
class ParameterStats:
    """What was done so far, and where the weights are now. Sizes in bytes, times in seconds."""

    total_bytes: int
    """Of the weights that may leave memory."""
    resident_bytes: int
    """Of these, in memory: in use, kept as they fit, being read, or still being written."""
    peak_resident_bytes: int
    """The most that was in memory since the call."""
    on_disk_bytes: int
    """Of these, on the disk only."""
    staying_bytes: int
    """Of the weights that never leave: small ones, and those of which others have the memory."""
    read_bytes: int
    written_bytes: int
    stall_s: float
    """Time in which computing waited for a weight."""
    write_failed_count: int
    """Writes that failed, whose weights stayed in memory."""
