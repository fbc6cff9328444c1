r"""What the hooks cost per saved tensor of a GPU, with the fake CUDA device in the place of one.

As ``hook_overhead.py`` measures it: microseconds of each pack and unpack where autograd makes them,
the interpreter's lock held, over trivial hooks; medians over all calls. The fake device
(``tests/fake_device``) runs PyTorch's own allocator and streams, so all but the driver is as on a
GPU. Told apart, from rounds of their own: for how long the hooks are without the lock (0 if Python
is no library of its own, and so cannot be watched); how often they call the driver per saved tensor
(but for the thread that follows the copies); and how long they are in it, mostly without the lock
as well, which is the fake's own time. A real driver takes other times. Waits for the device in
which the lock was held are counted too: there must be none.

The fake device computes in threads of this machine, which have its caches and its cores, unlike
those of a GPU. The last row is without them: 200 tensors of 64 KiB are packed when the device has
nothing to do, wait until they are on the disk, and are unpacked and dropped. Its figures are the
means of the fastest round, with all that a call does for several; what of them is without the lock
is the median of rounds of their own.

    PYTHONPATH=tests/support:tests/fake_device python benches/training/gpu_hook_overhead.py \
        [--dir DIR] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fake_build
import fake_device
import ssdtrain
from hook_overhead import (
    KeepNothing,
    Row,
    Timed,
    median_us,
    row_of,
    table,
    tight_row,
    tight_us,
    trivial_pack,
    trivial_unpack,
)
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.machine import machine_facts

OPERATION_COUNT = 200
SMALL_ELEMENTS, LARGE_ELEMENTS = 1 << 8, 1 << 14
"""1 and 64 KiB in float32, on either side of `min_bytes` here: the call counts, not the memory."""
MIN_BYTES = 1 << 13
PINNED_BYTES = 64 << 20
OF_THE_WORKER = ("cuEventQuery", "cuEventElapsedTime", "cuThreadExchangeStreamCaptureMode")
"""Called again and again while something is under way, by the thread that follows the copies."""


@dataclass(frozen=True)
class WithoutLock:
    """Microseconds in which the hooks of one saved tensor do not have the interpreter's lock."""

    pack_us: float
    unpack_us: float

    @property
    def both_us(self) -> float:
        """Pack and unpack together."""
        return self.pack_us + self.unpack_us


@dataclass(frozen=True)
class InDriver:
    """What the hooks of one saved tensor do in the driver; the times are medians."""

    calls: float
    pack_us: float
    unpack_us: float

    @property
    def both_us(self) -> float:
        """Pack and unpack together."""
        return self.pack_us + self.unpack_us


def chain(elements: int) -> Tensor:
    """Save so many tensors, each with memory of its own."""
    x = torch.zeros(elements, device="cuda", requires_grad=True)
    for _ in range(OPERATION_COUNT):
        x = x.sin()
    return x.sum()


def measure(
    fake: fake_device.FakeDevice, kind: str, elements: int, directory: str, rounds: int
) -> tuple[Row, WithoutLock, InDriver]:
    """Measure one kind; return its figures, and what of them is without the lock, and in CUDA."""
    store = StoreConfig(dirs=(directory,), direct_io="optional")
    config = OffloadConfig(store=store, min_bytes=MIN_BYTES, pinned_bytes=PINNED_BYTES)
    session = ssdtrain.Session(config, KeepNothing())
    hooks: Any = session.context()
    trivial = Timed(trivial_pack, trivial_unpack, 4 * elements)
    ours = Timed(hooks.pack_hook, hooks.unpack_hook, 4 * elements)
    counts = []
    for number in range(rounds + 1):
        for timed in (trivial, ours):
            before = fake.calls()
            timed.run(lambda: settled(session, elements))
            torch.cuda.synchronize()
            made = fake.calls() - before
            calls = (count for name, count in made.items() if is_of_hooks(name))
            counts.append(sum(calls) / OPERATION_COUNT)
            if number == 0:
                timed.pack_ns.clear()
                timed.unpack_ns.clear()
                warm_stall_s = session.stats.stall_s
    stall_us = (session.stats.stall_s - warm_stall_s) * 1e6
    without_lock, in_driver = measure_apart(fake, session, elements, rounds)
    written, waits = session.stats.bytes_written, fake.waits_with_gil()
    session.close()
    assert (written > 0) == (elements == LARGE_ELEMENTS), f"{kind}: wrote {written}"
    assert not waits, f"the device was waited for with the interpreter's lock: {waits}"
    row = row_of(kind, trivial, ours, stall_us)
    calls = statistics.median(counts[3::2]) - statistics.median(counts[2::2])
    without = WithoutLock(median_us(without_lock.pack_ns), median_us(without_lock.unpack_ns))
    in_both = InDriver(calls, median_us(in_driver.pack_ns), median_us(in_driver.unpack_ns))
    return row, without, in_both


