"""A process of the demo: trains in a mode, and prints its record as the last line, in JSON.

The parent runs it as `python -m ssdtrain.demo.process MODE OPTIONS`, or by `without.py`, under
which the package `ssdtrain` is empty.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

import ssdtrain
from ssdtrain.demo.counting import SavedStorageCounter
from ssdtrain.demo.models import blocks_of, build_trainee, recompute_block
from ssdtrain.demo.options import OTHER_BYTES, Mode, Run, Step, StepKind, TrainingOptions
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.machine.process_memory import (
    MemoryUnknownError,
    known_bytes,
    reset_high_water_mark,
    status_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

SGD_RATE = 1e-3
ADAMW_RATE = 2e-5
"""Small enough for a loss that falls from the first step on, without a schedule."""
SAMPLE_INTERVAL_S = 0.004
WARM_UP_COUNT = 3
"""The first step tells which tensors are saved, the next two prove recipes. Then they are used."""


class Training:
    """The training of a mode, step by step."""

    def __init__(self, mode: Mode, options: TrainingOptions, stack: ExitStack) -> None:
        self.options = options
        self.is_whole = options.given_bytes is not None
        self.rss_bytes_before: int | None = None
        if self.is_whole:
            self.note_memory()
        self.session: Any = None
        if mode in ("offload", "whole"):
            assert options.directory is not None, "the demo names a directory for this mode"
            bound = None if options.given_bytes is None else options.given_bytes - OTHER_BYTES
            session = ssdtrain.offload(options.directory, max_resident_bytes=bound)
            self.session = stack.enter_context(session)
        # The modules of a model on meta get their bytes one after the other, under the bound.
        with torch.device("meta") if mode == "whole" else nullcontext():
            self.trainee = build_trainee(options)
        module: Any = self.trainee.module
        if mode == "whole":
            ssdtrain.offload_parameters(module, self.session)
        if self.is_whole:
            # The same numbers in both modes, however the model was built.
            torch.manual_seed(options.seed)
            module.reset_parameters()
        self.parameters: list[nn.Parameter] = list(module.parameters())
        # A session counts by itself, and a counter would hold the memory of weights that leave.
        self.counter = SavedStorageCounter([] if self.session else self.parameters)
        if mode == "recompute":
            for block in blocks_of(module):
                recompute_block(block, self.counter.checkpoint_contexts)
        self._optimizer: Any = (
            torch.optim.AdamW(self.parameters, lr=ADAMW_RATE, fused=True)
            if self.is_whole
            else torch.optim.SGD(self.parameters, lr=SGD_RATE)
        )
        if mode == "whole":
            ssdtrain.offload_optimizer(self._optimizer, self.session)
            ends = module.tokens, module.positions, module.norm, module.head
            for part in (*module.blocks, *ends):
                _update_in_backward(self._optimizer, list(part.parameters()), stack)
        self._batches = ByteBatches(
            load_text(options.data),
            batch=options.batch,
            sequence=options.sequence,
            seed=options.seed,
        )
        self._step_count = 0

    def note_memory(self) -> None:
        """Note the resident set, and let the kernel find its highest mark anew from here on."""
        with suppress(MemoryUnknownError):  # then the report shows "-"
            self.rss_bytes_before = reset_high_water_mark()

    def step(self, kind: StepKind) -> Step:
        """Train a step; only forward, backward and optimizer are timed."""
        text = self._batches.at(self._step_count)
        self._step_count += 1
        before, began_s = self._traffic(), perf_counter()
        loss = self._train(text)
        seconds = perf_counter() - began_s
        after = self._traffic()
        print(f"  {kind:>8} step {seconds:7.2f} s  loss {loss:.4f}", file=sys.stderr)
        return Step(
            kind=kind,
            seconds=seconds,
            loss=loss.hex(),
            gradients_digest=gradients_digest(self.parameters),
            bytes_written=after[0] - before[0],
            bytes_read=after[1] - before[1],
            stall_s=after[2] - before[2],
        )

    def measured_step(self) -> tuple[Step, list[tuple[float, int]]]:
        """Train a step whose memory is sampled, which takes time; return it with its curve."""
        counted = self.counter.measure() if self.session is None else nullcontext()
        with sampled(self._sampled_bytes) as samples, counted:
            record = self.step("measured")
        # The digest comes after the step, and is no part of its curve.
        return record, [sample for sample in samples if sample[0] <= record.seconds]

    def activation_bytes_peak(self) -> int:
        """Return the peak: the session's of settled plans, or the counter's of a step."""
        if self.session is not None:
            return int(self.session.stats.saved_resident_bytes_peak)
        return self.counter.resident_bytes_peak

    def _train(self, text: Tensor) -> float:
        if not self.is_whole:
            # Zeroed, not dropped: gradients are resident before a step like the weights, so only
            # saved tensors need more memory in a step.
            self._optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            loss = self.trainee.loss(text)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self.is_whole:
            self._optimizer.zero_grad()
        return float(loss.item())

    def _traffic(self) -> tuple[int, int, float]:
        """Return the bytes written, the bytes read and the stalls so far, of all classes."""
        if self.session is None:
            return 0, 0, 0.0
        stats = self.session.stats
        classes = stats.classes or (stats,)
        names = "bytes_written", "bytes_read", "stall_s"
        written, read, stall_s = (sum(getattr(of, name) for of in classes) for name in names)
        return written, read, stall_s

    def _sampled_bytes(self) -> int:
        if self.is_whole:
            return max(0, known_bytes("VmRSS") - (self.rss_bytes_before or 0))
        if self.session is not None:
            return int(self.session.stats.resident_bytes)
        return self.counter.resident_bytes


def _update_in_backward(
    optimizer: torch.optim.Optimizer, group: list[nn.Parameter], stack: ExitStack
) -> None:
    """Update parameters as soon as all of them have their gradients, and free the gradients.

    AdamW updates each parameter by itself, so the bits are those of a single step at the end.
    """
    left = len(group)

    def note(_: Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            left = len(group)
            # Other parameters have no gradient now, so AdamW skips them.
            optimizer.step()
            optimizer.zero_grad()

    for parameter in group:
        hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        # The collector does not see the cycle of parameter, hook and optimizer.
        stack.callback(hook.remove)


@contextmanager
def sampled(read_bytes: Callable[[], int]) -> Iterator[list[tuple[float, int]]]:
    """Sample bytes in a thread while the block runs: (seconds since its begin, bytes)."""
    samples: list[tuple[float, int]] = []
    ended = threading.Event()
    began_s = perf_counter()

    def run() -> None:
        while not ended.wait(SAMPLE_INTERVAL_S):
            samples.append((perf_counter() - began_s, read_bytes()))

    thread = threading.Thread(target=run, name="ssdtrain-demo-sampler")
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def gradients_digest(parameters: Iterable[nn.Parameter]) -> str:
    """Hash the bytes of every gradient, in the order of the parameters.

    It uses all threads: a virtual machine may return memory that is idle between steps to its host,
    and the next step would be slower.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        digests = threads.map(_digest, [parameter.grad for parameter in parameters])
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return hashlib.sha256(b"none").digest()
    raw = tensor.detach().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).digest()


