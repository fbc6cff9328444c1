"""One training step on a GPU, with what autograd saves kept, recomputed, and offloaded.

Llama-style blocks. All ways train the same weights in one process and take turns step by step, so
that all see the same machine. *keep* is plain PyTorch, and *keep again* too: their ratio tells the
noise. *recompute* is `torch.utils.checkpoint` per block, *staged* is ssdtrain through pinned memory
and *gds* the same by GPUDirect Storage, where that works, both with their defaults; *host* is
*staged* with `max_host_bytes`. *save_on_cpu* is PyTorch's own (pinned) and *streamed_to_host* the
same on a stream of its own, as torchtune does it; these two are trained last, in turns with keep.
Told are medians: the time of a step, its ratio to keep's in the same round, and the peak of what
PyTorch has of the device's memory above what was there before the step. All losses must be
bit-equal.

    python benches/gpu_step.py [--dir DIR] [--hidden N] [--layers N] [--dtype NAME] [--ways NAME...]
                               [--rounds N] [--warm-up N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

import ssdtrain

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

from gpu_found import Found, run_step, step_parser
from gpu_llama import Llama
from gpu_modes import HOST_MODES, WAYS, Mode, free_host_bytes, modes

EXIT_NO_GPU = 3

WARM_UP_COUNT = 4
"""Rounds before the timed ones: in them allocators fill up, and offload learns order and rates."""
LATE_WARM_UP_COUNT = 2
"""Of those that copy everything, which learn nothing."""
HOST_SHARE_MAX = 0.4
"""Of the free memory of the machine, for the ways that copy to it: PyTorch may pin twice of it."""
GIB = 1 << 30
HOST_BYTES = 16 * GIB
"""Of the CPU's memory for *host*, or a quarter of what is free, if that is less."""
OWN_SHARE = 0.6
"""Of the time, for all but the two that copy everything to the CPU's memory."""
TINY = {"hidden": 64, "layers": 2, "sequence": 32, "batch": 2, "rounds": 2}
TINY_OFFLOAD = {"min_bytes": 512, "pinned_bytes": 4 << 20}
"""For tests; the smallest saved tensors that go to the disk by default are larger."""


class Lane:
    """One way, and what was seen of it."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.seconds: list[float] = []
        self.peak_bytes: list[int] = []
        self.losses: list[str] = []
        self.left_out = mode.lack()
        """Why it is not trained, if it is not."""

    def turn(self, model: Llama, x: Tensor, *, is_timed: bool) -> None:
        """Train one step; without memory for it, leave the way out from now on."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began_s = perf_counter()
        try:
            loss = self.mode.step(model, x)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            self.left_out = "the GPU has too little memory"
            torch.cuda.empty_cache()
            return
        except ssdtrain.UnsupportedError as error:
            self.left_out = str(error)
            return
        took_s = perf_counter() - began_s
        self.losses.append(float(loss.item()).hex())
        self.peak_bytes.append(torch.cuda.max_memory_allocated() - before)
        if is_timed:
            self.seconds.append(took_s)


