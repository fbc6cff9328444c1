"""Switches on huge pages for torch's tensors, which the disk reads and writes at twice the rate.

torch has a switch, ``THP_MEM_ALLOC_ENABLE=1``, which it reads when it makes its first CPU tensor.
With it the memory of freed tensors also goes back to the system, where glibc would keep it.
"""

from __future__ import annotations

import os

from ssdtrain.notices import PROCESS

__all__ = ["SMALL_PAGES_REMEDY", "has_small_pages", "note_small_pages", "prefer_huge_pages"]

SWITCH = "THP_MEM_ALLOC_ENABLE"
PROBE_BYTES = 4 << 20
PAGE_BYTES = 4096
SMALL_PAGES_REMEDY = (
    f"start with `ssdtrain run --dir DIR script.py`, import ssdtrain first, or set {SWITCH}=1"
)

_small: set[str] = set()
"""Not empty once tensors were found to be on small pages."""


def prefer_huge_pages() -> None:
    """Set torch's switch, unless the user has set it; works before torch's first tensor."""
    os.environ.setdefault(SWITCH, "1")


def note_small_pages() -> None:
    """Warn once if torch had made tensors before the switch was set."""
    if os.environ.get(SWITCH) != "1":
        return
    import torch  # noqa: PLC0415 - `import ssdtrain` sets the switch also where torch is broken

    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    if probe.data_ptr() % PAGE_BYTES:
        _small.add(SWITCH)
        PROCESS.say(
            "small pages",
            "tensors are not on huge pages, because one was made before ssdtrain was imported "
            "(transformers, lightning and others make some at their import): the disk is slower "
            "and more memory stays in use; %s",
            SMALL_PAGES_REMEDY,
        )


def has_small_pages() -> bool:
    """Return whether ``note_small_pages`` has found small pages."""
    return bool(_small)
