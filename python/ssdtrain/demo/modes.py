"""One process of the demo: trains the model under one mode and tells its parent, a line at a time.

Run by the demo as `python -m ssdtrain.demo.modes MODE MEASURED OPTIONS`, or by `without.py`.
"""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssdtrain.demo.child import Emit, Traffic, exit_code_of, step_figures, take_standard_output
from ssdtrain.demo.counting import Sampler, SavedStorageCounter
from ssdtrain.demo.models import build_trainee
from ssdtrain.demo.options import (
    MODES,
    MemoryRecord,
    Mode,
    StepKind,
    StepRecord,
    TrainingOptions,
)
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.machine.process_memory import MemoryUnknownError, reset_high_water_mark, status_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

LEARNING_RATE = 1e-3
"""Small enough for a loss that falls from the first step on, without a schedule."""


class ModeProcess:
    """The training of one mode, step by step."""

    def __init__(self, mode: Mode, options: TrainingOptions, stack: ExitStack) -> None:
        self.options = options
        self.trainee = build_trainee(options)
        self.parameters = list(self.trainee.module.parameters())
        self.counter = SavedStorageCounter(self.parameters)
        self.session: Any = None
        if mode == "recompute":
            self.trainee.recompute_blocks(self.counter.checkpoint_contexts)
        if mode == "offload":
            self.session = _open_session(options, stack)
        self._optimizer = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)
        self._batches = ByteBatches(
            load_text(None if options.data is None else Path(options.data)),
            batch=options.batch,
            sequence=options.sequence,
            seed=options.seed,
        )
        self._step_count = 0

    def step(self, kind: StepKind) -> StepRecord:
        """Train one step; only forward, backward and optimizer are timed."""
        text = self._batches.at(self._step_count)
        self._step_count += 1
        found = step_figures(lambda: self._train(text), self._traffic)
        return StepRecord(
            kind=kind,
            seconds=found.seconds,
            loss=found.loss.hex(),
            gradients_digest=gradients_digest(self.parameters),
            bytes_written=found.traffic.written_bytes,
            bytes_read=found.traffic.read_bytes,
            stall_s=found.traffic.stall_s,
            foreign_cpu_s=found.foreign_cpu_s,
        )

    def measured_step(self) -> tuple[StepRecord, list[tuple[float, int]]]:
        """Train one step that is watched, which takes time, and return its curve with it."""
        if self.session is not None:
            with Sampler(lambda: int(self.session.stats.resident_bytes)) as sampler:
                record = self.step("measured")
        else:
            with Sampler(lambda: self.counter.resident_bytes) as sampler, self.counter.measure():
                record = self.step("measured")
        # What came after the step, such as the digest, is no part of its curve.
        return record, [sample for sample in sampler.samples if sample[0] <= record.seconds]

    def activation_bytes_peak(self, *, measured: bool) -> int | None:
        """Tell the peak: the session's own over all steps, or the counter's over the measured."""
        if self.session is not None:
            return int(self.session.stats.resident_bytes_peak)
        return self.counter.resident_bytes_peak if measured else None

    def _train(self, text: torch.Tensor) -> float:
        # Gradients are zeroed, not dropped: then they are resident before a step as the weights
        # are, and what a step needs on top is what the saved tensors need.
        self._optimizer.zero_grad(set_to_none=False)
        with self._autocast():
            loss = self.trainee.loss(text)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.item())

    def _autocast(self) -> AbstractContextManager[object]:
        if self.options.dtype == "float32":
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def _traffic(self) -> Traffic:
        if self.session is None:
            return Traffic()
        stats = self.session.stats
        return Traffic(
            read_bytes=stats.bytes_read,
            written_bytes=stats.bytes_written,
            stall_s=stats.stall_s,
        )


def gradients_digest(parameters: list[nn.Parameter]) -> str:
    """Hash the raw bytes of every gradient, in the order of the parameters.

    On all threads, because a pause between the steps changes their times: memory that lies idle may
    go back to a virtual machine's host, and is dear to touch again.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        digests = threads.map(_digest, [parameter.grad for parameter in parameters])
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(gradient: torch.Tensor | None) -> bytes:
    if gradient is None:
        return hashlib.sha256(b"no gradient").digest()
    raw = gradient.detach().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).digest()


def run_mode(mode: Mode, options: TrainingOptions, *, measured: bool, emit: Emit) -> None:
    """Train under one mode: a warm-up step, the timed steps, and perhaps a measured one."""
    with ExitStack() as stack:
        process = ModeProcess(mode, options, stack)
        emit("start", parameters_count=sum(p.numel() for p in process.parameters))
        emit("step", **asdict(process.step("warm-up")))
        before: int | None = None
        high: int | None = None
        note: str | None = None
        try:
            before = reset_high_water_mark()
        except MemoryUnknownError as error:
            note = str(error)
        for _ in range(options.steps):
            emit("step", **asdict(process.step("timed")))
        try:
            # Without a reset the mark would be that of the warm-up step.
            high = None if before is None else status_bytes("VmHWM")
        except MemoryUnknownError as error:
            note = str(error)
        curve: list[tuple[float, int]] = []
        if measured:
            record, curve = process.measured_step()
            emit("step", **asdict(record))
        memory = MemoryRecord(
            activation_bytes_peak=process.activation_bytes_peak(measured=measured),
            rss_bytes_before=before,
            rss_bytes_high=high,
            rss_note=note,
            curve=curve,
        )
        emit("memory", **asdict(memory))
        emit("end", summary="" if process.session is None else str(process.session))


def _open_session(options: TrainingOptions, stack: ExitStack) -> Any:
    # Imported here: plain and recompute do without it.
    import ssdtrain  # noqa: PLC0415

    assert options.directory is not None, "the demo names a directory when offload runs"
    # A few steps are too few to learn what a byte costs: they would be varied, and not compared.
    session = ssdtrain.offload(options.directory, max_resident_bytes=options.max_resident_bytes)
    return stack.enter_context(session)


def main(arguments: list[str]) -> int:
    """Run one mode and return the exit code of the process."""
    emit = take_standard_output()
    name, measured, options = arguments
    (mode,) = (mode for mode in MODES if mode == name)

    def run() -> None:
        given = TrainingOptions.from_json(options)
        run_mode(mode, given, measured=measured == "measured", emit=emit)

    return exit_code_of(run, emit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