def train(mode: Mode, options: TrainingOptions) -> Run:
    """Train in a mode: warm-up steps, the timed steps, and a measured step."""
    with ExitStack() as stack:
        training = Training(mode, options, stack)
        warm_up_count = 1 if training.is_whole else WARM_UP_COUNT
        steps = [training.step("warm-up") for _ in range(warm_up_count)]
        if not training.is_whole:
            training.note_memory()
        steps += [training.step("timed") for _ in range(options.steps)]
        before = training.rss_bytes_before
        # Without a reset the mark would be that of an earlier moment.
        peak = None if before is None else status_bytes("VmHWM") - before
        measured, curve = training.measured_step()
        # One weight after the other: they may not fit in memory together.
        weights = hashlib.sha256(b"".join(map(_digest, training.parameters)))
        return Run(
            mode=mode,
            parameters_count=sum(parameter.numel() for parameter in training.parameters),
            steps=[*steps, measured],
            weights_digest=weights.hexdigest(),
            activation_bytes_peak=training.activation_bytes_peak(),
            rss_bytes_peak=peak,
            curve=curve,
        )


if __name__ == "__main__":
    trained = train(cast("Mode", sys.argv[1]), TrainingOptions.from_json(sys.argv[2]))
    print(json.dumps(asdict(trained)))
