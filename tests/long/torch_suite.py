"""Runs a file of PyTorch's own tests under the hooks, and compares it with a plain run.

    torch_suite.py FOLDER [--file test_autograd.py] [--only NAME] [--made-again]

FOLDER is ``test`` of a checkout of PyTorch, best of the version that is installed: the wheel does
not bring its tests. Each test runs three times, in fresh processes: plainly; with the plainest
hooks that keep autograd's promises (*reference*); and with ssdtrain's as the default hooks, where
everything is written (nothing is too small, nothing is kept) and on the disk before a backward
begins. With ``--made-again`` each saved tensor that has a recipe is made again from others instead.
Only tests that pass plainly count. A test that fails under ssdtrain must stand in
``REFUSES`` with the reason and fail under the reference hooks too, else this ends with 1. A process
that dies or hangs costs the test it died in; the next one goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from checkout import SCRATCH
from ssdtrain.config import Rematerialize
from support import IN_PLACE, Rig

TEST_S_MAX = 240
"""A test that takes longer counts as dead."""
MESSAGE_MAX = 1000

SECOND_PAIR = "registers hooks of its own on a saved tensor, and PyTorch allows one pair"
IDENTITY = "asks for the very object that was saved, and hooks return another"
FORBIDS = "forbids hooks, and PyTorch refuses that while there are some"

REFUSES = {
    "TestAutograd.test_checkpointing_without_reentrant_saved_object_identity": IDENTITY,
    "TestAutograd.test_custom_function_saved_tensors": SECOND_PAIR,
    "TestAutograd.test_disabling_saved_tensor_hooks": FORBIDS,
    "TestAutograd.test_disabling_saved_tensor_hooks_nested": FORBIDS,
    "TestAutograd.test_grad_fn_attr_bindings": SECOND_PAIR,
    "TestAutograd.test_no_unnecessary_unwrapping": IDENTITY,
    "TestAutograd.test_pack_hook_with_inplace_modification_should_fail": SECOND_PAIR,
    "TestAutograd.test_saved_tensor_hooks_extra_exit_during_bw_no_crash": SECOND_PAIR,
    "TestAutograd.test_saved_variable_packing_unpacking_did_not_save_original_with_hooks": (
        SECOND_PAIR
    ),
    "TestAutograd.test_saved_variable_packing_unpacking_saved_original_with_hooks": SECOND_PAIR,
    "TestAutograd.test_saved_variable_saved_original_inplace_detach": (
        "expects an error that autograd raises for the original of a saved tensor; with hooks it "
        "has no original"
    ),
}
"""Tests that fail under any hooks on saved tensors, and why: held against the reference hooks."""

LEFT = "left something"
MAKING = "ssdtrain was making a saved tensor"
"""In the note of an error that a recipe raises."""


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests_in(one)
        else:
            yield one


def name_of(test: unittest.TestCase) -> str:
    """Return class and method: the module has the name of the file."""
    return ".".join(test.id().split(".")[-2:])


def outcome_of(result: unittest.TestResult) -> tuple[str, str]:
    for outcome, found in (
        ("failed", result.failures),
        ("raised", result.errors),
        ("skipped", result.skipped),
        ("failed as expected", result.expectedFailures),
    ):
        if found:
            return outcome, found[0][1].strip()[-MESSAGE_MAX:]
    if result.unexpectedSuccesses:
        return "passed unexpectedly", ""
    return "passed", ""


def run(test: unittest.TestCase) -> tuple[str, str]:
    """Run a test and forget what it and its result hold."""
    result = unittest.TestResult()
    test.run(result)
    found = outcome_of(result)
    test.__dict__.clear()
    return found


def run_plainly(test: unittest.TestCase, folder: Path) -> dict[str, Any]:
    outcome, message = run(test)
    return {"outcome": outcome, "message": message}


class Held:
    """What the reference hooks keep: the tensor, and its version, which hooks have to check."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version


def run_reference(test: unittest.TestCase, folder: Path) -> dict[str, Any]:
    """Run a test with hooks that keep everything in memory."""
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        one = Held(tensor)
        held.add(one)
        return one

    def unpack(one: Held) -> Tensor:
        if one.version not in (-1, one.tensor._version):
            raise RuntimeError("a saved tensor has been modified by an inplace operation")
        return one.tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outcome, message = run(test)
    if held:
        gc.collect()
    if outcome == "passed" and held:
        outcome, message = LEFT, f"{len(held)} saved tensors"
    return {"outcome": outcome, "message": message}


def run_hooked(
    test: unittest.TestCase, folder: Path, rematerialize: Rematerialize = "never"
) -> dict[str, Any]:
    """Run a test with everything offloaded that its own thread saves."""
    rig = Rig(folder, verify=True, rematerialize=rematerialize)
    with rig.context(), flushing(rig):
        outcome, message = run(test)
    try:
        rig.assert_empty()
    except AssertionError as error:
        if outcome == "passed":
            outcome, message = LEFT, str(error)
    stats = rig.stats
    rig.session.close()
    moved = {"written": stats.bytes_written, "read": stats.bytes_read}
    moved["made again"] = stats.tensors_rematerialized
    return {"outcome": outcome, "message": message, **moved}


def run_made_again(test: unittest.TestCase, folder: Path) -> dict[str, Any]:
    """Run a test as `run_hooked` does, with each recipe that there is."""
    return run_hooked(test, folder, "always")


