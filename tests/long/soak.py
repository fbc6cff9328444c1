"""Trains for as long as wanted over disks that fail, and compares every loss with a plain run.

    soak.py --minutes 30 --seed 1 [--dir DIRECTORY]

Rounds alternate between the real engines and the simulated disk with random faults: short I/O, EIO,
EINTR, a full disk, flipped bits. In every third round recipes make saved tensors again. A step
either gives the very loss and gradients of a plain run, or raises an error of the store; then it is
taken again plainly. Resident memory, descriptors, threads and live extents must stay flat. Ends
with 0 and a summary, or with the first thing that was wrong.
``tests/faults/test_stress.py`` runs some seconds of it in every test run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from checkout import SCRATCH
from ssdtrain import CorruptError, StorageError
from ssdtrain._core import SimulatedDisk
from ssdtrain.config import StoreConfig
from ssdtrain.open_store import open_store
from ssdtrain.session import Session
from support import Rig, store_threads, wait_until

MIB = 1 << 20
STEPS_PER_ROUND = 4
ARENA_MAX = -8
"""glibc's number of this option of `mallopt`."""
WARM_ROUNDS = 12
"""Rounds before anything is compared: allocators and pools fill up."""
GROWTH_BYTES_MAX = 40 * MIB
"""What resident memory may add to that of the first rounds: fragments, at most a store's arena."""
WIDTH, ROWS, LAYERS = 128, 2048, 6

REAL: tuple[dict[str, Any], ...] = ({"backend": "auto"}, {"backend": "psync"})
PLANS: tuple[dict[str, float], ...] = (
    {"short_rate": 0.4, "retry_rate": 0.3},
    {"io_error_rate": 0.06},
    {"bit_flip_rate": 0.05},
    {"capacity_bytes": 4 * MIB},
    {"short_rate": 0.2, "retry_rate": 0.2, "io_error_rate": 0.01, "bit_flip_rate": 0.02},
)
"""Faults by piece of I/O; a tensor here is one piece."""


