"""Whether steps take what the planner's simulator says: predicted and real ones side by side.

For each model and share of the disk's rate one process trains by turns without ssdtrain, with hooks
that keep everything, with all that is saved offloaded, and with what hides behind computing (the
cut). The round of the hooks that keep everything is the trace, and what the other two wrote and
read, and in which order, becomes the moves of a plan. The simulator (`rust/plan`) plays them with
the rates that the sessions measured on that disk. The price of a byte comes from the steps with the
whole rate of the disk, and is used for all rates of that model.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hook_overhead import KeepNothing
from never_worse import (
    BLKIO,
    GIB,
    KeepAll,
    Plain,
    Way,
    disk_rate,
    keep_figures,
    prepared,
    throttled,
)
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.planning.policy import Item, Plan, Policy
from ssdtrain.planning.recording import Recording, trace_of
from ssdtrain.planning.solve import Device, Move, Step

ADAPTING_TURNS = 12
"""The plans of the cut settle after three rounds, and the caution some rounds later."""
LATENCY_S = 100e-6
WINDOW_BYTES = 32 << 20
"""What a session reads ahead in any case (rust/core/src/window.rs)."""


def newest(way: Way) -> tuple[Recording, Plan]:
    """Return the last round of a session, and the plan for it."""
    hooks: Any = way.session._hooks  # noqa: SLF001 - the items of a round have names only there
    signature, recorded = next(reversed(hooks._prefetcher.recorded.items()))  # noqa: SLF001
    return recorded, hooks._policy.plans[signature]  # noqa: SLF001


def moves_of(items: Sequence[Item], kept: frozenset[int]) -> tuple[list[Move], list[Move], float]:
    """Return the writes and the reads of a session as moves, and when the first need comes.

    The kernels are those of ``trace_of``: one ends with each event. Each write is asked for when
    its tensor was saved, all reads at the first need: memory bounds how far they go ahead.
    """
    events = sorted(
        [(item.packed_s, 0, place) for place, item in enumerate(items)]
        + [(item.needed_s, 1, place) for place, item in enumerate(items)]
    )
    away = {place for place, item in enumerate(items) if item.key not in kept}
    writes: list[Move] = []
    reads: list[Move] = []
    first_need = next(kernel for kernel, (_, what, _) in enumerate(events) if what == 1)
    for kernel, (_, what, place) in enumerate(events):
        if place in away and what == 0:
            writes.append((place, "ssd", kernel, float(kernel)))
        elif place in away:
            reads.append((place, "fetch", first_need, float(kernel)))
    return writes, reads, events[first_need][0] - events[0][0]


def predicted(kept_all: Recording, way: Way, told: dict[str, Any]) -> dict[str, float]:
    """Let the simulator play what a session did; times in seconds, of the round alone."""
    recorded, plan = newest(way)
    trace = trace_of(kept_all, name="", origin="")
    if [one.nbytes for one in recorded.items] != [one.nbytes for one in kept_all.items]:
        raise SystemExit("the rounds that are compared have other tensors")
    kept = frozenset() if told["keeps_nothing"] else plan.keep
    items = [
        Item(own.key, one.nbytes, one.packed_s, one.needed_s)
        for own, one in zip(recorded.items, kept_all.items, strict=True)
    ]
    step = Step(trace)
    device = Device(
        memory_bytes=1 << 50,
        write_bytes_per_s=told["write_rate"],
        read_bytes_per_s=told["read_rate"],
        bus_bytes_per_s=1e12,
        latency_s=LATENCY_S,
        duplex_share=0.5,
        price_s_per_byte=told["price_s_per_byte"],
    )
    writes, reads, forward_s = moves_of(items, kept)
    lazy = step.judged_moves(device, writes)
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
        "kept_peak_bytes": max(step.live_bytes()),
        "slot_bytes": max(one.nbytes for one in kept_all.items),
    }


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Take the turns; return what each way took, and what is predicted of it."""
    options = TrainingOptions.from_json(given["options"])
    assert options.directory is not None
    ways = {
        "keep": Way(options.directory, KeepAll()),
        "all": Way(options.directory, KeepNothing()),
        "cut": Way(options.directory, Policy()),
    }
    plain, step_of = Plain(), prepared(options)
    takers = [plain.take, *(way.take for way in ways.values())]
    turns = given["turns"]
    for turn in range(ADAPTING_TURNS + turns):
        for taker in takers[turn % 4 :] + takers[: turn % 4]:
            taker(step_of(turn))
    kept_all, _ = newest(ways["keep"])
    rows = {name: measured(way, plain.seconds, turns) for name, way in ways.items()}
    price = given["price_s_per_byte"]
    if price is None:
        moved = rows["all"]["written_bytes"] + rows["all"]["read_bytes"]
        over_s = rows["all"]["seconds"] - rows["all"]["stall_s"] - rows["keep"]["seconds"]
        price = max(0.0, over_s / max(moved, 1))
    kept_peak_bytes = rows["keep"]["peak_bytes"]
    for name in ("all", "cut"):
        told = {**rows[name], "price_s_per_byte": price, "keeps_nothing": name == "all"}
        played = predicted(kept_all, ways[name], told)
        # What is no part of the round: the optimizer, and what comes before the first pack.
        rest_s = rows["keep"]["seconds"] - played["ideal_s"]
        rows[name] |= {
            "predicted_s": played["step_s"] + rest_s,
            "predicted_peak_bytes": played["peak_bytes"]
            + kept_peak_bytes
            - played["kept_peak_bytes"],
            "predicted_written_bytes": played["written_bytes"],
            "predicted_stall_s": played["stall_s"],
            "slot_bytes": played["slot_bytes"],
        }
    return {
        "plain_s": statistics.median(plain.seconds[-turns:]),
        "price_s_per_byte": price,
        "ways": rows,
    }


def measured(way: Way, plain_s: list[float], turns: int) -> dict[str, Any]:
    """Return what one way took, as medians of the turns that count."""
    ratios = [one / plain for one, plain in zip(way.seconds, plain_s, strict=True)][-turns:]
    rates = way.session._hooks._transfer.rates()  # type: ignore[union-attr]  # noqa: SLF001
    return {
        "ratio": statistics.median(ratios),
        "seconds": statistics.median(ratios) * statistics.median(plain_s[-turns:]),
        "peak_bytes": statistics.median(way.peaks[-turns:]),
        "written_bytes": statistics.median(way.written[-turns:]),
        "read_bytes": statistics.median(way.read[-turns:]),
        "stall_s": statistics.median(way.stalled[-turns:]),
        "write_rate": rates.write,
        "read_rate": rates.read,
    }


def measure(options: TrainingOptions, rate: float | None, price: float | None, turns: int) -> Any:
    """Start the process of one row and return what it tells."""
    given = {
        "options": options.to_json(),
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
    parser.add_argument("--models", nargs="+", default=["gpt", "gpt2", "bert", "t5"])
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
                model=model, dtype=arguments.dtype, directory=directory,
                layers=arguments.layers, hidden=arguments.hidden,
                sequence=arguments.sequence, batch=arguments.batch,
            )  # fmt: skip
            price = None
            for share in shares:
                told = measure(
                    options, None if share == 1 else share * rate, price, arguments.turns
                )
                price = told["price_s_per_byte"] if share == shares[0] else price
                rows.append({"model": model, "share": share, **told})
                show(rows[-1])
        if arguments.json is not None:
            keep_figures(arguments.json, Path(__file__).name, words, directory, rate, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
