"""The model of how long drives live gives the figures of its paper, and every part can be set."""

import json
from dataclasses import replace

import pytest

from ssdtrain.__main__ import main
from ssdtrain.errors import ConfigError
from ssdtrain.planning.lifespan import PAPER, Transformer, Wear
from ssdtrain.planning.profiles import DRIVES, named


def test_the_paper_claims_more_than_two_years() -> None:
    # Four 980 PRO of 2 TB, 12.1 GB/s: 4.8 PB x 2.5 x 86 / 12.1 GB/s.
    assert PAPER.rated_bytes == 4 * named(DRIVES, "980 PRO 2TB", "drive").rated_bytes
    assert round(PAPER.relaxed_days() / 365, 2) == 2.70
    assert int(PAPER.sequential_days()) == 11
    assert round(PAPER.rated_days(), 1) == 4.6


@pytest.mark.parametrize(
    ("hidden", "layers", "gib"), [(8192, 4, 11.0), (12288, 3, 12.4), (16384, 2, 11.0)]
)
def test_sizes_of_the_papers_third_table(hidden: int, layers: int, gib: float) -> None:
    model = Transformer(batch=16, sequence=1024, hidden=hidden, layers=layers, tensor_parallel=2)
    assert round(model.activation_bytes() / 2**30, 1) == gib


def test_work_of_a_step_is_six_operations_for_each_parameter_and_token() -> None:
    # With short sequences attention counts for little: 12 h^2 parameters in each layer.
    model = Transformer(batch=1, sequence=8, hidden=4096, layers=10)
    assert model.step_flops() == pytest.approx(6 * 8 * 12 * 4096**2 * 10, rel=1e-3)
    halved = replace(model, tensor_parallel=2)
    assert halved.step_flops() == model.step_flops() / 2


def test_each_assumption_counts() -> None:
    wear = Wear(rated_bytes=864e12, written_bytes_per_s=1e9)
    assert wear.rated_days() == 10
    assert replace(wear, own_amplification=1.25).sequential_days() == 20
    assert replace(wear, rated_amplification=1.0).sequential_days() == 10
    assert replace(wear, retention_gain=2.0).relaxed_days() == 50
    assert wear.budget_bytes_per_day(2.0) == pytest.approx(864e12 / 730)
    for name in ("rated_bytes", "written_bytes_per_s", "own_amplification", "retention_gain"):
        with pytest.raises(ConfigError, match=name):
            replace(wear, **{name: 0.0})
    with pytest.raises(ConfigError, match="years"):
        wear.budget_bytes_per_day(0)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["lifespan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_written_bytes_can_be_given_in_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    drive = ("--tbw", "864")
    by_rate = answer(capsys, *drive, "--write-rate", "2GB")
    by_step = answer(capsys, *drive, "--bytes-per-step", "40GB", "--step-time", "20")
    assert by_rate == by_step
    assert by_rate["rated_days"] == 5
    sizes = ("--batch", "16", "--sequence", "1024", "--hidden", "8192", "--layers", "4")
    timed = answer(capsys, *drive, *sizes, "--tensor-parallel", "2", "--step-time", "2")
    assert timed["written_bytes_per_s"] == 16 * 1024 * 8192 * 22 * 4 / 2
    model = Transformer(batch=16, sequence=1024, hidden=8192, layers=4)
    computed = answer(capsys, *drive, *sizes, "--teraflops", "100")
    expected = model.activation_bytes() / (model.step_flops() / 1e14)
    assert computed["written_bytes_per_s"] == pytest.approx(expected)
    two = answer(capsys, "--drive", "990-pro-2tb", "--drives", "2", "--write-rate", "2GB")
    assert two["rated_bytes"] == 2400e12


def test_the_report_tells_all_three_lives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lifespan", "--paper", "--retention-gain", "43", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relaxed_days"] == pytest.approx(2.7 * 365 / 2, 0.01)
    assert main(["lifespan", "--paper"]) == 0
    told = capsys.readouterr().out
    for words in ("4.6 days", "11.5 days", "2.70 years", "x 2.5", "x 86", "12.1 GB/s", " 2.6 TB "):
        assert words in told
    assert main(["lifespan", "--tbw", "5", "--write-rate", "1GB"]) == 0
    assert " 2.7 GB  a day may be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--drive NAME"),
        (("--drive", "990-pro-2tb", "--tbw", "5"), "--tbw TB, not both"),
        (("--drive", "floppy"), "no drive is called 'floppy' here; there are 980-pro-1tb"),
        (("--tbw", "5"), "--write-rate"),
        (("--tbw", "5", "--drives", "0", "--write-rate", "1GB"), "--drives must be 1 or more"),
        (("--tbw", "5", "--batch", "2"), "--sequence, --hidden, --layers is missing"),
        (("--tbw", "5", "--bytes-per-step", "1GB"), "how long a step takes"),
        (
            ("--tbw", "5", "--write-rate", "1GB", "--step-time", "2", "--layers", "3"),
            "--write-rate already gives the figure for which --step-time, --layers would be used",
        ),
        (("--paper", "--tbw", "5"), "--paper already gives the figure for which --tbw would be"),
    ],
)
def test_missing_and_superfluous_options_are_named(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The drive is looked up last, so give what is written.
    more = ("--write-rate", "1GB") if "floppy" in words else ()
    assert main(["lifespan", *words, *more]) == 2
    assert said in capsys.readouterr().err
