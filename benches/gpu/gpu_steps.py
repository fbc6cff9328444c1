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

RESERVED_SHARE = 0.5
"""Of the limit of each later step, what a step leaves for it."""
WIDE_WAYS = ("keep", "recompute", "selective", "rematerialize", "both")
"""Of widths at which a step is long."""
SMALL_WAYS = ("keep", "keep again", "rematerialize", "host", "both")
FLOAT32_WAYS = ("keep", "recompute", "rematerialize", "both")
STEP_S_MIN = 5.0
"""With less, a step is not begun."""
END_S_MAX = 5.0
"""So long a process that was killed is waited for: one that hangs in a driver may never end."""

State = Literal["passed", "failed", "took too long", "cut off", "not begun"]
"""*Cut off* was ended because the time of the whole run was over, before its own limit."""


@dataclass(frozen=True)
class Step:
    """One step: a program of Python, and how long it may take."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    kind: Literal["step", "doctor", "tests"] = "step"
    """How it tells what it found."""
    paced_share: float | None = None
    """Of the time that it is given, after which it is to begin no round; ``None``: it has none."""


@dataclass
class Outcome:
    """What came of a step."""

    name: str
    state: State
    seconds: float
    given_s: float = 0.0
    """How long it might have taken."""
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self)


@dataclass
class Budget:
    """The time of the whole run, from which each step draws.

    A step gets at most its limit, and leaves each later one half of its own, or less if even that
    is more than there is: so one that hangs takes no other's turn away.
    """

    seconds: float
    todo: list[Step]
    began_s: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        """Share out what there is."""
        wanted_s = sum(step.limit_s for step in self.todo)
        self._share = min(RESERVED_SHARE, max(0.0, self.seconds) / wanted_s)

    def left_s(self) -> float:
        """Return what is left for all that has not been drawn for."""
        return self.began_s + self.seconds - monotonic()

    def draw(self, step: Step) -> float:
        """Return how long a step may take: the next one, or one whose turn has passed over some."""
        del self.todo[: self.todo.index(step) + 1]
        reserved_s = self._share * sum(later.limit_s for later in self.todo)
        return min(step.limit_s, self.left_s() - reserved_s)


@dataclass(frozen=True)
class Runner:
    """Runs steps with one interpreter over one directory."""

    python: Sequence[str]
    """The words that start Python, as a shell would split them."""
    directory: Path
    is_tiny: bool

    def run(self, step: Step, limit_s: float) -> Outcome:
        """Run a step, and end it with all that it started once its time is over."""
        with tempfile.TemporaryDirectory(
            dir=self.directory, prefix="check-", ignore_cleanup_errors=True
        ) as folder:
            told = Path(folder) / "told"
            began_s = monotonic()
            code, said = self.ended(self._command(step, told, limit_s), limit_s)
            outcome = Outcome(step.name, "passed", monotonic() - began_s, limit_s)
            try:
                read_as(step.kind, told, said, outcome)
            except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
                outcome.failures.append(f"the step did not tell what it found: {error}")
        if code is None:
            is_cut_off = limit_s < step.limit_s
            outcome.state = "cut off" if is_cut_off else "took too long"
            why = f", and not after {step.limit_s:.0f} s, for lack of time" if is_cut_off else ""
            outcome.failures = [f"it was ended after {limit_s:.0f} s{why}"]
        elif code or outcome.failures:
            outcome.state = "failed"
            outcome.failures = outcome.failures or [f"it ended with the code {code}"]
        if outcome.state != "passed":
            outcome.last_words = said.splitlines()[-LAST_WORDS_COUNT:]
        return outcome

    def _command(self, step: Step, told: Path, limit_s: float) -> list[str]:
        command = [*self.python, *step.words]
        if step.paced_share is not None:
            command += ["--seconds", str(limit_s * step.paced_share)]
        if step.kind == "tests":
            return [*command, f"--junit-xml={told}", f"--rootdir={ROOT}"]
        if step.kind == "doctor":
            return [*command, str(self.directory), "--json"]
        command += ["--dir", str(self.directory), "--json", str(told)]
        return [*command, "--tiny"] if self.is_tiny else command

    def ended(self, command: list[str], limit_s: float) -> tuple[int | None, str]:
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
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S_MAX)
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
    """Return all steps in their order, each with the most that it may take.

    The sum is more than eight minutes: see `Budget`.
    """

    def own(name: str, limit_s: float, *words: str) -> Step:
        return Step(name, (str(STEPS / f"gpu_{name}.py"), *words), limit_s)

    def trained(name: str, limit_s: float, ways: Sequence[str], *words: str) -> Step:
        # Begins no round after so long, and has the rest for the one that was begun, for steps
        # whose gradients are compared, and for the end of the process, which unpins memory.
        script = (str(STEPS.parent / "gpu_step.py"), *words)
        given = ("--ways", *ways) if ways else ()
        return Step(f"step, {name}", (*script, *given), limit_s, paced_share=0.6)

    wide = ("--hidden", "8192", "--layers", "4")
    # A GPU that waits for Python, with its hooks; nobody needs offload there.
    small = ("--hidden", "1024", "--sequence", "1024", "--rounds", "30")
    float32 = ("--dtype", "float32", "--layers", "2", "--batch", "2", "--rounds", "5")
    pytest = ("-m", "pytest", "-m", "gpu and not long", "-q", "tests/cuda")
    # Neither plugins nor the settings that need them: pytest alone is enough here.
    plain = ("--noconftest", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider")
    keyword = ("-k", "test_report or slot") if is_tiny else ()
    return [
        own("facts", 30),
        Step("doctor", ("-m", "ssdtrain", "doctor"), 40, "doctor"),
        own("copies", 30),
        own("drive", 30),
        own("cufile", 60),
        Step("contract", (*pytest, *plain, *workers(), *keyword), 150, "tests"),
        own("equal", 60),
        own("faults", 60, "--python", *python),
        # Last: they take fewer rounds if less time is left.
        trained("hidden 4096", 115, ()),
        trained("hidden 8192", 75, WIDE_WAYS, *wide),
        trained("hidden 1024", 40, SMALL_WAYS, *small),
        trained("float32", 50, FLOAT32_WAYS, *float32),
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
