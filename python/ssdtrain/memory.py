"""Where torch's own CPU tensors lie: on huge pages, in a heap that is not given back too eagerly.

Huge pages: the disk reads and writes them at twice the rate. torch has a switch for them,
``THP_MEM_ALLOC_ENABLE=1``, which it reads when it makes its first CPU tensor. It also makes freed
tensors go back to the system, where glibc would keep them.

The heap: a plain run carves its short-lived tensors from a gigabyte of freed activations.
Offloaded, the heap is small, and glibc would map and unmap a buffer of 32 MiB each time one is
needed; the kernel clears every page of it (`mallopt(3)`). Some spare heap at the top costs less.
"""

from __future__ import annotations

import ctypes
import logging
import os

__all__ = ["keep_spare_heap", "note_small_pages", "prefer_huge_pages"]

log = logging.getLogger("ssdtrain")

SWITCH = "THP_MEM_ALLOC_ENABLE"
PROBE_BYTES = 4 << 20
PAGE_BYTES = 4096

MALLOC_OPTIONS = {
    "TRIM_THRESHOLD": (-1, 128 << 20),
    "TOP_PAD": (-2, 64 << 20),
    "MMAP_THRESHOLD": (-3, 32 << 20),
}
"""glibc's numbers for `mallopt`, and bytes: what may stay free at the top of the heap, what it
grows by, and the largest buffer that is not mapped on its own (glibc takes 32 MiB at most)."""

_noted = False


def prefer_huge_pages() -> None:
    """Set torch's switch, unless the user has set it; works before torch's first tensor."""
    os.environ.setdefault(SWITCH, "1")


def keep_spare_heap() -> None:
    """Let glibc keep some free heap, unless the user has tuned it; other allocators ignore it."""
    by_user = any(f"MALLOC_{name}_" in os.environ for name in MALLOC_OPTIONS)
    if by_user or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, (number, nbytes) in MALLOC_OPTIONS.items():
        if mallopt(ctypes.c_int(number), ctypes.c_int(nbytes)) != 1:
            log.debug("mallopt did not take %s=%d", name, nbytes)


def note_small_pages() -> None:
    """Warn once if torch had made tensors before the switch was set."""
    global _noted  # noqa: PLW0603 - said once per process
    if _noted or os.environ.get(SWITCH) != "1":
        return
    _noted = True
    import torch  # noqa: PLC0415 - `import ssdtrain` sets the switch also where torch is broken

    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    if probe.data_ptr() % PAGE_BYTES:
        log.warning(
            "tensors are not on huge pages, which slows the disk and hides freed memory: import "
            "ssdtrain before the first tensor is made, or set %s=1",
            SWITCH,
        )
