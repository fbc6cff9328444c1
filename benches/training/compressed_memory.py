"""Whether compressed memory could take what a disk takes: how small saved tensors get, at what CPU.

Trains the demo's models for a few steps, takes all that the next forward saves above 128 KiB, and
compresses it with lz4 and zstd (level 1), the fastest there are. Rates are per second of CPU, since
the processors that compress are those that train.

    pip install lz4 zstandard
    python benches/training/compressed_memory.py [--models gpt bert] [--dtypes float32 bfloat16]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import lz4.frame
import torch
import zstandard
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text

STEPS_BEFORE = 5
BYTES_MIN = 128 << 10
GIB = 1 << 30
CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "lz4": (lz4.frame.compress, lz4.frame.decompress),
    "zstd": (zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress),
}


def saved_bytes(options: TrainingOptions) -> bytes:
    """Return what one forward saves, each storage once."""
    trainee = build_trainee(options)
    batches = ByteBatches(
        load_text(None), batch=options.batch, sequence=options.sequence, seed=options.seed
    )
    optimizer = torch.optim.SGD(trainee.module.parameters(), lr=1e-2)
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes >= BYTES_MIN and not tensor.is_leaf:
            seen[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    def unpack(packed: Any) -> Any:
        return packed

    for step in range(STEPS_BEFORE + 1):
        seen.clear()
        enabled = options.dtype == "bfloat16"
        with saved_tensors_hooks(pack, unpack), torch.autocast("cpu", enabled=enabled):
            loss = trainee.loss(batches.at(step))
        if step < STEPS_BEFORE:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    raw = [one.contiguous().view(torch.uint8).numpy().tobytes() for one in seen.values()]
    return b"".join(raw)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt", "bert"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args(words)
    print("model dtype codec    MiB  size left  compress GiB/CPU-s  decompress GiB/CPU-s")
    for model in arguments.models:
        for dtype in arguments.dtypes:
            options = TrainingOptions(
                model=model, dtype=dtype, layers=2, hidden=256, sequence=128, batch=4
            )
            raw = saved_bytes(options)
            for name, (compress, decompress) in CODECS.items():
                began_s = time.process_time()
                small = compress(raw)
                between_s = time.process_time()
                assert decompress(small) == raw
                ended_s = time.process_time()
                print(
                    f"{model:<5} {dtype:<8} {name:<5} {len(raw) >> 20:4d}  "
                    f"{len(small) / len(raw):9.3f}  {len(raw) / GIB / (between_s - began_s):18.2f}"
                    f"  {len(raw) / GIB / (ended_s - between_s):20.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
