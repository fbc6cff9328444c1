"""The figures of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OptimizerStats"]


@dataclass(frozen=True)
class OptimizerStats:
    """What an offloaded optimizer did so far. Bytes and seconds."""

    on_disk_bytes: int
    """State that is on the disk only."""
    resident_bytes: int
    """State that is in memory now: small tensors, what somebody looked at or holds, what is still
    on its way to the disk, what the disk refused."""
    written_bytes: int
    read_bytes: int
    step_count: int
    step_s: float
    """Time in ``step``, all steps together."""
    stall_s: float
    """Time in which updates waited for the disk."""
    waited_s: float
    """Time in which the training waited for updates outside of ``step`` (``overlap="forward"``)."""
    write_failed_count: int
    """Tensors that stayed in memory for a while because the disk did not take them."""
    gradient_on_disk_bytes: int = 0
    """Gradients that are on the disk only; all of these are 0 without ``max_gradient_bytes``."""
    gradient_peak_bytes: int = 0
    """The most of gradients that was in memory at once, of those of 64 KiB and more."""
    gradient_written_bytes: int = 0
    """Gradients that went to the disk, each time that one did."""
    gradient_read_bytes: int = 0
    """Gradients that came back."""
    gradient_stall_s: float = 0.0
    """Time in which backwards and updates waited for gradients."""
