"""The standing rules of docs/architecture.md, as functions over the files of a checkout.

Each rule takes the root of a checkout and yields its violations, one sentence each: where, what is
wrong, what to do. The lists a rule reads are fenced blocks of docs/architecture.md, so that the
document stays true; tests/unit/test_architecture.py runs the rules and proves that each can fail.
"""

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOC = "docs/architecture.md"
RUST_ORDER = "import-order rust"
PYTHON_ORDER = "import-order python"
UNSAFE_FILES = "unsafe-files"
AUTOGRAD_NAMERS = "names-torch-autograd"
BLOCKS = (RUST_ORDER, PYTHON_ORDER, UNSAFE_FILES, AUTOGRAD_NAMERS)

RUST_CORE = "rust/core/src"
# Of each crate: its folder, how its modules' names begin in the order, what other crates call it.
CRATES = (
    (RUST_CORE, "", "ssdtrain_core"),
    ("rust/plan/src", "plan/", "ssdtrain_plan"),
    ("rust/py/src", "py/", ""),
)
PACKAGE = "python/ssdtrain"
# The engine, and the benchmark that toggles what the engine does not use.
IO_URING_FILES = (f"{RUST_CORE}/engine/uring.rs", "benches/io/ring_pass.rs")

PRODUCT_FOLDERS = ("rust", "python")
TEST_FOLDERS = ("tests", "benches")
PRODUCT_FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
ROOM_WORDS_MIN = 4
# Folders of which docs/architecture.md speaks as a whole.
ROOMS_IN_ONE = ("commands", "demo")

KEPT_FOLDERS = {".ci", ".github"}
MADE_FOLDERS = {"target", "dist", "__pycache__", "ssdtrain-demo"}

Rule = Callable[[Path], Iterator[str]]


# --- the document and the files -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Doc:
    """docs/architecture.md: the blocks that rules read, and every other line."""

    blocks: dict[str, list[str]]
    prose: list[str]

    @classmethod
    def read(cls, root: Path) -> "Doc":
        """Split the document of `root`."""
        blocks: dict[str, list[str]] = {}
        prose: list[str] = []
        lines = iter((root / DOC).read_text().splitlines())
        for line in lines:
            name = " ".join(line.removeprefix("```").split())
            if line.startswith("```") and name in BLOCKS:
                if name in blocks:
                    raise ValueError(f"{DOC} has two blocks ```{name}; keep one")
                content = iter(lambda: next(lines, "```"), "```")
                blocks[name] = [entry.strip() for entry in content if entry.strip()]
            else:
                prose.append(line)
        return cls(blocks, prose)

    def block(self, name: str) -> list[str]:
        """The lines of one block."""
        if name not in self.blocks:
            raise ValueError(f"{DOC} has no block ```{name}; a rule of the tests reads it")
        return self.blocks[name]


def files(root: Path, folders: tuple[str, ...], *suffixes: str) -> Iterator[Path]:
    """The files under some folders of the checkout that end so, in a stable order."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path


def text_files(root: Path) -> Iterator[Path]:
    """Every text file of the checkout, without what builds and environments left in it."""
    for folder, names, file_names in os.walk(root):
        here = Path(folder)
        names[:] = [
            name
            for name in sorted(names)
            if name in KEPT_FOLDERS
            or not (name.startswith(".") or name in MADE_FOLDERS or _is_environment(here / name))
        ]
        for name in sorted(file_names):
            path = here / name
            # A zero byte in its first part marks a file that is not text.
            with path.open("rb") as file:
                if b"\0" not in file.read(8192):
                    yield path


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def shown(root: Path, path: Path) -> str:
    """A path as messages and blocks write it."""
    return path.relative_to(root).as_posix()


def line_of(text: str, at: int) -> int:
    """The line number of a position."""
    return text.count("\n", 0, at) + 1


# --- reading Rust -------------------------------------------------------------

# A lifetime has no closing quote and is left alone.
_RUST_OPAQUE = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/                     # comments
    | \b(?:b|c)?r(\#*)".*?"\1                # raw strings
    | "(?:\\.|[^"\\])*"                      # strings
    | '(?: \\'|\\[^'\n]+ | [^\\'\n] )'       # characters
    """,
    re.DOTALL | re.VERBOSE,
)
_INLINE_MODULE = re.compile(r"\bmod\s+(\w+)\s*\{")
_TEST_MODULE = re.compile(r"#\[cfg\([^\]]*\btest\b[^\]]*\)\]\s*(?:#\[[^\]]*\]\s*)*mod\s+\w+\s*\{")
_CHILD_MODULE = re.compile(r"\bmod\s+(\w+)\s*;")
_VISIBILITY = re.compile(r"\bpub\s*\([^)]*\)")
_FUNCTION = re.compile(r"\bfn\s+(\w+)")
_USE_NAME = re.compile(r"\s*(\w+|\*)")
_USE_SEPARATOR = re.compile(r"\s*::\s*(?=[\w*{])")
_USE_NEXT = re.compile(r"(?:\s+as\s+\w+)?\s*,?\s*")


