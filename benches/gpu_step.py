"""One training step on a GPU: what autograd saves is kept, made again, or taken elsewhere.

Llama-style blocks. All ways train the same weights in one process and take turns step by step, so
that all see the same machine:

    keep            plain PyTorch; keep again too, and their ratio tells the noise
    recompute       torch.utils.checkpoint for each block
    selective       the same, but results of matrix products and of attention are kept
    rematerialize   ssdtrain.offload(): saved tensors are made again, nothing is moved
    host            ssdtrain.offload(max_host_bytes=..., rematerialize="never")
    both            ssdtrain.offload(max_host_bytes=...)
    bound           the same with max_device_bytes: 0.45 of keep's peak (12 GiB at width 4096)
    low bound       the same with recompute's peak, measured in the first round
    disk            ssdtrain.offload(DIR, max_host_bytes=...)
    gds             ssdtrain.offload(DIR, gds="required"), where GPUDirect Storage works
    save_on_cpu     torch.autograd.graph.save_on_cpu, pinned

Told are medians: the time of a step, the peak of what PyTorch has of the device's memory above what
was there before the step, and for both the ratio to keep's in the same round. Of ssdtrain also what
a timed step made again, copied and wrote on average, how long the GPU and Python waited, and in
which step the plan was a new one for the last time. The JSON has a row for each of its steps.

The ways of torch join keep in the first round and in the two before the timed ones. All losses must
be bit-equal. At the end a few steps of each way of ssdtrain run with deterministic algorithms, and
all gradients must have the bits of keep.

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
from gpu_modes import WAYS, Bounded, Mode, Offload, free_host_bytes, modes
from ssdtrain.sizes import shown_bytes

EXIT_NO_GPU = 3

WARM_UP_COUNT = 8
"""Rounds before the timed ones: ssdtrain proves recipes in two, and learns order and rates."""
PLAIN_WARM_UP_COUNT = 2
"""Of those, for the ways of torch: allocators fill up."""
EQUAL_COUNT = 5
"""Steps whose gradients are compared. Deterministic attention may save other tensors than the timed
steps did; then recipes are proved in two of these steps, and used after them."""
HOST_SHARE_MAX = 0.4
"""Of the free memory of the machine, for *save_on_cpu*: PyTorch may pin twice of it."""
GIB = 1 << 30
HOST_BYTES = 16 * GIB
"""Of the CPU's memory for each way that has a plan for it, or an eighth of what is free."""
TINY = {"hidden": 64, "layers": 2, "sequence": 32, "batch": 2, "rounds": 2}
TINY_HOST_BYTES = 16 << 20
TINY_OFFLOAD = {"min_bytes": 512, "pinned_bytes": 4 << 20}
"""For tests; the smallest saved tensors that go to the disk by default are larger."""


class Lane:
    """One way, and what was seen of it."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.seconds: dict[int, float] = {}
        """By round, of the timed ones."""
        self.peak_bytes: dict[int, int] = {}
        """By round."""
        self.losses: set[str] = set()
        self.is_bound = not isinstance(mode, Bounded)
        """True unless its bound waits for the peak of another way."""
        self.log = mode.new_log() if self.is_bound else None
        self.left_out = mode.lack() if self.is_bound else None
        """Why it is not trained, if it is not."""

    def bind(self, lanes: dict[str, Lane]) -> None:
        """Set its bound by the last peak of the way that it is compared with."""
        mode = self.mode
        assert isinstance(mode, Bounded)
        other = lanes.get(mode.other)
        if other is None or not other.peak_bytes:
            self.left_out = f"its bound is a share of the peak of {mode.other}, which is not known"
            return
        mode.bind(list(other.peak_bytes.values())[-1])
        self.is_bound, self.log = True, mode.new_log()

    def turn(self, model: Llama, x: Tensor, number: int, *, is_timed: bool) -> None:
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
        self.losses.add(float(loss.item()).hex())
        self.peak_bytes[number] = torch.cuda.max_memory_allocated() - before
        if is_timed:
            self.seconds[number] = took_s
        if self.log is not None:
            self.log.note(took_s, self.peak_bytes[number])


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
    host_bytes = TINY_HOST_BYTES if options.tiny else min(HOST_BYTES, free_host_bytes() // 8)
    ways = modes(folder, offload, host_bytes)
    lanes = {name: Lane(ways[name]) for name in ways if name in {"keep", *options.ways}}
    rounds = train(options, model, x, lanes)
    asked = ("hidden", "layers", "sequence", "batch", "dtype", "warm_up")
    found.figures["asked"] = {name: getattr(options, name) for name in asked}
    found.note("device", torch.cuda.get_device_name())
    found.note("rounds", rounds, f"{rounds}, after {options.warm_up} to warm up")
    found.figures["modes"] = {name: figures(lane, lanes["keep"]) for name, lane in lanes.items()}
    for name, one in found.figures["modes"].items():
        found.rows.append((name, shown(one)))
        if one.get("left_out") and isinstance(lanes[name].mode, Offload) and name != "gds":
            found.fail(f"{name} was not trained: {one['left_out']}")
    losses = {loss for lane in lanes.values() for loss in lane.losses}
    found.note("losses_bit_equal", len(losses) == 1)
    if len(losses) != 1:
        found.fail(f"losses differ between ways or steps: {sorted(losses)}")
    compare_gradients(model, x, lanes, found)


def train(options: argparse.Namespace, model: Llama, x: Tensor, lanes: dict[str, Lane]) -> int:
    """Let the ways take turns until the rounds, or the time, are over; return the timed rounds."""
    end_s = monotonic() + options.seconds
    done = 0
    names = list(lanes)
    for number in range(options.warm_up + options.rounds):
        is_timed = number >= options.warm_up
        if done and monotonic() > end_s:
            break
        # Another one begins each round, so that each comes after each.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            lane = lanes[name]
            is_plain = name != "keep" and not isinstance(lane.mode, Offload)
            # In the first round their peaks are measured.
            if is_plain and 0 < number < options.warm_up - PLAIN_WARM_UP_COUNT:
                continue
            if lane.left_out is None and not lane.is_bound:
                lane.bind(lanes)
            if name == "save_on_cpu" and not lane.peak_bytes:
                lane.left_out = lack_of_host_memory(lanes["keep"])
            if lane.left_out is None:
                lane.turn(model, x, number, is_timed=is_timed)
        done += is_timed
    return done


def lack_of_host_memory(keep: Lane) -> str | None:
    """Say why a way that copies to the CPU's memory is left out, if it is."""
    if not keep.peak_bytes:
        return "how much of the CPU's memory it needs is not known, as keep was left out"
    needed, free = max(keep.peak_bytes.values()), free_host_bytes()
    if needed <= free * HOST_SHARE_MAX:
        return None
    return (
        f"it needs {needed / GIB:.1f} GiB of the CPU's memory, of which {free / GIB:.1f} are free"
    )