def measure_apart(
    fake: fake_device.FakeDevice, session: ssdtrain.Session, elements: int, rounds: int
) -> tuple[Timed, Timed]:
    """Measure by other clocks, which take time as well: without the lock, and in the driver."""
    hooks: Any = session.context()
    clocks = fake.ns_without_lock, fake.ns_in_calls
    without_lock, in_driver = (
        Timed(hooks.pack_hook, hooks.unpack_hook, 4 * elements, clock) for clock in clocks
    )
    fake.time_calls(is_on=True)
    for _ in range(rounds):
        for timed in (without_lock, in_driver):
            timed.run(lambda: settled(session, elements))
            torch.cuda.synchronize()
    fake.time_calls(is_on=False)
    return without_lock, in_driver


def measure_tight(
    fake: fake_device.FakeDevice, directory: str, rounds: int
) -> tuple[Row, WithoutLock]:
    """Measure packs and unpacks that have the machine for themselves."""
    store = StoreConfig(dirs=(directory,), direct_io="optional")
    config = OffloadConfig(store=store, min_bytes=4 * LARGE_ELEMENTS, pinned_bytes=PINNED_BYTES)
    with closing(ssdtrain.Session(config, KeepNothing())) as session:
        row = tight_row(session, rounds, "cuda")
        hooks: Any = session.context()
        pair = hooks.pack_hook, hooks.unpack_hook
        fake.time_calls(is_on=True)
        apart = [tight_us(session, *pair, "cuda", fake.ns_without_lock) for _ in range(rounds)]
        fake.time_calls(is_on=False)
    pack_us, unpack_us = (statistics.median(one) for one in zip(*apart, strict=True))
    return row, WithoutLock(pack_us, unpack_us)


def settled(session: ssdtrain.Session, elements: int) -> Tensor:
    """Run forward, and see all that was saved leave the GPU."""
    total = chain(elements)
    torch.cuda.synchronize()
    session.flush()
    return total


def is_of_hooks(name: str) -> bool:
    return name.startswith("cu") and not name.startswith("cuda") and name not in OF_THE_WORKER


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, help="a directory on a local file system (default: a new one here)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="forward and backward passes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    wanted = fake_build.environment()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # The driver has to be there before the process begins.
        os.execve(  # noqa: S606 - this very program again
            sys.executable, [sys.executable, __file__, *arguments], {**os.environ, **wanted}
        )
    fake = fake_device.start(watch_host=False)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        kinds = (("below min_bytes", SMALL_ELEMENTS), ("offloaded", LARGE_ELEMENTS))
        measured = [measure(fake, *kind, directory, options.rounds) for kind in kinds]
        tight, tight_without_lock = measure_tight(fake, directory, options.rounds)
    print(f"microseconds per call, medians; torch {torch.__version__}, {options.rounds} rounds\n")
    print(table([*(row for row, _, _ in measured), tight]))
    locks = [(row, without_lock) for row, without_lock, _ in measured]
    for row, without_lock in [*locks, (tight, tight_without_lock)]:
        print(
            f"{row.kind}: of {row.over_us:.1f} us {without_lock.both_us:.1f} us are without the "
            f"interpreter's lock (pack {without_lock.pack_us:.1f}, unpack "
            f"{without_lock.unpack_us:.1f})"
        )
    for row, _, driver in measured:
        print(
            f"{row.kind}: of {row.over_us:.1f} us {driver.both_us:.1f} us are the fake driver's "
            f"own (pack {driver.pack_us:.1f}, unpack {driver.unpack_us:.1f}); in both together it "
            f"is called {driver.calls:.1f} times"
        )
    if options.json is not None:
        machine = machine_facts(options.dir) | {"directory": None}
        rows = [
            asdict(row) | {"without_lock": asdict(without_lock), "in_driver": asdict(driver)}
            for row, without_lock, driver in measured
        ]
        rows.append(asdict(tight) | {"without_lock": asdict(tight_without_lock)})
        record = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine,
            "device": "fake",
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
