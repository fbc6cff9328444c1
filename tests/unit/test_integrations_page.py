"""Pages about trainers and the report name the packages, tests and figures that there are."""

from __future__ import annotations

import re
import tomllib

from checkout import ROOT
from ssdtrain.integrations.coverage import DONE, NOW

PAGE = (ROOT / "docs" / "guides" / "trainers.md").read_text()
REPORT = (ROOT / "docs" / "reference" / "report.md").read_text()
TESTED = re.findall(r"^\| `([a-z-]+)` \| ([0-9.]+) \| `(tests/\S+\.py)`", PAGE, re.MULTILINE)


def numbers(version: str) -> list[int]:
    return [int(one) for one in version.split(".")]


def test_each_package_is_imported_by_its_test() -> None:
    assert len(TESTED) >= 6
    for package, _, test in TESTED:
        name = package.replace("-", "_")
        imported = re.search(
            rf"(import|from|importorskip\(\")\s*{name}\b", (ROOT / test).read_text()
        )
        assert imported, f"{test} does not import {name}"


def test_no_version_is_older_than_what_is_asked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = dict(one.split(">=") for extra in extras.values() for one in extra if ">=" in one)
    tested = {package: version for package, version, _ in TESTED}
    assert {"transformers", "accelerate", "peft", "lightning"} <= tested.keys() & asked.keys()
    for package in tested.keys() & asked.keys():
        assert numbers(tested[package]) >= numbers(asked[package].split(",")[0]), package


def test_every_figure_in_the_log_is_told() -> None:
    told = re.findall(r"^\| `ssdtrain/(\w+)` \|", REPORT, re.MULTILINE)
    assert told == [*DONE, *NOW]
