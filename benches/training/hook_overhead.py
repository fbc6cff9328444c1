"""What the hooks cost per saved tensor: microseconds per pack and unpack, over trivial hooks.

Each call is timed where autograd makes it. Rounds with trivial hooks (pack returns a detached
tensor, unpack returns it detached again) and with ours take turns, so that both see the same
machine; printed are medians over all calls and their differences, and the difference of the means,
which shows also what one call does for several, and what the machine does meanwhile (waits for the
disk are taken off: they are the session's stalls). The row of tensors that stay by plan is beside
identity hooks, which return what they get. Operations run in one thread, so
that a core is left for the I/O worker: where all cores compute, the worker that a call wakes may
interrupt it, and the submission of the request counts as the call's (--threads shows it).

The last row has next to nothing between the calls, so that caches stay warm: 200 tensors of 64 KiB
are packed, each for a node of its own, wait until they are on the disk, and are unpacked and
dropped. Its figures are the means of the fastest round, with all that a call does for several, and
its unpack is with the drop.

    python benches/training/hook_overhead.py [--dir DIR] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.demo.machine import machine_facts
from ssdtrain.planning.policy import Policy

OPERATION_COUNT = 200
"""Saved tensors per forward."""
WARM_COUNT = 8
"""Rounds until a plan has settled, and some are followed in part."""
SMALL_ELEMENTS = 1 << 10
LARGE_ELEMENTS = 1 << 17
"""512 KiB in float32: above `min_bytes`, and so small that the call counts, not the memory."""
BATCH_ELEMENTS = 1 << 20
"""4 MiB: what is given to the disk at once."""


class KeepNothing(Policy):
    """A policy that writes everything, so that each call takes the whole way."""

    def learn(self, *arguments: Any) -> None:
        """Make plans, for their times, and keep nothing by them."""
        super().learn(*arguments)
        self.keep.clear()

    def note_futile(self, key: int) -> None:
        """Write it again all the same."""

    def is_settled(self, _: int) -> bool:
        """Have each round followed in whole: its plan keeps what is written here."""
        return False


class KeepAll(KeepNothing):
    """A policy by which all stays."""

    def learn(self, signature: int, items: Any, *others: Any) -> None:
        """Make plans, for their times, and keep all by them."""
        Policy.learn(self, signature, items, *others)
        self.keep |= {item.key for item in items}

    def is_settled(self, signature: int) -> bool:
        """Have only some rounds followed in whole, as in any training."""
        return Policy.is_settled(self, signature)


@dataclass(frozen=True)
class Row:
    """Microseconds of one kind of saved tensor; medians but for the last."""

    kind: str
    trivial_pack_us: float
    pack_us: float
    trivial_unpack_us: float
    unpack_us: float
    mean_over_us: float
    """Pack and unpack together, less the trivial hooks and less the waits for the disk."""

    @property
    def over_us(self) -> float:
        """Pack and unpack together, less the trivial hooks."""
        return self.pack_us + self.unpack_us - self.trivial_pack_us - self.trivial_unpack_us


def skipped() -> Tensor:
    """Save tensors below `min_bytes`."""
    x = torch.ones(SMALL_ELEMENTS, requires_grad=True)
    for _ in range(OPERATION_COUNT):
        x = x.exp()
    return x.sum()


def weights() -> Tensor:
    """Save parameters, and views of them."""
    weight = nn.Parameter(torch.ones(512, 512))
    x = torch.ones(1, 512, requires_grad=True)
    total = torch.zeros(())
    for _ in range(OPERATION_COUNT):
        total = total + nn.functional.linear(x, weight).sum()
    return total


def deduplicated() -> Tensor:
    """Save one large tensor again and again."""
    x = torch.ones(LARGE_ELEMENTS, requires_grad=True) * 1
    scale = torch.ones((), requires_grad=True)
    # Alone it would be no batch of writes, and would be needed before it was on the disk.
    total = torch.zeros(BATCH_ELEMENTS, requires_grad=True).exp().sum()
    for _ in range(OPERATION_COUNT):
        total = total + (x * scale)[:1].sum()
    return total


def offloaded() -> Tensor:
    """Save large tensors, each with memory of its own."""
    x = torch.zeros(LARGE_ELEMENTS, requires_grad=True)
    for _ in range(OPERATION_COUNT):
        x = x.exp().mul(0.5)
    return x.sum()


def kept() -> Tensor:
    """Save large tensors, each the input of its node, so that identity hooks make no cycle."""
    x = torch.zeros(KEPT_ELEMENTS, requires_grad=True)
    for _ in range(OPERATION_COUNT):
        x = x.sin()
    return x.sum()


KEPT = "kept by plan"
KEPT_ELEMENTS = 1 << 14
TIGHT = "offloaded, tight loop"
TIGHT_ELEMENTS = 1 << 14

KINDS: dict[str, Callable[[], Tensor]] = {
    "below min_bytes": skipped,
    "weights": weights,
    "deduplicated": deduplicated,
    "offloaded": offloaded,
}


class Timed:
    """A pair of hooks whose calls are timed, one by one."""

    def __init__(
        self,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        nbytes_min: int,
        now_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._now_ns = now_ns
        self._nbytes_min = nbytes_min
        """Smaller tensors that the same operations save are not what is measured."""
        self.pack_ns: list[int] = []
        self.unpack_ns: list[int] = []

    def run(self, work: Callable[[], Tensor]) -> None:
        """Run forward and backward."""
        with saved_tensors_hooks(self.pack, self.unpack):
            loss = work()
            loss.backward()  # type: ignore[no-untyped-call]

    def mean_us(self) -> float:
        """Return what a pack and an unpack together took on average."""
        return (statistics.mean(self.pack_ns) + statistics.mean(self.unpack_ns)) / 1000

    def pack(self, tensor: Tensor) -> object:
        """Time a pack."""
        begin = self._now_ns()
        packed = self._pack(tensor)
        duration = self._now_ns() - begin
        if tensor.nbytes >= self._nbytes_min:
            self.pack_ns.append(duration)
        return packed

    def unpack(self, packed: object) -> Tensor:
        """Time an unpack."""
        begin = self._now_ns()
        tensor = self._unpack(packed)
        duration = self._now_ns() - begin
        if tensor.nbytes >= self._nbytes_min:
            self.unpack_ns.append(duration)
        return tensor


def trivial_pack(tensor: Tensor) -> object:
    return tensor.detach()


def trivial_unpack(packed: Tensor) -> Tensor:
    return packed.detach()


def measure(kind: str, directory: str, rounds: int) -> Row:
    """Measure one kind of saved tensor."""
    store = StoreConfig(dirs=(directory,), direct_io="optional")
    session = ssdtrain.Session(OffloadConfig(store=store), KeepNothing())
    hooks: Any = session.context()
    nbytes_min = 4 * (SMALL_ELEMENTS if kind == "below min_bytes" else LARGE_ELEMENTS)
    trivial = Timed(trivial_pack, trivial_unpack, nbytes_min)
    ours = Timed(hooks.pack_hook, hooks.unpack_hook, nbytes_min)
    work = KINDS[kind]
    for number in range(rounds + 1):
        for timed in (trivial, ours):
            timed.run(work)
        if number == 0:
            # The first round fills caches and teaches the order.
            for timed in (trivial, ours):
                timed.pack_ns.clear()
                timed.unpack_ns.clear()
            warm_stall_s = session.stats.stall_s
    stall_us = (session.stats.stall_s - warm_stall_s) * 1e6
    written = session.stats.bytes_written
    session.close()
    assert (written > 0) == (kind in ("deduplicated", "offloaded")), f"{kind}: wrote {written}"

    return row_of(kind, trivial, ours, stall_us)


def measure_kept(directory: str, rounds: int) -> Row:
    """Measure tensors that stay by plan, beside identity hooks."""
    store = StoreConfig(dirs=(directory,), direct_io="optional")
    config = OffloadConfig(store=store, min_bytes=4 * KEPT_ELEMENTS, rematerialize="never")
    with closing(ssdtrain.Session(config, KeepAll())) as session:
        hooks: Any = session.context()
        identity = Timed(same, same, config.min_bytes)
        ours = Timed(hooks.pack_hook, hooks.unpack_hook, config.min_bytes)
        for number in range(rounds + WARM_COUNT):
            for timed in (identity, ours):
                timed.run(kept)
                if number < WARM_COUNT:
                    timed.pack_ns.clear()
                    timed.unpack_ns.clear()
        return row_of(KEPT, identity, ours, 0.0)


def same(one: Any) -> Any:
    return one


def median_us(durations_ns: list[int]) -> float:
    """Return the median, in microseconds."""
    return statistics.median(durations_ns) / 1000


def row_of(kind: str, trivial: Timed, ours: Timed, stall_us: float) -> Row:
    """Return what was timed as a row; `stall_us` is what the unpacks waited for the disk."""
    return Row(
        kind,
        median_us(trivial.pack_ns),
        median_us(ours.pack_ns),
        median_us(trivial.unpack_ns),
        median_us(ours.unpack_ns),
        ours.mean_us() - trivial.mean_us() - stall_us / len(ours.unpack_ns),
    )


def measure_tight(directory: str, rounds: int) -> Row:
    """Measure packs, and unpacks with drops, with next to nothing between them."""
    store = StoreConfig(dirs=(directory,), direct_io="optional")
    config = OffloadConfig(store=store, min_bytes=4 * TIGHT_ELEMENTS)
    with closing(ssdtrain.Session(config, KeepNothing())) as session:
        return tight_row(session, rounds)


def tight_row(session: ssdtrain.Session, rounds: int, device: str = "cpu") -> Row:
    """Measure them in a session."""
    hooks: Any = session.context()
    pairs = ((trivial_pack, trivial_unpack), (hooks.pack_hook, hooks.unpack_hook))
    fastest = [[float("inf"), float("inf")] for _ in pairs]
    for _ in range(rounds + 1):
        for best, (pack, unpack) in zip(fastest, pairs, strict=True):
            for place, one_us in enumerate(tight_us(session, pack, unpack, device)):
                best[place] = min(best[place], one_us)
    assert session.stats.bytes_written > 0, "nothing was written"
    (trivial_pack_us, trivial_unpack_us), (pack_us, unpack_us) = fastest
    over_us = pack_us + unpack_us - trivial_pack_us - trivial_unpack_us
    return Row(TIGHT, trivial_pack_us, pack_us, trivial_unpack_us, unpack_us, over_us)


def tight_us(
    session: ssdtrain.Session,
    pack: Callable[[Tensor], object],
    unpack: Callable[[Any], Tensor],
    device: str = "cpu",
    now_ns: Callable[[], int] = perf_counter_ns,
) -> tuple[float, float]:
    """Return the time per pack, and per unpack with its drop, less the waits for the disk."""
    node = torch.zeros(8, requires_grad=True, device=device).sum()
    results = [node * torch.ones(TIGHT_ELEMENTS, device=device) for _ in range(OPERATION_COUNT)]
    settle(device)
    packed, packed_ns, unpacked_ns = [], 0, 0
    scalar = torch.zeros((), requires_grad=True)
    for one in results:
        # Its node is passed when the next tensor is packed, which may begin to write it.
        scalar.neg()
        begin = now_ns()
        packed.append(pack(one))
        packed_ns += now_ns() - begin
    del one
    results.clear()
    settle(device)
    session.flush()
    stall_s = session.stats.stall_s
    while packed:
        begin = now_ns()
        unpack(packed.pop())
        unpacked_ns += now_ns() - begin
    settle(device)
    stalled_ns = (session.stats.stall_s - stall_s) * 1e9
    per_call = 1 / OPERATION_COUNT / 1000
    return packed_ns * per_call, (unpacked_ns - stalled_ns) * per_call


def settle(device: str) -> None:
    """Wait for what a GPU computes."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown; *both, over* is pack and unpack less the trivial hooks."""
    lines = [
        "| saved tensor | trivial pack | pack | trivial unpack | unpack | both, over | its mean |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        figures = (row.trivial_pack_us, row.pack_us, row.trivial_unpack_us, row.unpack_us)
        cells = " | ".join(f"{one:.1f}" for one in (*figures, row.over_us, row.mean_over_us))
        lines.append(f"| {row.kind} | {cells} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, help="a directory on a local file system (default: a new one here)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="forward and backward passes")
    parser.add_argument("--threads", type=int, default=1, help="of torch's operations")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        rows = [measure(kind, directory, options.rounds) for kind in KINDS]
        rows.append(measure_kept(directory, options.rounds))
        rows.append(measure_tight(directory, options.rounds))
    print(
        f"microseconds per call, medians; torch {torch.__version__}, {options.rounds} rounds, "
        f"threads: {options.threads}\n"
    )
    print(table(rows))
    if options.json is not None:
        machine = machine_facts(options.dir) | {"directory": None}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = {"date": date, "machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
