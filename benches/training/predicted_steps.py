"""Whether steps take what the planner's simulator says: predicted and real ones side by side.

For each model and share of the disk's rate one process trains in four ways by turns: without a
session, with hooks that keep every tensor, with all tensors offloaded, and with the cut, which
offloads what hides behind computing. A turn is two steps of each way, of which the second counts
(see `never_worse.py`). After the turns in which it adapts the cut's plan is held, so that all steps
that count have one plan.

The trace comes from the hooks that keep every tensor: each event is at its median moment. The moves
of a plan come from the two ways that offload: a write begins when the batch of the tensor is given
to the disk, and reads come in the order of the needs. The simulator (`rust/plan`) plays these moves
with the bytes that the session's engine has in flight, and with the rates of the disk. These were
measured in that process before the first step, while all processors computed: for each direction
alone, and for both at once. The price of a byte comes from the steps with the whole rate of the
disk, and is used for all rates of that model.

The table has the time of a step, over the plain one of that turn, as it was and as it is predicted;
the bytes written in a step; and the most saved bytes in memory, in units of the largest tensor
("slots") between predicted and real.

A slower disk is a control group (blkio) that bounds reads and writes; only root may make one, and
without it the disk is measured as it is.

    python benches/training/predicted_steps.py [--models ...] [--shares 1 0.5 0.2 0.1]
        [--turns N] [--dir DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch
from torch import nn

import ssdtrain
from hook_overhead import KeepNothing
from never_worse import (
    BLKIO,
    GIB,
    LATENCY_S,
    KeepAll,
    Plain,
    Way,
    counting,
    disk_rate,
    keep_figures,
    newest,
    throttled,
)
from plain_steps import prepared
from ssdtrain.activations.writeback import BATCH_BYTES, BATCH_COUNT
from ssdtrain.config import MIN_BYTES_DEFAULT
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.machine import tuning
from ssdtrain.planning.policy import Item, Policy, Rates
from ssdtrain.planning.recording import Recording, trace_of
from ssdtrain.planning.solve import Device, Move, Step

ADAPTING_TURNS = 6
"""The plans of the cut settle after three rounds, and the caution some rounds later."""
WINDOW_BYTES = 32 << 20
"""What a session reads ahead in any case (rust/core/src/window.rs)."""
WRITE_PATIENCE_S = 0.1
"""How long a piece of a write is in flight at most (rust/core/src/engine/contract.rs)."""
RATE_BYTES = 64 << 20
"""Moved in each direction to know the rates of the disk of one row."""
RATE_ROUNDS = 5


class Held(Policy):
    """The cut, which stops learning once it is told to: then all steps have one plan."""

    is_held = False

    def learn(
        self, signature: int, items: Sequence[Item], rates: Rates, stall_share: float | None
    ) -> None:
        """Plan the next round, unless the plan is held."""
        if not self.is_held:
            super().learn(signature, items, rates, stall_share)


@dataclass(frozen=True)
class Disk:
    """What the simulator is told of a disk: its rates, and what sessions give to it at once."""

    write_rate: float
    read_rate: float
    duplex_share: float
    queue_depth: int
    piece_bytes: int

    def in_flight_bytes(self, items: Sequence[Item]) -> int:
        """Return what pieces of these tensors hold: many tensors are smaller than a full piece.

        Of a slow disk that is what it takes within the patience of the engine, two pieces at least.
        """
        pieces = sum(-(-one.nbytes // self.piece_bytes) for one in items)
        piece_bytes = sum(one.nbytes for one in items) // pieces
        in_time = max(int(self.write_rate * WRITE_PATIENCE_S), 2 * piece_bytes)
        return min(self.queue_depth * piece_bytes, in_time)


@contextmanager
def computing() -> Iterator[None]:
    """Have all processors compute meanwhile, as they do in a step; the disk gets less of them."""
    factor = torch.full((1024, 1024), 1e-3)
    is_over = Event()

    def multiply() -> None:
        while not is_over.is_set():
            torch.mm(factor, factor)

    thread = Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def disk_of(directory: str) -> Disk:
    """Measure a disk, each direction alone and both at once."""
    tensor = torch.ones(RATE_BYTES, dtype=torch.uint8)
    taken: dict[str, list[float]] = {"write": [], "read": [], "both": []}
    with ssdtrain.TensorStore(directory) as store:
        stored = store.write(tensor)
        stored.wait()
        for _ in range(RATE_ROUNDS):
            began_s = perf_counter()
            other = store.write(tensor)
            other.wait()
            taken["write"].append(perf_counter() - began_s)
            began_s = perf_counter()
            store.read(stored).result()
            taken["read"].append(perf_counter() - began_s)
            del other
            began_s = perf_counter()
            pending, other = store.read(stored), store.write(tensor)
            pending.result()
            other.wait()
            taken["both"].append(perf_counter() - began_s)
            del other
    write_s, read_s, both_s = (statistics.median(one) for one in taken.values())
    # While both are busy each has this share of its rate; the slower one ends alone.
    first_s, more_s = min(write_s, read_s), max(write_s, read_s)
    share = first_s / max(both_s - more_s + first_s, first_s)
    kept = tuning.load(directory)
    chosen = tuning.DEFAULT if kept is None else kept.tuning
    depth, piece_bytes = chosen.queue_depth, chosen.piece_bytes
    return Disk(RATE_BYTES / write_s, RATE_BYTES / read_s, share, depth, piece_bytes)


def usual(rounds: Sequence[Recording]) -> Recording:
    """Return the round whose events come at the median of their moments."""
    first = rounds[0]
    sizes = [one.nbytes for one in first.items]
    if any([one.nbytes for one in other.items] != sizes for other in rounds):
        raise SystemExit("the rounds that are compared have other tensors")

    def at(moment: Callable[[Recording], float]) -> float:
        return statistics.median(moment(one) - one.began_s for one in rounds)

    items = [
        Item(
            item.key,
            item.nbytes,
            at(lambda one, place=place: one.items[place].packed_s),  # type: ignore[misc]
            at(lambda one, place=place: one.items[place].needed_s),  # type: ignore[misc]
        )
        for place, item in enumerate(first.items)
    ]
    return Recording(items, 0.0, at(lambda one: one.ended_s))


def moves_of(items: Sequence[Item], kept: set[int]) -> tuple[list[Move], list[Move], float]:
    """Return the writes and the reads of a session as moves, and when the first need comes.

    The kernels are those of ``trace_of``: one ends with each event. Writes are given to the disk in
    batches, at the first save of a later node, or when backward begins. All reads are asked for at
    the first need: memory bounds how far they go ahead.
    """
    events = sorted(
        [(item.packed_s, 0, place) for place, item in enumerate(items)]
        + [(item.needed_s, 1, place) for place, item in enumerate(items)]
    )
    writes: list[Move] = []
    reads: list[Move] = []
    waiting: list[int] = []
    batch_bytes = min(BATCH_BYTES, BATCH_COUNT * MIN_BYTES_DEFAULT)
    first_need = next(kernel for kernel, (_, what, _) in enumerate(events) if what == 1)
    for kernel, (_, what, place) in enumerate(events):
        is_batch = sum(items[one].nbytes for one in waiting) >= batch_bytes
        if is_batch or kernel == first_need:
            writes += [(one, "ssd", kernel, float(len(writes))) for one in waiting]
            waiting = []
        if items[place].key in kept:
            continue
        if what == 0:
            waiting.append(place)
        else:
            reads.append((place, "fetch", first_need, float(kernel)))
    return writes, reads, events[first_need][0] - events[0][0]


def predicted(kept_all: Recording, way: Way, disk: Disk, price: float) -> dict[str, float]:
    """Let the simulator play what a session did; times in seconds, of the round alone."""
    recorded = newest(way)
    if [one.nbytes for one in recorded.items] != [one.nbytes for one in kept_all.items]:
        raise SystemExit("the rounds that are compared have other tensors")
    policy = way.policy
    items = [
        Item(own.key, one.nbytes, one.packed_s, one.needed_s)
        for own, one in zip(recorded.items, kept_all.items, strict=True)
    ]
    kept = {one.key for one in items if one.key in policy.keep}
    step = Step(trace_of(kept_all, name="", origin=""))
    device = Device(
        memory_bytes=1 << 50,
        write_bytes_per_s=disk.write_rate,
        read_bytes_per_s=disk.read_rate,
        bus_bytes_per_s=1e12,
        latency_s=LATENCY_S,
        duplex_share=disk.duplex_share,
        price_s_per_byte=price,
        in_flight_bytes=disk.in_flight_bytes(items),
    )
    writes, reads, forward_s = moves_of(items, kept)
    lazy = step.judged_moves(replace(device, price_s_per_byte=0.0), writes)
    # Reads go ahead by the window, and into what backward has freed.
    begun = [nbytes for moment, nbytes in lazy.resident if moment <= forward_s]
    memory_bytes = max(lazy.peak_bytes, begun[-1] + WINDOW_BYTES)
    found = step.judged_moves(device, writes + reads, memory_bytes)
    return {
        "ideal_s": step.ideal_seconds(),
        "step_s": found.step_s,
        "stall_s": found.stall_s,
        "peak_bytes": step.peak_bytes(found),
        "written_bytes": found.moved_bytes[0],
        "read_bytes": found.moved_bytes[2],
        "kept_peak_bytes": max(step.live_bytes()),
        "slot_bytes": max(one.nbytes for one in kept_all.items),
    }


class Convolutions:
    """A convolutional network with batch normalisation, on images that each turn draws anew."""

    def __init__(self, options: TrainingOptions) -> None:
        torch.manual_seed(options.seed)
        width = options.hidden // 8
        blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(options.layers):
            blocks += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU()]
        self._module = nn.Sequential(
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-3)
        self._shape = (2 * options.batch, 3, 96, 96)
        self._seed = options.seed

    def step_of(self, turn: int) -> Callable[[], None]:
        """Return the training step of a turn."""
        generator = torch.Generator().manual_seed(self._seed + turn)
        images = torch.randn(self._shape, generator=generator)
        labels = torch.randint(10, self._shape[:1], generator=generator)

        def step() -> None:
            self._optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(self._module(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

        return step


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Take the turns; return what each way took, and what is predicted of it."""
    options = TrainingOptions.from_json(given["options"])
    assert options.directory is not None
    with computing():
        disk = disk_of(options.directory)
    cut = Held()
    ways = {
        "keep": Way(options.directory, KeepAll()),
        "all": Way(options.directory, KeepNothing()),
        "cut": Way(options.directory, cut),
    }
    plain = Plain()
    step_of = Convolutions(options).step_of if given["is_conv"] else prepared(options)
    takers = [plain.take, *(way.take for way in ways.values())]
    turns, rounds = given["turns"], []
    for turn in range(ADAPTING_TURNS + turns):
        cut.is_held = turn >= ADAPTING_TURNS
        for taker in takers[turn % 4 :] + takers[: turn % 4]:
            # The first step meets the memory and the disk as another way has left them.
            taker(step_of(turn))
            taker(step_of(turn))
        if turn > ADAPTING_TURNS:
            rounds.append(newest(ways["keep"]))
    kept_all = usual(rounds)
    rows = {name: measured(way, plain.seconds, turns) for name, way in ways.items()}
    price = given["price_s_per_byte"]
    if price is None:
        moved = rows["all"]["written_bytes"] + rows["all"]["read_bytes"]
        over_s = rows["all"]["seconds"] - rows["all"]["stall_s"] - rows["keep"]["seconds"]
        price = max(0.0, over_s / max(moved, 1))
    for name in ("all", "cut"):
        played = predicted(kept_all, ways[name], disk, price)
        # What is no part of the round: the optimizer, and what comes before the first pack.
        rest_s = rows["keep"]["seconds"] - played["ideal_s"]
        rows[name] |= {
            "predicted_s": played["step_s"] + rest_s,
            "predicted_peak_bytes": played["peak_bytes"]
            + rows["keep"]["peak_bytes"]
            - played["kept_peak_bytes"],
            "predicted_written_bytes": played["written_bytes"],
            "predicted_read_bytes": played["read_bytes"],
            "predicted_stall_s": played["stall_s"],
            "slot_bytes": played["slot_bytes"],
        }
    return {
        "plain_s": statistics.median(counting(plain.seconds, turns)),
        "price_s_per_byte": price,
        "disk": asdict(disk),
        "ways": rows,
    }


