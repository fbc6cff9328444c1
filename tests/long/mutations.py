"""Removes each defence of the product from a copy of the package, and runs the tests that guard it.

``make mutations`` calls it. What is compiled is built anew without its line. A defence is guarded
if its tests pass with it and each of them fails without it; tests/support/defences.py finds both.
The exit code is 1 if one can go unnoticed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import defences
import repeats
from checkout import ROOT, TESTS

PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others say that it could not judge."""
TIMEOUT_S = 120
WORKERS_COUNT = 2
EXTENSION = "_core.abi3.so"
BUILD = ROOT / "target" / "mutations"
BUILDING = threading.Lock()
BUILD_SETTINGS = {"CARGO_TARGET_DIR": str(BUILD / "target"), "CARGO_PROFILE_RELEASE_LTO": "off"}

INSTEAD = {
    "checkpoint recognition": "let is_recomputed = false;",
    "lifetime by handle": (
        "let reference = PyWeakrefReference::new(saved)?.unbind(); std::mem::forget(saved.clone());"
    ),
    "live memory before the disk": (
        "let Some(storage) = this.storage(py).filter(|_| false) else { return Ok(None) };"
    ),
    "memory of others stays": "Ok(owns(address) && false)",
    "never the tensor itself": "tensor.clone()",
    "memory that moved": "&& true;",
    "no lock while waiting for a read": (
        "let tensor = own.lock.locked(py, || own.read(saved, &loading))?;"
    ),
    "one counter for all who saved it": 'let twin = counter.call_method0(intern!(py, "clone"))?;',
    "parts that count apart stay": "Ok(root_bytes == u64::MAX)",
    "provenance: the base of a view": "if false {",
    "provenance: the walk to the parameter": "for _ in 0..0 {",
    "shared counters below autograd": "if True:",
    "storage offset": "offset: 0,",
    "what is computed again is compared": "if False:",
    "strides": ('let stride = empty.call_method1("new_empty", (&size,))?.call_method0("stride")?;'),
    "the gate": "records.begin_write(record, self.session.writing(py), None)?;",
    "version at pack": "|| false;",
    "verify": "verify=False,",
    "version of what is kept": "let is_same = true;",
    "a leaf that is kept cannot be swapped": (
        "let unswappable: Option<Bound<'_, PyWeakrefReference>> = None;"
    ),
    "a leaf that is kept is held itself": "let held = if false {",
    "a leaf in memory is handed out itself": "&& false;",
    "values of a mask": "if False:",
    "weights without history": "Ok(users == 0)",
    "what a refused backward left is dropped": "if _lowest:",
    "what a plain tensor is": "return Ok(Verdict::Plain);",
    "what is larger than its parameter": "Ok(storage_bytes > 0)",
    "a copy down waits for what computes its source": "let after: [&Event; 0] = [];",
    "a slot is written after it is filled": "Ok(false) => { self.begin_write(&parcel); }",
    "a source waits for its last part": "let last = &self.parts[0];",
    "the current stream": "let handle = 0;",
    "the stream of the pack": (
        "let raw = user_stream(GpuStream { gpu: stream.gpu, handle: "
        "way.calls.current_stream(py, stream.gpu).unwrap() });"
    ),
    "a source that dies under its copy": "drop(departure);",
    "no lock while waiting for a GPU": "if true {",
    "who needs room waits with who waits for a GPU": "Ok(false)",
    "every stream waits for a load": "let lent = Some(core::Result::Ok(()));",
    "a target that is given up": "drop(departure);",
    "a target is allocated for the stream of the pack": (
        "let storage = self.way.calls.allocate(py, GpuStream { gpu: self.stream.gpu, handle: "
        "self.way.calls.current_stream(py, self.stream.gpu)? }, nbytes)?;"
    ),
    "a slot is free after it is written": "let owner = Box::new(());",
    "no weight leaves beside busy threads": "if false {",
    "no weight leaves that is used": "if false {",
    "no weight leaves that others have": "if false {",
    "version of a saved weight": "(lambda *_: None)(",
    "other memory of a saved weight": "if False:",
    "a changed weight is written again": "if entry.sum is not None:",
    "weights on memory of others stay": "if False:",
    "gradients on memory of others stay": "return True",
    "gradients stay that a graph or another library has": "return super().leave()",
    "a weight that changed past its counter since its update began": "changed = None",
    "gradients on memory of others are used in step()": "if False:",
    "weights stay that a graph or another library has": "return super().leave()",
    "bytes that are saved again": "continue;",
    "looks let none leave that was in memory": "self._use(entry)",
    "a weight that was saved is brought back": "let is_away = is_plain && holder.is_none();",
    "nothing is saved in the middle of a step": "return",
    "options that cannot be copied are read in step() only": "pass",
    "a number that parts of a step rebind to different values is an error": "if False:",
    "shared weights stay": "return True",
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
    files = {mark.file for mark in defences.marks() if mark.defence == name}
    changed = {file: text_without(name, file) for file in files}
    saved = {}
    for file, text in changed.items():
        if file.suffix == ".py":
            there = package / file.relative_to(defences.PACKAGE)
            saved[there] = there.read_bytes()
            there.write_text(text)
    compiled = {file: text for file, text in changed.items() if file.suffix == ".rs"}
    if compiled:
        there = package / EXTENSION
        saved[there] = there.read_bytes()
        there.write_bytes(build(compiled))
    try:
        yield
    finally:
        for there, content in saved.items():
            there.write_bytes(content)


def text_without(name: str, file: Path) -> str:
    return "\n".join(mutated(file.read_text().splitlines(), name)) + "\n"


def build(changed: Mapping[Path, str]) -> bytes:
    """Build the compiled part from a copy of its sources, with the texts of some files changed."""
    with BUILDING:
        # One place for all, so that only what changed is compiled again.
        for name in ("Cargo.toml", "Cargo.lock"):
            copy_if_other((ROOT / name).read_bytes(), BUILD / name)
        for file in sorted((ROOT / "rust").rglob("*")):
            if file.is_file() and "target" not in file.parts:
                text = changed.get(file)
                content = file.read_bytes() if text is None else text.encode()
                copy_if_other(content, BUILD / file.relative_to(ROOT))
        command = ["cargo", "build", "--release", "--locked", "--package", "ssdtrain-py"]
        environment = {**os.environ, "PYO3_PYTHON": sys.executable, **BUILD_SETTINGS}
        done = subprocess.run(
            command, cwd=BUILD, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"without its line the compiled part does not build:\n{done.stderr}")
        return (BUILD / "target" / "release" / "lib_core.so").read_bytes()


def copy_if_other(content: bytes, place: Path) -> None:
    """Write a file unless it is there: cargo goes by the times of files."""
    if not place.exists() or place.read_bytes() != content:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def outcome(folder: Path, tests: Sequence[str], times: int) -> tuple[int, Counter[str], str]:
    """Run tests against the package in ``folder``, so many times.

    Returns pytest's exit code, in how many runs each test failed, and pytest's last words.
    """
    results = folder / "results.xml"
    paths = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    environment[repeats.REPEATS] = str(times)
    command = [sys.executable, "-P", "-m", "pytest", "-q", f"--timeout={TIMEOUT_S}"]
    command += ["-p", repeats.__name__]
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


def failed_in(results: Path) -> Counter[str]:
    """Count for each test, as the documentation calls it, the runs in which a case failed."""
    if not results.exists():
        return Counter()
    cases = ElementTree.parse(results).iter("testcase")
    results.unlink()
    failed = set[tuple[str, str]]()
    for one in cases:
        if one.find("failure") is not None or one.find("error") is not None:
            name, _, case = one.attrib["name"].partition("[")
            test = f"{one.attrib['classname'].rpartition('.')[2]}::{name}"
            failed.add((test, "".join(re.findall(r"\brun\d+\b", case))))
    return Counter(test for test, _ in failed)


def judge(
    name: str, tests: Sequence[str], folders: SimpleQueue[Path], times: int
) -> tuple[list[str], str]:
    """Run a defence's tests so many times without it.

    Returns what is wrong: tests that pass, or cannot judge, without the defence; and by which tests
    it was noticed, how often if more than once.
    """
    folder = folders.get()
    try:
        with without(name, folder):
            code, failed_counts, words = outcome(folder, tests, times)
            # A program with threads that wait for ever may be ended by a signal after its report.
            has_reported = code < 0 and bool(failed_counts)
            if code not in (PASSED, FAILED) and not has_reported:
                return [f"the tests do not run\n{words}"], ""
    finally:
        folders.put(folder)
    often = {
        test: f" in {failed_counts[test]} of {times} runs" if times > 1 else "" for test in tests
    }
    problems = [
        f"{test} passes without it" + (f": it fails{often[test]} only" if often[test] else "")
        for test in tests
        if failed_counts[test] < times
    ]
    return problems, ", ".join(test + often[test] for test in tests)


def main() -> None:
    """Judge every defence, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only defences that contain one of these")
    parser.add_argument(
        "--times", type=int, default=1, help="run the tests of each so often, and count"
    )
    options = parser.parse_args()
    words = options.words
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
        code, _, last_words = outcome(first, every, 1)
        if code != PASSED:
            sys.exit(f"with every defence in place the tests do not pass:\n{last_words}")
        sys.stdout.write(f"with every defence in place {len(every)} tests pass\n")
        folders: SimpleQueue[Path] = SimpleQueue()
        folders.put(first)
        folders.put(second)
        bad_count = 0
        with ThreadPoolExecutor(WORKERS_COUNT) as pool:
            judged = pool.map(lambda one: judge(*one, folders, options.times), chosen.items())
            for name, (problems, noticed) in zip(chosen, judged, strict=True):
                bad_count += bool(problems)
                seen = "; ".join(problems) or f"noticed by {noticed}"
                sys.stdout.write(f"without {name}: {seen}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - bad_count} of {len(chosen)} defences are guarded\n")
    sys.exit(1 if bad_count else 0)


if __name__ == "__main__":
    main()
