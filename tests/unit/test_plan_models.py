"""What `ssdtrain plan` says of models of the user that do something else than it needs."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdtrain.__main__ import main
from ssdtrain.commands import plan
from ssdtrain.planning import derive as deriving

HEAD = "import sys, torch\ndef build(batch, sequence, dtype):\n"
MODEL = "    model = torch.nn.Linear(sequence, 4, dtype=dtype)\n"
DATA = "torch.zeros(batch, sequence, dtype=dtype)"
GOOD = f"{HEAD}{MODEL}    return model, lambda: model({DATA}).sum()\n"


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what the command has put on the path and imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("mine", "neighbour_of_mine"):
        sys.modules.pop(name, None)


def told(file: Path, text: str, *words: str) -> int:
    file.write_text(text)
    return main(["plan", f"{file}:build", "--sequence", "64", *words])


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(:\n", "mine.py raised SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "mine.py raised SystemExit: 3 ("),
        (HEAD + "    return [][sequence]\n", "IndexError: list index out of range"),
        (HEAD + MODEL + "    return model\n", "build returned Linear, not a model and a function"),
        (
            HEAD + "    return torch.nn.LazyLinear(4), lambda: 7\n",
            "weight, bias of the model get their shapes from the first batch",
        ),
        (
            HEAD + MODEL + f"    return model, lambda: model({DATA})\n",
            "the loss is a Tensor of shape (1, 4), not one number",
        ),
        (
            HEAD + MODEL + f"    return model, lambda: model({DATA}).detach().sum()\n",
            "the loss does not depend on the weights: something detaches it",
        ),
        (
            HEAD + MODEL + f"    x = {DATA}\n    return model, lambda: model(x[x > 0]).sum()\n",
            "the model, or the function of its loss, raised NotImplementedError",
        ),
        (
            HEAD + MODEL + "    x = torch.zeros(batch, sequence, dtype=dtype, device='cpu')\n"
            "    return model, lambda: model(x).sum()\n",
            "Tensors made without a device are on 'meta', too",
        ),
        (
            HEAD + MODEL + "    model.requires_grad_(False)\n    return model, lambda: 7\n",
            "no weight of the model asks for a gradient",
        ),
        (
            HEAD + MODEL + "    def loss():\n"
            f"        found = model({DATA}).sum()\n        found.backward(retain_graph=True)\n"
            "        return found\n    return model, loss\n",
            "return it, without a call of backward()",
        ),
        (
            HEAD + MODEL + "    def loss():\n"
            f"        if model({DATA}).isnan().any():\n            raise ValueError('NaN')\n"
            "    return model, loss\n",
            "mine.py, line 6); bool tensors were taken as true at ",
        ),
        (
            HEAD + MODEL + "    def loss():\n"
            f"        while ({DATA} > 0).any():\n            pass\n"
            "    return model, loss\n",
            "mine.py, line 5 asks again and again for the value of a bool tensor",
        ),
        (
            HEAD + MODEL + f"    return model, lambda: model({DATA}).sum() / {DATA}.numpy().size\n",
            "give a step that ssdtrain recorded instead (--trace FILE)",
        ),
    ],
)
def test_a_file_that_makes_no_model_is_told_with_its_line(
    text: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deriving, "ASKED_MAX", 100)
    file = tmp_path / "mine.py"
    assert told(file, text) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("as_it_was")
def test_a_file_may_import_its_neighbour_and_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(GOOD)
    text = "print('hello')\nfrom neighbour_of_mine import build\n"
    assert told(tmp_path / "mine.py", text, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["ways"]["keep"]["fits"]
    assert "hello" in output.err


@pytest.mark.usefixtures("as_it_was")
def test_a_condition_taken_as_true_and_another_dtype_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        HEAD + MODEL.replace("=dtype", "=torch.float32") + "    def loss():\n"
        f"        found = model({DATA}.to(torch.float32))\n"
        "        return found.sum() if found.isfinite().all() else found.mean()\n"
        "    return model, loss\n"
    )
    assert told(tmp_path / "mine.py", text) == 0
    report = capsys.readouterr().out
    assert "The step is derived from shapes, weights in float32; bool tensors were taken" in report
    assert "mine.py, line 6." in report
    assert "--dtype bfloat16 did not change the weights" in report


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(("device", "is_told"), [("cpu", True), ("off", False)])
def test_autocast_which_does_nothing_to_shapes_is_told(
    device: str, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    region = "'cpu', enabled=False" if device == "off" else f"'{device}', torch.bfloat16"
    text = (
        HEAD + MODEL + "    def loss():\n"
        f"        with torch.autocast({region}):\n"
        f"            return model({DATA}).sum()\n"
        "    return model, loss\n"
    )
    assert told(tmp_path / "mine.py", text) == 0
    assert ("torch.autocast does nothing to shapes" in capsys.readouterr().out) == is_told


@pytest.mark.usefixtures("as_it_was")
def test_an_interrupt_while_a_model_is_looked_at_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = "    def loss():\n        raise KeyboardInterrupt\n"
    text = HEAD + MODEL + loss + "    return model, loss\n"
    assert told(tmp_path / "mine.py", text) == 130
    assert capsys.readouterr().err == "ssdtrain plan: interrupted; nothing was planned\n"


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_slow_model_says_that_the_command_is_at_work(
    is_slow: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_slow:
        monkeypatch.setattr(plan, "SILENCE_S_MAX", 0.0)
    # The loss of a slow model waits until it is said.
    wait = _join_timers if is_slow else int
    monkeypatch.setattr(sys, "at_work", wait, raising=False)
    loss = f"    def loss():\n        sys.at_work()\n        return model({DATA}).sum()\n"
    assert told(tmp_path / "mine.py", HEAD + MODEL + loss + "    return model, loss\n") == 0
    assert ("ssdtrain plan: still at work" in capsys.readouterr().err) == is_slow
    for one in _timers():
        one.join(timeout=5)
        assert not one.is_alive(), "nobody has ended it"


def _timers() -> list[threading.Timer]:
    return [one for one in threading.enumerate() if isinstance(one, threading.Timer)]


def _join_timers() -> None:
    for one in _timers():
        one.join()


def test_a_way_that_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert-base", "--sequence", "64", "--memory", "1MiB"]) == 1
    report = capsys.readouterr().out
    assert "What does not fit:\n  keep: it takes" in report
    assert "So this step does not fit: a smaller --batch" in report
    assert "at its peak, and there are 1 MiB\n" in report


def test_a_file_without_a_function_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mine.py"]) == 2
    assert "which function of mine.py makes the model? Name it" in capsys.readouterr().err


@pytest.mark.usefixtures("as_it_was")
def test_more_micro_batches_than_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deriving, "KERNELS_MAX", 50)
    file = tmp_path / "mine.py"
    assert told(file, GOOD, "--accumulate", "2") == 0
    capsys.readouterr()
    assert told(file, GOOD, "--accumulate", "1000000000") == 2
    assert "1,000,000,000 micro-batches of" in capsys.readouterr().err


def test_conditions_of_a_named_model_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """What calls the command, as this test or the script that is installed, is no model."""
    pytest.importorskip("transformers")
    assert main(["plan", "gpt2", "--sequence", "64"]) == 0
    assert "taken as true" not in capsys.readouterr().out


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the least memory of a step that is at most 2 % longer (--slowdown-max)"),
        (("--slowdown-max", "0.5"), "at most 50 % longer (--slowdown-max)"),
        (("--memory", "2KiB"), "Each way that moves anything is planned for the shortest step"),
        (("--budget", "activation=1GiB"), "is planned for the shortest step that fits"),
    ],
)
def test_the_objective_is_told(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(tmp_path / "mine.py", GOOD, *words)
    assert said in capsys.readouterr().out
