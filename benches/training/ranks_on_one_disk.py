"""Whether processes that share a disk share its rate, and what they lose by sharing it.

Each process is a rank of one thread, and does one of two things that wait for the disk alone:
`state` is a step of a fused AdamW whose state is on the disk; `activations` is a forward and
a backward whose saved tensors are eight times what the bound leaves in memory. In each turn every
rank runs alone, and then all of them begin together; the order rotates.

*Slower over faster* is how much longer the last rank took than the first one when all ran. *Over
the sum* is the time until the last one had ended, over the sum of what each took alone: 1 is a disk
that is used as well by all as by one, less one that a single rank does not fill.

With --share a control group (blkio) gives all ranks together that share of the disk's rate; only
root may make one.

    python benches/training/ranks_on_one_disk.py [--dir DIR] [--ranks N] [--work state activations]
        [--share 0.2] [--turns N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn import Parameter

import ssdtrain
from never_worse import disk_rate, throttled
from turns import Child, answer, parser_of, started, write_record

WIDTH = 2048
"""Of square tensors of 16 MiB."""
WEIGHTS = 8
"""With 32 MiB of state each."""
OPERATIONS = 24
"""Which save a tensor each."""
BOUND_BYTES = 3 * 16 << 20
WARMING_TURNS = 2
WORK = ("state", "activations")


def state(directory: Path) -> Callable[[], object]:
    """Return a step of an optimizer whose state is on the disk."""
    weights = [Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(WEIGHTS)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    ssdtrain.offload_optimizer(optimizer, directory, buffer_bytes="128MiB")
    return optimizer.step


def activations(directory: Path) -> Callable[[], object]:
    """Return a forward and backward that save much more than may stay in memory."""
    first = torch.randn(WIDTH, WIDTH, requires_grad=True)

    @ssdtrain.offload(directory, max_resident_bytes=BOUND_BYTES)
    def step() -> None:
        x = first
        for _ in range(OPERATIONS):
            x = x.abs()  # saves what it is given, and is shorter than a write of it
        x.sum().backward()  # type: ignore[no-untyped-call]
        first.grad = None

    return step


def child(options: argparse.Namespace) -> int:
    """Answer each line with the seconds of one step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = {"state": state, "activations": activations}[options.child](options.dir)

    def timed(_: str) -> dict[str, float]:
        began_s = perf_counter()
        step()
        return {"seconds": perf_counter() - began_s}

    answer(timed)
    return 0


def turn_of(ranks: list[Child], number: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each rank alone, and of each when all begin together."""
    alone = [0.0] * len(ranks)
    together: list[float] = []
    for place in range(len(ranks) + 1):
        which = (place + number) % (len(ranks) + 1)
        if which < len(ranks):
            alone[which] = ranks[which].ask("step")["seconds"]
            continue
        for rank in ranks:
            rank.tell("step")
        together = [rank.hear()["seconds"] for rank in ranks]
    return alone, together


def measure(ranks: list[Child], turns: int) -> dict[str, Any]:
    """Return medians over the turns."""
    rows = [turn_of(ranks, number) for number in range(WARMING_TURNS + turns)][WARMING_TURNS:]
    unequal = [max(together) / min(together) for _, together in rows]
    over_sum = [max(together) / sum(alone) for alone, together in rows]
    alone_s, together_s = (
        [statistics.median(each) for each in zip(*one, strict=True)]
        for one in zip(*rows, strict=True)
    )
    return {
        "alone_s": alone_s,
        "together_s": together_s,
        "slower_over_faster": statistics.median(unequal),
        "slower_over_faster_worst": max(unequal),
        "over_sum": statistics.median(over_sum),
    }


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--share", type=float, help="of the disk's rate, for all ranks together")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.ranks < 2 or options.turns < 1:
        parser.error("--ranks must be at least 2, and --turns at least 1")
    return options


def main(words: list[str] | None = None) -> int:
    """Measure each kind of work, and print a table."""
    options = parse(words)
    if options.child:
        return child(options)
    place = options.dir or Path.cwd()
    rate = None if options.share is None else options.share * disk_rate(str(place))
    found: dict[str, Any] = {"rate_bytes_per_s": rate, "work": {}}
    print("work         rank  alone, s  together, s  slower over faster (worst)  over the sum")
    for work in options.work:
        names = [(f"rank {number}", work) for number in range(options.ranks)]
        with (
            throttled(str(place), rate) if rate else nullcontext(),
            started(names, __file__, [], place) as (ranks, _),
        ):
            figures = found["work"][work] = measure(ranks, options.turns)
        for number, pair in enumerate(zip(figures["alone_s"], figures["together_s"], strict=True)):
            line = f"{work:12s} {number:4d}  {pair[0]:8.3f}  {pair[1]:11.3f}"
            if number == 0:
                line += (
                    f"  {figures['slower_over_faster']:18.2f}"
                    f" ({figures['slower_over_faster_worst']:.2f})  {figures['over_sum']:12.2f}"
                )
            print(line, flush=True)
    write_record(options, ("ranks", "turns", "share"), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
