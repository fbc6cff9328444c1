"""`max_device_bytes`: the room that a bound on a GPU's memory leaves for saved tensors.

torch's allocator holds weights, gradients, workspace and saved tensors. The saved tensors are known
from the account of the session, and all else is the difference. A part of it stands when a step
begins, and is read then; the rest comes and goes within the step, and is known from the steps
before. It is a goal: a step that cannot meet it runs on.

The peak of torch is never reset here, because the program may watch it. It is read when the first
tensor of a step is saved, when its backward begins, and when that has ended. If it has not moved,
the peak of the step is that of its saved tensors and of all else as it was known.

No step before has told anything to the first one. So its room grows in parts, and torch's memory is
read before each of them.
"""

from __future__ import annotations

from collections.abc import Callable
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

AUTO_SHARE = 15 / 16
"""``"auto"`` leaves the rest for holes between the tensors in torch's segments."""
FIRST_PARTS = 16
"""The first step takes its room in so many parts."""
FIRST_BACKWARD_FACTOR = 2
"""The first backward is expected to work in so many times the memory of its forward: it makes two
products for each of the forward."""
FORGET_SHARE = 1 / 32
"""A step that works in less memory than those before lowers what is known by this share of the
difference: steps differ, and one that meets the bound must not let the next one miss it."""
LEARN_COUNT = 8
"""After so many steps in a row that missed the bound by as much, nothing more is to be learned."""
EQUAL_SHARE = 1 / 64
"""Peaks that differ by less than this share of the bound are as high as each other."""


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
        given: Bytes; or ``"auto"`` for what is free now and what torch has reserved, less a
            sixteenth.
        account: The saved tensors of the session; its soft limit is set.
        saved_bytes: Returns the bytes that saved tensors take now.

    """

    def __init__(
        self, given: int | Literal["auto"], account: Account, saved_bytes: Callable[[], int]
    ) -> None:
        self._gpu = torch.cuda.current_device()
        self._account, self._saved_bytes = account, saved_bytes
        if given == "auto":
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
            given = int(AUTO_SHARE * (free_bytes + torch.cuda.memory_reserved(self._gpu)))
        self.limit_bytes = given
        self.excess_bytes = 0
        """Bytes above the bound at the peak of the last step, a forward with its backwards."""
        self._step_excess_bytes = 0
        self._is_begun = False
        self._standing_bytes = 0
        """Bytes that are no saved tensors, when the last step began."""
        self._passing_bytes: int | None = None
        """The most such bytes beside these, in the steps before; ``None`` before the first."""
        self._seen_bytes = 0
        """The same in the last step."""
        self._peak_bytes = 0
        """Torch's peak when the last step began."""
        self._saved_peak_bytes = 0
        """The most that saved tensors took in the last step."""
        self._missed = self._missed_before = 0, 0
        """The excess of steps in a row that missed the bound by as much, and their count; and the
        same before the last step."""

    @property
    def room_bytes(self) -> int:
        """The bytes that the bound leaves for saved tensors."""
        passing_bytes = max(self._passing_bytes or 0, self._seen_bytes)
        return max(0, self.limit_bytes - self._standing_bytes - passing_bytes)

    @property
    def is_learning(self) -> bool:
        """True if the last step missed the bound, and the next may be nearer to it."""
        return 0 < self._missed[1] <= LEARN_COUNT

    def begin_round(self) -> None:
        """Begin a step with its first saved tensor; tell at the first one what is expected."""
        self._missed_before, self._step_excess_bytes = self._missed, 0
        self._account.take_recent_peak()
        allocated_bytes, self._peak_bytes = self._torch_bytes()
        self._standing_bytes = max(0, allocated_bytes - self._saved_bytes())
        self._seen_bytes = self._saved_peak_bytes = 0
        if not self._is_begun:
            self._is_begun = True
            self._tell()
        self._limit()

    def look(self) -> None:
        """Learn from torch's memory now, if room for a saved tensor is short in the first step."""
        if self._passing_bytes is None:
            self._see()
            self._limit()

    def begin_backward(self) -> None:
        """Learn from the forward; before the first backward expect more of that."""
        if self._passing_bytes is None:
            self._see()
            self._account.limit_softly(
                max(0, self.room_bytes - (FIRST_BACKWARD_FACTOR - 1) * self._seen_bytes)
            )

    def end_backward(self) -> None:
        """Learn from the peak of a forward and its backward, which has ended now."""
        peak_bytes, has_moved = self._see()
        self._peak_bytes = peak_bytes
        known_bytes = max(self._passing_bytes or 0, self._seen_bytes)
        if not has_moved:
            others_bytes = self._standing_bytes + known_bytes
            peak_bytes = min(peak_bytes, others_bytes + self._saved_peak_bytes)
        elif self._seen_bytes < known_bytes:
            known_bytes -= int(FORGET_SHARE * (known_bytes - self._seen_bytes))
        self._passing_bytes, self._seen_bytes = known_bytes, 0
        self._step_excess_bytes = max(self._step_excess_bytes, peak_bytes - self.limit_bytes)
        self._note_excess(self._step_excess_bytes)
        self._limit()

    def _note_excess(self, excess_bytes: int) -> None:
        """Note the excess of a step so far; it may get another backward."""
        self.excess_bytes = excess_bytes
        missed_bytes, missed_count = self._missed_before
        if not excess_bytes:
            self._missed = 0, 0
        elif abs(excess_bytes - missed_bytes) > EQUAL_SHARE * self.limit_bytes:
            self._missed = excess_bytes, 1
        else:
            self._missed = missed_bytes, missed_count + 1

    def _see(self) -> tuple[int, bool]:
        """Note the bytes that are no saved tensors; return torch's peak, and whether it moved."""
        saved_bytes = self._saved_bytes()
        recent_bytes = self._account.take_recent_peak()
        self._saved_peak_bytes = max(self._saved_peak_bytes, recent_bytes, saved_bytes)
        allocated_bytes, peak_bytes = self._torch_bytes()
        others_bytes = allocated_bytes - saved_bytes
        # It has grown, or the program has reset it.
        has_moved = peak_bytes != self._peak_bytes
        if has_moved:
            others_bytes = max(others_bytes, peak_bytes - self._saved_peak_bytes)
        self._seen_bytes = max(self._seen_bytes, others_bytes - self._standing_bytes)
        return peak_bytes, has_moved

    def _limit(self) -> None:
        limit_bytes = self.room_bytes
        if self._passing_bytes is None:
            part_bytes = limit_bytes // FIRST_PARTS
            limit_bytes = min(limit_bytes, self._saved_bytes() + part_bytes)
        self._account.limit_softly(limit_bytes)

    def _torch_bytes(self) -> tuple[int, int]:
        """Return what torch has allocated, and its peak."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._gpu)["allocated_bytes"]["all"]
        return counts["current"], counts["peak"]

    def _tell(self) -> None:
        """Log what is there before the first saved tensor, and what that leaves."""
        held, bound = shown_bytes(self._standing_bytes), shown_bytes(self.limit_bytes)
        if not self.room_bytes:
            log.warning(
                "max_device_bytes (%s) cannot be met: the program holds %s of GPU %d before its "
                "first saved tensor; steps run on, with as little above that as copies and recipes "
                "allow",
                bound,
                held,
                self._gpu,
            )
            return
        log.info(
            "max_device_bytes is %s: the program holds %s of GPU %d before its first saved tensor, "
            "so %s are left for saved tensors, workspace, and gradients and optimizer state that "
            "are not there yet",
            bound,
            held,
            self._gpu,
            shown_bytes(self.room_bytes),
        )
