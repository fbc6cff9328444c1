"""Saved tensors that are made again: what a step writes less for it, and what that costs.

For each model three fresh processes train alike and take turns step by step, so that all see the
same machine: `plain` never imports ssdtrain, `never` offloads without recipes, `auto` makes saved
tensors again where its plan says so. Times are compared within each turn. A peak is that of the
resident set in a step, above what was resident before. Losses and gradients must be equal in bits
in every step.

    python benches/training/rematerialize_step.py [--models gpt llama ...] [--dir DIR]
        [--steps N] [--warm-up N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.process import gradients_digest
from ssdtrain.machine.process_memory import reset_high_water_mark, status_bytes
from turns import answer, parser_of, ratio, started, write_record

MIB = 1 << 20
WAYS = ("plain", "never", "auto")
WARM_UP_COUNT = 8
"""Steps before the timed ones: recipes are proved in two of them, and plans settle after three."""
DEMO = {"gpt": "gpt", "gpt-dropout": "gpt", "gpt2": "gpt2", "bert": "bert", "t5": "t5"}
"""The demo's models, on bytes of text."""
OTHERS = ("llama", "llama-bfloat16", "qwen3", "qwen3-bfloat16", "vit")
"""Models of Hugging Face with random weights."""
ASKED = ("models", "steps", "warm_up", "layers", "hidden", "sequence", "batch", "threads")


def demo_model(name: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a model of the demo and the function that returns its loss."""
    trainee = build_trainee(
        TrainingOptions(
            model=DEMO[name],  # type: ignore[arg-type] - argparse has checked it
            layers=options.layers,
            hidden=options.hidden,
            sequence=options.sequence,
            batch=options.batch,
            dropout=0.1 if name == "gpt-dropout" else None,
        )
    )
    text = torch.randint(0, 256, (options.batch, options.sequence + 1))
    return trainee.module, lambda: trainee.loss(text)


def other_model(name: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build another model of Hugging Face and the function that returns its loss."""
    import transformers  # noqa: PLC0415 - it takes seconds

    kind, _, dtype = name.partition("-")
    hidden, layers, heads = options.hidden, options.layers, options.hidden // 64
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    if kind == "vit":
        config = transformers.ViTConfig(
            **sizes, intermediate_size=4 * hidden, image_size=256, patch_size=16
        )
        module = transformers.ViTForImageClassification(config)
        pictures = torch.randn(max(1, options.batch * options.sequence // 256), 3, 256, 256)
        labels = torch.zeros(len(pictures), dtype=torch.long)
        return module.train(), lambda: module(pixel_values=pictures, labels=labels).loss
    family = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{family}Config")(
        **sizes,
        vocab_size=2048,
        intermediate_size=7 * hidden // 2,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=options.sequence,
    )
    module = getattr(transformers, f"{family}ForCausalLM")(config)
    module.to(getattr(torch, dtype or "float32")).train()
    tokens = torch.randint(0, 2048, (options.batch, options.sequence))
    return module, lambda: module(input_ids=tokens, labels=tokens).loss


class Trainee:
    """One way's process: a model, and its session if it has one."""

    def __init__(self, way: str, options: argparse.Namespace, stack: ExitStack) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        build = demo_model if options.model in DEMO else other_model
        self.module, self.loss = build(options.model, options)
        self.session: Any = None
        if way != "plain":
            self.session = stack.enter_context(
                ssdtrain.offload(options.dir, rematerialize=way)  # type: ignore[arg-type]
            )

    def step(self, what: str) -> dict[str, Any]:
        """Run forward and backward; return their time, and the peak of memory above that before."""
        assert what == "step"
        self.module.zero_grad(set_to_none=False)
        gc.collect()
        torch.manual_seed(1)
        before = reset_high_water_mark()
        began_s = perf_counter()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        found: dict[str, Any] = {"seconds": perf_counter() - began_s}
        found["rss_bytes"] = status_bytes("VmHWM") - before
        found["bits"] = [loss.item().hex(), gradients_digest(list(self.module.parameters()))]
        if self.session is not None:
            stats = self.session.stats
            names = ("bytes_written", "bytes_rematerialized", "bytes_kept", "rematerialize_s")
            found |= {name: getattr(stats, name) for name in names}
        return found


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model in all ways; return what a step of each took and wrote."""
    words = [f"--model={model}", f"--threads={options.threads}"]
    words += [
        f"--{name}={getattr(options, name)}" for name in ("layers", "hidden", "sequence", "batch")
    ]
    with started(
        [(way, way) for way in WAYS], __file__, words, options.dir, without_name="plain"
    ) as (children, _):
        for _ in range(options.warm_up):
            before = [child.ask("step") for child in children]
        turns = [[child.ask("step") for child in children] for _ in range(options.steps)]
    bits = {str(found["bits"]) for turn in [before, *turns] for found in turn}
    seconds, peaks = (
        {way: [turn[place][name] for turn in turns] for place, way in enumerate(WAYS)}
        for name in ("seconds", "rss_bytes")
    )
    per_step = {
        way: {
            name: (turns[-1][place][name] - before[place][name]) / options.steps
            for name in ("bytes_written", "bytes_rematerialized", "bytes_kept", "rematerialize_s")
        }
        for place, way in enumerate(WAYS)
        if way != "plain"
    }
    return {
        "model": model,
        "equal_bits": len(bits) == 1,
        "auto_of_never": ratio(seconds["auto"], seconds["never"]),
        "auto_of_plain": ratio(seconds["auto"], seconds["plain"]),
        "never_of_plain": ratio(seconds["never"], seconds["plain"]),
        "seconds": {way: statistics.median(took) for way, took in seconds.items()},
        "per_step": per_step,
        "rss_peak_bytes": {way: statistics.median(peak) for way, peak in peaks.items()},
    }


def shown(found: dict[str, Any]) -> str:
    """Return the row of a model."""
    never, auto = found["per_step"]["never"], found["per_step"]["auto"]
    less = 1 - auto["bytes_written"] / max(1.0, never["bytes_written"])
    peaks = found["rss_peak_bytes"]
    return (
        f"{found['model']:15} written {never['bytes_written'] / MIB:7.1f} -> "
        f"{auto['bytes_written'] / MIB:7.1f} MiB ({less:+.0%} less), made again "
        f"{auto['bytes_rematerialized'] / MIB:7.1f} MiB in {auto['rematerialize_s'] * 1e3:5.1f} ms"
        f"; kept {never['bytes_kept'] / MIB:6.1f} -> {auto['bytes_kept'] / MIB:6.1f} MiB; "
        f"step {found['seconds']['plain']:.3f} s plain, never {found['never_of_plain']:.3f}, auto "
        f"{found['auto_of_plain']:.3f} of plain, auto of never {found['auto_of_never']:.3f}; RSS "
        f"{' / '.join(f'{peaks[way] / MIB:.0f}' for way in WAYS)} MiB; "
        f"bits {'equal' if found['equal_bits'] else 'DIFFER'}"
    )


def main() -> int:
    """Measure, print a row for each model, and return 1 if bits differ."""
    parser = parser_of(__doc__)
    names = [*DEMO, *OTHERS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--model", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_COUNT)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if options.child is not None:
        with ExitStack() as stack:
            answer(Trainee(options.child, options, stack).step)
        return 0
    rows: list[dict[str, Any]] = []
    for model in options.models:
        rows.append(measured(model, options))
        print(shown(rows[-1]), flush=True)
        write_record(options, ASKED, {"rows": rows})
    return 0 if all(row["equal_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
