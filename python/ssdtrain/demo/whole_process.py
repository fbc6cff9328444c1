"""One process of `demo --whole`: trains with AdamW, plainly or with all on the disk.

Run by the demo as `python -m ssdtrain.demo.whole_process MODE OPTIONS`; where it trains plainly, by
`without.py`, under which it does not import ssdtrain. It says when it is ready, waits for a line on
its standard input (meanwhile it may be put into a group with less memory), and trains.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.demo.child import Emit, Traffic, exit_code_of, step_figures, take_standard_output
from ssdtrain.demo.counting import SavedStorageCounter
from ssdtrain.demo.gpt import ByteGPT, ByteGPTTrainee
from ssdtrain.demo.text import ByteBatches, load_text
from ssdtrain.demo.whole_options import (
    STATE_BYTES_PER_PARAMETER,
    MemoryClass,
    WholeEnd,
    WholeOptions,
    WholeStep,
)
from ssdtrain.machine.process_memory import status_bytes

LEARNING_RATE = 2e-5
"""Small enough for a loss that falls from the first step on, without a schedule."""


class Plain:
    """Training with everything in memory, as it is written without ssdtrain."""

    def __init__(self, options: WholeOptions, stack: ExitStack) -> None:
        self.options = options
        self.stack = stack
        self.trainee = self.build()
        assert isinstance(self.trainee.module, ByteGPT)
        self.model = self.trainee.module
        # The same numbers in all modes, however the model was built.
        torch.manual_seed(options.training.seed)
        self.model.reset_parameters()
        self.parameters = list(self.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        self.activation_bytes = 0

    def build(self) -> ByteGPTTrainee:
        """Build the model in memory."""
        return ByteGPTTrainee(self.options.training)

    def step(self, text: Tensor) -> float:
        """Train one step and return its loss."""
        loss = self.trainee.loss(text)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def warm_up(self, text: Tensor) -> float:
        """Train the first step, and count what it saves."""
        counter = SavedStorageCounter(self.parameters)
        with counter.measure():
            loss = self.step(text)
        self.activation_bytes = counter.resident_bytes_peak
        return loss

    def traffic(self) -> Traffic:
        """Return what has moved so far."""
        return Traffic()

    def memory(self) -> list[MemoryClass]:
        """Return what each kind takes, all of it in memory."""
        count = sum(parameter.numel() for parameter in self.parameters)
        weights = sum(parameter.nbytes for parameter in self.parameters)
        sizes = {
            "weights": weights,
            "gradients": weights,
            "AdamW state": STATE_BYTES_PER_PARAMETER * count,
            "activations": self.activation_bytes,
        }
        return [
            MemoryClass(name=name, all_bytes=size, in_memory_bytes=size)
            for name, size in sizes.items()
        ]


class Whole(Plain):
    """The same training with weights, state and activations on the disk.

    A gradient is what has no place there: so each block is updated as soon as its gradients are
    complete, and they are freed. AdamW's update is per parameter: its bits are those of one step
    over all at the end.
    """

    def __init__(self, options: WholeOptions, stack: ExitStack) -> None:
        directory = options.training.directory
        assert directory is not None, "the demo names one"
        self.store = stack.enter_context(ssdtrain.TensorStore(directory))
        super().__init__(options, stack)
        ssdtrain.offload_optimizer(self.optimizer, self.store, buffer_bytes=options.buffer_bytes)
        self.session = stack.enter_context(
            ssdtrain.offload(directory, max_resident_bytes=options.activations_bytes)
        )
        self.gradient_bytes = self.gradient_bytes_peak = 0
        self.state_bytes_peak = 0
        ends = (self.model.tokens, self.model.positions), (self.model.norm, self.model.head)
        for modules in (*ends, *((block,) for block in self.model.blocks)):
            self._update_in_backward([p for module in modules for p in module.parameters()])

    def build(self) -> ByteGPTTrainee:
        """Build the model without bytes, which it gets module by module under the bound."""
        with torch.device("meta"):
            trainee = ByteGPTTrainee(self.options.training)
        ssdtrain.offload_parameters(trainee.module, self.store)
        return trainee

    def step(self, text: Tensor) -> float:
        """Train one step; the updates are made in backward."""
        before = self.session.stats.bytes_eligible
        loss = self.trainee.loss(text)
        self.activation_bytes = self.session.stats.bytes_eligible - before
        loss.backward()  # type: ignore[no-untyped-call]
        if any(parameter.grad is not None for parameter in self.parameters):
            raise AssertionError("a gradient is left, so a parameter was not updated")
        return float(loss.item())

    def warm_up(self, text: Tensor) -> float:
        """Train the first step."""
        return self.step(text)

    def traffic(self) -> Traffic:
        """Return what has moved so far, of all kinds."""
        weights = ssdtrain.parameter_stats(self.model)
        state, saved = self.optimizer.offload_stats, self.session.stats
        return Traffic(
            read_bytes=weights.read_bytes + state.read_bytes + saved.bytes_read,
            written_bytes=weights.written_bytes + state.written_bytes + saved.bytes_written,
            stall_s=weights.stall_s + state.stall_s + saved.stall_s,
        )

    def memory(self) -> list[MemoryClass]:
        """Return what each kind takes, and what of it was in memory at most."""
        weights = ssdtrain.parameter_stats(self.model)
        at_most = {
            "weights": weights.peak_resident_bytes + weights.staying_bytes,
            "gradients": self.gradient_bytes_peak,
            "AdamW state": max(self.state_bytes_peak, self.options.buffer_bytes),
            "activations": self.session.stats.resident_bytes_peak,
        }
        return [
            MemoryClass(
                name=one.name,
                all_bytes=one.all_bytes,
                in_memory_bytes=at_most[one.name],
            )
            for one in super().memory()
        ]

    def _update_in_backward(self, group: list[nn.Parameter]) -> None:
        """Update parameters as soon as each has its gradient, and free these."""
        left = len(group)

        def note(parameter: Tensor) -> None:
            nonlocal left
            assert parameter.grad is not None
            self.gradient_bytes += parameter.grad.nbytes
            self.gradient_bytes_peak = max(self.gradient_bytes_peak, self.gradient_bytes)
            left -= 1
            if left:
                return
            left = len(group)
            # All others have no gradient now, and are passed over.
            self.optimizer.step()
            for one in group:
                one.grad = None
            self.gradient_bytes = 0
            state = self.optimizer.offload_stats
            self.state_bytes_peak = max(self.state_bytes_peak, state.resident_bytes)

        for parameter in group:
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]


def run_mode(mode: str, options: WholeOptions, emit: Emit) -> None:
    """Train under one mode: a warm-up step and the timed ones."""
    training = options.training
    with ExitStack() as stack:
        kind = Whole if mode == "whole" else Plain
        process = kind(options, stack)
        emit("start", parameters_count=sum(p.numel() for p in process.parameters))
        batches = ByteBatches(
            load_text(None if training.data is None else Path(training.data)),
            batch=training.batch,
            sequence=training.sequence,
            seed=training.seed,
        )
        for number in range(training.steps + 1):
            text = batches.at(number)
            train = process.step if number else process.warm_up
            found = step_figures(partial(train, text), process.traffic)
            step = WholeStep(
                kind="timed" if number else "warm-up",
                seconds=found.seconds,
                loss=found.loss.hex(),
                read_bytes=found.traffic.read_bytes,
                written_bytes=found.traffic.written_bytes,
                stall_s=found.traffic.stall_s,
                foreign_cpu_s=found.foreign_cpu_s,
            )
            emit("step", **asdict(step))
        memory = process.memory()
        digest = weights_digest(process.parameters)
        emit("end", **asdict(WholeEnd(weights_digest=digest, memory=memory)))


def weights_digest(parameters: list[nn.Parameter]) -> str:
    """Hash the raw bytes of every weight, one after the other."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().numpy().data)
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Run one mode and return the exit code of the process."""
    emit = take_standard_output()
    mode, given = arguments
    options = WholeOptions.from_json(given)
    emit("ready", libraries_bytes=status_bytes("VmRSS"))
    sys.stdin.readline()
    return exit_code_of(lambda: run_mode(mode, options, emit), emit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
