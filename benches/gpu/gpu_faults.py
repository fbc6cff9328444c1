"""Step of `benches/gpu_check.py`: a process that is killed, an interrupt, and a disk without room.

Faults of single calls are tried by `pytest -m gpu`; these need a process that trains, or sizes of a
real step. Nothing may be left on the disk, and no step may end with other bits.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import torch

import ssdtrain
from gpu_found import Found, run_step, step_parser
from gpu_llama import Llama, use_same_bits

SIZES, TINY_SIZES = (2048, 4, 1024), (64, 2, 32)
"""Hidden, layers, sequence."""
OFFLOAD, TINY_OFFLOAD = {}, {"min_bytes": 512, "pinned_bytes": 4 << 20}
BOUND_BYTES, TINY_BOUND_BYTES = 128 << 20, 32 << 10
END_S_MAX = 30
"""A process that was interrupted ends sooner, or hangs."""
READY = "trains"
STEPS = 3


def loss_of(model: Llama, x: torch.Tensor) -> str:
    """Train a step; return the bits of the loss and of the gradients' sum."""
    model.zero_grad()
    loss = model(x)
    loss.backward()
    total = sum(float(one.grad.double().abs().sum()) for one in model.parameters())
    return f"{loss.item().hex()} {total.hex()}"


def made(options: argparse.Namespace) -> tuple[Llama, torch.Tensor]:
    """Return a model and what goes in."""
    hidden, layers, sequence = TINY_SIZES if options.tiny else SIZES
    torch.manual_seed(0)
    use_same_bits()
    with torch.device("cuda"):
        return Llama(hidden, layers), torch.randn(2, sequence, hidden)


def train_for_ever(options: argparse.Namespace) -> None:
    """In a child: say when the first step has ended, and go on until a signal comes."""
    # A shell has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, x = made(options)
    given = TINY_OFFLOAD if options.tiny else OFFLOAD
    with ssdtrain.offload(options.dir, **given):
        loss_of(model, x)
        print(READY, flush=True)
        while True:
            loss_of(model, x)


def end_by(number: signal.Signals, options: argparse.Namespace, folder: Path) -> tuple[int, float]:
    """End a process that trains; return its exit code and the seconds that this took."""
    command = [*options.python, __file__, "--child", "--dir", str(folder)]
    command += ["--tiny"] if options.tiny else []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.readline().strip()
    if first != READY:
        raise RuntimeError(f"the process that is to be ended did not train: {child.communicate()}")
    began_s = monotonic()
    child.send_signal(number)
    try:
        child.communicate(timeout=END_S_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
    return child.returncode, monotonic() - began_s


def look(options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Try each fault."""
    for name, number, codes in (
        ("killed", signal.SIGKILL, {-signal.SIGKILL}),
        # Python tells of an interrupt by its traceback, or ends as by the signal.
        ("interrupted", signal.SIGINT, {1, 130, -signal.SIGINT}),
    ):
        code, seconds = end_by(number, options, folder)
        left = sorted(os.listdir(folder))
        told = {"exit_code": code, "seconds": seconds, "left": left}
        found.note(name, told, f"ended with {code} in {seconds:.1f} s, {len(left)} files left")
        if left:
            found.fail(f"a process that was {name} left {left} behind")
        if code not in codes:
            found.fail(f"a process that was {name} ended with {code}, not one of {sorted(codes)}")
    model, x = made(options)
    plain, again = loss_of(model, x), loss_of(model, x)
    bound = TINY_BOUND_BYTES if options.tiny else BOUND_BYTES
    given = TINY_OFFLOAD if options.tiny else OFFLOAD
    with ssdtrain.offload(folder, max_disk_bytes=bound, direct_io="optional", **given) as session:
        losses = {loss_of(model, x) for _ in range(STEPS)}
    is_same = losses == {plain} if plain == again else None
    words = {True: "bit-equal", False: "DIFFERENT", None: "two plain runs differ here"}[is_same]
    stats = session.stats
    told = {"bit_equal": is_same, "reserved_bytes": stats.disk_reserved_bytes}
    told |= {"from_gpu_bytes": stats.from_gpu_bytes, "written_bytes": stats.bytes_written}
    written = f"{stats.bytes_written >> 10} of {stats.from_gpu_bytes >> 10} KiB written"
    found.note("disk_without_room", told, f"{words}, {written}")
    if stats.disk_reserved_bytes > bound:
        found.fail(f"{stats.disk_reserved_bytes} bytes on the disk, of which {bound} were allowed")
    if stats.bytes_written >= stats.from_gpu_bytes:
        found.fail("the bound on the disk was not reached, so it was not tried")
    if is_same is False:
        found.fail("with a bound on the disk a step gave other bits")


def main(arguments: list[str]) -> int:
    """Run the step, or be one of its children."""
    parser = step_parser(__doc__)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        train_for_ever(options)
    return run_step(look, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
