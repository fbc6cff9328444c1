"""Step of `benches/gpu_check.py`: training at real sizes, kept and offloaded, bit by bit.

Losses, gradients and weights of a few steps with an optimizer, with the operators of PyTorch that
give the same bits each time. Each kind is first trained twice without ssdtrain: if those runs
differ, nothing can be said of it here, and that is told. Then it is trained with a directory, and
without one with all saved tensors made again that can be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ssdtrain
from gpu_found import Found, run_step, step_parser
from gpu_llama import Llama, recomputed, use_same_bits

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": True},
    "dropout": {"dtype": torch.bfloat16, "dropout": 0.1},
    "recompute": {"dtype": torch.bfloat16, "dropout": 0.1, "run": recomputed},
}
SIZES = {"hidden": 2048, "layers": 4, "sequence": 1024, "batch": 4}
TINY_SIZES = {"hidden": 64, "layers": 2, "sequence": 32, "batch": 2}
TINY_OFFLOAD = {"min_bytes": 512, "pinned_bytes": 4 << 20}
STEPS = 5
"""In two of them recipes are proved, and the next ones use them."""


def train(sizes: dict[str, int], kind: dict[str, Any]) -> list[Tensor]:
    """Return losses, gradients and weights, on the CPU."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Llama(sizes["hidden"], sizes["layers"], kind.get("dropout", 0.0)).to(kind["dtype"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[Tensor] = []
    for _ in range(STEPS):
        shape = (sizes["batch"], sizes["sequence"], sizes["hidden"])
        x = torch.randn(shape, device="cuda", dtype=kind["dtype"])
        with torch.autocast("cuda", torch.bfloat16, enabled=kind.get("autocast", False)):
            loss = model(x, run=kind.get("run"))
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().cpu())
        if len(seen) == STEPS:
            seen += [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        optimizer.zero_grad()
    return [*seen, *(one.detach().cpu() for one in model.parameters())]


def look(options: argparse.Namespace, folder: Path, found: Found) -> None:
    """Compare every kind."""
    use_same_bits()
    sizes = TINY_SIZES if options.tiny else SIZES
    given: dict[str, Any] = TINY_OFFLOAD if options.tiny else {}
    for name, kind in KINDS.items():
        plain = train(sizes, kind)
        if not all(map(torch.equal, plain, train(sizes, kind))):
            found.note(name, None, "two plain runs differ on this GPU, so nothing can be said")
            continue
        with ssdtrain.offload(folder, **given) as session:
            same = all(map(torch.equal, plain, train(sizes, kind)))
        with ssdtrain.offload(rematerialize="always", **given) as without_directory:
            same_again = all(map(torch.equal, plain, train(sizes, kind)))
        stats = session.stats
        left = stats.bytes_offloaded + stats.bytes_forwarded
        again = without_directory.stats.bytes_rematerialized
        words = "bit-equal" if same and same_again else "DIFFERENT"
        told = {"bit_equal": same, "offloaded_bytes": left, "read_bytes": stats.bytes_read}
        told |= {"again_bit_equal": same_again, "again_bytes": again}
        sizes_shown = f"{left / 2**20:.1f} MiB went to the disk, {again / 2**20:.1f} made again"
        found.note(name, told, f"{words}, {sizes_shown}")
        if not same:
            found.fail(f"{name}: training with a directory gave other bits than without ssdtrain")
        if not same_again:
            found.fail(f"{name}: tensors that were made again gave other bits")
        if not again and "run" not in kind:
            # A checkpointed block saves nothing that could be made again.
            found.fail(f"{name}: no saved tensor was made again")
        if not stats.from_gpu_bytes:
            found.fail(f"{name}: nothing left the GPU: {stats.reason}")


if __name__ == "__main__":
    sys.exit(run_step(look, step_parser(__doc__).parse_args()))
