"""What a step of AdamW costs whose state lies on the disk.

Six ways take turns, in another order in each round:

    plain       the plain optimizer, in a process of its own that never imports ssdtrain
    imported    the plain optimizer in this process, where the ways below are
    offloaded   the offloaded optimizer
    undoing     the same with undo=True
    traffic     the same reads and writes around an update that does nothing
    beside      the plain step, and this traffic in another thread; neither waits for the other

No offloaded step can take less than the longer of traffic and plain step. Both take longer beside
each other, where they share cores and the bandwidth of memory.

With --masters the parameters are bfloat16 ones with float32 masters, and the plain way is the loop
that keeps these in memory.

With --schedules a model is trained instead, plainly in both processes and with each schedule of the
updates in turns. What a step takes beyond forward and backward of a plain run is its exposed time.

    python benches/training/optimizer_step.py [--dir DIR] [--parameters N] [--rounds N] [--json F]
        [--masters] [--schedules] [--rows N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

import ssdtrain
from ssdtrain.demo.machine import machine_facts
from turns import Child, answer, ratio

WIDTH = 2048
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
}


SCHEDULES = ("step", "backward")
STEPS_PER_TURN = 3
"""Of each way in each round, after one that only leaves its updates to the first of these."""


class Idle(torch.optim.AdamW):
    """Makes the state of AdamW in the first step, and updates nothing in the others."""

    def step(self, closure: Any = None) -> Any:
        """Make the state, or do nothing."""
        if any(len(self.state[param]) == 0 for param in self.param_groups[0]["params"]):
            return super().step(closure)
        return None


class MasterLoop:
    """Float32 masters of bfloat16 parameters, in memory, as users write it."""

    def __init__(self, params: list[Parameter], **options: Any) -> None:
        self.params = params
        self.masters = [Parameter(param.detach().float()) for param in params]
        self.inner = torch.optim.AdamW(self.masters, **options)

    def step(self) -> None:
        """Update the masters, and round them."""
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self.inner.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
                master.grad = None


def parameters(count: int, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Return square weights with gradients, at least ``count`` numbers."""
    generator = torch.Generator().manual_seed(0)

    def made() -> Tensor:
        return torch.randn(WIDTH, WIDTH, generator=generator).to(dtype)

    weights = [Parameter(made()) for _ in range(-(-count // WIDTH**2))]
    for weight in weights:
        weight.grad = made()
    return weights


def weights_of(optimizer: Any) -> list[Parameter]:
    """Return what an optimizer, or the loop of masters, updates."""
    if isinstance(optimizer, MasterLoop):
        return optimizer.params
    params: list[Parameter] = optimizer.param_groups[0]["params"]
    return params


def plain_optimizer(options: dict[str, Any], given: argparse.Namespace) -> Any:
    """Return what a step of the plain program updates with."""
    dtype = torch.bfloat16 if given.masters else torch.float32
    weights = parameters(given.parameters, dtype)
    return (MasterLoop if given.masters else torch.optim.AdamW)(weights, **options)


def run_child(given: argparse.Namespace) -> None:
    """Answer each line with the seconds of plain steps: the program that never imports ssdtrain."""
    if given.child == "schedules":
        module, x = model_of(given), input_of(given)
        optimizer: Any = torch.optim.AdamW(module.parameters(), fused=True)
        answer(lambda _: turn_of(module, optimizer, x))
        return
    optimizer = plain_optimizer(KINDS[given.child], given)

    def timed(_: str) -> dict[str, float]:
        began = perf_counter()
        optimizer.step()
        return {"seconds": perf_counter() - began}

    answer(timed)


def measure(
    kind_name: str, directory: Path, given: argparse.Namespace, program: Child
) -> dict[str, float]:
    """Return medians of seconds per step, and the ratios within each round."""
    options = KINDS[kind_name]
    dtype = torch.bfloat16 if given.masters else torch.float32
    ours = {
        "buffer_bytes": given.buffer_bytes,
        "master_dtype": torch.float32 if given.masters else None,
    }

    def made(kind: type[torch.optim.AdamW] = torch.optim.AdamW, **more: Any) -> Any:
        optimizer = kind(parameters(given.parameters, dtype), **options)
        return ssdtrain.offload_optimizer(optimizer, directory, **ours, **more)

    plain, beside = plain_optimizer(options, given), plain_optimizer(options, given)
    offloaded, undoing, traffic = made(), made(undo=True), made(Idle)

    def step_beside_traffic() -> None:
        with ThreadPoolExecutor(1) as other:
            pending = other.submit(traffic.step)
            beside.step()
            pending.result()

    steps: dict[str, Callable[[], Any]] = {
        "plain": lambda: program.ask("step")["seconds"],
        "imported": plain.step,
        "offloaded": offloaded.step,
        "undoing": undoing.step,
        "traffic": traffic.step,
        "beside": step_beside_traffic,
    }
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(given.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = perf_counter()
            found = steps[name]()
            took_s = perf_counter() - began
            # The first step makes the state.
            if number:
                times[name].append(found if name == "plain" else took_s)
    longer = [max(pair) for pair in zip(times["plain"], times["traffic"], strict=True)]
    stats = offloaded.offload_stats
    weights = weights_of(plain)
    for other in (offloaded, undoing, beside):
        if not all(map(torch.equal, weights, weights_of(other))):
            raise AssertionError("the weights differ from those of the plain run")
    count = sum(weight.numel() for weight in weights)
    return {
        "state_bytes": float(stats.on_disk_bytes + stats.resident_bytes),
        "resident_bytes_after_step": float(stats.resident_bytes),
        **{f"{name}_s": statistics.median(took) for name, took in times.items()},
        "over_plain": ratio(times["offloaded"], times["plain"]),
        "over_imported": ratio(times["offloaded"], times["imported"]),
        "over_traffic": ratio(times["offloaded"], times["traffic"]),
        "over_longer": ratio(times["offloaded"], longer),
        "over_beside": ratio(times["offloaded"], times["beside"]),
        "undoing_over_offloaded": ratio(times["undoing"], times["offloaded"]),
        "written_bytes_per_step": stats.written_bytes / stats.step_count,
        "read_bytes_per_step": stats.read_bytes / stats.step_count,
        "written_bytes_per_parameter": stats.written_bytes / stats.step_count / count,
        # The first step makes the state, and reads nothing.
        "read_bytes_per_parameter": stats.read_bytes / (stats.step_count - 1) / count,
        "stall_share": stats.stall_s / stats.step_s,
    }


def input_of(given: argparse.Namespace) -> Tensor:
    """Return the model's input."""
    return torch.randn(given.rows, WIDTH, generator=torch.Generator().manual_seed(0))


def model_of(given: argparse.Namespace) -> nn.Module:
    """Return a model of that many parameters."""
    torch.manual_seed(0)
    layer_count = -(-given.parameters // WIDTH**2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layer_count)))


def turn_of(module: nn.Module, optimizer: Any, x: Tensor) -> dict[str, float]:
    """Train the steps of a turn; return the seconds of one, and of its forward and backward."""
    _train(module, optimizer, x)
    began = perf_counter()
    compute_s = sum(_train(module, optimizer, x) for _ in range(STEPS_PER_TURN))
    took_s = perf_counter() - began
    return {"seconds": took_s / STEPS_PER_TURN, "compute_s": compute_s / STEPS_PER_TURN}


def measure_schedules(
    directory: Path, given: argparse.Namespace, program: Child
) -> dict[str, float]:
    """Return medians of seconds per step of a model, in all and beyond forward and backward."""
    x = input_of(given)
    ways: dict[str, tuple[nn.Module, Any]] = {}
    for name in ("imported", *SCHEDULES):
        module = model_of(given)
        optimizer: Any = torch.optim.AdamW(module.parameters(), fused=True)
        if name != "imported":
            ssdtrain.offload_optimizer(
                optimizer, directory, overlap=name, buffer_bytes=given.buffer_bytes
            )
        ways[name] = module, optimizer
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ("plain", *ways)}
    for number in range(given.rounds + 1):
        first = number % len(turns)
        for name in [*turns, *turns][first : first + len(turns)]:
            found = program.ask("turn") if name == "plain" else turn_of(*ways[name], x)
            # The first steps make the state.
            if number:
                turns[name].append(found)
    weights = [dict(module.state_dict()) for module, _ in ways.values()]
    if any(not torch.equal(one[key], weights[0][key]) for one in weights[1:] for key in one):
        raise AssertionError("the weights differ from those of the plain run")
    times = {name: [one["seconds"] for one in found] for name, found in turns.items()}

    def beyond(base: str) -> dict[str, list[float]]:
        computed = [one["compute_s"] for one in turns[base]]
        return {
            name: [all_s - compute_s for all_s, compute_s in zip(took, computed, strict=True)]
            for name, took in times.items()
        }

    exposed, over_imported = beyond("plain"), beyond("imported")
    return {
        "forward_and_backward_s": statistics.median(one["compute_s"] for one in turns["plain"]),
        "imported_forward_and_backward_s": statistics.median(
            one["compute_s"] for one in turns["imported"]
        ),
        **{f"{name}_s": statistics.median(took) for name, took in times.items()},
        **{f"{name}_over_plain": ratio(took, times["plain"]) for name, took in times.items()},
        **{f"{name}_exposed_s": statistics.median(one) for name, one in exposed.items()},
        **{
            f"{name}_exposed_over_imported_s": statistics.median(one)
            for name, one in over_imported.items()
        },
        "backward_over_step_exposed": ratio(exposed["backward"], exposed["step"]),
    }


def _train(module: nn.Module, optimizer: Any, x: Tensor) -> float:
    """Make a step of training; return the seconds of its forward and backward."""
    began = perf_counter()
    module(x).square().mean().backward()
    took_s = perf_counter() - began
    optimizer.step()
    optimizer.zero_grad()
    return took_s


def _print_steps(rows: dict[str, dict[str, float]]) -> None:
    print(
        "| optimizer | state, MiB | plain, s | traffic alone, s | both beside each other, s | "
        "offloaded, s | over plain | over imported | over the longer of plain and traffic | "
        "over both beside each other | with undo over without | bytes of a parameter each way |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for name, row in rows.items():
        print(
            f"| {name} | {row['state_bytes'] / 2**20:.0f} | {row['plain_s']:.3f} | "
            f"{row['traffic_s']:.3f} | {row['beside_s']:.3f} | {row['offloaded_s']:.3f} | "
            f"{row['over_plain']:.2f} | {row['over_imported']:.2f} | {row['over_longer']:.2f} | "
            f"{row['over_beside']:.2f} | "
            f"{row['undoing_over_offloaded']:.2f} | "
            f"{row['written_bytes_per_parameter']:.3f}, {row['read_bytes_per_parameter']:.3f} |"
        )


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a directory on a local file system")
    parser.add_argument("--parameters", type=int, default=64 << 20, help="numbers in the model")
    parser.add_argument("--buffer-bytes", default="256MiB", help="of ssdtrain.offload_optimizer")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each way")
    parser.add_argument("--masters", action="store_true", help="of bfloat16 parameters")
    parser.add_argument("--schedules", action="store_true", help="train a model, on each schedule")
    parser.add_argument("--rows", type=int, default=2048, help="of the model's input")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        run_child(options)
        return 0
    if options.masters and options.schedules:
        parser.error("--masters measures steps alone, without --schedules")
    if options.rounds < 1 or options.parameters < 1:
        parser.error("--rounds and --parameters must be at least 1")
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as directory:
        rows = {}
        for name in ("schedules",) if options.schedules else KINDS:
            program = Child("plain", [__file__, *arguments, "--child", name], is_without=True)
            if options.schedules:
                rows[name] = measure_schedules(Path(directory), options, program)
            else:
                rows[name] = measure(name, Path(directory), options, program)
            program.end()
        if options.schedules:
            for name, seconds in rows["schedules"].items():
                print(f"{name}: {seconds:.3f}")
        else:
            _print_steps(rows)
    if options.json is not None:
        machine = machine_facts(options.dir) | {"directory": None}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = {"date": date, "machine": machine, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
