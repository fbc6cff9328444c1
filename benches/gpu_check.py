"""The acceptance run on a machine with a GPU: one command, at most eight minutes, JSON and a table.

It needs ssdtrain's wheel, PyTorch, pytest and this checkout; no network, no compiler. In order: the
facts of the machine, `ssdtrain doctor`, the rates of the GPU's link and of the drive, the tests of
`tests/cuda` on the GPU, training bit by bit, `benches/gpu_step.py` at three sizes, and faults. A
step that fails, or takes too long, does not stop the others. It writes to the drive for minutes:
tens to hundreds of GB.

    python benches/gpu_check.py --dir DIR [--json FILE]

Exit codes: 0 all is well; 1 something failed, or had no time; 2 a wrong option; 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

from gpu_steps import Outcome, Runner, Step, steps, words_of

FORMAT = 1
EXIT_WELL, EXIT_FAILED, EXIT_NO_GPU = 0, 1, 3
SECONDS_MAX = 480.0
"""For all steps; the limits of the single ones, made for this, are more in sum."""
STEP_S_MIN = 5.0
"""With less, a step is not begun."""
PROBE_S_MAX = 60
PROBE = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name())"
LABEL_COLUMNS = 32


def lack_of_gpu(python: Sequence[str], folder: Path) -> str | None:
    """Say why PyTorch can use no GPU here, in a process of its own; ``None`` if it can."""
    script = folder / "probe.py"
    script.write_text(PROBE)
    try:
        done = subprocess.run(
            [*python, str(script)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"CUDA did not start within {PROBE_S_MAX} s"
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"CUDA does not start ({done.returncode})"])[-1]


def check(runner: Runner, todo: Sequence[Step], seconds_max: float) -> list[Outcome]:
    """Run all steps, telling each as it ends."""
    end_s = monotonic() + seconds_max
    outcomes = []
    for step in todo:
        left_s = end_s - monotonic()
        if left_s < STEP_S_MIN:
            outcome = Outcome(step.name, "not begun", 0.0, failures=["no time was left"])
        else:
            limit_s = step.limit_s * max(1.0, seconds_max / SECONDS_MAX)
            outcome = runner.run(step, min(limit_s, left_s))
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


def record_of(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return all that was found, for JSON."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "has_gpu": True,
        "steps": [one.as_dict() for one in outcomes],
        "failures": [f"{one.name}: {what}" for one in outcomes for what in one.failures],
    }


def main(arguments: list[str]) -> int:
    """Check, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive to use")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="write it here")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="for all steps together")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="the steps with these names")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test, not of a GPU")
    parser.add_argument("--python", type=shlex.split, default=[], help="what starts Python")
    options = parser.parse_args(arguments)
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a directory; name one on a local NVMe drive")
    python = words_of(options.python)
    todo = steps(python, is_tiny=options.tiny)
    if unknown := set(options.only or ()) - {step.name for step in todo}:
        parser.error(f"there is no step {sorted(unknown)}; there are {[one.name for one in todo]}")
    todo = [step for step in todo if not options.only or step.name in options.only]
    began_s = monotonic()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="gpu-check-") as folder:
        if (lack := lack_of_gpu(python, Path(folder))) is not None:
            print(f"no GPU that PyTorch can use, so nothing was checked: {lack}")
            lacking = {"format": FORMAT, "has_gpu": False, "why": lack}
            options.json.write_text(json.dumps(lacking, indent=1) + "\n")
            return EXIT_NO_GPU
        runner = Runner(python, Path(folder).resolve(), options.tiny)
        outcomes = check(runner, todo, options.seconds)
    record = record_of(outcomes, monotonic() - began_s)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{'step':<{LABEL_COLUMNS}} {'state':<14} {'seconds':>8}")
    for one in outcomes:
        print(f"{one.name:<{LABEL_COLUMNS}} {one.state:<14} {one.seconds:>8.1f}")
    print(f"written to {options.json}; {len(record['failures'])} failures")
    return EXIT_FAILED if record["failures"] else EXIT_WELL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
