"""What `make wheel` looks at can be wrong in each of these ways, and is then refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import distributions
import fresh_install
from checkout import ROOT, TESTS
from ssdtrain import _core

PROVE = TESTS / "wheel" / "prove.py"
GLIBC_MAX = (2, 28)
TAG = "cp311-abi3-manylinux_2_28_x86_64"
AUDIT = {"overall_tag": "manylinux_2_28_x86_64", "external_libs": {}, "unsupported_isa": False}
ELF = """\
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
  0x0060:   Name: GLIBC_2.28  Flags: none  Version: 11
  0x0070:   Name: GLIBC_2.2.5  Flags: none  Version: 7
"""


# --- what is in the wheel and in the sdist ------------------------------------


@pytest.mark.parametrize("files_of", [distributions.wheel_files, distributions.sdist_files])
def test_an_archive_must_hold_the_checkout_and_nothing_else(files_of) -> None:
    expected = files_of(ROOT, "1.2.3")
    found = {name: b"made" if it is None else it for name, it in expected.items()}
    assert list(distributions.content_problems(found, expected)) == []

    changed = next(name for name in found if name.endswith("ssdtrain/py.typed"))
    missing = next(name for name in found if name.endswith("LICENSE"))
    found[changed] = b"other"
    del found[missing]
    found["tests/conftest.py"] = b""
    assert list(distributions.content_problems(found, expected)) == [
        f"{missing} is missing",
        "tests/conftest.py does not belong there",
        f"{changed} is not the file of the checkout",
    ]


def test_a_wheel_holds_stubs_types_licence_and_one_compiled_part() -> None:
    names = set(distributions.wheel_files(ROOT, "1.2.3"))
    assert {"ssdtrain/_core.pyi", "ssdtrain/py.typed"} <= names
    assert "ssdtrain-1.2.3.dist-info/licenses/LICENSE" in names
    assert [name for name in names if name.endswith(".so")] == ["ssdtrain/_core.abi3.so"]


# --- where the wheel runs -----------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (TAG, None),
        ("cp311-abi3-manylinux_2_17_aarch64", None),
        ("cp311-abi3-manylinux_2_34_x86_64", "newer than 2.28"),
        ("cp311-abi3-linux_x86_64", "not that of CPython 3.11 and newer on manylinux"),
        ("cp311-cp311-manylinux_2_28_x86_64", "not that of CPython 3.11 and newer"),
    ],
)
def test_the_tag_promises_old_pythons_and_an_old_glibc(tag: str, words: str | None) -> None:
    problems = list(distributions.tag_problems(tag, GLIBC_MAX))
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"overall_tag": "linux_x86_64"}, "auditwheel says linux_x86_64"),
        ({"external_libs": {"libzstd.so.1": "/usr/lib/libzstd.so.1"}}, "libzstd.so.1"),
        ({"unsupported_isa": True}, "instructions"),
    ],
)
def test_auditwheel_must_agree(change: dict[str, object], words: str | None) -> None:
    problems = list(distributions.audit_problems({**AUDIT, **change}, TAG))
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ELF, None),
        (ELF.replace("2.28", "2.36"), "needs glibc 2.36, newer than 2.28"),
        (ELF.replace("2.2.5", "PRIVATE"), "a private function of one glibc"),
        (ELF.replace("libc.so.6", "libstdc++.so.6"), "needs libstdc++.so.6"),
        ("", "no version of glibc"),
    ],
)
def test_readelf_must_agree(text: str, words: str | None) -> None:
    problems = list(distributions.elf_problems(text, GLIBC_MAX))
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


def test_readelf_is_understood() -> None:
    """The installed module is built for this machine: its versions are there, but may be newer."""
    text = distributions.elf_listing(Path(_core.__file__).read_bytes())
    newest = distributions.glibc_versions(text)[-1]
    assert list(distributions.elf_problems(text, newest)) == []
    assert len(list(distributions.elf_problems(text, (2, 1)))) == 1
    assert "[libc.so.6]" in text


# --- which interpreters, and what is not proved -------------------------------


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(folder: Path, name: str, version: list[int]) -> Path:
    return program(folder / name, f"echo '[{version}, \"{folder / name}\"]'")


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "absent"), str(folder)]))
    return folder


def test_the_oldest_and_the_newest_on_path_are_chosen(only_path: Path, capfd) -> None:
    for minor in (9, 11, 12, 14):
        python(only_path, f"python3.{minor}", [3, minor, 1])
    python(only_path, "python3.14t", [3, 14, 1])
    program(only_path / "python3.15", "echo 'not installed here' >&2; exit 127")
    chosen = fresh_install.chosen([])
    assert [one.version for one in chosen] == [(3, 11, 1), (3, 14, 1)]
    told = capfd.readouterr().out.splitlines()
    assert "python3.15: NOT USED: not installed here" in told
    assert [line.split(":")[0] for line in told] == [f"python3.{n}" for n in (11, 12, 14, 15)]


def test_without_the_oldest_python_nothing_is_chosen(only_path: Path) -> None:
    python(only_path, "python3.12", [3, 12, 0])
    with pytest.raises(SystemExit, match=r"no Python 3\.11 was found"):
        fresh_install.chosen([])


@pytest.mark.parametrize(
    ("version", "words"), [(None, "NOT USED: not found"), ([3, 10, 2], "older than 3.11")]
)
def test_a_python_that_was_named_is_not_left_out(
    version: list[int] | None, words: str, only_path: Path, capfd
) -> None:
    good = python(only_path, "python3.11", [3, 11, 4])
    if version is not None:
        python(only_path, "other", version)
    assert [one.path for one in fresh_install.chosen(["python3.11"])] == [str(good)]
    with pytest.raises(SystemExit, match="cannot be used"):
        fresh_install.chosen(["python3.11", "other"])
    assert words in capfd.readouterr().out


def test_pip_gets_its_own_settings_and_nothing_else() -> None:
    passed = ("HOME", "PIP_CERT", "https_proxy", "NO_PROXY", "SSL_CERT_FILE")
    held = ("PATH", "PYTHONPATH", "CARGO_HOME", "VIRTUAL_ENV", "PYPIP_X", "https_proxy_x")
    assert all(map(fresh_install.PIP_NEEDS.fullmatch, passed))
    assert not any(map(fresh_install.PIP_NEEDS.fullmatch, held))


@pytest.mark.long
def test_nothing_is_proved_where_rust_is_found(only_path: Path, tmp_path: Path) -> None:
    cargo = program(only_path / "cargo", "exit 1")
    done = subprocess.run(
        [sys.executable, "-P", PROVE, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{cargo} is on PATH" in done.stderr
