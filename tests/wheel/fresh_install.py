"""Installs what was built into fresh environments, and proves it there with prove.py.

    python tests/wheel/fresh_install.py dist --scratch FOLDER [--pythons "python3.11 python3.13"]

The wheel is installed where no program of this machine can be found: no Rust and no compiler. The
sdist is installed with them. Each environment gets torch, about 5 GB, and goes away at the end.
Without --pythons the oldest and the newest `python3.N` on PATH are taken.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROVE = Path(__file__).resolve().with_name("prove.py")
# The oldest Python that the wheel is for; pyproject.toml says so to pip.
OLDEST = (3, 11)
# How pip reaches its packages from here; nothing else of this environment gets through.
PIP_NEEDS = re.compile(r"HOME|PIP_.+|(?i:https?|all|no)_(?i:proxy)|SSL_CERT_(FILE|DIR)")


@dataclass(frozen=True, order=True)
class Interpreter:
    """A CPython that runs."""

    version: tuple[int, ...]
    path: str

    @property
    def shown(self) -> str:
        """The version as people write it."""
        return ".".join(str(part) for part in self.version)


def say(text: str) -> None:
    """Print a line before the next program prints its own."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(command: list[str | Path], folder: Path, environ: dict[str, str]) -> None:
    """Run a program, whose output says what went wrong if it fails."""
    done = subprocess.run(command, check=False, cwd=folder, env=environ)
    if done.returncode != 0:
        sys.exit(f"exit status {done.returncode}: {' '.join(map(str, command))}")


def interpreter(name: str) -> Interpreter | str:
    """Ask an interpreter what it is, or return why it cannot be used."""
    if shutil.which(name) is None:
        return "not found"
    question = "import json, sys, venv; print(json.dumps([sys.version_info[:3], sys.executable]))"
    answer = subprocess.run([name, "-c", question], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return " ".join(answer.stderr.split()) or f"exit status {answer.returncode}"
    version, path = json.loads(answer.stdout)
    if tuple(version) < OLDEST:
        return f"Python {'.'.join(map(str, version))}, older than 3.11"
    return Interpreter(tuple(version), path)


def names_on_path() -> list[str]:
    """Every `python3.N` on PATH for which the wheel is made, the oldest first."""
    minors = {
        int(found[1])
        for folder in os.get_exec_path()
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if (found := re.fullmatch(r"python3\.(\d+)", name))
    }
    return [f"python3.{minor}" for minor in sorted(minors) if (3, minor) >= OLDEST]


def chosen(wanted: list[str]) -> list[Interpreter]:
    """The interpreters to prove with: those that were named, or the oldest and the newest."""
    asked = {name: interpreter(name) for name in wanted or names_on_path()}
    for name, found in asked.items():
        say(f"{name}: {found.path if isinstance(found, Interpreter) else f'NOT USED: {found}'}")
    usable = [found for found in asked.values() if isinstance(found, Interpreter)]
    if wanted and len(usable) < len(wanted):
        sys.exit("a Python that was named cannot be used; see above")
    if wanted:
        return usable
    if not usable or min(usable).version[:2] != OLDEST:
        sys.exit(
            "no Python 3.11 was found, the oldest that the wheel is for. Install it, or name what"
            ' to use instead: make wheel PYTHONS="python3.12 python3.13"'
        )
    return sorted({min(usable), max(usable)})


def prove(python: Interpreter, archive: Path, scratch: Path, environ: dict[str, str]) -> None:
    """Install an archive into a fresh environment and prove it; `environ` is what pip sees."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="fresh-") as name:
        folder = Path(name)
        environment, home, disk = folder / "environment", folder / "home", folder / "disk"
        home.mkdir()
        disk.mkdir()
        began = time.monotonic()
        run([python.path, "-m", "venv", environment], folder, environ)
        programs = environment / "bin"
        path = os.pathsep.join(filter(None, [str(programs), environ.get("PATH")]))
        pip = [programs / "python", "-m", "pip", "--no-input", "--disable-pip-version-check"]
        run([*pip, "install", "--quiet", archive], folder, {**environ, "PATH": path})
        run([*pip, "check"], folder, {**environ, "PATH": path})
        installed = time.monotonic()
        # Only the fresh environment: no settings of the user's, no program of the machine's.
        bare = {"PATH": str(programs), "HOME": str(home), "LANG": "C.UTF-8"}
        run([programs / "python", "-P", PROVE, disk], folder, bare)
        proved = time.monotonic()
        left = sorted(str(path) for path in disk.rglob("*"))
        if left:
            sys.exit(f"the proof left files behind: {', '.join(left)}")
    say(
        f"proved {archive.name} with Python {python.shown}: installed in {installed - began:.0f} s,"
        f" proved in {proved - installed:.0f} s"
    )


def main() -> None:
    """Prove the wheel with each Python and no Rust, then the sdist with one Python and Rust."""
    parser = argparse.ArgumentParser(description="Prove the wheel and the sdist in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scratch", type=Path, required=True, help="where environments are made")
    parser.add_argument("--pythons", default="", help="names or paths, with spaces between them")
    options = parser.parse_args()
    pythons = chosen(options.pythons.split())
    scratch = options.scratch.resolve()
    (wheel,) = options.folder.resolve().glob("*.whl")
    (sdist,) = options.folder.resolve().glob("*.tar.gz")
    without_rust = {name: text for name, text in os.environ.items() if PIP_NEEDS.fullmatch(name)}
    say(f"proving with {', '.join(python.shown for python in pythons)}")
    for python in pythons:
        prove(python, wheel, scratch, without_rust)
    # The build sees the packages of the fresh environment alone, and compiles every file: cargo
    # goes by times, which are the same in each sdist, so an old build folder would count as new.
    hidden = re.compile(r"PYTHON.*|CARGO_(BUILD_)?TARGET_DIR")
    with_rust = {name: text for name, text in os.environ.items() if not hidden.fullmatch(name)}
    prove(pythons[0], sdist, scratch, with_rust)


if __name__ == "__main__":
    main()
