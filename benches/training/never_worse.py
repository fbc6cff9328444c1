"""Whether offloading ever makes a step longer than it may: on the disk, and on slower ones.

For each model, dtype and share of the disk's rate two processes train by turns. One is the plain
program, which never imports ssdtrain. The other trains in several ways:

    keep      without a session
    again     the same once more: their ratio is the noise
    trivial   with hooks that do nothing: the time that torch takes to call hooks
    all       every saved tensor is written
    ours      a session as it is by default: offloads what the disk hides (the cut of SSDTrain)
    teraio    what algorithm 1 of TERAIO (arXiv 2506.06472) chooses for the peak of `ours`

A turn is two steps of each, in an order that rotates, so that other work on the machine meets all
alike. The second step counts, as the first one meets memory and disk as another way has left them.
The ratio of a way is the median over the turns of its time over that of the plain program's step in
that turn, with the standard error of this median. In brackets is the ratio to `keep`, which has
imported ssdtrain as well: the cost of offloading alone. The first turns, in which sessions adapt,
are left out. The peak is the median over the turns of the most saved bytes in memory, over those of
a plain step.

A slower disk is a control group (blkio) that bounds reads and writes; only root may make one, and
without it the disk is measured as it is.

    python benches/training/never_worse.py [--models gpt2 bert] [--dtypes float32 bfloat16]
        [--shares 1 0.5 0.2 0.1 0.033] [--ways again ours] [--turns N] [--dir DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from hook_overhead import KeepNothing, trivial_pack, trivial_unpack
from plain_steps import Program, prepared
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recording import Recording, trace_of
from ssdtrain.planning.solve import Device, Step

ADAPTING_TURNS = 12
"""Plans settle after three rounds, and the share of the disk's rates that they count on later."""
TERAIO_TURN = ADAPTING_TURNS - 5
"""When TERAIO's choice is made: `ours` has found its peak, and some turns are left to settle."""
PEAK_STEPS = 8
"""Steps before that turn, of whose peaks the median is the peak of `ours`."""
WAYS = ("again", "trivial", "all", "ours", "teraio")
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
"""So many times the width of the middle half, over the root of how many values there are, is the
standard error of a median of normal values."""
LATENCY_S = 100e-6
BLKIO = Path("/sys/fs/cgroup/blkio")
GIB = 1 << 30
RATE_BYTES = 256 << 20
"""Written and read to know the rate of the disk."""


class _Everything(set[int]):
    def __contains__(self, key: object) -> bool:
        return True


