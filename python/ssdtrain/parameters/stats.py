"""The figures of a model whose weights lie on SSDs."""

from __future__ import annotations

from dataclasses import dataclass

from ssdtrain.sizes import shown_bytes, shown_count

__all__ = ["ParameterStats"]


@dataclass(frozen=True)
class ParameterStats:
    """Traffic so far, and places of the weights now. Sizes in bytes, times in seconds."""

    total_bytes: int
    """Bytes of all weights that may leave memory."""
    resident_bytes: int
    """Bytes of these in memory: in use, kept because they fit, being read, or being written."""
    peak_resident_bytes: int
    """The most bytes of these in memory since the call."""
    on_disk_bytes: int
    """Bytes of these on the disk only."""
    staying_bytes: int
    """Bytes of weights that never leave: small weights, and weights on memory of others."""
    read_bytes: int
    written_bytes: int
    stall_s: float
    """Time in which computing waited for a weight."""
    write_failed_count: int
    """Writes that failed, whose weights stayed in memory."""

    def __str__(self) -> str:
        """Tell the figures to a person, in one line."""
        text = (
            f"of {shown_bytes(self.total_bytes)} of weights {shown_bytes(self.resident_bytes)} in "
            f"memory (peak {shown_bytes(self.peak_resident_bytes)}) and "
            f"{shown_bytes(self.on_disk_bytes)} on disk, {shown_bytes(self.staying_bytes)} more "
            f"never leave; {shown_bytes(self.written_bytes)} written, "
            f"{shown_bytes(self.read_bytes)} read, {self.stall_s:.3f} s stalled"
        )
        if self.write_failed_count:
            text += f", {shown_count(self.write_failed_count, 'write')} failed"
        return text
