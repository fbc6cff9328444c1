"""The acceptance run on a machine with a GPU: one command, at most eight minutes, JSON and a table.

It needs ssdtrain's wheel, PyTorch, pytest and this checkout; no network, no compiler. In order: the
facts of the machine, `ssdtrain doctor`, the rates of the GPU's link and of the drive, whether
cuFile works, the tests of `tests/cuda` on the GPU, training bit by bit, faults, and
`benches/gpu_step.py` at four sizes. A step that fails, or takes too long, does not stop the others;
each leaves those after it half of what they may take. It writes to the drive for minutes: tens to
hundreds of GB.

    python benches/gpu_check.py --dir DIR [--json FILE]

Exit codes: 0 all is well; 1 something failed, or had no time; 2 a wrong option; 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

from gpu_steps import STEP_S_MIN, Budget, Outcome, Runner, steps, words_of

FORMAT = 1
EXIT_WELL, EXIT_FAILED, EXIT_NO_GPU = 0, 1, 3
SECONDS_MAX = 480.0
"""For the whole run, with the look for a GPU before the steps and the tidying up after them."""
TIDY_S = 10.0
"""Of these, kept for the end: to kill what runs then, and to remove what it left."""
PROBE_S_MAX = 60
PROBE = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name())"
LABEL_COLUMNS = 32


def lack_of_gpu(runner: Runner, seconds_max: float) -> str | None:
    """Say why PyTorch can use no GPU here, in a process of its own; ``None`` if it can."""
    script = runner.directory / "probe.py"
    script.write_text(PROBE)
    limit_s = min(PROBE_S_MAX, seconds_max)
    code, said = runner.ended([*runner.python, str(script)], limit_s)
    if code is None:
        return f"CUDA did not start within {limit_s:.0f} s"
    if not code:
        return None
    return (said.strip().splitlines() or [f"CUDA does not start ({code})"])[-1]


def check(runner: Runner, budget: Budget) -> list[Outcome]:
    """Run all steps, telling each as it ends."""
    outcomes = []
    for step in list(budget.todo):
        limit_s = budget.draw(step)
        if limit_s < STEP_S_MIN:
            left = f"{max(0.0, budget.left_s()):.0f} of {budget.seconds:.0f} s were left"
            outcome = Outcome(step.name, "not begun", 0.0, failures=[f"no time for it: {left}"])
        else:
            outcome = runner.run(step, limit_s)
        outcomes.append(outcome)
        print(text_of(outcome), flush=True)
    return outcomes


def text_of(outcome: Outcome) -> str:
    """Lay what came of a step out for a person."""
    lines = [f"== {outcome.name}: {outcome.state} ({outcome.seconds:.1f} s)"]
    lines += [f"   {label:<{LABEL_COLUMNS}} {shown}" for label, shown in outcome.rows]
    lines += [f"   FAILED: {one}" for one in outcome.failures]
    lines += [f"   | {line}" for line in outcome.last_words]
    return "\n".join(lines)


def record_of(outcomes: Sequence[Outcome], seconds: float, seconds_max: float) -> dict[str, Any]:
    """Return all that was found, for JSON."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "seconds_max": seconds_max,
        "has_gpu": True,
        "steps": [one.as_dict() for one in outcomes],
        "failures": [f"{one.name}: {what}" for one in outcomes for what in one.failures],
    }


def main(arguments: list[str]) -> int:
    """Check, print, write, and return the exit code."""
    began_s = monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive to use")
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-check.json"), help="write it there (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS_MAX, help="for the whole run (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", help="steps by name; a wrong name lists them"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes of a test, not of a GPU")
    parser.add_argument("--python", type=shlex.split, default=[], help="what starts Python")
    options = parser.parse_args(arguments)
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a directory; name one on a local NVMe drive")
    if options.seconds < TIDY_S + STEP_S_MIN:
        parser.error(f"--seconds must be at least {TIDY_S + STEP_S_MIN:.0f}")
    python = words_of(options.python)
    todo = steps(python, is_tiny=options.tiny)
    if unknown := set(options.only or ()) - {step.name for step in todo}:
        parser.error(f"there is no step {sorted(unknown)}; there are {[one.name for one in todo]}")
    todo = [step for step in todo if not options.only or step.name in options.only]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="gpu-check-") as folder:
        runner = Runner(python, Path(folder).resolve(), options.tiny)
        if (lack := lack_of_gpu(runner, options.seconds)) is not None:
            print(f"no GPU that PyTorch can use, so nothing was checked: {lack}")
            lacking = {"format": FORMAT, "has_gpu": False, "why": lack}
            options.json.write_text(json.dumps(lacking, indent=1) + "\n")
            return EXIT_NO_GPU
        if options.seconds > SECONDS_MAX:
            # A slow machine gets more time for each step, too.
            longer = options.seconds / SECONDS_MAX
            todo = [replace(step, limit_s=step.limit_s * longer) for step in todo]
        outcomes = check(runner, Budget(options.seconds - TIDY_S, todo, began_s))
    record = record_of(outcomes, monotonic() - began_s, options.seconds)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{'step':<{LABEL_COLUMNS}} {'state':<14} {'seconds':>8}")
    for one in outcomes:
        print(f"{one.name:<{LABEL_COLUMNS}} {one.state:<14} {one.seconds:>8.1f}")
    print(f"written to {options.json}; {len(record['failures'])} failures")
    return EXIT_FAILED if record["failures"] else EXIT_WELL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
