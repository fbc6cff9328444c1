"""What it costs to import ssdtrain after transformers, and what giving free memory back mends.

    python benches/training/import_order.py --dir DIR

transformers makes a tensor when it is imported, and with its first tensor torch decides whether
tensors lie on huge pages. Each process trains a GPT-2 of 6 layers, width 384, for four steps.
*Peak* is ``VmHWM`` above ``VmRSS`` before the first step, *CPU* the process's time over the steps.

- plain: a program that never imports ssdtrain.
- first, last: ``import ssdtrain`` before, and after transformers.
- without: free memory is never given back (``GIVE_BACK_BYTES`` of `activations/writeback.py`).
- mapped: the same, and each block of 1 MiB or more is a mapping of its own (``M_MMAP_THRESHOLD``).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

CASES = ("plain", "first", "first without", "last", "last without", "last mapped")
STEP_COUNT = 4
MIB = 1 << 20
M_MMAP_THRESHOLD = -3
"""Its number in `malloc.h`."""
VOCABULARY_COUNT = 2048
"""So small that logits, which no option offloads before their loss, do not hide the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, help="directory on the drive to offload to")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each case (default 5)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 256 tokens (default 8)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(options.case, options.dir, options.batch)))
        return
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(options.repeats):
        # In turns, forwards and backwards, so that a drift of the machine meets all of them.
        for case in CASES if number % 2 == 0 else CASES[::-1]:
            runs[case].append(child(case, options))
    report(runs)
    if options.json is not None:
        options.json.write_text(json.dumps(document(runs, options.batch), indent=1) + "\n")


def child(case: str, options: argparse.Namespace) -> dict[str, float]:
    from ssdtrain.demo import without  # noqa: PLC0415 - its place in a child is what is measured

    words = [__file__, "--dir", options.dir, "--batch", str(options.batch), "--case", case]
    environ = without.environment()
    output = without.output_of(*words, is_without=case == "plain", environ=environ)
    found: dict[str, float] = json.loads(output)
    return found


def measure(case: str, directory: str, batch: int) -> dict[str, float]:
    if case.startswith("first"):
        import ssdtrain  # noqa: PLC0415 - its place is what is measured
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - as above

    if case.startswith("last"):
        import ssdtrain  # noqa: PLC0415 - as above
    import torch  # noqa: PLC0415 - as above

    from ssdtrain.machine.process_memory import status_bytes  # noqa: PLC0415 - as above

    if case.endswith(("without", "mapped")):
        from ssdtrain.activations import writeback  # noqa: PLC0415 - as above

        writeback.GIVE_BACK_BYTES = 1 << 62
    if case.endswith("mapped"):
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB) == 1
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6,
        n_embd=384,
        n_head=6,
        vocab_size=VOCABULARY_COUNT,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(0, VOCABULARY_COUNT, (batch, 256))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    losses: list[str] = []

    def train() -> None:
        for _ in range(STEP_COUNT):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            losses.append(loss.item().hex())

    before_bytes = status_bytes("VmRSS")
    cpu_s, began_s = time.process_time(), time.perf_counter()
    found: dict[str, Any] = {}
    if case == "plain":
        train()
    else:
        with ssdtrain.offload(directory) as session:
            train()
        found["resident_bytes_peak"] = session.stats.resident_bytes_peak
        found["bytes_offloaded"] = session.stats.bytes_offloaded
    return found | {
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - began_s,
        "peak_bytes": status_bytes("VmHWM") - before_bytes,
        "end_bytes": status_bytes("VmRSS") - before_bytes,
        "loss": losses[-1],
    }


def middle(runs: list[dict[str, float]], key: str) -> float:
    return median(one.get(key, 0) for one in runs)


def report(runs: dict[str, list[dict[str, float]]]) -> None:
    print("| case | peak, MiB | at the end, MiB | saved at the peak, MiB | CPU s | wall s |")
    print("|---|--:|--:|--:|--:|--:|")
    for case, found in runs.items():
        sizes = (middle(found, f"{name}_bytes") / MIB for name in ("peak", "end"))
        saved = middle(found, "resident_bytes_peak") / MIB
        times = " | ".join(f"{middle(found, key):.2f}" for key in ("cpu_s", "wall_s"))
        print(f"| {case} | {' | '.join(f'{one:.0f}' for one in sizes)} | {saved:.0f} | {times} |")
    losses = {one["loss"] for found in runs.values() for one in found}
    print(f"\nlast losses: {'all equal' if len(losses) == 1 else 'NOT EQUAL'}")


def document(runs: dict[str, list[dict[str, float]]], batch: int) -> dict[str, Any]:
    from importlib.metadata import version  # noqa: PLC0415 - parents import as little as they can

    keys = ("peak_bytes", "end_bytes", "resident_bytes_peak", "bytes_offloaded", "cpu_s", "wall_s")
    return {
        "batch": batch,
        "repeats": len(runs["plain"]),
        "steps": STEP_COUNT,
        "torch": version("torch"),
        "kernel": os.uname().release,
        "cores": os.cpu_count(),
        "medians": {
            case: {key: round(middle(found, key), 2) for key in keys}
            for case, found in runs.items()
        },
        "bit_identical": len({one["loss"] for found in runs.values() for one in found}) == 1,
    }


if __name__ == "__main__":
    main()
