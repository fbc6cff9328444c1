"""The tree keeps the rules of CONTRIBUTING.md, and of the page on the architecture."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkout import ROOT

PAGE = "docs/internals/architecture.md"
PACKAGE = Path("python", "ssdtrain")
RULED = ("rust", "python", "tests", "benches")
TOLD = (".ci", ".github", "docs", *RULED)
MADE = {"target", "__pycache__"}
ALLOWED = {
    r"\btorch\.autograd\.graph\b|\btorch\._C\._autograd\b": {
        "activations/fingerprints.py",
        "activations/hooks.py",
        "activations/installed.py",
        "checkpoints/shards.py",
        "commands/reach.py",
        "demo/counting.py",
        "optimizer/taken.py",
        "parameters/saved_weight.py",
        "parameters/weights.py",
        "ssdtrain/store.py",
    },
    r"\bio_uring::|\buse io_uring\b": {"core/src/engine/uring.rs", "io/ring_pass.rs"},
}
"""Names that only some files may use: autograd's hooks and internals, and the crate of rings."""
# In two pieces, so that this file keeps the rule.
REGISTRIES = re.compile(r"\b(pypi|python" + r"hosted|crates)\.(org|io)\b|--(extra-)?index" + "-url")

LOCKED = "registry+https://github.com/rust-lang/crates" + ".io-index"


def files(root: Path, folders: tuple[str, ...], *suffixes: str) -> Iterator[tuple[str, str]]:
    """Give the name and the text of each file in some folders; with suffixes, of those alone."""
    for folder in folders:
        for path in (root / folder, *sorted((root / folder).rglob("*"))):
            inside = path.relative_to(root)
            is_asked = not suffixes or path.suffix in suffixes
            if is_asked and path.is_file() and MADE.isdisjoint(inside.parts):
                yield inside.as_posix(), path.read_text(errors="replace")


def rooms_that_look_up(root: Path) -> Iterator[str]:
    """A room of Python imports only rooms on lines above its own in the list of the page."""
    page = (root / PAGE).read_text()
    block = page.partition("```layers\n")[2].partition("```")[0]
    level = {room: line for line, rooms in enumerate(block.splitlines()) for room in rooms.split()}
    modules = {
        name.removeprefix(f"{PACKAGE}/").removesuffix(".py"): text
        for name, text in files(root, (str(PACKAGE),), ".py")
    }
    for name, text in modules.items():
        here = _room(name, level)
        for line, path in _imported(ast.parse(text)):
            there = _room(_module(path, modules), level)
            if here is None or there is None:
                yield f"{name}: `{name if here is None else path}` is in no room"
            elif here != there and level[here] <= level[there]:
                yield f"{name}:{line}: {here} imports {path} of {there}, which is not above it"


def _room(module: str, level: dict[str, int]) -> str | None:
    """Return the room of a module: a file with a place of its own, or its folder."""
    return next((room for room in (module, module.partition("/")[0]) if room in level), None)


def _module(path: str, modules: dict[str, str]) -> str:
    """Return the module that a dotted path leads into."""
    words = path.split(".")[1:]
    for end in range(len(words), 0, -1):
        module = "/".join(words[:end])
        if module in modules or module == "_core" or f"{module}/__init__" in modules:
            return module
    return "__init__"


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Give the paths of the package that are imported, wherever in a file."""
    for node in ast.walk(tree):
        paths: list[str] = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports begin with ssdtrain"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((node.lineno, path) for path in paths if path.split(".")[0] == "ssdtrain")


def too_large(root: Path) -> Iterator[str]:
    """Files have 500 lines at most, tests and benches 700, functions of the package 70."""
    for name, text in files(root, RULED, ".rs", ".py", ".cpp", ".h"):
        is_product = name.startswith(("rust", "python"))
        count = len(text.splitlines())
        if count > (500 if is_product else 700):
            yield f"{name}: {count} lines; split it where two ideas meet"
        for node in ast.walk(ast.parse(text)) if is_product and name.endswith(".py") else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                if (node.end_lineno or 0) - first.lineno >= 70:
                    yield f"{name}:{node.lineno}: {node.name} is too long; name a part of it"
    for name, text in files(root, RULED, ".rs", ".cpp", ".h"):
        # Of Python ruff says so; rustfmt leaves comments as long as they are.
        wide = [line for line in text.splitlines() if len(line) > 100]
        yield from (f"{name}: a line has more than 100 columns: {line}" for line in wide)


def named_elsewhere(root: Path) -> Iterator[str]:
    """Only the files above name what is dear; no test sleeps; no file names a registry."""
    for name, text in files(root, RULED, ".rs", ".py"):
        for pattern, allowed in ALLOWED.items():
            is_ruled = name.endswith(".rs") or name.startswith(str(PACKAGE))
            if is_ruled and not name.endswith(tuple(allowed)) and re.search(pattern, text):
                yield f"{name}: names {pattern}; let a file that may do so offer it"
        if re.search(r"\btime\.sleep" + r"\(", text):
            yield f"{name}: sleeps; wait for the event itself"
    names = [path.name for path in root.iterdir() if path.is_file() or path.name in TOLD]
    for name, text in files(root, tuple(names)):
        # cargo writes its standard registry into its lock.
        if REGISTRIES.search(text.replace(LOCKED, "")):
            yield f"{name}: names a package registry; that is the business of who installs"


@pytest.mark.parametrize("rule", [rooms_that_look_up, too_large, named_elsewhere])
def test_the_tree_keeps(rule: Callable[[Path], Iterator[str]]) -> None:
    found = list(rule(ROOT))
    if found:
        pytest.fail("\n".join([str(rule.__doc__), *found]), pytrace=False)


def test_installed_package_is_this_tree() -> None:
    """The tests try what a user gets: the installed wheel, made from these sources."""
    remedy = "run `make test`, which installs the tree and tests what it installed"
    spec = importlib.util.find_spec("ssdtrain")
    assert spec is not None, f"ssdtrain is not installed in {sys.prefix}; {remedy}"
    assert spec.origin is not None
    source, installed = ROOT / PACKAGE, Path(spec.origin).parent
    assert installed.is_relative_to(sys.prefix), f"ssdtrain comes from {installed}; {remedy}"
    assert installed != source, f"ssdtrain comes from {installed}; {remedy}"
    assert list(installed.glob("_core*.so")), f"{installed} has no compiled core; {remedy}"
    trees = [dict(files(folder, (".",), ".py", ".pyi", ".typed")) for folder in (source, installed)]
    names = trees[0].keys() | trees[1].keys()
    changed = sorted(name for name in names if trees[0].get(name) != trees[1].get(name))
    assert not changed, f"the installed ssdtrain differs from the tree in {changed}; {remedy}"
