"""The steps of `benches/gpu_check.py`: a process each, with a time limit, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
STEPS = Path(__file__).resolve().parent
TESTS_PATHS = (ROOT / "tests" / "support", ROOT / "tests" / "fake_device")
LAST_WORDS_COUNT = 15
"""Lines of a step that failed which are kept."""

State = Literal["passed", "failed", "took too long", "not begun"]


@dataclass(frozen=True)
class Step:
    """One step: a program of Python, and how long it may take."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    kind: Literal["step", "doctor", "tests"] = "step"
    """How it tells what it found."""


@dataclass
class Outcome:
    """What came of a step."""

    name: str
    state: State
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Runner:
    """Runs steps with one interpreter over one directory."""

    python: Sequence[str]
    """The words that start Python, as a shell would split them."""
    directory: Path
    is_tiny: bool

    def run(self, step: Step, limit_s: float) -> Outcome:
        """Run a step, and end it with all that it started once its time is over."""
        with tempfile.TemporaryDirectory(dir=self.directory, prefix="check-") as folder:
            told = Path(folder) / "told"
            began_s = monotonic()
            code, said = self._ended(self._command(step, told), limit_s)
            outcome = Outcome(step.name, "passed", monotonic() - began_s)
            try:
                read_as(step.kind, told, said, outcome)
            except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
                outcome.failures.append(f"the step did not tell what it found: {error}")
        if code is None:
            outcome.state = "took too long"
            outcome.failures = [f"it was ended after {limit_s:.0f} s"]
        elif code or outcome.failures:
            outcome.state = "failed"
            outcome.failures = outcome.failures or [f"it ended with the code {code}"]
        if outcome.state != "passed":
            outcome.last_words = said.splitlines()[-LAST_WORDS_COUNT:]
        return outcome

    def _command(self, step: Step, told: Path) -> list[str]:
        command = [*self.python, *step.words]
        if step.kind == "tests":
            return [*command, f"--junit-xml={told}", f"--rootdir={ROOT}"]
        if step.kind == "doctor":
            return [*command, str(self.directory), "--json"]
        command += ["--dir", str(self.directory), "--json", str(told)]
        return [*command, "--tiny"] if self.is_tiny else command

    def _ended(self, command: list[str], limit_s: float) -> tuple[int | None, str]:
        """Return how it ended (``None``: it had to be ended), and what it said."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # With what it started: a step has a process group of its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()

    def _environment(self) -> dict[str, str]:
        paths = [*map(str, TESTS_PATHS), os.environ.get("PYTHONPATH", "")]
        cache = str(self.directory / "cache")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # What `ssdtrain bench` found once must not decide what is measured here.
            "XDG_CACHE_HOME": cache,
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def read_as(kind: str, told: Path, said: str, outcome: Outcome) -> None:
    """Take over what a step told."""
    if kind == "step":
        found = json.loads(told.read_text())
        outcome.figures, outcome.failures = found["figures"], found["failures"]
        outcome.rows = [(label, shown) for label, shown in found["rows"]]
    elif kind == "doctor":
        # Notes on standard error may stand before the document.
        found = json.loads(said[said.index("{") :])
        outcome.figures = found
        checks = found["checks"]
        outcome.rows = [(one["name"], f"{one['state']}  {one['finding']}") for one in checks]
        outcome.failures = [
            f"{one['name']}: {one['finding']}" for one in checks if one["state"] == "FAIL"
        ]
    else:
        read_tests(told, outcome)


def read_tests(told: Path, outcome: Outcome) -> None:
    """Count the tests by how they ended."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    # The file is that of our own pytest.
    for case in ElementTree.parse(told).iter("testcase"):  # noqa: S314
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        kinds = {part.tag: part.attrib.get("message", "") for part in case}
        if "failure" in kinds or "error" in kinds:
            counts["failed"] += 1
            message = kinds.get("failure") or kinds.get("error") or "it failed"
            outcome.failures.append(f"{name}: {message.splitlines()[0] if message else ''}")
        elif "skipped" in kinds:
            counts["skipped"] += 1
            outcome.rows.append((name, f"skipped: {kinds['skipped']}"))
        else:
            counts["passed"] += 1
    outcome.figures = counts
    outcome.rows.insert(0, ("tests", ", ".join(f"{count} {how}" for how, count in counts.items())))
    if not counts["passed"]:
        outcome.failures.append("no test has run and passed")


def steps(python: Sequence[str], *, is_tiny: bool) -> list[Step]:
    """Return all steps in their order, with limits for a run of eight minutes.

    A probe of cuFile belongs after the drive's rates.
    """

    def own(name: str, limit_s: float, *words: str) -> Step:
        return Step(name, (str(STEPS / f"gpu_{name}.py"), *words), limit_s)

    def trained(name: str, limit_s: float, *words: str) -> Step:
        # Begins no round after so long, and has the rest for the one that was begun.
        script = (str(STEPS.parent / "gpu_step.py"), "--seconds", str(limit_s * 0.4), *words)
        return Step(name, script, limit_s)

    pytest = ("-m", "pytest", "-m", "gpu and not long", "-q", "tests/cuda")
    # Neither plugins nor the settings that need them: pytest alone is enough here.
    plain = ("--noconftest", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider")
    keyword = ("-k", "test_report or slot") if is_tiny else ()
    return [
        own("facts", 30),
        Step("doctor", ("-m", "ssdtrain", "doctor"), 40, "doctor"),
        own("copies", 30),
        own("drive", 30),
        Step("contract", (*pytest, *plain, *workers(), *keyword), 150, "tests"),
        own("equal", 60),
        trained("step, hidden 4096", 70),
        trained("step, hidden 8192", 70, "--hidden", "8192", "--layers", "4"),
        trained("step, float32", 60, "--dtype", "float32", "--batch", "2", "--rounds", "3"),
        own("faults", 60, "--python", *python),
    ]


def workers() -> tuple[str, ...]:
    """Let the tests share the GPU where the plugin for it is installed."""
    try:
        import xdist  # noqa: F401, PLC0415 - the check runs without it
    except ImportError:
        return ()
    return ("-n", str(min(4, os.cpu_count() or 1)))


def words_of(command: Sequence[str]) -> list[str]:
    """Return the words that start Python: this interpreter if there are none."""
    return list(command) or [sys.executable]