class KeepAll(Policy):
    """A policy under which nothing is written: a plain step, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = _Everything()


class _AllBut(set[int]):
    def __init__(self, offloaded: set[int]) -> None:
        super().__init__()
        self._offloaded = offloaded

    def __contains__(self, key: object) -> bool:
        return key not in self._offloaded


class Given(KeepAll):
    """A policy that keeps all until it is told what to offload."""

    def offload(self, keys: set[int]) -> None:
        """Keep all but these from now on."""
        self.keep = _AllBut(keys)


class Way:
    """One session, which takes its step in each turn."""

    def __init__(self, directory: str, policy: Policy) -> None:
        config = OffloadConfig(store=StoreConfig(dirs=(directory,)))
        self.policy = policy
        self.session = ssdtrain.Session(config, policy)
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.written: list[int] = []
        self.read: list[int] = []
        self.stalled: list[float] = []

    def take(self, step: Callable[[], None]) -> None:
        """Take a step, and note its time, its peak and what it wrote."""
        hooks = self.session._hooks  # noqa: SLF001 - the peak of one step
        assert hooks is not None
        account = hooks._residency.account  # noqa: SLF001
        account.forget_peak()
        before = self.session.stats
        began_s = perf_counter()
        with self.session.context():
            step()
        self.seconds.append(perf_counter() - began_s)
        after = self.session.stats
        self.peaks.append(account.peak_bytes)
        self.written.append(after.bytes_written - before.bytes_written)
        self.read.append(after.bytes_read - before.bytes_read)
        self.stalled.append(after.stall_s - before.stall_s)


class Plain:
    """Steps without a session."""

    def __init__(self, peak_bytes: int = 0) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.written: list[int] = []
        self._peak_bytes = peak_bytes

    def take(self, step: Callable[[], None]) -> None:
        """Take a step, and note its time."""
        began_s = perf_counter()
        step()
        self.seconds.append(perf_counter() - began_s)
        self.peaks.append(self._peak_bytes)
        self.written.append(0)


class Trivial(Plain):
    """Steps without a session, whose saved tensors are given to hooks that do nothing."""

    def take(self, step: Callable[[], None]) -> None:
        """Take a step, and note its time."""

        def hooked() -> None:
            with saved_tensors_hooks(trivial_pack, trivial_unpack):
                step()

        super().take(hooked)


def newest(way: Way) -> Recording:
    """Return the last round of a session that has ended."""
    hooks: Any = way.session._hooks  # noqa: SLF001 - the items of a round have names only there
    recorded: Recording = next(reversed(hooks.prefetcher.recorded.values()))
    return recorded


def chosen_by_teraio(recorded: Recording, rate: float, peak_share: float) -> set[int]:
    """Return the keys of what algorithm 1 offloads, for a peak that is such a share of keeping."""
    step = Step(trace_of(recorded, name="", origin=""))
    memory_bytes = int(peak_share * max(step.live_bytes()))
    device = Device(
        memory_bytes=memory_bytes,
        write_bytes_per_s=rate,
        read_bytes_per_s=rate,
        bus_bytes_per_s=1e12,
        latency_s=LATENCY_S,
    )
    moves = step.judged(device, "teraio").moves
    return {recorded.items[tensor].key for tensor, where, _, _ in moves if where == "ssd"}


def disk_rate(directory: str) -> float:
    """Return the bytes per second of the slower direction."""
    tensor = torch.ones(RATE_BYTES, dtype=torch.uint8)
    rates = []
    with ssdtrain.TensorStore(directory) as store:
        for _ in range(3):
            began_s = perf_counter()
            stored = store.write(tensor)
            stored.wait()
            written_s = perf_counter()
            store.read(stored).result()
            slower_s = max(written_s - began_s, perf_counter() - written_s)
            rates.append(RATE_BYTES / slower_s)
    return statistics.median(rates)


@contextmanager
def throttled(directory: str, rate: float | None) -> Iterator[None]:
    """Bound the disk for this process; its threads begin inside."""
    if rate is None:
        yield
        return
    device = os.stat(directory).st_dev
    group = BLKIO / f"never-worse-{os.getpid()}"
    group.mkdir()
    home = BLKIO / "cgroup.procs"
    try:
        for direction in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {int(rate)}"
            (group / f"blkio.throttle.{direction}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        home.write_text(str(os.getpid()))
        group.rmdir()


def ways_of(names: list[str], directory: str, kept_bytes: int) -> dict[str, Way | Plain]:
    """Return the ways that are compared with plain steps."""
    made: dict[str, Callable[[], Way | Plain]] = {
        "again": lambda: Plain(kept_bytes),
        "trivial": lambda: Trivial(kept_bytes),
        "all": lambda: Way(directory, KeepNothing()),
        "ours": lambda: Way(directory, Policy()),
        "teraio": lambda: Way(directory, Given()),
    }
    return {name: made[name]() for name in names}


def train(options: TrainingOptions, rate: float, turns: int, names: list[str]) -> dict[str, Any]:
    """Take the turns beside the plain program; return the figures of each way."""
    assert options.directory is not None
    directory = options.directory
    step_of = prepared(options)
    counted = Way(directory, KeepAll())
    counted.take(step_of(0))
    kept_bytes = counted.peaks[0]
    keep = Plain(kept_bytes)
    ways = {"keep": keep, **ways_of(names, directory, kept_bytes)}
    program = Program(options)
    takers = [program.take, *(way.take for way in ways.values())]
    for turn in range(ADAPTING_TURNS + turns):
        step = step_of(turn)
        if turn == TERAIO_TURN and "teraio" in ways:
            ours, teraio = ways["ours"], ways["teraio"]
            assert isinstance(ours, Way)
            assert isinstance(teraio, Way)
            assert isinstance(teraio.policy, Given)
            share = min(statistics.median(ours.peaks[-PEAK_STEPS:]) / kept_bytes, 1.0)
            teraio.policy.offload(chosen_by_teraio(newest(ours), rate, share))
        first = turn % len(takers)
        for taker in takers[first:] + takers[:first]:
            taker(step)
            taker(step)
    program.close()
    plain_s, keep_s = counting(program.seconds, turns), counting(keep.seconds, turns)
    told = {name: _figures(way, plain_s, keep_s, kept_bytes) for name, way in ways.items()}
    return {"plain_s": statistics.median(plain_s), "plain_peak_bytes": kept_bytes, "ways": told}


def counting(values: list[Any], turns: int) -> list[Any]:
    """Return what belongs to the second step of each of the last turns."""
    return values[-2 * turns :][1::2]


def _figures(
    way: Way | Plain, plain_s: list[float], keep_s: list[float], kept_bytes: int
) -> dict[str, float]:
    turns = len(plain_s)
    seconds, peaks = counting(way.seconds, turns), counting(way.peaks, turns)
    return {
        **_ratios("ratio", seconds, plain_s),
        **_ratios("over_keep", seconds, keep_s),
        "peak": statistics.median(peaks) / kept_bytes,
        "peak_high": max(peaks) / kept_bytes,
        "written_bytes": statistics.median(counting(way.written, turns)),
    }


def _ratios(name: str, seconds: list[float], others_s: list[float]) -> dict[str, float]:
    """Return the median of the turns' ratios, its standard error, and the middle half."""
    turns = len(others_s)
    ratios = sorted(one / other for one, other in zip(seconds, others_s, strict=True))
    low, high = ratios[turns // 4], ratios[-1 - turns // 4]
    return {
        name: statistics.median(ratios),
        f"{name}_error": MEDIAN_ERROR * (high - low) / math.sqrt(turns),
        f"{name}_low": low,
        f"{name}_high": high,
    }


def run_child(words: list[str]) -> int:
    """Train in a process of its own, so that memory and threads begin anew."""
    given = json.loads(words[0])
    options = TrainingOptions.from_json(given["options"])
    assert options.directory is not None
    with throttled(options.directory, given["rate"] if given["is_slowed"] else None):
        told = train(options, given["rate"], given["turns"], given["ways"])
    print(json.dumps(told))
    return 0


def measure(
    options: TrainingOptions, rate: float, arguments: Any, *, is_slowed: bool
) -> dict[str, Any]:
    """Start the process of one row and return what it tells."""
    given = {
        "options": options.to_json(),
        "rate": rate,
        "is_slowed": is_slowed,
        "turns": arguments.turns,
        "ways": arguments.ways,
    }
    command = [sys.executable, "-P", __file__, "--child", json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def keep_figures(  # noqa: PLR0917 - a file has all of it
    path: Path, script: str, words: list[str], directory: str, rate: float, rows: list[Any]
) -> None:
    """Write what was measured, with the command and the machine."""
    document = {
        "command": f"python benches/training/{script} " + " ".join(words),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(Path(directory)) | {"directory": None},
        "disk_bytes_per_s": rate,
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    cells = [
        f"{one['ratio']:.3f} ± {one['ratio_error']:.3f} ({one['over_keep']:.3f} ± "
        f"{one['over_keep_error']:.3f}) {one['peak']:.2f}"
        for one in row["ways"].values()
    ]
    name = f"{row['model']} {row['dtype']} 1/{1 / row['share']:.0f}"
    print(f"{name:<20} {row['plain_s']:6.3f}  " + "  ".join(cells), flush=True)


def main(words: list[str]) -> int:
    if words[:1] == ["--child"]:
        return run_child(words[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shares", nargs="+", type=float, default=[1, 1 / 2, 1 / 5, 0.1, 1 / 30])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=60)
    for name, value in (("layers", 4), ("hidden", 512), ("sequence", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(words)
    if arguments.turns <= len(WAYS) + 1:
        parser.error(f"--turns must be more than {len(WAYS) + 1}: the order of the ways rotates")
    if "teraio" in arguments.ways and "ours" not in arguments.ways:
        parser.error("--ways teraio needs ours, whose rounds and peak it is given")
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.home()) as directory:
        rate = disk_rate(directory)
        can_throttle = os.geteuid() == 0 and BLKIO.is_dir()
        shares = arguments.shares if can_throttle else [1.0]
        print(f"disk: {rate / GIB:.2f} GiB/s" + ("" if can_throttle else "; cannot be throttled"))
        names = ["keep", *arguments.ways]
        heads = "  ".join(f"{f'{name} (over keep), peak':<34}" for name in names)
        print(f"{'':<20} {'plain':>6}  {heads}")
        rows = []
        for model in arguments.models:
            for dtype in arguments.dtypes:
                options = TrainingOptions(
                    model=model, dtype=dtype, directory=directory,
                    layers=arguments.layers, hidden=arguments.hidden,
                    sequence=arguments.sequence, batch=arguments.batch,
                )  # fmt: skip
                for share in shares:
                    told = measure(options, share * rate, arguments, is_slowed=share != 1)
                    rows.append({"model": model, "dtype": dtype, "share": share, **told})
                    show(rows[-1])
                    if arguments.json is not None:
                        name = Path(__file__).name
                        keep_figures(arguments.json, name, words, directory, rate, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
