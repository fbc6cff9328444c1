"""The demo's parent: starts one fresh process per mode and repeat, and collects what they tell."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from ssdtrain.demo import without
from ssdtrain.demo.options import (
    WITHOUT_SSDTRAIN,
    MemoryRecord,
    Mode,
    ModeRun,
    StepRecord,
    TrainingOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Progress:
    """One line for each step, so that a run of minutes does not look like one that hangs."""

    def __init__(self, stream: TextIO, *, repeats: int, timed_count: int) -> None:
        self._stream = stream
        self._repeats = repeats
        self._timed_count = timed_count

    def step(self, run: ModeRun) -> None:
        """Tell about the newest step of a run."""
        step = run.steps[-1]
        name = f"{step.kind} step"
        if step.kind == "timed":
            name = f"step {len(run.timed)} of {self._timed_count}"
        self.note(
            f"{run.mode:<9}  repeat {run.repeat} of {self._repeats}  {name:<13}  "
            f"{step.seconds:7.2f} s  loss {float.fromhex(step.loss):.4f}"
        )

    def note(self, line: str) -> None:
        """Print a line at once."""
        print(line, file=self._stream, flush=True)


def run_all(
    options: TrainingOptions, modes: Iterable[Mode], *, repeats: int, progress: Progress
) -> list[ModeRun]:
    """Run the modes in turn, again and again, so that a drift of the machine meets all of them.

    A mode that fails is not repeated; the others go on.
    """
    modes = list(modes)
    runs: list[ModeRun] = []
    failed: set[Mode] = set()
    for repeat in range(1, repeats + 1):
        for mode in modes:
            if mode in failed:
                continue
            run = run_process(mode, repeat, options, progress)
            runs.append(run)
            if run.failure is not None:
                failed.add(mode)
                progress.note(f"{mode} failed: {run.failure}")
                if repeat < repeats:
                    progress.note(f"{mode} is not repeated; the other modes go on")
    return runs


@contextmanager
def started(
    module: str, *words: str, is_without: bool, stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a fresh process (`without.start`), and wait for its end."""
    with without.start(module, *words, is_without=is_without, stdin=stdin) as process:
        try:
            yield process
        except BaseException:
            # Ctrl-C, or a closed terminal: a process of gigabytes must not go on alone.
            process.kill()
            raise


def run_process(mode: Mode, repeat: int, options: TrainingOptions, progress: Progress) -> ModeRun:
    """Run one mode in a fresh process and wait for its end."""
    # One measured step tells the peak and the curve; those of the later repeats would be the same.
    measured = "measured" if repeat == 1 else "unmeasured"
    run = ModeRun(mode=mode, repeat=repeat)
    ended = False
    words = (mode, measured, options.to_json())
    is_without = mode in WITHOUT_SSDTRAIN
    with started("ssdtrain.demo.modes", *words, is_without=is_without) as process:
        assert process.stdout is not None
        for line in process.stdout:
            ended = _take(json.loads(line), run, progress) or ended
    if run.failure is None and (process.returncode != 0 or not ended):
        run.failure = explain_end(process.returncode, len(run.steps))
    return run


def _take(event: Mapping[str, Any], run: ModeRun, progress: Progress) -> bool:
    """Take in one line of the protocol; return whether it was the last."""
    fields = dict(event)
    match fields.pop("event"):
        case "start":
            run.parameters_count = fields["parameters_count"]
        case "step":
            run.steps.append(StepRecord(**fields))
            progress.step(run)
        case "memory":
            run.memory = MemoryRecord(**fields)
        case "failure":
            run.failure = fields["message"]
        case "end":
            run.summary = fields["summary"]
            return True
        case other:
            raise AssertionError(f"the process of {run.mode} sent an unknown event {other!r}")
    return False


def explain_end(return_code: int, step_count: int) -> str:
    """Say why a process ended that did not say so itself."""
    after = f"after {step_count} finished steps"
    if return_code == -signal.SIGKILL:
        return (
            f"its process was killed ({after}), most likely by the kernel for want of memory "
            "(`dmesg`, or memory.events of its cgroup, tells); give it more, or train less with "
            "--batch or --sequence"
        )
    if return_code < 0:
        name = signal.Signals(-return_code).name
        return f"its process died of {name} ({after}); its last words are above"
    return f"its process ended with exit code {return_code} ({after}); its last words are above"
