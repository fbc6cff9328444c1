"""`demo --whole`: trains a model of several times the memory that it is given, and tells.

Three fresh processes follow each other: a plain run of a model with fewer layers, from which is
reckoned what to expect; the whole one, in a group with little memory where that can be made; and
the same training plainly, outside of it, to compare the bits and the time.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

import ssdtrain
from ssdtrain.demo.counting import Sampler
from ssdtrain.demo.machine import machine_facts
from ssdtrain.demo.memory_group import MemoryGroup, NoGroupError
from ssdtrain.demo.options import TrainingOptions
from ssdtrain.demo.runner import explain_end, started
from ssdtrain.demo.whole_options import (
    DiskRates,
    MemoryClass,
    WholeEnd,
    WholeMode,
    WholeOptions,
    WholeRun,
    WholeStep,
)
from ssdtrain.demo.whole_plan import OTHER_BYTES, Expected, expected
from ssdtrain.demo.whole_report import WholeReport, expectation
from ssdtrain.machine.process_memory import available_bytes
from ssdtrain.sizes import shown_bytes

FITS_PART = 8
"""The model that is measured beforehand has one layer of so many."""
ACTIVATIONS_PART = 8
BUFFER_PART = 10
"""What of the given memory is for saved tensors, and for the state on its way."""
INTERVAL_S = 0.02
RAW_PIECE_BYTES = 16 << 20
RAW_PIECE_COUNT = 16
"""What is written and read to know the disk's rates."""
RAW_ROUNDS = 3
"""The best one counts: the first also makes the file and the memory."""


class TooLittleMemoryError(Exception):
    """The whole does not fit; the message says what to change."""


def options_of(training: TrainingOptions, given_bytes: int) -> WholeOptions:
    """Divide the given memory."""
    return WholeOptions(
        training=training,
        given_bytes=given_bytes,
        activations_bytes=given_bytes // ACTIVATIONS_PART,
        buffer_bytes=given_bytes // BUFFER_PART,
    )


