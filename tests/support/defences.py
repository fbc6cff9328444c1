"""The defences of the product and the tests that guard them; writes the table of both.

    python tests/support/defences.py

A line of the package that keeps a wrong gradient, a lost byte or a leak away carries a mark: the
comment ``# defence: NAME`` (in Rust ``// defence: NAME``) at its end, or alone on the line above.
Several lines may share a name. A test that fails without it says so:
``@pytest.mark.defends("NAME")``. The table in docs/internals/correctness.md is made of both, and
``make mutations`` removes the marked lines, one defence after the other.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT, TESTS

PACKAGE = ROOT / "python" / "ssdtrain"
COMPILED = (ROOT / "rust" / "py" / "src", ROOT / "rust" / "core" / "src")
PAGE = ROOT / "docs" / "internals" / "correctness.md"
MARK = re.compile(r"(?P<code>.*?)\s*(?:#|//) defence: (?P<name>.+)$")
HEAD = "| defence | where | without it fails |\n|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


@dataclass(frozen=True, slots=True)
class Mark:
    """A defended line: of which file, and at which place in its lines."""

    defence: str
    file: Path
    at: int

    @property
    def module(self) -> str:
        """The file's path, in Python within the package."""
        base = ROOT if self.file.suffix == ".rs" else PACKAGE
        return self.file.relative_to(base).as_posix()


def marks() -> list[Mark]:
    """Return every mark, by file and line."""
    compiled = [path for folder in COMPILED for path in sorted(folder.rglob("*.rs"))]
    files = [*sorted(PACKAGE.rglob("*.py")), *compiled]
    return [
        Mark(name, path, at)
        for path in files
        for name, at in marked_lines(path.read_text().splitlines())
    ]


def marked_lines(lines: list[str]) -> Iterator[tuple[str, int]]:
    above: list[str] = []
    for at, line in enumerate(lines):
        found = MARK.match(line)
        if found and not found["code"].strip():
            above.append(found["name"])
            continue
        for name in [*above, *([found["name"]] if found else [])]:
            yield name, at
        above.clear()


def guards(tests: Path = TESTS) -> dict[str, list[str]]:
    """Return the tests that say of themselves that they guard a defence, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.glob("*/test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for name in defended_by(node):
                    found.setdefault(name, []).append(f"{path.stem}::{node.name}")
    return found


def defended_by(test: ast.FunctionDef) -> Iterator[str]:
    for one in test.decorator_list:
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.mark.defends":
            yield from (ast.literal_eval(argument) for argument in one.args)


def table() -> str:
    """Return the table of docs/internals/correctness.md."""
    tests = guards()
    rows = {
        (mark.defence, mark.module): ", ".join(f"`{test}`" for test in tests[mark.defence])
        for mark in marks()
    }
    return HEAD + "".join(f"| {name} | `{file}` | {who} |\n" for (name, file), who in rows.items())


def differences() -> list[str]:
    """Say which defence no test guards, and which test guards what is not there."""
    marked, guarded = {one.defence for one in marks()}, set(guards())
    unguarded = [f"no test guards the defence {one!r}" for one in sorted(marked - guarded)]
    return unguarded + [f"no line is marked `# defence: {one}`" for one in sorted(guarded - marked)]


def main() -> None:
    if wrong := differences():
        sys.exit("\n".join(wrong))
    text, count = TABLE.subn(lambda _: table(), PAGE.read_text())
    assert count == 1, f"{PAGE} has no place for the table"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
