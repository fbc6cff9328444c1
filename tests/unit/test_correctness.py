"""``docs/internals/correctness.md`` names tests that exist, and the tree's defences."""

from __future__ import annotations

import defences
from mutations import INSTEAD
from test_reliability import NAMED, has_test

MARKS = defences.marks()
NAMES = sorted({one.defence for one in MARKS})


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
