r"""What the hooks cost per saved tensor of a GPU, with the fake CUDA device in the place of one.

As ``hook_overhead.py`` measures it: microseconds of each pack and unpack where autograd makes them,
the interpreter's lock held, over trivial hooks; medians over all calls. The fake device
(``tests/fake_device``) runs PyTorch's own allocator and streams, so all but the driver is as on a
GPU. What the driver's own calls cost is counted apart: how many there are per saved tensor (but for
those of the thread that follows the copies), and what those take on the fake that move one. A real
driver takes other times. Waits for the device in which the lock was held are counted too: there
must be none.

    PYTHONPATH=tests/support:tests/fake_device python benches/training/gpu_hook_overhead.py \
        [--dir DIR] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

import fake_build
import fake_device
import ssdtrain
from hook_overhead import KeepNothing, Row, Timed, table, trivial_pack, trivial_unpack
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.machine import machine_facts

OPERATION_COUNT = 200
SMALL_ELEMENTS, LARGE_ELEMENTS = 1 << 8, 1 << 14
"""1 and 64 KiB in float32, on either side of `min_bytes` here: the call counts, not the memory."""
MIN_BYTES = 1 << 13
PINNED_BYTES = 64 << 20
OF_THE_WORKER = ("cuEventQuery", "cuEventElapsedTime", "cuThreadExchangeStreamCaptureMode")
"""Called again and again while something is under way, by the thread that follows the copies."""
CALLS = 2_000


def chain(elements: int) -> Tensor:
    """Save so many tensors, each with memory of its own."""
    x = torch.zeros(elements, device="cuda", requires_grad=True)
    for _ in range(OPERATION_COUNT):
        x = x.sin()
    return x.sum()


def measure(
    fake: fake_device.FakeDevice, kind: str, elements: int, directory: str, rounds: int
) -> tuple[Row, float]:
    """Measure one kind; return its figures, and the driver's calls for each saved tensor."""
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
    written, waits = session.stats.bytes_written, fake.waits_with_gil()
    session.close()
    assert (written > 0) == (elements == LARGE_ELEMENTS), f"{kind}: wrote {written}"
    assert not waits, f"the device was waited for with the interpreter's lock: {waits}"
    median = {
        name: statistics.median(values) / 1000
        for name, values in (
            ("trivial_pack_us", trivial.pack_ns),
            ("pack_us", ours.pack_ns),
            ("trivial_unpack_us", trivial.unpack_ns),
            ("unpack_us", ours.unpack_ns),
        )
    }
    row = Row(kind, **median, mean_over_us=ours.mean_us() - trivial.mean_us())
    return row, statistics.median(counts[3::2]) - statistics.median(counts[2::2])


def settled(session: ssdtrain.Session, elements: int) -> Tensor:
    """Run forward, and see all that was saved leave the GPU."""
    total = chain(elements)
    torch.cuda.synchronize()
    session.flush()
    return total


def is_of_hooks(name: str) -> bool:
    return name.startswith("cu") and not name.startswith("cuda") and name not in OF_THE_WORKER


def driver_us() -> float:
    """Return what the fake takes for the calls that move a tensor down and up, without Python.

    Each direction is an event that is recorded, waited for by another stream, a copy there, an
    event behind it, and a wait for that. The streams have nothing to do before, as mostly in a
    hook: then the fake has threads to wake.
    """
    library, stream, copies = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_void_p()
    event, pinned, nbytes = ctypes.c_void_p(), ctypes.c_void_p(), 4 * LARGE_ELEMENTS
    device = ctypes.c_ulonglong()
    for code in (
        library.cuStreamCreate(ctypes.byref(stream), 1),
        library.cuStreamCreate(ctypes.byref(copies), 1),
        library.cuEventCreate(ctypes.byref(event), 2),
        library.cuMemAlloc_v2(ctypes.byref(device), nbytes),
        library.cuMemHostAlloc(ctypes.byref(pinned), nbytes, 0),
    ):
        assert code == 0, code
    size = ctypes.c_size_t(nbytes)
    down = library.cuMemcpyDtoHAsync_v2, (pinned, device, size, copies)
    up = library.cuMemcpyHtoDAsync_v2, (device, pinned, size, copies)
    called = []
    for copy in (down, up):
        called += [
            (library.cuEventRecord, (event, stream)),
            (library.cuStreamWaitEvent, (copies, event, 0)),
            copy,
            (library.cuEventRecord, (event, copies)),
            (library.cuStreamWaitEvent, (stream, event, 0)),
        ]
    # What ctypes takes for a call, of something that does nothing.
    idle = [(library.isalnum, (0, *arguments)) for _, arguments in called]
    moved, overhead = [], []
    for _ in range(CALLS):
        for one in (stream, copies):
            library.cuStreamSynchronize(one)
        moved.append(timed_us(called))
        overhead.append(timed_us(idle))
    return statistics.median(moved) - statistics.median(overhead)


def timed_us(calls: list[tuple[Any, tuple[Any, ...]]]) -> float:
    """Return the time of a row of calls, none of which may fail."""
    begin = perf_counter_ns()
    for function, arguments in calls:
        function(*arguments)
    return (perf_counter_ns() - begin) / 1000


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
    moved_us = driver_us()
    print(f"microseconds per call, medians; torch {torch.__version__}, {options.rounds} rounds\n")
    print(table([row for row, _ in measured]))
    for row, calls in measured:
        print(f"{row.kind}: {calls:.1f} calls of the driver for each")
    print(f"the ten of them that move a tensor down and up: {moved_us:.1f} us on the fake")
    if options.json is not None:
        machine = asdict(machine_facts(options.dir)) | {"directory": None}
        rows = [asdict(row) | {"driver_calls": round(calls, 1)} for row, calls in measured]
        record = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine,
            "device": "fake",
            "driver_down_and_up_us": round(moved_us, 1),
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
