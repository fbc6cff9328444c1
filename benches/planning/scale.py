"""How long a plan for some 60,000 kernels takes, and what it is worth; TERAIO's beside it.

    python benches/planning/scale.py [--micro-batches 7] [--teraio] [--json FILE]

The step is Llama-3-70B's forward and backward, so many micro-batches of them, and AdamW, derived
from `meta` tensors for one GPU that would have to stream everything: 80 GiB, drives behind a whole
PCIe 5 bus. TERAIO (arXiv 2506.06472) plans Llama-3-70B too, and says 31 to 397 s; its batch and
sequence are not given here, since only the number of kernels is meant to be alike. Both plans are
judged by one simulator. Times are of the process's CPU, which other processes do not lengthen much.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from ssdtrain._core import StepPlan
from ssdtrain.planning.derive import Optimizer, Roofline, derive
from ssdtrain.planning.models import builder
from ssdtrain.planning.profiles import GPUS, PCIE_BYTES_PER_S
from ssdtrain.planning.solve import Device, Step

GPU = GPUS["h100"]
COMPUTE_SHARE, MEMORY_SHARE = 0.6, 0.8


def timed(name: str, make: Callable[[], StepPlan]) -> dict[str, Any]:
    """Make a plan and tell what it took and what it is worth."""
    wall, used = perf_counter(), process_time()
    plan = make()
    told = {
        "plan": name,
        "cpu_seconds": round(process_time() - used, 3),
        "wall_seconds": round(perf_counter() - wall, 3),
        "step_seconds": round(plan.step_s, 4),
        "stall_seconds": round(plan.stall_s, 4),
        "above_bound": round(plan.step_s / plan.bound_s - 1, 4),
        "moves": len(plan.moves),
        "written_bytes": plan.moved_bytes[0],
    }
    print(
        f"{name:28} {told['cpu_seconds']:9.3f} s of CPU {told['wall_seconds']:9.3f} s;"
        f" step {plan.step_s:8.3f} s, stall {plan.stall_s:8.3f} s,"
        f" {told['above_bound']:.1%} above the bound",
        flush=True,
    )
    return told


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--micro-batches", type=int, default=7)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--memory-gib", type=int, default=80)
    parser.add_argument("--teraio", action="store_true", help="its algorithm 1 as well: minutes")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args(words)
    roofline = Roofline(
        tensor_flops=GPU.tensor_flops * COMPUTE_SHARE,
        single_flops=GPU.single_flops * COMPUTE_SHARE,
        memory_bytes_per_s=GPU.memory_bytes_per_s * MEMORY_SHARE,
    )
    build = builder(options.model, 1, options.sequence, torch.bfloat16)
    adamw = Optimizer(states=2, state_bytes=None)
    trace = derive(options.model, build, roofline, adamw, options.micro_batches)
    bus = PCIE_BYTES_PER_S[GPU.pcie_generation]
    device = Device(
        memory_bytes=options.memory_gib << 30,
        write_bytes_per_s=bus,
        read_bytes_per_s=bus,
        bus_bytes_per_s=bus,
    )
    step = Step(trace)
    print(
        f"{len(trace.kernels):,} kernels, {len(trace.tensors):,} tensors;"
        f" {max(step.live_bytes()) / 2**30:.0f} GiB live in {options.memory_gib} GiB;"
        f" a step without waits takes {step.ideal_seconds():.3f} s"
    )
    plans = [
        timed("without a plan", lambda: step.judged(device, "keep")),
        timed("SSDTrain's cut", lambda: step.judged(device, "ssdtrain")),
        timed("first plan", lambda: step.least_step(device, drafts=1)),
        timed("four drafts", lambda: step.least_step(device, drafts=4)),
    ]
    if options.teraio:
        plans.append(timed("TERAIO's algorithm 1", lambda: step.judged(device, "teraio")))
    if options.json:
        figures = {
            "model": options.model,
            "kernels": len(trace.kernels),
            "tensors": len(trace.tensors),
            "memory_bytes": device.memory_bytes,
            "ideal_seconds": step.ideal_seconds(),
            "machine": platform.platform(),
            "plans": plans,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
