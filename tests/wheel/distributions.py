"""Looks at what was built: is everything in it, nothing else, and does it run on old systems.

    python tests/wheel/distributions.py --glibc-max 2.28 dist

Two programs look at the compiled part, independently of each other: auditwheel judges the wheel as
a whole; readelf, which comes with a C compiler, lists the glibc versions and libraries it names.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "ssdtrain/_core.abi3.so"
# What every Linux with glibc has; `ld-linux-ARCHITECTURE` is the loader itself.
SYSTEM_LIBRARY = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")

Version = tuple[int, ...]
Expected = dict[str, bytes | None]
"""Path in an archive: its bytes, or None where the build tool writes the file itself."""


# --- what must be in them -----------------------------------------------------


def package_files(root: Path) -> Expected:
    """What a user imports: the modules, the stubs and the mark that there are types."""
    package = root / "python" / "ssdtrain"
    return {
        f"ssdtrain/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }


def wheel_files(root: Path, version: str) -> Expected:
    """Everything that a wheel of this checkout holds."""
    info = f"ssdtrain-{version}.dist-info"
    made = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "sboms/ssdtrain-py.cyclonedx.json")
    return {
        **package_files(root),
        COMPILED: None,
        **{f"{info}/{name}": None for name in made},
        f"{info}/licenses/LICENSE": (root / "LICENSE").read_bytes(),
    }


def sdist_files(root: Path, version: str) -> Expected:
    """Everything that an sdist of this checkout holds: what the wheel is built from."""
    copied = ("Cargo.lock", "LICENSE", "README.md", "pyproject.toml")
    crates = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]
    # maturin takes out of the manifests what names files that are not in the sdist.
    rewritten = ("Cargo.toml", *(f"{crate}/Cargo.toml" for crate in crates))
    sources = [path for crate in crates for path in (root / crate).rglob("*.rs")]
    files: Expected = {f"python/{name}": content for name, content in package_files(root).items()}
    files |= {name: (root / name).read_bytes() for name in copied}
    files |= {path.relative_to(root).as_posix(): path.read_bytes() for path in sources}
    files |= dict.fromkeys(("PKG-INFO", *rewritten))
    return {f"ssdtrain-{version}/{name}": content for name, content in files.items()}


def content_problems(found: Mapping[str, bytes], expected: Expected) -> Iterator[str]:
    """Say what is missing, what does not belong there, and what is not the checkout's."""
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} does not belong there"
    for name in sorted(found.keys() & expected.keys()):
        if expected[name] not in (None, found[name]):
            yield f"{name} is not the file of the checkout"


# --- where the wheel runs -----------------------------------------------------


def tag_problems(tag: str, glibc_max: Version) -> Iterator[str]:
    """Check the end of the wheel's name, which is all that pip looks at."""
    found = re.fullmatch(r"cp311-abi3-manylinux_(\d+)_(\d+)_\w+", tag)
    if found is None:
        yield f"its tag is {tag}, not that of CPython 3.11 and newer on manylinux"
    elif (int(found[1]), int(found[2])) > glibc_max:
        yield f"its tag is {tag}, which needs a glibc newer than {shown(glibc_max)}"


def audit_problems(audit: Mapping[str, object], tag: str) -> Iterator[str]:
    """Compare what auditwheel found with what the wheel's name says."""
    platform = tag.rpartition("-")[2]
    if audit["overall_tag"] != platform:
        yield f"auditwheel says {audit['overall_tag']}, its name says {platform}"
    if audit["external_libs"]:
        yield f"it needs libraries that not every system has: {audit['external_libs']}"
    if audit["unsupported_isa"]:
        yield "it needs instructions that not every processor of this architecture has"


def glibc_versions(elf_text: str) -> list[Version]:
    """The versions of glibc that `readelf --version-info` names, the oldest first."""
    names = set(re.findall(r"\bGLIBC_(\d+(?:\.\d+)*)", elf_text))
    return sorted(tuple(int(part) for part in name.split(".")) for name in names)


