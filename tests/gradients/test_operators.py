"""The operators of torch, and tests of PyTorch's own, under the hooks: a part of both sweeps.

The whole sweep is every sample of every operator in both dtypes, with gradcheck and gradgradcheck
for the first three. The small one takes operators with a kernel that is often trained through, or
that saves in a way of its own. A sweep needs a process of its own: torch's test modules change its
flags.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkout import LONG

DTYPES = ("float64", "complex128")
OFTEN_TRAINED = (
    *("__getitem__", "addmm", "bmm", "cat", "cumprod", "einsum", "gather", "index_put", "mul"),
    *("linalg.cholesky", "linalg.qr", "linalg.solve", "log_softmax", "masked_fill", "prod"),
    *("rsub", "softmax", "std", "where"),
    *("nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.cross_entropy"),
    *("nn.functional.dropout", "nn.functional.embedding", "nn.functional.layer_norm"),
    *("nn.functional.max_pool2d", "nn.functional.rrelu"),
    "nn.functional.scaled_dot_product_attention",
)


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(LONG / "operators.py"), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, close_fds=True
    )


def tallies(tmp_path: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Run sweeps at the same time; each must end without a failure."""
    paths = [tmp_path / f"{at}.json" for at, _ in enumerate(runs)]
    started = [
        start(*options, "--json", str(path)) for options, path in zip(runs, paths, strict=True)
    ]
    said = [one.communicate()[0] for one in started]
    for one, words in zip(started, said, strict=True):
        assert one.returncode == 0, words
    return [json.loads(path.read_text()) for path in paths]


def total(found: list[dict[str, Any]], what: str) -> int:
    return sum(one["counts"].get(f"{dtype} {what}", 0) for one in found for dtype in DTYPES)


SMALL = [*(f"--only={name}" for name in OFTEN_TRAINED), "--samples=2", "--checks=1"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("runs", "samples_min"),
    [
        pytest.param([SMALL], 90, id="small"),
        pytest.param([["--part=1/2"], ["--part=2/2"]], 20_000, id="whole", marks=pytest.mark.long),
    ],
)
def test_operators_give_the_same_bits_from_the_disk(
    runs: list[list[str]], samples_min: int, tmp_path: Path
) -> None:
    found = tallies(tmp_path, runs)
    samples, passed = total(found, "samples"), total(found, "passed")
    # What is not applicable must stay the exception: torch 2.15 has 3 such samples in 20,861.
    assert passed > samples_min
    assert samples - passed < samples / 50, [one["not_applicable"] for one in found]
    assert total(found, "passed twice") > 0.8 * passed
    # Many operators save nothing (views, sums) or only what is not ours.
    saving = total(found, "operators run") - total(found, "operators that save nothing")
    assert total(found, "operators that read") > 0.9 * saving
    assert total(found, "bytes read") > samples_min << 10
    assert total(found, "tensors forwarded") < total(found, "tensors offloaded") / 50
    for check in ("gradcheck", "gradgradcheck"):
        assert total(found, f"{check} failed") == 0
        assert total(found, f"{check} passed") > samples_min / 20


# PyTorch's own tests are not in its wheel: the runner is tried on a file of ours.

PASSES = """
    def test_passes(self):
        x = torch.randn(1000, requires_grad=True)
        y = (x * 2).sin().sum()
        y.backward()
        self.assertTrue(torch.equal(x.grad, (x.detach() * 2).cos() * 2))

    def test_fails_plainly(self):
        self.assertEqual(1, 2)

    def test_dies_plainly(self):
        os._exit(7)

    @unittest.skip("not here")
    def test_is_skipped(self):
        pass
"""
REFUSED = """
    def test_no_unnecessary_unwrapping(self):
        x = torch.randn(5, requires_grad=True)
        self.assertIs((x * x).grad_fn._saved_self, x)
"""
UNKNOWN = """
    def test_identity_of_another_name(self):
        x = torch.randn(5, requires_grad=True)
        self.assertIs((x * x).grad_fn._saved_self, x)
"""
OURS = """
    def test_no_unnecessary_unwrapping(self):
        y = (torch.randn(5, requires_grad=True) * 2).sin()
        kinds = repr([type(one) for one in gc.get_objects()])
        self.assertNotIn("ssdtrain._core.SavedTensor", kinds)
"""
LEAKS = """
    def test_leaks(self):
        x = torch.randn(5, requires_grad=True)
        (x * 2).exp().sum().backward(create_graph=True)
"""


def run_suite(folder: Path, *tests: str) -> tuple[int, str]:
    head = "import gc, os, torch, unittest\n\nclass TestAutograd(unittest.TestCase):\n"
    (folder / "test_autograd.py").write_text(head + "".join(tests))
    command = [sys.executable, str(LONG / "torch_suite.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_the_runner_of_torchs_tests_counts_what_passes_plainly(tmp_path: Path) -> None:
    code, said = run_suite(tmp_path, PASSES, REFUSED, LEAKS)
    assert code == 0, said
    for row in (
        "6  tests",
        "1  failed plainly: not counted",
        "1  died plainly: not counted",
        "1  skipped plainly: not counted",
        "3  pass plainly",
        "1  of them pass under the hooks",
        "1  pass, and leave their graph behind, as under the reference hooks",
        "1  fail under any hooks:",
        "0  fail unexplained",
        "2  tests that pass plainly read from the disk under the hooks",
    ):
        assert f" {row}\n" in said, f"{row!r} is missing in\n{said}"


@pytest.mark.long
def test_the_runner_of_torchs_tests_accepts_no_other_failure(tmp_path: Path) -> None:
    """Neither one that is not in the list, nor one that the reference hooks pass."""
    code, said = run_suite(tmp_path, UNKNOWN, OURS)
    assert code == 1, said
    assert " 2  fail unexplained\n" in said
    unknown, ours = said.split("\n\nTestAutograd.")[1:]
    assert unknown.startswith("test_identity_of_another_name: failed\n")
    assert "under the reference hooks: failed" in unknown
    assert ours.startswith("test_no_unnecessary_unwrapping: failed\n")
    assert "under the reference hooks: passed" in ours


@pytest.mark.long
def test_the_runner_of_torchs_tests_names_the_file_it_misses(tmp_path: Path) -> None:
    command = [sys.executable, str(LONG / "torch_suite.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'test_autograd.py'} is not there" in done.stderr
