"""Removes each defence of the product from a copy of the package, and runs the tests that guard it.

``make mutations`` calls it. A defence is guarded if its tests pass with it and each of them fails
without it; tests/support/defences.py finds both. The exit code is 1 if one can go unnoticed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import defences
from checkout import ROOT, TESTS

PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others say that it could not judge."""
TIMEOUT_S = 120
WORKERS_COUNT = 2

INSTEAD = {
    "a tensor of its own for each unpack": "return kept",
    "checkpoint recognition": "if True:",
    "hooks that the compiler does not trace": "if False:",
    "lifetime by handle": "entry = lambda: saved",
    "live memory before the disk": "if storage is None or record.nbytes:",
    "memory of others stays": "return False",
    "never the tensor itself": "self.tensor = tensor",
    "no lock while waiting for a read": "with self._lock: found = self._wait(packed, found)",
    "one counter for all who saved it": "counted = self.counter.clone()",
    "parts that count apart stay": "return False",
    "provenance: the base of a view": "if False:",
    "provenance: the walk to the parameter": "for _ in range(0):",
    "shared counters below autograd": "if False:",
    "storage offset": "self.offset = 0",
    "the gate": "self._writeback._begin_write(record)",
    "verify": "verify=False,",
    "version at unpack": "if version not in (NO_VERSION, version):  # noqa: SLF001",
    "weights without history": "return False",
    "what a refused backward left is dropped": "if _lowest:",
    "what is larger than its parameter": "return True",
}
"""What stands in the place of a marked line where to remove it would break the code around it."""


def mutated(lines: Sequence[str], name: str) -> list[str]:
    """Return a file's lines without one defence."""
    marked = {at for defence, at in defences.marked_lines(list(lines)) if defence == name}
    found = []
    for at, line in enumerate(lines):
        if at not in marked:
            found.append(line)
        elif name in INSTEAD:
            indent = line[: len(line) - len(line.lstrip())]
            found.append(indent + INSTEAD[name])
    return found


@contextmanager
def copied_package() -> Iterator[Path]:
    """Copy what is installed, the compiled part with it; yield the folder to import it from."""
    spec = importlib.util.find_spec("ssdtrain")
    if spec is None or spec.origin is None:
        sys.exit("ssdtrain is not installed for this Python; `make mutations` installs it")
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(spec.origin).parent, Path(folder, "ssdtrain"), ignore=ignored)
        yield Path(folder)


@contextmanager
def without(name: str, folder: Path) -> Iterator[None]:
    """Take a defence out of the package in ``folder`` for a while."""
    package = folder / "ssdtrain"
    modules = {mark.module for mark in defences.marks(package) if mark.defence == name}
    whole = {package / module: (package / module).read_text() for module in modules}
    for path, text in whole.items():
        path.write_text("\n".join(mutated(text.splitlines(), name)) + "\n")
    try:
        yield
    finally:
        for path, text in whole.items():
            path.write_text(text)


def outcome(folder: Path, tests: Sequence[str]) -> tuple[int, set[str], str]:
    """Run tests against the package in ``folder``.

    Returns pytest's exit code, the tests that failed, and pytest's last words.
    """
    results = folder / "results.xml"
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", f"--timeout={TIMEOUT_S}"]
    command += [f"--junit-xml={results}", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    done = subprocess.run(
        [*command, *map(node, tests)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    words = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    return done.returncode, failed_in(results), words


def node(test: str) -> str:
    """Return what pytest calls a test that the documentation calls ``test_module::test_name``."""
    module, _, name = test.partition("::")
    (path,) = TESTS.glob(f"*/{module}.py")
    return f"{path}::{name}"


def failed_in(results: Path) -> set[str]:
    """Return the tests of which a case failed, as the documentation calls them."""
    if not results.exists():
        return set()
    cases = ElementTree.parse(results).iter("testcase")
    results.unlink()
    return {
        f"{one.attrib['classname'].rpartition('.')[2]}::{one.attrib['name'].partition('[')[0]}"
        for one in cases
        if one.find("failure") is not None or one.find("error") is not None
    }


def judge(name: str, tests: Sequence[str], folders: SimpleQueue[Path]) -> list[str]:
    """Return what is wrong: tests that pass, or cannot judge, without the defence."""
    folder = folders.get()
    try:
        with without(name, folder):
            code, failed, words = outcome(folder, tests)
    finally:
        folders.put(folder)
    if code not in (PASSED, FAILED):
        return [f"the tests do not run\n{words}"]
    return [f"{test} passes without it" for test in tests if test not in failed]


def main() -> None:
    """Judge every defence, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only defences that contain one of these")
    words = parser.parse_args().words
    if wrong := defences.differences():
        sys.exit("\n".join(wrong))
    chosen = {
        name: tests
        for name, tests in defences.guards().items()
        if not words or any(word in name for word in words)
    }
    if not chosen:
        sys.exit(f"no defence contains {words}")
    with copied_package() as first, copied_package() as second:
        every = sorted({test for tests in chosen.values() for test in tests})
        code, _, last_words = outcome(first, every)
        if code != PASSED:
            sys.exit(f"with every defence in place the tests do not pass:\n{last_words}")
        sys.stdout.write(f"with every defence in place {len(every)} tests pass\n")
        folders: SimpleQueue[Path] = SimpleQueue()
        folders.put(first)
        folders.put(second)
        bad_count = 0
        with ThreadPoolExecutor(WORKERS_COUNT) as pool:
            judged = pool.map(lambda one: judge(*one, folders), chosen.items())
            for (name, tests), problems in zip(chosen.items(), judged, strict=True):
                bad_count += bool(problems)
                seen = "; ".join(problems) or "noticed by " + ", ".join(tests)
                sys.stdout.write(f"without {name}: {seen}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - bad_count} of {len(chosen)} defences are guarded\n")
    sys.exit(1 if bad_count else 0)


if __name__ == "__main__":
    main()
