"""Starts fresh processes of the demo's modes in turn, and collects their records."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable

from ssdtrain.demo import without
from ssdtrain.demo.options import WITHOUT_SSDTRAIN, Mode, Run, Step, TrainingOptions


def run_all(options: TrainingOptions, modes: Iterable[Mode], repeats: int) -> list[Run]:
    """Run the modes in turn, again and again, so that a drift of the machine affects them all.

    A mode that fails is not repeated; the others go on.
    """
    runs: list[Run] = []
    left = list(modes)
    for repeat in range(1, repeats + 1):
        for mode in tuple(left):
            print(f"{mode}, repeat {repeat}", file=sys.stderr)
            run = run_process(mode, options)
            run.repeat = repeat
            runs.append(run)
            if run.failure is not None:
                left.remove(mode)
                print(f"{mode} failed, and is not repeated: {run.failure}", file=sys.stderr)
    return runs


def run_process(mode: Mode, options: TrainingOptions) -> Run:
    """Run a mode in a fresh process and wait for its end."""
    words = ("ssdtrain.demo.process", mode, options.to_json())
    with without.start(*words, is_without=mode in WITHOUT_SSDTRAIN) as process:
        assert process.stdout is not None
        try:
            lines = process.stdout.read().splitlines()
        except BaseException:
            # Ctrl-C, or a closed terminal: a process of gigabytes must not go on alone.
            process.kill()
            raise
    if process.returncode != 0:
        return Run(mode=mode, failure=_explain_end(process.returncode))
    record = json.loads(lines[-1])
    record["steps"] = [Step(**step) for step in record["steps"]]
    return Run(**record)


def _explain_end(return_code: int) -> str:
    if return_code == -signal.SIGKILL:
        return (
            "its process was killed, most likely by the kernel for want of memory; give it more, "
            "or train less with --batch or --sequence"
        )
    name = f"exit code {return_code}" if return_code >= 0 else signal.Signals(-return_code).name
    return f"its process ended with {name}; its error is above"
