"""What the processes of both demos have in common: how they measure a step, and how they tell.

Every line that such a process writes on its standard output is one JSON object with a key `event`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ssdtrain.demo.machine import busy_cpu_s
from ssdtrain.errors import SsdtrainError

Emit = Callable[..., None]
"""Writes a line: the name of the event, and its fields by keyword."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What went to the disk and came from it so far; all zero where nothing is offloaded."""

    read_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A training step: its loss, its time, and what moved meanwhile."""

    loss: float
    seconds: float
    traffic: Traffic
    foreign_cpu_s: float | None
    """CPU time that other processes of the machine took; None where the system does not tell."""


def step_figures(train: Callable[[], float], traffic: Callable[[], Traffic]) -> StepFigures:
    """Train a step, which returns its loss; nothing else is timed."""
    before, cpu_before = traffic(), _foreign_cpu_s()
    start = time.perf_counter()
    loss = train()
    seconds = time.perf_counter() - start
    after, cpu_after = traffic(), _foreign_cpu_s()
    foreign = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    return StepFigures(
        loss=loss,
        seconds=seconds,
        traffic=Traffic(
            read_bytes=after.read_bytes - before.read_bytes,
            written_bytes=after.written_bytes - before.written_bytes,
            stall_s=after.stall_s - before.stall_s,
        ),
        # The kernel counts in ticks of 10 ms, so a little less than nothing is possible.
        foreign_cpu_s=None if foreign is None else max(0.0, foreign),
    )


def _foreign_cpu_s() -> float | None:
    busy = busy_cpu_s()
    return None if busy is None else busy - time.process_time()


def take_standard_output() -> Emit:
    """Keep standard output for the protocol; whatever else prints there goes to standard error."""
    sys.stdout.flush()
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=protocol, flush=True)

    return emit


def exit_code_of(run: Callable[[], None], emit: Emit) -> int:
    """Run, tell what fails, and return the exit code of the process."""
    try:
        run()
    except (ImportError, OSError, SsdtrainError, ValueError) as error:
        # What a user can mend: the message says how, a traceback would bury it.
        emit("failure", message=f"{type(error).__name__}: {error}")
        return 1
    except Exception as error:
        emit("failure", message=f"{type(error).__name__}: {error} (traceback above)")
        raise
    return 0