def elf_problems(elf_text: str, glibc_max: Version) -> Iterator[str]:
    """Check the versions and the libraries that `readelf` lists."""
    versions = glibc_versions(elf_text)
    if not versions:
        yield "readelf lists no version of glibc, which every compiled module needs"
    elif versions[-1] > glibc_max:
        yield f"it needs glibc {shown(versions[-1])}, newer than {shown(glibc_max)}"
    if "GLIBC_PRIVATE" in elf_text:
        yield "it needs a private function of one glibc, which no other has"
    for library in re.findall(r"\(NEEDED\).*\[(.+)\]", elf_text):
        if not SYSTEM_LIBRARY.fullmatch(library):
            yield f"it needs {library}, which not every system has"


def shown(version: Version) -> str:
    """A version as people write it."""
    return ".".join(str(part) for part in version)


# --- the programs that look ---------------------------------------------------


def audited(wheel: Path) -> dict[str, object]:
    """Print what auditwheel says to people, and return what it says to programs."""
    show = [sys.executable, "-m", "auditwheel", "show"]
    subprocess.run([*show, wheel], check=True)
    told = subprocess.run([*show, "--json", wheel], check=True, stdout=subprocess.PIPE)
    return json.loads(told.stdout)


def elf_listing(compiled: bytes) -> str:
    """Return what readelf says of the compiled part."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(compiled)
        file.flush()
        command = ["readelf", "--wide", "--dynamic", "--version-info", file.name]
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            command, check=True, text=True, stdout=subprocess.PIPE, env=environment
        ).stdout


def wheel_problems(wheel: Path, version: str, glibc_max: Version) -> Iterator[str]:
    """Everything that is wrong with a wheel."""
    prefix = f"ssdtrain-{version}-"
    if not wheel.name.startswith(prefix):
        yield f"its name does not begin with {prefix}, after the version in Cargo.toml"
        return
    tag = wheel.stem.removeprefix(prefix)
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    yield from content_problems(found, wheel_files(ROOT, version))
    yield from tag_problems(tag, glibc_max)
    if COMPILED not in found:
        return
    yield from audit_problems(audited(wheel), tag)
    elf_text = elf_listing(found[COMPILED])
    yield from elf_problems(elf_text, glibc_max)
    newest = glibc_versions(elf_text)[-1:]
    sys.stdout.write(
        f"{wheel.name}: {wheel.stat().st_size} bytes, {len(found)} files,"
        f" newest glibc symbol: {', '.join(map(shown, newest))}\n"
    )


def sdist_problems(sdist: Path, version: str) -> Iterator[str]:
    """Everything that is wrong with an sdist."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        opened = {member.name: archive.extractfile(member) for member in members}
        found = {name: file.read() for name, file in opened.items() if file is not None}
    yield from (f"{name} is not a plain file" for name, file in opened.items() if file is None)
    yield from content_problems(found, sdist_files(ROOT, version))
    sys.stdout.write(f"{sdist.name}: {sdist.stat().st_size} bytes, {len(found)} files\n")


def only(folder: Path, pattern: str) -> Path:
    """The one file of its kind."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder} has {len(found)} files {pattern}, not one; run: make wheel")
    return found[0]


def main() -> None:
    """Look at the wheel and the sdist, and exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Look at the wheel and the sdist in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--glibc-max", required=True, metavar="2.28")
    options = parser.parse_args()
    glibc_max = tuple(int(part) for part in options.glibc_max.split("."))
    manifest = (ROOT / "Cargo.toml").read_text()
    version = re.search(r'^version = "(.+)"$', manifest, re.MULTILINE)[1]
    wheel, sdist = only(options.folder, "*.whl"), only(options.folder, "*.tar.gz")
    problems = [f"{wheel.name}: {one}" for one in wheel_problems(wheel, version, glibc_max)]
    problems += [f"{sdist.name}: {one}" for one in sdist_problems(sdist, version)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
