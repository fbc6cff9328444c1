"""The figures of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ssdtrain.sizes import shown_bytes, shown_count

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
    small_bytes: int = 0
    """State in tensors of less than 64 KiB, which stay in memory."""
    nested_bytes: int = 0
    """State in tensors that are in a dict or list of the state, which stay in memory."""
    being_written_bytes: int = 0
    """State on its way to the disk: in memory as long as the buffer for writes has room for it."""
    write_buffer_bytes: int = 0
    """The size of that buffer: a quarter of ``buffer_bytes``."""

    @property
    def reason(self) -> str | None:
        """Why no state is on the disk only; ``None`` if some is, or nothing tells."""
        if self.on_disk_bytes or not (self.resident_bytes or self.step_count):
            return None
        if not self.resident_bytes:
            return "the optimizer keeps none"
        for nbytes, which in (
            (self.small_bytes, "of less than 64 KiB"),
            (self.nested_bytes, "in a dict or list of the state"),
        ):
            if 2 * nbytes > self.resident_bytes:
                return f"{shown_bytes(nbytes)} of it are tensors {which}, which stay in memory"
        if 2 * self.being_written_bytes > self.resident_bytes:
            return (
                f"the buffer for writes, a quarter of buffer_bytes, is "
                f"{shown_bytes(self.write_buffer_bytes)} and holds "
                f"{shown_bytes(self.being_written_bytes)} of it; a smaller buffer_bytes frees "
                "memory"
            )
        if self.write_failed_count:
            return "the disk did not take it, for which the log has the cause"
        held = (
            "somebody has looked at it since the last step, or holds it or a view of it, or it "
            "is of another kind than plain dense tensors of the CPU"
        )
        return held if self.step_count else None

    def __str__(self) -> str:
        """Tell the figures to a person, in one line."""
        text = (
            f"state: {shown_bytes(self.resident_bytes)} in memory and "
            f"{shown_bytes(self.on_disk_bytes)} on disk, {shown_bytes(self.written_bytes)} "
            f"written, {shown_bytes(self.read_bytes)} read; "
            f"{shown_count(self.step_count, 'step')} in {self.step_s:.3f} s; "
            f"updates waited {self.stall_s:.3f} s for the disk"
        )
        if self.gradient_written_bytes or self.gradient_peak_bytes:
            text += (
                f"; gradients: {shown_bytes(self.gradient_on_disk_bytes)} on disk, at most "
                f"{shown_bytes(self.gradient_peak_bytes)} in memory, "
                f"{shown_bytes(self.gradient_written_bytes)} written, "
                f"{shown_bytes(self.gradient_read_bytes)} read, "
                f"{self.gradient_stall_s:.3f} s stalled"
            )
        if self.write_failed_count:
            failed = shown_count(
                self.write_failed_count,
                "write failed or was refused",
                "writes failed or were refused",
            )
            text += f"; {failed}"
        if self.reason is not None:
            text += f"; no state is on disk only: {self.reason}"
        return text
