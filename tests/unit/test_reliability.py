"""``docs/internals/reliability.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from checkout import ROOT, TESTS

NAMED = re.compile(r"`([a-z_]+)::([a-z0-9_]+)`")


def sources_of(module: str) -> list[Path]:
    """Return the files that may hold the tests of a module: of Python, or of Rust."""
    rust = f"{module.removeprefix('test_')}.rs"
    found = [*TESTS.glob(f"*/{module}.py"), *TESTS.glob(f"rust/{rust}")]
    return found or list((ROOT / "rust").rglob(f"src/**/{module}.rs"))


def has_test(module: str, name: str) -> bool:
    defined = re.compile(rf"^ *(?:def|fn) {name}\(", re.MULTILINE)
    return any(defined.search(path.read_text()) for path in sources_of(module))


def test_every_named_test_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "internals" / "reliability.md").read_text())
    assert len(named) > 40
    assert not [f"{module}::{name}" for module, name in named if not has_test(module, name)]
