"""What it costs to touch memory again that was given back to the system, by how long it lay free.

    python benches/io/free_pages.py

A hypervisor may take free pages from its guest (free page reporting looks every two seconds). They
look like any other memory there, but the first touch waits for the host.
"""

from __future__ import annotations

import argparse
import mmap
import threading
import time
from statistics import median

HUGE_PAGE_BYTES = 2 << 20
IDLE_S = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)


def touch_s_per_gib(nbytes: int) -> float:
    """Map ``nbytes`` on huge pages, touch each, give them back; return seconds per GiB."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        began_s = time.perf_counter()
        for start in range(0, nbytes, HUGE_PAGE_BYTES):
            memory[start] = 1
        return (time.perf_counter() - began_s) / (nbytes / (1 << 30))


def main() -> None:
    """Print one row per idle time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="memory per touch (default 256)")
    parser.add_argument("--runs", type=int, default=3, help="touches per row (default 3)")
    options = parser.parse_args()
    nbytes = options.mib << 20
    found: dict[float, list[float]] = {idle_s: [] for idle_s in IDLE_S}
    for _ in range(options.runs):
        for idle_s, costs in found.items():
            touch_s_per_gib(nbytes)
            # That time passes is what is measured.
            threading.Event().wait(idle_s)
            costs.append(touch_s_per_gib(nbytes))
    base = median(found[0.0])
    print("| free for, s | to touch it again, s per GiB | ratio |\n|--:|--:|--:|")
    for idle_s, costs in found.items():
        print(f"| {idle_s:g} | {median(costs):.3f} | {median(costs) / base:.1f} |")


if __name__ == "__main__":
    main()
