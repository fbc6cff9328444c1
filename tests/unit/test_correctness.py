"""``docs/internals/correctness.md`` names tests that exist, and the tree's defences."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

import defences
from checkout import ROOT
from mutations import INSTEAD, mutated
from test_reliability import NAMED, has_test

MARKS = defences.marks()
NAMES = sorted({one.defence for one in MARKS})
EDITION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["edition"]


def test_every_named_test_exists() -> None:
    named = NAMED.findall(defences.PAGE.read_text())
    assert len(named) > 60
    assert not [f"{module}::{name}" for module, name in named if not has_test(module, name)]


def test_every_defence_has_its_line_and_its_tests() -> None:
    assert not defences.differences()
    assert len(NAMES) >= 29
    assert set(INSTEAD) <= set(NAMES)


def test_the_table_of_defences_is_up_to_date() -> None:
    remedy = "run `make defences`, which writes it"
    assert defences.table() in defences.PAGE.read_text(), remedy


@pytest.mark.parametrize("name", NAMES)
def test_without_a_defence_the_package_can_still_be_read(name: str) -> None:
    """By Python, or by Rust's formatter; ``make mutations`` builds what is compiled."""
    for file in {one.file for one in MARKS if one.defence == name}:
        lines = file.read_text().splitlines()
        without = mutated(lines, name)
        assert without != lines
        if file.suffix == ".py":
            compile("\n".join(without), file.name, "exec")
            continue
        command = ["rustfmt", "--edition", EDITION, "--emit", "stdout"]
        read = subprocess.run(
            command, input="\n".join(without), capture_output=True, text=True, check=False
        )
        assert read.returncode == 0, read.stderr


def test_a_mark_speaks_of_its_line_or_of_the_next(tmp_path: Path) -> None:
    lines = ["a = 1  # defence: one", "    # defence: two", "    b = 2", "c();  // defence: three"]
    assert list(defences.marked_lines(lines)) == [("one", 0), ("two", 2), ("three", 3)]
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "test_x.py").write_text(
        '@pytest.mark.defends("one", "two")\ndef test_a(): pass\ndef test_b(): pass\n'
    )
    assert defences.guards(tmp_path) == {"one": ["test_x::test_a"], "two": ["test_x::test_a"]}