def compare(options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Train in turns, and note what was found."""
    if options.tiny:
        vars(options).update(TINY)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    with torch.device("cuda"):
        model = Llama(options.hidden, options.layers).to(dtype)
        x = torch.randn(options.batch, options.sequence, options.hidden, dtype=dtype)
    offload = TINY_OFFLOAD if options.tiny else {}
    host_bytes = min(HOST_BYTES, free_host_bytes() // 4)
    ways = modes(model, folder, offload, host_bytes)
    lanes = {name: Lane(ways[name]) for name in ways if name in {"keep", *options.ways}}
    own = {name: lane for name, lane in lanes.items() if name not in HOST_MODES}
    end_s = monotonic() + options.seconds
    share = OWN_SHARE if len(own) < len(lanes) else 1
    own_end_s = end_s - (1 - share) * options.seconds
    rounds = train((options.warm_up, options.rounds), own_end_s, model, x, own)
    late_keep = Lane(ways["keep"])
    late = {"keep": late_keep} | {name: lanes[name] for name in lanes if name in HOST_MODES}
    if len(late) > 1:
        train((LATE_WARM_UP_COUNT, options.rounds), end_s, model, x, late)
    asked = ("hidden", "layers", "sequence", "batch", "dtype")
    found.figures["asked"] = {name: getattr(options, name) for name in asked}
    found.note("rounds", rounds)
    found.note("device", torch.cuda.get_device_name())
    found.figures["modes"] = {
        name: figures(lane, late_keep if name in HOST_MODES else lanes["keep"])
        for name, lane in lanes.items()
    }
    for name, one in found.figures["modes"].items():
        found.rows.append((name, shown(one)))
    losses = {loss for lane in (*lanes.values(), late_keep) for loss in lane.losses}
    found.note("losses_bit_equal", len(losses) == 1)
    if len(losses) != 1:
        found.fail(f"losses differ between ways or steps: {sorted(losses)}")
    if "staged" in lanes and not lanes["staged"].seconds:
        found.fail(f"staged was not trained: {lanes['staged'].left_out}")
    sessions = {name: lane.mode.session() for name, lane in lanes.items()}
    reports = {name: str(one) for name, one in sessions.items() if one is not None}
    found.figures["reports"] = reports
    found.rows += [(name, line) for name, text in reports.items() for line in text.splitlines()]


def train(
    counts: tuple[int, int], end_s: float, model: Llama, x: Tensor, lanes: dict[str, Lane]
) -> int:
    """Let the ways take turns until the rounds, or the time, are over; return the timed rounds.

    ``counts`` are those of rounds before the timed ones, and of these at most.
    """
    warm_up_count, rounds = counts
    done = 0
    names = list(lanes)
    for number in range(warm_up_count + rounds):
        is_timed = number >= warm_up_count
        if done and monotonic() > end_s:
            break
        # Another one begins each round, so that each comes after each.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            lane = lanes[name]
            if number == 0 and name in HOST_MODES:
                lane.left_out = lack_of_host_memory(lanes["keep"])
            if lane.left_out is None:
                lane.turn(model, x, is_timed=is_timed)
        done += is_timed
    return done


def lack_of_host_memory(keep: Lane) -> str | None:
    """Say why a way that copies to the CPU's memory is left out, if it is."""
    if not keep.peak_bytes:
        return "how much of the CPU's memory it needs is not known, as keep was left out"
    needed, free = keep.peak_bytes[0], free_host_bytes()
    if needed <= free * HOST_SHARE_MAX:
        return None
    return (
        f"it needs {needed / GIB:.1f} GiB of the CPU's memory, of which {free / GIB:.1f} are free"
    )


def figures(lane: Lane, keep: Lane) -> dict[str, Any]:
    """Return what was seen of a way."""
    if lane.left_out is not None or not lane.seconds:
        return {"left_out": lane.left_out or "no time was left"}
    ratio = None
    if len(keep.seconds) == len(lane.seconds):
        # Only steps of the same round saw the same machine.
        ratio = statistics.median(map(float.__truediv__, lane.seconds, keep.seconds))
    session = lane.mode.session()
    return {
        "step_s": statistics.median(lane.seconds),
        "over_keep": ratio,
        "peak_bytes": statistics.median(lane.peak_bytes[-len(lane.seconds) :]),
        "first_peak_bytes": lane.peak_bytes[0],
        "losses": sorted(set(lane.losses)),
        "stats": None if session is None else session.stats.as_dict(),
    }


def shown(one: dict[str, Any]) -> str:
    """Lay a way's figures out in a row."""
    if "left_out" in one:
        return f"left out: {one['left_out']}"
    ratio = "" if one["over_keep"] is None else f" {one['over_keep']:.3f}x"
    text = f"{one['step_s']:.3f} s{ratio}, peak {one['peak_bytes'] / GIB:.2f} GiB"
    stats = one["stats"]
    if stats is not None:
        text += (
            f", {stats['from_gpu_bytes'] / GIB:.2f} GiB from the GPU, "
            f"{stats['to_gpu_bytes'] / GIB:.2f} back, {stats['stall_s']:.3f} s stalled"
        )
        if stats["ring_bytes"]:
            # Not of PyTorch, so no part of the peak.
            text += f", through {stats['ring_bytes'] / GIB:.2f} GiB of the GPU"
    return text


def main(arguments: list[str]) -> int:
    """Compare, print, and return the exit code."""
    parser = step_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each way at most")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP_COUNT, help=f"steps before these ({WARM_UP_COUNT})"
    )
    parser.add_argument("--seconds", type=float, default=600, help="begin no round after these")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="NAME", help=", ".join(WAYS)
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warm_up < 1 or options.hidden % 256:
        parser.error("--rounds and --warm-up must be at least 1, --hidden a multiple of 256")
    if not torch.cuda.is_available():
        message = "there is no GPU that PyTorch can use; `ssdtrain doctor DIR` says more"
        print(message, file=sys.stderr)
        return EXIT_NO_GPU
    return run_step(compare, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