class Model:
    """A small model, trained: each step begins where the last plain one ended."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers, nn.Dropout(0.1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def gradients(self, step: int, flush: Callable[[], None]) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(step)
        self.optimizer.zero_grad(set_to_none=True)
        batch = torch.randn(ROWS, WIDTH)
        loss = (self.model(batch) - batch.roll(1, 1)).square().mean()
        flush()
        loss.backward()
        return loss.detach(), [one.grad for one in self.model.parameters() if one.grad is not None]


def resident_bytes() -> int:
    # What glibc keeps of freed memory is not a leak.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The rounds and what they found."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place = place
        self.chance = random.Random(seed)
        self.model = Model(seed)
        self.step = 0
        self.round = 0
        self.counts: Counter[str] = Counter()
        self.flat: tuple[int, int] | None = None
        self.resident_bytes_max = 0
        self.faults: dict[str, Any] = {}

    def run(self, seconds: float) -> None:
        """Run whole rounds until the time is over, and enough of them to compare."""
        deadline_s = monotonic() + seconds
        while monotonic() < deadline_s or self.round < WARM_ROUNDS + len(PLANS) * 2:
            simulated = self.round % 2 == 1
            self.faults = {}
            options = self.plan() if simulated else dict(REAL[self.round // 2 % len(REAL)])
            options["rematerialize"] = "never" if self.round % 3 else "always"
            self.counts["simulated rounds" if simulated else "real rounds"] += 1
            self.run_round(options)
            if simulated:
                self.flip_bits()
            self.round += 1
            self.look_for_growth()

    def plan(self) -> dict[str, Any]:
        faults: dict[str, Any] = dict(PLANS[self.round // 2 % len(PLANS)])
        faults["seed"] = self.chance.getrandbits(60)
        self.faults = faults
        return {"backend": "simulated", "faults": faults}

    def run_round(self, options: dict[str, Any]) -> None:
        rig = Rig(self.place, verify=True, **options)
        session = rig.session
        for _ in range(STEPS_PER_ROUND):
            self.run_step(session, options)
            if self.chance.random() < 0.3:
                rig.store.trim()
        gc.collect()
        wait_until(lambda: session.stats.disk_used_bytes == 0, "the release of all extents")
        wait_until(lambda: session.stats.resident_bytes == 0, "the release of all memory")
        stats, raw = session.stats, rig.store.stats()
        self.counts["MiB written"] += stats.bytes_written // MIB
        self.counts["MiB read"] += stats.bytes_read // MIB
        self.counts["tensors made again"] += stats.tensors_rematerialized
        self.counts["failed writes"] += raw["write_failed_count"]
        self.counts["failed reads"] += raw["read_failed_count"]
        if options["backend"] != "simulated":
            assert raw["read_failed_count"] == raw["write_failed_count"] == 0, "the disk is broken"
        session.close()

    def run_step(self, session: Session, options: dict[str, Any]) -> None:
        """Take one step plainly and offloaded; equal in every bit, or an error of the store."""
        self.step += 1
        expected_loss, expected = self.model.gradients(self.step, lambda: None)
        try:
            with session.context():
                loss, actual = self.model.gradients(self.step, session.flush)
        except CorruptError:
            self.counts["steps that found a flipped bit"] += 1
            assert "bit_flip_rate" in self.faults, "no bit was to flip"
        except StorageError:
            self.counts["steps that met a failed read"] += 1
            assert "io_error_rate" in self.faults, "no read was to fail"
        else:
            assert torch.equal(loss, expected_loss), "the loss differs"
            assert all(map(torch.equal, actual, expected)), "a gradient differs"
            self.counts["steps equal bit for bit"] += 1
        # The parameters move by the plain gradients, which are the same or the only ones.
        for parameter, gradient in zip(self.model.model.parameters(), expected, strict=True):
            parameter.grad = gradient
        self.model.optimizer.step()

    def flip_bits(self) -> None:
        """Flip one bit in each of some reads, so that what was injected is known exactly."""
        disk = SimulatedDisk(seed=self.chance.getrandbits(60), bit_flip_rate=1.0)
        store = open_store(
            StoreConfig(
                dirs=(str(self.place),),
                backend="simulated",
                direct_io="optional",
                verify=True,
                simulated_disk=disk,
            )
        )
        for _ in range(16):
            # Whole pages: a bit in the blocks beside a tensor would be nobody's.
            nbytes = 4096 * self.chance.randrange(1, 256)
            source = torch.randint(0, 256, (nbytes + 4096,), dtype=torch.uint8)
            stored = store.write(source.data_ptr() + -source.data_ptr() % 4096, nbytes, source)
            stored.wait()
            self.counts["bits flipped on purpose"] += 1
            try:
                store.read(stored).wait()
            except CorruptError:
                self.counts["bits flipped on purpose and found"] += 1
        store.close()
        flipped = self.counts["bits flipped on purpose"]
        found = self.counts["bits flipped on purpose and found"]
        assert flipped == found, f"{flipped} bits were flipped, {found} were found"

    def look_for_growth(self) -> None:
        gc.collect()
        wait_until(lambda: not store_threads(), "the end of the store's threads")
        now = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        resident = resident_bytes()
        if self.round <= WARM_ROUNDS:
            self.flat = now
            self.resident_bytes_max = max(self.resident_bytes_max, resident)
            return
        assert now == self.flat, f"descriptors and threads were {self.flat}, are {now}"
        most = self.resident_bytes_max + GROWTH_BYTES_MAX
        assert resident <= most, f"{resident} bytes resident, {most} are the most expected"
        self.counts["resident MiB above the first rounds"] = (
            max(0, resident - self.resident_bytes_max) // MIB
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Train over failing disks, compared with none.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="default: a new folder under target/tmp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # One heap for all threads: those of ever new threads would settle over hundreds of rounds only.
    ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
    # Failed writes are part of the plan here.
    logging.getLogger("ssdtrain").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.dir or SCRATCH) as folder:
        soak = Soak(Path(folder), options.seed)
        try:
            soak.run(options.minutes * 60)
        finally:
            told = "".join(f"  {name}: {count}\n" for name, count in sorted(soak.counts.items()))
            sys.stdout.write(f"soak: seed {options.seed}, {soak.round} rounds\n{told}")
        assert not os.listdir(folder), "a name was left"
    for wanted in ("steps that found a flipped bit", "failed writes", "tensors made again"):
        assert soak.counts[wanted] > 0, f"the plan did not come to it: no {wanted}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