def compare_gradients(model: Llama, x: Tensor, lanes: dict[str, Lane], found: Found) -> None:
    """Compare the gradients of the ways of ssdtrain with keep's, bit by bit."""
    torch.use_deterministic_algorithms(True)
    # Filling what is empty would hide what is not written, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    trained = {name: lane for name, lane in lanes.items() if lane.seconds and not lane.left_out}
    if "keep" not in trained:
        return
    expected: list[Tensor] = []

    def is_same(lane: Lane) -> bool:
        lane.turn(model, x, -1, is_timed=False)
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        if not expected:
            expected.extend(gradient.clone() for gradient in gradients)
        return all(map(torch.equal, gradients, expected))

    if not all(is_same(trained["keep"]) for _ in range(2)):
        found.note("gradients_bit_equal", None, "two plain steps differ on this GPU")
        return
    for name, lane in trained.items():
        if lane.log is None:
            continue
        same = all([is_same(lane) for _ in range(EQUAL_COUNT)])  # noqa: C419 - each trains
        if lane.left_out is not None:
            found.fail(f"{name}: gradients were not compared: {lane.left_out}")
            continue
        away = {key: lane.log.means(1)[key] for key in ("bytes_rematerialized", "bytes_offloaded")}
        found.figures["modes"][name] |= {"gradients_bit_equal": same, "away_in_these": away}
        again, moved = map(shown_bytes, away.values())
        words = "bit-equal" if same else "DIFFERENT"
        found.rows.append((f"gradients of {name}", f"{words}; {again} made again, {moved} away"))
        if not same:
            found.fail(f"{name}: gradients have other bits than those of keep")


def figures(lane: Lane, keep: Lane) -> dict[str, Any]:
    """Return what was seen of a way."""
    if lane.left_out is not None or not lane.seconds:
        return {"left_out": lane.left_out or "no time was left"}
    # Only steps of the same round saw the same machine.
    shared = lane.seconds.keys() & keep.seconds.keys()
    result: dict[str, Any] = {
        "step_s": statistics.median(lane.seconds.values()),
        "over_keep": median_ratio(lane.seconds, keep.seconds),
        "peak_bytes": statistics.median(lane.peak_bytes[number] for number in lane.seconds),
        "peak_over_keep": median_ratio({it: lane.peak_bytes[it] for it in shared}, keep.peak_bytes),
        "losses": sorted(lane.losses),
    }
    if lane.log is not None:
        result |= {
            "per_step": lane.log.means(len(lane.seconds)),
            "new_plan_step": lane.log.new_plan_step,
            "step_count": len(lane.peak_bytes),
            "stats": lane.log.stats(),
            "report": lane.log.report(),
            "steps": lane.log.rows,
        }
    return result


def median_ratio(these: dict[int, float], others: dict[int, float]) -> float | None:
    """Return the median of the ratios of the rounds that both have, if there are any."""
    ratios = [these[number] / others[number] for number in these.keys() & others.keys()]
    return statistics.median(ratios) if ratios else None


def shown(one: dict[str, Any]) -> str:
    """Lay a way's figures out in a row."""
    if "left_out" in one:
        return f"left out: {one['left_out']}"
    times, peaks = (
        "" if (ratio := one[name]) is None else f" {ratio:.3f}x"
        for name in ("over_keep", "peak_over_keep")
    )
    text = f"{one['step_s']:.3f} s{times}, peak {shown_bytes(one['peak_bytes'])}{peaks}"
    if "per_step" not in one:
        return text
    mean, stats = one["per_step"], one["stats"]
    if stats["device_bound_bytes"]:
        text += f", bound missed by {shown_bytes(stats['device_excess_bytes'])} in the last step"
    again, copied, written = (
        shown_bytes(mean[name])
        for name in ("bytes_rematerialized", "from_gpu_bytes", "bytes_written")
    )
    return (
        f"{text}; a step: {again} made again, {copied} copied, {written} written, waits of "
        f"{mean['gpu_stall_s']:.4f} s (GPU) and {mean['stall_s']:.4f} s (Python); last new plan "
        f"in step {one['new_plan_step']} of {one['step_count']}"
    )


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