def rust_code(text: str) -> str:
    """The text with comments and the insides of strings as spaces; every position stays."""

    def blank(found: re.Match[str]) -> str:
        kept = '"' if '"' in found[0] and not found[0].startswith("/") else " "
        return kept + re.sub(r"[^\n]", " ", found[0][1:-1]) + kept

    return _RUST_OPAQUE.sub(blank, text)


def block_end(code: str, at: int) -> int:
    """The position after the brace that closes the one at `at`."""
    depth = 0
    for brace in re.finditer(r"[{}]", code[at:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return at + brace.end()
    return len(code)


def use_tree(code: str, at: int) -> tuple[list[tuple[str, ...]], int]:
    """The paths that start at `at`, and where they end: `a::{b, c::d}` is a::b and a::c::d."""
    name = _USE_NAME.match(code, at)
    if name is None:
        return [], at + 1
    separator = _USE_SEPARATOR.match(code, name.end())
    if separator is None:
        return [(name[1],)], name.end()
    at = separator.end()
    if code[at] != "{":
        tails, at = use_tree(code, at)
        return [(name[1], *tail) for tail in tails], at
    paths: list[tuple[str, ...]] = []
    at += 1
    while at < len(code):
        if follows := _USE_NEXT.match(code, at):
            at = follows.end()
        if code.startswith("}", at):
            return paths, at + 1
        tails, at = use_tree(code, at)
        paths += [(name[1], *tail) for tail in tails]
    return paths, at


@dataclass(frozen=True, slots=True)
class Reference:
    """That one module names another."""

    line: int
    text: str
    target: str


def rust_modules(root: Path) -> dict[str, Path]:
    """Module names as the order writes them: `engine/psync`, `lib`; `plan/...`, `py/...`."""
    modules = {}
    for folder, prefix, _ in CRATES:
        for path in files(root, (folder,), ".rs"):
            name = shown(root / folder, path).removesuffix(".rs").removesuffix("/mod")
            modules[prefix + name] = path
    return modules


@dataclass(frozen=True, slots=True)
class RustFile:
    """One module's code and what the names in it stand for."""

    name: str
    code: str
    children: frozenset[str]
    inline: list[tuple[int, int, str]]
    modules: frozenset[str]

    @classmethod
    def read(cls, name: str, path: Path, modules: dict[str, Path]) -> "RustFile":
        """Take one file of `modules`."""
        # `pub(in crate::a)` says who may look, not what is used.
        code = _VISIBILITY.sub(lambda found: " " * len(found[0]), rust_code(path.read_text()))
        inline = [
            (found.start(), block_end(code, found.end() - 1), found[1])
            for found in _INLINE_MODULE.finditer(code)
        ]
        children = frozenset(_CHILD_MODULE.findall(code))
        return cls(name, code, children, inline, frozenset(modules))

    def resolve(self, words: tuple[str, ...], at: int) -> str | None:
        """The module that a path at a position leads into."""
        prefixes = {outside: prefix for _, prefix, outside in CRATES}
        crate = max((one for one in prefixes.values() if self.name.startswith(one)), key=len)
        own = self.name.removeprefix(crate)
        here = () if own == "lib" else tuple(own.split("/"))
        if words[0] == "crate" or words[0] in prefixes:
            crate = prefixes.get(words[0], crate)
            here, words = (), words[1:]
        elif words[0] not in self.children:
            here += tuple(name for start, end, name in self.inline if start < at < end)
        while words and words[0] in {"self", "super"}:
            here, words = here[:-1] if words[0] == "super" else here, words[1:]
        while words and self._module(crate, (*here, words[0])):
            here, words = (*here, words[0]), words[1:]
        # An inline module belongs to the file it stands in.
        while here and not self._module(crate, here):
            here = here[:-1]
        return self._module(crate, here)

    def _module(self, crate: str, where: tuple[str, ...]) -> str | None:
        name = crate + ("/".join(where) or "lib")
        return name if name in self.modules else None


def rust_references(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Reference]:
    """The modules of this workspace that one file names, by `crate`, `super`, `self` or a child."""
    file = RustFile.read(name, path, modules)
    outside = [name for _, _, name in CRATES if name]
    roots = "|".join(["crate", "super", "self", *outside, *sorted(file.children)])
    root_pattern = re.compile(
        rf"(?<![\w:.])(?:{roots})(?=\s*::)|(?<=\buse )(?:crate|super)(?= as\b)"
    )
    at = 0
    while found := root_pattern.search(file.code, at):
        paths, at = use_tree(file.code, found.start())
        for words in paths:
            target = file.resolve(words, found.start())
            if target is not None and target != name:
                yield Reference(line_of(file.code, found.start()), "::".join(words), target)


def rust_functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Name, line and length in lines of every function with a body."""
    for found in _FUNCTION.finditer(code):
        depth = 0
        for mark in re.finditer(r"[()\[\]{;]", code[found.end() :]):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(mark[0], 0)
            if depth == 0 and mark[0] in "{;":
                if mark[0] == "{":
                    end = block_end(code, found.end() + mark.start())
                    yield (
                        found[1],
                        line_of(code, found.start()),
                        code.count("\n", found.start(), end) + 1,
                    )
                break


# --- reading Python -----------------------------------------------------------


def python_modules(root: Path) -> dict[str, Path]:
    """Module names as the order writes them: `hooks`, `__init__`, `demo/table`."""
    package = root / PACKAGE
    return {
        shown(package, path).removesuffix(path.suffix): path
        for path in files(root, (PACKAGE,), ".py", ".pyi")
        if not _is_folder_docstring(package, path)
    }


def _is_folder_docstring(package: Path, path: Path) -> bool:
    """Whether this is the `__init__` of a folder and offers nothing: the folder is not a room."""
    if path.name != "__init__.py" or path.parent == package:
        return False
    body = ast.parse(path.read_text()).body
    return all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in body)


def python_references(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Reference]:
    """The modules of the package that one file imports, wherever in the file it does."""
    package = ("ssdtrain", *name.split("/")[:-1])

    def resolve(words: list[str]) -> str | None:
        """The longest beginning of a dotted path that is a module, `a/__init__` for a package."""
        for length in range(len(words), 0, -1):
            inside = words[1:length]
            for candidate in ("/".join(inside), "/".join((*inside, "__init__"))):
                if words[0] == "ssdtrain" and candidate in modules:
                    return candidate
        return None

    for node in ast.walk(ast.parse(path.read_text(), path.name)):
        for words in _imported(node, package):
            target = resolve(words.split("."))
            if target is not None and target != name:
                yield Reference(getattr(node, "lineno", 0), words, target)


def _imported(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The dotted paths that one statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        start = [*base, *(node.module.split(".") if node.module else [])]
        return [".".join([*start, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
        return [
            argument.value
            for argument in node.args[:1]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
    return []


def dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def python_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported path and every `a.b.c`, with import aliases written out, and its line."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            yield node.lineno, f"{aliases.get(first, first)}.{rest}"


# --- the rules ----------------------------------------------------------------


def _order(
    root: Path,
    block: str,
    modules: dict[str, Path],
    references: Callable[[str, Path, dict[str, Path]], Iterator[Reference]],
) -> Iterator[str]:
    """A module may name those on lines above its own; `folder/*` stands for a whole package."""
    lines = [line.split() for line in Doc.read(root).block(block)]
    entries = [entry for line in lines for entry in line]
    level = {entry: number for number, line in enumerate(lines) for entry in line}

    def room(name: str) -> str | None:
        if name in level:
            return name
        package = name.rpartition("/")[0] + "/*"
        return package if package in level else None

    for entry, count in Counter(entries).items():
        if count > 1:
            yield f"{DOC}: ```{block} lists `{entry}` {count} times; keep one"
        if entry not in {room(name) for name in modules}:
            yield f"{DOC}: ```{block} lists `{entry}`, which is not in the tree; take it out"
    for name, path in modules.items():
        here = room(name)
        if here is None:
            yield f"{shown(root, path)}: not in ```{block} of {DOC}; give `{name}` its line there"
            continue
        for reference in references(name, path, modules):
            there = room(reference.target)
            if there is not None and there != here and level[there] >= level[here]:
                yield (
                    f"{shown(root, path)}:{reference.line}: `{name}` names `{reference.text}` of"
                    f" `{reference.target}`, which does not stand above it in ```{block}; take it"
                    " from the module that defines it, or move what both need to one above both"
                )


def rust_import_order(root: Path) -> Iterator[str]:
    """Rust modules name only modules on lines above their own."""
    yield from _order(root, RUST_ORDER, rust_modules(root), rust_references)


def python_import_order(root: Path) -> Iterator[str]:
    """Python modules import only modules on lines above their own."""
    yield from _order(root, PYTHON_ORDER, python_modules(root), python_references)


def public_names_above_init(root: Path) -> Iterator[str]:
    """What stands below `__init__` in the order is written as a user would write it."""
    entries = " ".join(Doc.read(root).block(PYTHON_ORDER)).split()
    users = entries[entries.index("__init__") + 1 :] if "__init__" in entries else []
    modules = python_modules(root)
    for name, path in modules.items():
        folder = name.rpartition("/")[0]
        if name not in users and f"{folder}/*" not in users:
            continue
        for reference in python_references(name, path, modules):
            if folder and reference.target.startswith(f"{folder}/"):
                continue
            if any(re.match(r"_(?!_)", word) for word in reference.text.split(".")):
                yield (
                    f"{shown(root, path)}:{reference.line}: `{reference.text}` is private to"
                    " ssdtrain; use what it offers to everyone"
                )


def _is_list(path: Path) -> bool:
    """Whether a `mod.rs` only lists its folder: then the folder is not a room."""
    return path.name == "mod.rs" and not re.search(r"\b(?:fn|struct|enum|impl)\b", path.read_text())


def room_sentences(root: Path) -> Iterator[str]:
    """Every module has its line in docs/architecture.md, and files of one name a line each."""
    token = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:pyi?|rs)\b")
    # A line with little more than the name is no sentence about it.
    said = [
        token.findall(line)
        for line in Doc.read(root).prose
        if len(re.findall(r"\w+", token.sub("", line))) >= ROOM_WORDS_MIN
    ]
    rooms = {name: path for name, path in rust_modules(root).items() if not _is_list(path)}
    for name, path in python_modules(root).items():
        if name.rpartition("/")[0] not in ROOMS_IN_ONE:
            rooms[f"ssdtrain {name}"] = path
    silent = []
    for path in rooms.values():
        full = shown(root, path)
        if not any(f"/{full}".endswith(f"/{name}") for names in said for name in names):
            silent.append(path.name)
            yield f"{full}: {DOC} has no line for it; say in a sentence what the room is for"
    for name, count in Counter(path.name for path in rooms.values()).items():
        lines = sum(any(token.rpartition("/")[2] == name for token in names) for names in said)
        if lines < count and name not in silent:
            yield (
                f"{DOC}: fewer lines about `{name}` than there are files of this name; give each"
                " its sentence, with its folder"
            )


def unsafe_places(root: Path) -> Iterator[str]:
    """`unsafe` stands in the listed files only, and every listed file needs it."""
    listed = Doc.read(root).block(UNSAFE_FILES)
    found = {
        shown(root, path): line_of(code, use.start())
        for path in files(root, PRODUCT_FOLDERS + TEST_FOLDERS, ".rs")
        for code in [rust_code(path.read_text())]
        if (use := re.search(r"\bunsafe\b", code))
    }
    for name, line in found.items():
        if name not in listed:
            yield (
                f"{name}:{line}: `unsafe` in a file that is not in ```{UNSAFE_FILES} of {DOC};"
                " use a safe wrapper from one that is"
            )
    for name in listed:
        if name not in found:
            yield f"{DOC}: ```{UNSAFE_FILES} lists {name}, which has no `unsafe`; take it out"


def sizes(root: Path) -> Iterator[str]:
    """Files, functions and lines have a size that a reader can hold."""
    for path in files(root, PRODUCT_FOLDERS + TEST_FOLDERS, ".rs", ".py", ".pyi", ".cpp", ".h"):
        name = shown(root, path)
        text = path.read_text()
        product = name.startswith(PRODUCT_FOLDERS)
        lines_max = PRODUCT_FILE_LINES_MAX if product else TEST_FILE_LINES_MAX
        # There is one list of signatures for a compiled module, however long it is.
        is_list = path.suffix == ".pyi"
        if (count := len(text.splitlines())) > lines_max and not is_list:
            yield f"{name}: {count} lines, {lines_max} at most; split it where two ideas meet"
        # Of Python ruff says so; rustfmt leaves comments as long as they are.
        other_lines = [] if path.suffix in {".py", ".pyi"} else text.splitlines()
        for number, line in enumerate(other_lines, 1):
            if len(line) > COLUMNS_MAX:
                yield f"{name}:{number}: {len(line)} columns, {COLUMNS_MAX} at most; wrap it"
        if path.suffix in {".cpp", ".h"} or not product:
            continue
        functions = rust_functions(rust_code(text)) if path.suffix == ".rs" else _functions(text)
        for function, number, count in functions:
            if count > FUNCTION_LINES_MAX:
                yield (
                    f"{name}:{number}: `{function}` has {count} lines, {FUNCTION_LINES_MAX} at"
                    " most; give a part of it a name"
                )


def _functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, line and length of every Python function, its docstring not counted (as in Rust)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            words = 0
            if ast.get_docstring(node) is not None:
                words = (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1 - words


def autograd_names(root: Path) -> Iterator[str]:
    """Only the listed modules touch autograd's hooks and internals, and each of them does."""
    listed = Doc.read(root).block(AUTOGRAD_NAMERS)
    inside = re.compile(r"torch\.autograd\.graph\b|torch\._C\._autograd\b")
    seen = set()
    for name, path in python_modules(root).items():
        names = python_names(ast.parse(path.read_text()))
        # One entry for a line: `a.b.c` holds `a.b` too.
        lines = {line: words for line, words in sorted(names) if inside.match(words)}
        if lines and name in listed:
            seen.add(name)
            continue
        for line, words in lines.items():
            yield (
                f"{shown(root, path)}:{line}: names `{words}`; only the modules in"
                f" ```{AUTOGRAD_NAMERS} of {DOC} may, let one of them offer what is needed"
            )
    for name in listed:
        if name not in seen:
            yield f"{DOC}: ```{AUTOGRAD_NAMERS} lists `{name}`, which does not; take it out"


def io_uring_names(root: Path) -> Iterator[str]:
    """Only the engine and the benchmark of rings know the io_uring crate."""
    for path in files(root, PRODUCT_FOLDERS + TEST_FOLDERS, ".rs"):
        name, code = shown(root, path), rust_code(path.read_text())
        for found in re.finditer(r"\bio_uring\s*::|\buse\s+io_uring\b|\bcrate\s+io_uring\b", code):
            if name not in IO_URING_FILES:
                yield (
                    f"{name}:{line_of(code, found.start())}: names the io_uring crate; only"
                    f" {IO_URING_FILES[0]} does, behind the engine trait"
                )


def registry_addresses(root: Path) -> Iterator[str]:
    """Where packages come from is the business of whoever installs."""
    # In pieces, so that this file does not break its own rule.
    hosts = "|".join(
        f"{name}\\." for name in ("pypi", "python" + "hosted", "download\\.pytorch", "crates")
    )
    address = re.compile(rf"\b(?:{hosts})(?:org|io)\b|--(?:extra-)?index" + "-url|index_" + "url")
    lock_source = f'source = "registry+https://github.com/rust-lang/{"crates"}.io-index"'
    for path in text_files(root):
        lock = path.name == "Cargo.lock"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            # cargo writes its standard registry into the lock; another one there is a leak.
            wrong = line.startswith("source = ") and line != lock_source if lock else None
            if wrong or (wrong is None and address.search(line)):
                yield (
                    f"{shown(root, path)}:{number}: names a package registry; leave it to the"
                    " configuration of pip or cargo"
                )


def sleeps(root: Path) -> Iterator[str]:
    """No test sleeps: it waits for what it needs, or it is wrong on a slow machine."""
    wait = "wait for the event itself (a ticket, a gate, a condition, a child's output)"
    for path in files(root, TEST_FOLDERS, ".py"):
        text = path.read_text()
        if "sleep" not in text:
            continue
        tree = ast.parse(text)
        lines = {line for line, name in python_names(tree) if name == "time.sleep"}
        # Programs for child processes stand in strings.
        lines |= {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and re.search(r"\btime\.sleep\(", str(node.value))
        }
        for line in sorted(lines):
            yield f"{shown(root, path)}:{line}: a test sleeps; {wait}"
    for path in files(root, PRODUCT_FOLDERS + TEST_FOLDERS, ".rs"):
        text = path.read_text()
        if "sleep" not in text:
            continue
        name, code = shown(root, path), rust_code(text)
        spans = [
            (found.start(), block_end(code, found.end() - 1))
            for found in _TEST_MODULE.finditer(code)
        ]
        if name.startswith(TEST_FOLDERS):
            spans = [(0, len(code))]
        for found in re.finditer(r"\bthread\s*::\s*(?:\{[^}]*\b)?sleep\b", code):
            if any(start <= found.start() < end for start, end in spans):
                yield f"{name}:{line_of(code, found.start())}: a test sleeps; {wait}"


RULES: tuple[Rule, ...] = (
    rust_import_order,
    python_import_order,
    public_names_above_init,
    room_sentences,
    unsafe_places,
    sizes,
    autograd_names,
    io_uring_names,
    registry_addresses,
    sleeps,
)
