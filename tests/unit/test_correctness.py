"""``docs/correctness.md`` names tests and defences that exist; ``make mutations`` knows both."""

from __future__ import annotations

import dataclasses
import re

import pytest

from checkout import ROOT
from mutations import MUTATIONS, Mutation, anchor_error
from test_reliability import NAMED, has_test

PAGE = (ROOT / "docs" / "correctness.md").read_text()
DEFENCE = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def defences(page: str) -> dict[str, tuple[str, ...]]:
    """Return the defences of the page, and the tests that guard each."""
    section = page.split("\n## Defences\n")[1].split("\n## ", maxsplit=1)[0]
    rows = DEFENCE.findall(section)[1:]
    return {name: tuple(map("::".join, NAMED.findall(tests))) for name, tests in rows}


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 60
    assert not [f"{module}::{name}" for module, name in named if not has_test(module, name)]


def test_the_page_and_the_mutations_list_the_same_defences_and_tests() -> None:
    assert defences(PAGE) == {one.defence: one.tests for one in MUTATIONS}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.defence)
def test_every_defence_stands_on_text_that_is_there_once(mutation: Mutation) -> None:
    assert anchor_error(mutation) is None
    assert mutation.new != mutation.old


def test_text_that_is_not_there_is_seen() -> None:
    gone = dataclasses.replace(MUTATIONS[0], old="this text is nowhere")
    assert (
        anchor_error(gone)
        == "activations/writeback.py has the text of 'version at pack' 0 times, not once"
    )
