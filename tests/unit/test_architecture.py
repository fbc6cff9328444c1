"""The tree keeps the rules of docs/architecture.md, and every rule can fail."""

import importlib.util
import sys
from pathlib import Path

import pytest

import tree_rules
from checkout import ROOT
from tree_rules import Rule


@pytest.mark.parametrize("rule", tree_rules.RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps(rule: Rule) -> None:
    violations = list(rule(ROOT))
    if violations:
        pytest.fail("\n".join([str(rule.__doc__), *violations]), pytrace=False)


def test_installed_package_is_this_tree() -> None:
    """The tests try what a user gets: the installed wheel, made from these sources."""
    remedy = "run `make test`, which installs the tree and tests what it installed"
    spec = importlib.util.find_spec("ssdtrain")
    assert spec is not None, f"ssdtrain is not installed in {sys.prefix}; {remedy}"
    assert spec.origin is not None
    source, installed = ROOT / tree_rules.PACKAGE, Path(spec.origin).parent
    assert installed.is_relative_to(sys.prefix), f"ssdtrain comes from {installed}; {remedy}"
    assert installed != source, f"ssdtrain comes from {installed}; {remedy}"
    assert list(installed.glob("_core*.so")), f"{installed} has no compiled core; {remedy}"
    contents = [
        {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.suffix in {".py", ".pyi", ".typed"}
        }
        for folder in (source, installed)
    ]
    changed = sorted(
        name
        for name in contents[0].keys() | contents[1].keys()
        if contents[0].get(name) != contents[1].get(name)
    )
    assert not changed, f"the installed ssdtrain differs from the tree in {changed}; {remedy}"


# In two pieces, because these words are against the rules here too.
REGISTRY = "pypi" + ".org"
SLEEP = "time.sleep" + "(1)"

# A small tree that keeps every rule.
DOC = """\
# Architecture
- `src/error.rs` holds the one error type of all.
- `engine/mod.rs` chooses among the engines there are.
- `engine/psync.rs` reads and writes with plain calls.
- `engine/uring.rs` reads and writes through a ring.
- `core/src/lib.rs` offers the crate to its users.
- `plan/src/lib.rs` offers the planner to its users.
- `trace.rs` has the kernels and tensors of a step.
- `py/src/lib.rs` is the module that Python imports.
- `errors.py` has the exceptions that users may catch.
- `hooks.py` packs and unpacks what autograd saves.
- `_core.pyi` says what the compiled part offers.
- `ssdtrain/__init__.py` names what users of the package see.

```import-order rust
error
engine/psync engine/uring
engine
lib
plan/trace
plan/lib
py/lib
```

```import-order python
errors
_core
hooks
__init__
demo/*
```

```unsafe-files
rust/core/src/engine/uring.rs
```

```names-torch-autograd
hooks
```
"""
URING = """\
use io_uring::IoUring;
use super::super::error::Error;

pub fn lives<'a>(word: &'a str) -> char {
    let first = words(word)
        .and(unsafe { nothing() });
    '{'
}
"""
MOD = """\
//! See [`crate::lib`], which no code here names: thread::sleep.
mod psync;
mod uring;
pub(crate) use uring::lives;
use crate::error::{self, Error as Wrong};

#[cfg(test)]
mod tests {
    use super::*;
    const NAME: &str = "crate::lib and unsafe { }";
}
"""
TREE = {
    "docs/architecture.md": DOC,
    "Cargo.lock": 'source = "registry+https://github.com/rust-lang/crates' + '.io-index"\n',
    "rust/core/src/error.rs": "pub struct Error;\n",
    "rust/core/src/engine/mod.rs": MOD,
    "rust/core/src/engine/psync.rs": "use crate::error::Error;\n",
    "rust/core/src/engine/uring.rs": URING,
    "rust/core/src/lib.rs": "pub mod error;\nmod engine;\npub use error::Error;\n",
    "rust/plan/src/trace.rs": "use ssdtrain_core::Error;\n",
    "rust/plan/src/lib.rs": "pub mod trace;\n",
    "rust/py/src/lib.rs": "use ssdtrain_core::{Error, engine::lives};\nuse ssdtrain_plan::trace;\n",
    "python/ssdtrain/errors.py": '"""Time."""\n\nimport time\n\n' + SLEEP + "\n",
    "python/ssdtrain/_core.pyi": "from ssdtrain.errors import StoreError\n",
    "python/ssdtrain/hooks.py": "from torch.autograd import graph\n\nfrom . import _core\n",
    "python/ssdtrain/__init__.py": "from ssdtrain.hooks import pack\n",
    "python/ssdtrain/demo/__init__.py": "from ssdtrain import __version__\n",
    "python/ssdtrain/demo/table.py": "from ssdtrain.demo import _widths\nimport ssdtrain\n",
    "python/ssdtrain/demo/_widths.py": "",
    "tests/test_all.py": "# time.sleep is what this test does without\n",
    "tests/store.rs": "// no thread::sleep\n",
}


def plant(root: Path, tree: dict[str, str]) -> None:
    """Write a tree of files."""
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize("rule", tree_rules.RULES, ids=lambda rule: rule.__name__)
def test_good_tree_keeps(rule: Rule, tmp_path: Path) -> None:
    plant(tmp_path, TREE)
    assert list(rule(tmp_path)) == []


def with_core(line: str, file: str = "error.rs") -> dict[str, str]:
    """The good tree with one more line in a file of the Rust core."""
    name = f"rust/core/src/{file}"
    return {name: TREE[name] + line + "\n"}


def with_python(line: str, file: str = "errors.py") -> dict[str, str]:
    """The good tree with one more line in a file of the package."""
    name = f"python/ssdtrain/{file}"
    return {name: TREE[name] + line + "\n"}


def with_doc(old: str, new: str) -> dict[str, str]:
    """The good tree with a change in its document."""
    assert DOC.count(old) == 1
    return {"docs/architecture.md": DOC.replace(old, new)}


LONG_RUST = "fn long(x: [u8; 4]) -> [u8; 4] {\n" + "    work();\n" * 69 + "}\n"
LONG_PYTHON = 'def long():\n    """Two\n\n    lines."""\n' + "    work()\n" * 70

# A rule, what breaks it, and words of the violation.
BAD: list[tuple[Rule, dict[str, str], str]] = [
    (
        tree_rules.rust_import_order,
        with_core("use crate::engine::psync::A;"),
        "error.rs:2: `error`",
    ),
    (tree_rules.rust_import_order, with_core("use crate::{engine};"), "of `engine`"),
    (tree_rules.rust_import_order, with_core("use crate::{\n    error::A,\n    Error};"), "`lib`"),
    (tree_rules.rust_import_order, with_core("fn f() { crate::engine::g::<u8>() }"), "`engine`"),
    (tree_rules.rust_import_order, with_core("use super::engine as e;"), "of `engine`"),
    (tree_rules.rust_import_order, with_core("use crate as all;"), "of `lib`"),
    (tree_rules.rust_import_order, with_core("mod m { use super::super::engine; }"), "`engine`"),
    (tree_rules.rust_import_order, with_core("use super::uring;", "engine/psync.rs"), "/uring`"),
    (tree_rules.rust_import_order, with_core("use super::open;", "engine/psync.rs"), "`engine`"),
    (tree_rules.rust_import_order, {"rust/core/src/new.rs": ""}, "new.rs: not in"),
    (tree_rules.rust_import_order, {"rust/py/src/new.rs": ""}, "`py/new`"),
    (tree_rules.rust_import_order, {"rust/plan/src/new.rs": ""}, "`plan/new`"),
    (tree_rules.rust_import_order, {"rust/plan/src/trace.rs": "use crate::lib;\n"}, "`plan/lib`"),
    (tree_rules.rust_import_order, with_core("use ssdtrain_plan::trace::A;"), "`plan/trace`"),
    (tree_rules.rust_import_order, with_doc("error\nengine/p", "error\ngone\nengine/p"), "`gone`"),
    (
        tree_rules.rust_import_order,
        with_doc("error\nengine/p", "error error\nengine/p"),
        "`error` 2 times",
    ),
    (
        tree_rules.rust_import_order,
        with_core("use engine::g;", "lib.rs") | with_doc("\nengine\nlib", "\nlib\nengine"),
        "`lib` names `engine::g`",
    ),
    (tree_rules.python_import_order, with_python("from . import hooks"), "errors.py:6: `errors`"),
    (tree_rules.python_import_order, with_python("from .hooks import pack"), "of `hooks`"),
    (
        tree_rules.python_import_order,
        with_python("import ssdtrain.hooks"),
        "of `hooks`",
    ),
    (tree_rules.python_import_order, with_python("from ssdtrain import pack"), "of `__init__`"),
    (tree_rules.python_import_order, with_python("from ssdtrain.demo import table"), "demo/table`"),
    (tree_rules.python_import_order, with_python("def f():\n    from . import hooks"), "`hooks`"),
    (
        tree_rules.python_import_order,
        with_python("if TYPE_CHECKING:\n    from . import hooks"),
        "of `hooks`",
    ),
    (
        tree_rules.python_import_order,
        with_python('importlib.import_module("ssdtrain.hooks")'),
        "of `hooks`",
    ),
    (
        tree_rules.python_import_order,
        with_python("from . import hooks", "_core.pyi"),
        "_core.pyi:2",
    ),
    (tree_rules.python_import_order, {"python/ssdtrain/new.py": ""}, "new.py: not in"),
    (tree_rules.python_import_order, with_doc("errors\n_core", "errors\ngone\n_core"), "`gone`"),
    (tree_rules.python_import_order, with_doc("errors\n_core", "errors\n_core _core"), "2 times"),
    (
        tree_rules.public_names_above_init,
        with_python("from ssdtrain import _core", "demo/table.py"),
        "`ssdtrain._core` is private",
    ),
    (
        tree_rules.public_names_above_init,
        with_python("from ..hooks import _pack", "demo/table.py"),
        "demo/table.py:3",
    ),
    (tree_rules.room_sentences, with_doc("`errors.py`", "`mirrors.py`"), "errors.py: "),
    (
        tree_rules.room_sentences,
        with_doc("packs and unpacks what autograd saves", ""),
        "hooks.py: ",
    ),
    (
        tree_rules.room_sentences,
        with_doc(
            "`core/src/lib.rs` offers the crate to its users.\n- `plan/src/lib.rs`", "`lib.rs`"
        ),
        "fewer lines about `lib.rs`",
    ),
    (tree_rules.unsafe_places, with_core("unsafe fn f() {}"), "error.rs:2: `unsafe`"),
    (tree_rules.unsafe_places, {"tests/store.rs": "unsafe { f() }\n"}, "tests/store.rs:1"),
    (
        tree_rules.unsafe_places,
        with_doc("src/engine/uring.rs\n```", "src/engine/uring.rs\nrust/core/src/error.rs\n```"),
        "lists rust/core/src/error.rs",
    ),
    (tree_rules.sizes, {"rust/core/src/a.rs": "\n" * 501}, "a.rs: 501 lines, 500 at most"),
    (tree_rules.sizes, {"python/ssdtrain/a.py": "\n" * 501}, "a.py: 501 lines"),
    (tree_rules.sizes, {"tests/a.py": "\n" * 701}, "tests/a.py: 701 lines, 700"),
    (tree_rules.sizes, {"benches/a.rs": "\n" * 701}, "benches/a.rs: 701 lines"),
    (tree_rules.sizes, {"tests/a.rs": "// " + "a" * 98}, "tests/a.rs:1: 101 columns"),
    (tree_rules.sizes, {"tests/a.cpp": "// " + "a" * 98}, "tests/a.cpp:1: 101 columns"),
    (tree_rules.sizes, {"tests/a.h": "\n" * 701}, "tests/a.h: 701 lines, 700"),
    (tree_rules.sizes, with_core(LONG_RUST), "error.rs:2: `long` has 71 lines"),
    (tree_rules.sizes, with_python(LONG_PYTHON), "errors.py:6: `long` has 71 lines"),
    (
        tree_rules.autograd_names,
        with_python("from torch.autograd.graph import Node"),
        "errors.py:6: names `torch.autograd.graph.Node`",
    ),
    (
        tree_rules.autograd_names,
        with_python("from torch import autograd as a\na.graph.Node"),
        "errors.py:7: names `torch.autograd.graph.Node`",
    ),
    (tree_rules.autograd_names, with_python("import torch as t\nt._C._autograd"), "errors.py:7"),
    (tree_rules.autograd_names, {"python/ssdtrain/hooks.py": ""}, "lists `hooks`"),
    (
        tree_rules.io_uring_names,
        with_core("use io_uring::squeue;"),
        "error.rs:2: names the io_uring",
    ),
    (tree_rules.io_uring_names, {"benches/a.rs": "use io_uring as ring;\n"}, "benches/a.rs:1"),
    (
        tree_rules.registry_addresses,
        {"CONTRIBUTING.md": f"\nfrom {REGISTRY}\n"},
        "CONTRIBUTING.md:2",
    ),
    (tree_rules.registry_addresses, {".ci/run": "pip install --index" + "-url x\n"}, ".ci/run:1"),
    (
        tree_rules.registry_addresses,
        {"Cargo.lock": 'source = "registry+https://mirror.example/index"\n'},
        "Cargo.lock:1",
    ),
    (tree_rules.sleeps, {"tests/a.py": f"import time\n\n{SLEEP}\n"}, "tests/a.py:3: a test sleeps"),
    (tree_rules.sleeps, {"tests/a.py": "from time import sleep\n"}, "tests/a.py:1"),
    (tree_rules.sleeps, {"tests/a.py": f'CHILD = "import time; {SLEEP}"\n'}, "tests/a.py:1"),
    (tree_rules.sleeps, {"tests/a.rs": "use std::{thread::{self, sleep}};"}, "tests/a.rs:1"),
    (tree_rules.sleeps, {"benches/a.rs": "\nstd::thread::sleep(x);"}, "benches/a.rs:2"),
    (
        tree_rules.sleeps,
        with_core("#[cfg(test)]\nmod tests {\n    fn f() { thread::sleep(x) }\n}"),
        "error.rs:4: a test sleeps",
    ),
]


@pytest.mark.parametrize(("rule", "change", "words"), BAD)
def test_bad_tree_is_found(rule: Rule, change: dict[str, str], words: str, tmp_path: Path) -> None:
    plant(tmp_path, TREE | change)
    violations = list(rule(tmp_path))
    assert len(violations) == 1, violations
    assert words in violations[0]


def test_every_rule_can_fail() -> None:
    assert {rule for rule, _, _ in BAD} == set(tree_rules.RULES)


def test_block_must_be_there_once(tmp_path: Path) -> None:
    plant(tmp_path, {"docs/architecture.md": "```unsafe-files\n```\n"})
    assert tree_rules.Doc.read(tmp_path).block(tree_rules.UNSAFE_FILES) == []
    with pytest.raises(ValueError, match="no block ```names-torch-autograd"):
        tree_rules.Doc.read(tmp_path).block(tree_rules.AUTOGRAD_NAMERS)
    plant(tmp_path, {"docs/architecture.md": "```unsafe-files\n```\n" * 2})
    with pytest.raises(ValueError, match="two blocks ```unsafe-files"):
        tree_rules.Doc.read(tmp_path)
