"""Starts fresh processes of the demo's modes in turn, and collects their records."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable
from typing import Any

from ssdtrain.demo import without
from ssdtrain.demo.options import WITHOUT_SSDTRAIN, End, Mode, Run, Step, TrainingOptions


def run_all(options: TrainingOptions, modes: Iterable[Mode], repeats: int) -> list[Run]:
    """Run the modes in turn, again and again, so that a drift of the machine affects them all.

    A mode that fails is not repeated; the others go on.
    """
    runs: list[Run] = []
    left = list(modes)
    for repeat in range(1, repeats + 1):
        for mode in tuple(left):
            run = run_process(mode, repeat, options)
            runs.append(run)
            if run.failure is not None:
                left.remove(mode)
                print(f"{mode} failed, and is not repeated: {run.failure}", file=sys.stderr)
    return runs


def run_process(mode: Mode, repeat: int, options: TrainingOptions) -> Run:
    """Run a mode in a fresh process and wait for its end."""
    run = Run(mode=mode, repeat=repeat)
    words = ("ssdtrain.demo.process", mode, options.to_json())
    with without.start(*words, is_without=mode in WITHOUT_SSDTRAIN) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _take(json.loads(line), run)
        except BaseException:
            # Ctrl-C, or a closed terminal: a process of gigabytes must not go on alone.
            process.kill()
            raise
    if run.failure is None and (process.returncode != 0 or run.end is None):
        run.failure = _explain_end(process.returncode, len(run.steps))
    return run


def _take(event: dict[str, Any], run: Run) -> None:
    """Add a line of the protocol to the run."""
    match event.pop("event"):
        case "start":
            run.parameters_count = event["parameters_count"]
        case "step":
            step = Step(**event)
            run.steps.append(step)
            print(
                f"{run.mode:<9}  repeat {run.repeat}  {step.kind:>8} step {len(run.steps)}  "
                f"{step.seconds:7.2f} s  loss {float.fromhex(step.loss):.4f}",
                file=sys.stderr,
            )
        case "failure":
            run.failure = event["message"]
        case _:
            run.end = End(**event)


def _explain_end(return_code: int, step_count: int) -> str:
    """Return why a process ended that sent no failure."""
    after = f"after {step_count} finished steps"
    if return_code == -signal.SIGKILL:
        return (
            f"its process was killed ({after}), most likely by the kernel for want of memory; give "
            "it more, or train less with --batch or --sequence"
        )
    name = f"exit code {return_code}" if return_code >= 0 else signal.Signals(-return_code).name
    return f"its process ended with {name} ({after}); its error is above"