def run_whole(options: WholeOptions, told: TextIO) -> WholeReport:
    """Run all of it, with progress told; return what was found."""
    training = options.training
    assert training.directory is not None, "the demo names one"
    layers = max(1, training.layers // FITS_PART)
    small = replace(options, training=replace(training, layers=layers))
    fits = _run("fits", small, None, told)
    runs = [fits]
    notes: list[str] = []
    rates: DiskRates | None = None
    plan: Expected | None = None
    is_limited = False
    if fits.failure is None:
        rates = disk_rates(training.directory)
        plan = expected(options, fits, rates)
        print(f"\n{expectation(options, plan, layers)}\n", file=told, flush=True)
        _refuse_too_little(options, plan)
        with ExitStack() as stack:
            group: MemoryGroup | None = None
            try:
                group = stack.enter_context(MemoryGroup(options.given_bytes))
            except NoGroupError as error:
                notes.append(f"memory was measured, not limited: no control group, as {error}")
            is_limited = group is not None
            runs.append(_run("whole", options, group, told))
        if runs[-1].failure is None:
            if available_bytes() >= plan.all_bytes + OTHER_BYTES:
                runs.append(_run("plain", options, None, told))
            else:
                # The plain run of the smaller model is there already.
                notes.append(
                    f"there is no {shown_bytes(plan.all_bytes)} for the plain run: the bits were "
                    f"compared with {layers} layers, and the time is scaled from there"
                )
                runs.append(_run("whole", small, None, told))
    return WholeReport(
        options=options,
        machine=machine_facts(Path(training.directory)),
        disk=rates,
        expected=plan,
        runs=runs,
        is_limited=is_limited,
        notes=notes,
    )


def disk_rates(directory: str) -> DiskRates:
    """Read and write through the store as fast as it goes."""
    total_bytes = RAW_PIECE_BYTES * RAW_PIECE_COUNT
    pieces = [torch.rand(RAW_PIECE_BYTES // 4) for _ in range(RAW_PIECE_COUNT)]
    read_s: list[float] = []
    written_s: list[float] = []
    with ssdtrain.TensorStore(directory) as store:
        for _ in range(RAW_ROUNDS):
            began_s = time.perf_counter()
            stored = [store.write(piece) for piece in pieces]
            for one in stored:
                one.wait()
            written_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            reads = [store.read(one) for one in stored]
            while reads:
                reads.pop(0).result()
            read_s.append(time.perf_counter() - began_s)
            for one in stored:
                store.release(one)
    return DiskRates(
        read_bytes_per_s=total_bytes / min(read_s), write_bytes_per_s=total_bytes / min(written_s)
    )


def _refuse_too_little(options: WholeOptions, plan: Expected) -> None:
    if plan.needed_bytes > options.given_bytes:
        raise TooLittleMemoryError(
            f"--memory {shown_bytes(options.given_bytes)} is less than the "
            f"{shown_bytes(plan.needed_bytes)} that a step needs at once; give more, or train a "
            "model with a smaller --hidden"
        )


def _run(
    mode: WholeMode, options: WholeOptions, group: MemoryGroup | None, told: TextIO
) -> WholeRun:
    """Run one mode in a fresh process and wait for its end."""
    run = WholeRun(mode=mode, layers=options.training.layers)
    words = (mode, options.to_json())
    module, is_without = "ssdtrain.demo.whole_process", mode != "whole"
    with started(module, *words, is_without=is_without, stdin=subprocess.PIPE) as process:
        _follow(process, run, group, told)
    if run.failure is None and (process.returncode != 0 or run.end is None):
        run.failure = explain_end(process.returncode, len(run.steps))
    if group is not None:
        run.peak_bytes = group.peak_bytes()
    elif run.curve:
        run.peak_bytes = max(size for _, size in run.curve)
    if run.failure is not None:
        print(f"{mode} failed: {run.failure}", file=told, flush=True)
    return run


def _follow(
    process: subprocess.Popen[str], run: WholeRun, group: MemoryGroup | None, told: TextIO
) -> None:
    """Let a process begin, and take in what it says until it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready:
        return
    run.libraries_bytes = json.loads(ready)["libraries_bytes"]
    if group is not None:
        group.take(process.pid)
    status = Path(f"/proc/{process.pid}/status")

    def above_libraries() -> int:
        """Return what is resident above the libraries; 0 once the process has ended."""
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return max(0, (int(line.split()[1]) << 10) - run.libraries_bytes)
        return 0

    with Sampler(above_libraries, INTERVAL_S) as sampler:
        # Closed, so that it begins; and it ends if this process does.
        process.stdin.close()
        for line in process.stdout:
            _take(json.loads(line), run, told)
    run.curve = sampler.samples


def _take(event: Mapping[str, Any], run: WholeRun, told: TextIO) -> None:
    """Take in one line of the protocol."""
    fields = dict(event)
    match fields.pop("event"):
        case "start":
            run.parameters_count = fields["parameters_count"]
        case "step":
            run.steps.append(WholeStep(**fields))
            _tell(run, told)
        case "failure":
            run.failure = fields["message"]
        case "end":
            memory = [MemoryClass(**one) for one in fields.pop("memory")]
            run.end = WholeEnd(memory=memory, **fields)
        case other:
            raise AssertionError(f"the process of {run.mode} sent an unknown event {other!r}")


def _tell(run: WholeRun, told: TextIO) -> None:
    """Print a line about the newest step, so that minutes do not look like a run that hangs."""
    step = run.steps[-1]
    name = f"step {len(run.timed)}" if step.kind == "timed" else "warm-up step"
    print(
        f"{run.mode:<6} {run.layers:>3} layers  {name:<13} {step.seconds:7.2f} s  "
        f"loss {float.fromhex(step.loss):.4f}  read {shown_bytes(step.read_bytes)}, "
        f"written {shown_bytes(step.written_bytes)}",
        file=told,
        flush=True,
    )