def measured(way: Way, plain_s: list[float], turns: int) -> dict[str, Any]:
    """Return what one way took, as medians of the steps that count."""
    plain_s = counting(plain_s, turns)
    ratios = [one / plain for one, plain in zip(counting(way.seconds, turns), plain_s, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "seconds": statistics.median(ratios) * statistics.median(plain_s),
        "peak_bytes": statistics.median(counting(way.peaks, turns)),
        "written_bytes": statistics.median(counting(way.written, turns)),
        "read_bytes": statistics.median(counting(way.read, turns)),
        "stall_s": statistics.median(counting(way.stalled, turns)),
    }


def measure(
    options: TrainingOptions, *, is_conv: bool, rate: float | None, price: float | None, turns: int
) -> Any:
    """Start the process of one row and return what it tells."""
    given = {
        "options": options.to_json(),
        "is_conv": is_conv,
        "rate": rate,
        "price_s_per_byte": price,
        "turns": turns,
    }
    command = [sys.executable, "-P", __file__, "--child", json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_child(words: list[str]) -> int:
    """Train in a process of its own, so that memory and threads begin anew."""
    given = json.loads(words[0])
    directory = TrainingOptions.from_json(given["options"]).directory
    assert directory is not None
    with throttled(directory, given["rate"]):
        told = train(given)
    print(json.dumps(told))
    return 0


def show(row: dict[str, Any]) -> None:
    """Print the two ways of one row."""
    plain_s = row["plain_s"]
    for name in ("cut", "all"):
        way = row["ways"][name]
        expected = way["predicted_s"] / plain_s
        slots = (way["predicted_peak_bytes"] - way["peak_bytes"]) / way["slot_bytes"]
        print(
            f"{row['model']:<6} 1/{1 / row['share']:<3.0f} {name}  {plain_s:7.3f}"
            f"  {way['ratio']:6.3f} {expected:9.3f} {expected / way['ratio'] - 1:+7.1%}"
            f"  {way['written_bytes'] / (1 << 20):8.1f}"
            f" {way['predicted_written_bytes'] / (1 << 20):9.1f}"
            f"  {way['peak_bytes'] / (1 << 20):6.1f} {slots:+6.1f}",
            flush=True,
        )


def main(words: list[str]) -> int:
    if words[:1] == ["--child"]:
        return run_child(words[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt", "gpt2", "bert", "conv"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shares", nargs="+", type=float, default=[1, 0.5, 0.2, 0.1])
    parser.add_argument("--turns", type=int, default=20)
    for name, value in (("layers", 4), ("hidden", 512), ("sequence", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(words)
    if arguments.turns < 4:
        parser.error("--turns must be at least 4: the order of the ways rotates over four")
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.home()) as directory:
        rate = disk_rate(directory)
        can_throttle = os.geteuid() == 0 and BLKIO.is_dir()
        shares = sorted(arguments.shares if can_throttle else [1.0], reverse=True)
        print(f"disk: {rate / GIB:.2f} GiB/s" + ("" if can_throttle else "; cannot be throttled"))
        print(
            f"{'model':<6} {'disk':<5} {'way':<4} {'plain s':>7}  {'ratio':>6} {'predicted':>9}"
            f" {'error':>7}  {'MiB out':>8} {'predicted':>9}  {'peak':>6} {'slots':>6}"
        )
        rows = []
        for model in arguments.models:
            options = TrainingOptions(
                model="gpt" if model == "conv" else model,
                dtype=arguments.dtype, directory=directory,
                layers=arguments.layers, hidden=arguments.hidden,
                sequence=arguments.sequence, batch=arguments.batch,
            )  # fmt: skip
            price = None
            for share in shares:
                told = measure(
                    options,
                    is_conv=model == "conv",
                    rate=None if share == 1 else share * rate,
                    price=price,
                    turns=arguments.turns,
                )
                price = told["price_s_per_byte"] if share == shares[0] else price
                rows.append({"model": model, "share": share, **told})
                show(rows[-1])
                if arguments.json is not None:
                    name = Path(__file__).name
                    keep_figures(arguments.json, name, words, directory, rate, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