class flushing:
    """Every backward begins with all that was saved on the disk."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.plain = torch.autograd.graph._engine_run_backward

    def __enter__(self) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.rig.flush()
            return self.plain(*args, **kwargs)

        self.install(run)

    def __exit__(self, *_: object) -> None:
        self.install(self.plain)

    @staticmethod
    def install(run: Callable[..., Any]) -> None:
        torch.autograd._engine_run_backward = run
        torch.autograd.graph._engine_run_backward = run


MODES = {
    "plain": run_plainly,
    "reference": run_reference,
    "hooked": run_hooked,
    "made again": run_made_again,
}


def child(options: argparse.Namespace) -> None:
    """Run what has no result yet; each test is announced, so that its death has a name."""
    sys.path.insert(0, str(options.folder))
    # Tests read what they expect from files beside their own, found by the main module's place.
    sys.modules["__main__"].__file__ = str(options.folder / options.file)
    module = importlib.import_module(Path(options.file).stem)
    done = {one["test"] for one in lines_of(options.results)}
    seen: Counter[str] = Counter()
    with (
        options.results.open("a") as results,
        tempfile.TemporaryDirectory(dir=SCRATCH) as folder,
    ):
        for test in tests_in(unittest.defaultTestLoader.loadTestsFromModule(module)):
            name = name_of(test)
            seen[name] += 1
            if name in done or seen[name] > 1 or (options.only and options.only not in name):
                continue
            say(results, {"test": name})
            faulthandler.dump_traceback_later(TEST_S_MAX, exit=True)
            found = MODES[options.child](test, Path(folder))
            faulthandler.cancel_dump_traceback_later()
            say(results, {"test": name, **found})


def say(results: TextIO, line: dict[str, Any]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_all(options: argparse.Namespace, mode: str, results: Path) -> dict[str, dict[str, Any]]:
    """Run every test in one mode, in as many processes as die; return the results by test."""
    results.write_text("")
    command = [sys.executable, "-W", "ignore", __file__, str(options.folder)]
    command += ["--file", options.file, "--child", mode, "--results", str(results)]
    command += ["--only", options.only] if options.only else []
    # PyTorch adds five lines of advice to every failure.
    environment = {**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    while True:
        before = len(lines_of(results))
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = lines_of(results)
        found = {one["test"]: one for one in lines}
        if done.returncode == 0:
            return found
        if len(lines) == before or "outcome" in lines[-1]:
            raise SystemExit(f"{options.file} cannot be run:\n{done.stdout}{done.stderr}")
        died = {"outcome": "died", "message": done.stderr.strip()[-MESSAGE_MAX:]}
        with results.open("a") as file:
            say(file, {"test": lines[-1]["test"], **died})


def report(found: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Print what became of the tests; whether every difference has its reason."""
    plain, reference, hooked = found.values()
    passing = [name for name, one in plain.items() if one["outcome"] == "passed"]
    other = [name for name in passing if hooked[name]["outcome"] != "passed"]
    refused = [name for name in other if reference[name]["outcome"] != "passed"]
    leaky = [
        name for name in refused if {hooked[name]["outcome"], reference[name]["outcome"]} == {LEFT}
    ]
    known = [name for name in refused if name in REFUSES and name not in leaky]
    changed = [
        name for name in other if all(it in hooked[name]["message"] for it in (IN_PLACE, MAKING))
    ]
    unexplained = [name for name in other if name not in {*known, *leaky, *changed}]
    ways = ("written", "read", "made again")
    moved = [sum(one.get(way, 0) for one in hooked.values()) for way in ways]
    readers = sum(hooked[name].get("read", 0) > 0 for name in passing)
    not_counted = Counter(one["outcome"] for one in plain.values() if one["outcome"] != "passed")
    rows = [
        f"torch {torch.__version__}",
        f"{len(plain):>6}  tests",
        *(f"{count:>6}  {outcome} plainly: not counted" for outcome, count in not_counted.items()),
        f"{len(passing):>6}  pass plainly",
        f"{len(passing) - len(other):>6}  of them pass under the hooks",
        f"{len(leaky):>6}  pass, and leave their graph behind, as under the reference hooks",
        f"{len(known):>6}  fail under any hooks:",
        *(f"          {name}: {REFUSES[name]}" for name in known),
        f"{len(changed):>6}  change a tensor in place from which another is made again:",
        *(f"          {name}" for name in changed),
        f"{len(unexplained):>6}  fail unexplained",
        f"{readers:>6}  tests that pass plainly read from the disk under the hooks",
        "{:,} bytes written, {:,} read, {:,} tensors made again".format(*moved),
    ]
    for name in unexplained:
        rows += ["", f"{name}: {hooked[name]['outcome']}", hooked[name]["message"]]
        rows += [f"under the reference hooks: {reference[name]['outcome']}"]
    sys.stdout.write("\n".join(rows) + "\n")
    if not moved[1]:
        sys.stdout.write("nothing was read from the disk: this run proves nothing\n")
    if "made again" in found and not moved[2]:
        sys.stdout.write("nothing was made again: this run proves nothing\n")
        return False
    return not unexplained and moved[1] > 0


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests under the hooks.")
    parser.add_argument("folder", type=Path, help="`test` of a checkout of PyTorch")
    parser.add_argument("--file", default="test_autograd.py", help="the file of tests in it")
    parser.add_argument("--only", default="", help="only tests with this in their name")
    parser.add_argument("--made-again", action="store_true", help="use each recipe there is")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    if not (options.folder / options.file).is_file():
        raise SystemExit(
            f"{options.folder / options.file} is not there: give the folder `test` of a checkout "
            f"of PyTorch; the version that is installed is {torch.__version__}"
        )
    if options.child:
        child(options)
        return 0
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        modes = ("plain", "reference", "made again" if options.made_again else "hooked")
        found = {mode: run_all(options, mode, Path(folder) / mode) for mode in modes}
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
