"""`max_device_bytes`: the room that a bound on a GPU's memory leaves for saved tensors.

torch's allocator holds weights, gradients, workspace and saved tensors. At the peak of a step the
saved tensors are known from the account of the session, and all else is the difference. So each
step tells how much the saved tensors of the next one may take. It is a goal: a step that cannot
meet it runs on.

The peak of torch is never reset here, because the program may watch it. It is read when the first
tensor of a step is saved and when its backward has ended. If it has not moved, the peak of the step
is that of its saved tensors and of all else as it was known.
"""

from __future__ import annotations

from typing import Literal

import torch

from ssdtrain._core import Account
from ssdtrain.errors import ConfigError
from ssdtrain.notices import log
from ssdtrain.sizes import shown_bytes

__all__ = [
    "DeviceBound",
    "empty_caches",
    "refuse_without_gpu",
    "shown_bound",
    "tell_of_memory",
]


def refuse_without_gpu() -> None:
    """Raise ``ConfigError`` if torch sees no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "max_device_bytes bounds the memory of a CUDA GPU, and torch sees none here "
            "(torch.cuda.is_available() is False); max_resident_bytes bounds the saved tensors of "
            "a CPU"
        )


def tell_of_memory(
    error: torch.OutOfMemoryError, saved_bytes: int, peak_bytes: int, *, is_bounded: bool
) -> None:
    """Add a note to torch's error: what saved tensors took, and which options let them leave."""
    options = "max_host_bytes lets them stay in the CPU's memory, and a directory on a disk"
    if not is_bounded:
        options = f"max_device_bytes='auto' bounds the GPU's memory, {options}"
    error.add_note(
        f"ssdtrain: saved tensors take {shown_bytes(saved_bytes)} of memory now, and took "
        f"{shown_bytes(peak_bytes)} at the peak. Of the options of ssdtrain.offload, {options}"
    )


def empty_caches() -> None:
    """Give the memory back that torch keeps for later allocations on GPUs."""
    torch.cuda.empty_cache()


def shown_bound(bound_bytes: int, excess_bytes: int) -> str:
    """Return the bound, and how the last step met it, for a person."""
    text = f"max_device_bytes {shown_bytes(bound_bytes)}"
    if not excess_bytes:
        return f"{text}, kept by the last step"
    return f"{text}, missed by {shown_bytes(excess_bytes)} at the peak of the last step"


class DeviceBound:
    """The bound of the GPU that is current when a session begins.

    Args:
        given: Bytes; or ``"auto"`` for what is free now and what torch has reserved.
        account: The saved tensors of the session; its soft limit is set.

    """

    def __init__(self, given: int | Literal["auto"], account: Account) -> None:
        refuse_without_gpu()
        self._gpu = torch.cuda.current_device()
        self._account = account
        if given == "auto":
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
            given = free_bytes + torch.cuda.memory_reserved(self._gpu)
        self.limit_bytes = given
        self.excess_bytes = 0
        """Bytes above the bound at the peak of the last step."""
        self._others_bytes = 0
        """Bytes that are no saved tensors, at the peak of the last step whose peak is known."""
        self._is_begun = False
        self._peak_bytes = 0
        """Torch's peak when the last step began."""

    @property
    def room_bytes(self) -> int:
        """The bytes that the bound leaves for saved tensors."""
        return max(0, self.limit_bytes - self._others_bytes)

    def begin_round(self) -> None:
        """Begin a step with its first saved tensor; tell at the first one what is expected."""
        self._account.take_recent_peak()
        self._peak_bytes = torch.cuda.max_memory_allocated(self._gpu)
        if self._is_begun:
            return
        self._is_begun = True
        self._others_bytes = torch.cuda.memory_allocated(self._gpu)
        self._account.limit_softly(self.room_bytes)
        log.info(
            "max_device_bytes is %s: the program holds %s of GPU %d before its first saved tensor, "
            "so %s are left for gradients, workspace and saved tensors",
            shown_bytes(self.limit_bytes),
            shown_bytes(self._others_bytes),
            self._gpu,
            shown_bytes(self.room_bytes),
        )

    def end_backward(self) -> None:
        """Learn from the peak of a forward and its backward, which has ended now."""
        saved_bytes = self._account.take_recent_peak()
        peak_bytes = torch.cuda.max_memory_allocated(self._gpu)
        if peak_bytes != self._peak_bytes:
            # It has grown, or the program has reset it.
            self._others_bytes = max(0, peak_bytes - saved_bytes)
        self._peak_bytes = peak_bytes
        self.excess_bytes = max(0, self._others_bytes + saved_bytes - self.limit_bytes)
        self._account.limit_softly(self.room_bytes)
