"""Builds the fake device, once for each state of its sources and each PyTorch.

What is built lies under ``target/fake_device``, in a folder named by a hash of all that goes in.
Several processes may ask at once: one builds, behind a lock, and the others find it done. A folder
takes its name when it is whole, so an interrupted build leaves nothing that would be taken for one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkout import FAKE_DEVICE, ROOT

SOURCES = FAKE_DEVICE
BUILDS = ROOT / "target" / "fake_device"

DRIVER = "libcuda.so.1"
"""The name by which everybody opens CUDA's driver; the functions of its runtime lie in it too."""
KERNELS = "kernels.so"
MACHINE = "machine.so"
"""Shows NVIDIA's own cuFile what it looks for on a machine, and a container lacks."""
CUFILE = "libcufile.so.0"
"""The name by which everybody opens cuFile; preloaded, it takes the place of PyTorch's own."""
SYMBOLS = "symbols.txt"
"""The functions that the fake offers, one in each line, beside what was built."""

CUDA_MAJOR_MIN = 13
FLAGS = ("-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread")

# What a function of CUDA looks like in its headers.
_DECLARED = re.compile(r"\b(?:CUresult|cudaError_t)(?:\s+CUDA\w+)?\s+(cu(?:da)?[A-Z]\w+)\s*\(")


class UnavailableError(Exception):
    """The fake device cannot be built here; says why."""


@dataclass(frozen=True, slots=True)
class Torch:
    """An installed PyTorch with CUDA, as far as a compiler must know it."""

    version: str
    folder: Path
    includes: tuple[Path, ...]
    cuda: Path


@functools.cache
def find_torch() -> Torch:
    """PyTorch as it is installed here; it is not imported."""
    _refuse_other_machines()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UnavailableError("PyTorch is not installed")
    folder = Path(spec.origin).parent
    versions = runpy.run_path(str(folder / "version.py"))
    cuda = versions.get("cuda")
    if cuda is None:
        raise UnavailableError(f"PyTorch {versions['__version__']} is a build without CUDA")
    if int(cuda.partition(".")[0]) < CUDA_MAJOR_MIN:
        raise UnavailableError(f"PyTorch is built for CUDA {cuda}; this needs {CUDA_MAJOR_MIN}")
    headers = sorted(folder.parent.glob("nvidia/cu*/include/cuda_runtime_api.h"))
    if not headers:
        raise UnavailableError("the packages of CUDA that PyTorch brings are without headers")
    include = folder / "include"
    return Torch(
        version=versions["__version__"],
        folder=folder,
        includes=(include, include / "torch/csrc/api/include"),
        cuda=headers[-1].parent,
    )


@functools.cache
def build() -> Path:
    """The folder with what was built, building it if nobody has yet."""
    torch, compiler = find_torch(), _find_compiler()
    return _built(compiler, torch, lambda out: _compile(compiler, torch, out))


@functools.cache
def build_driver() -> Path:
    """The same with the driver alone, for programs without PyTorch: it needs no header of CUDA."""
    _refuse_other_machines()
    compiler = _find_compiler()
    return _built(compiler, None, lambda out: _compile_driver(compiler, out))


def _refuse_other_machines() -> None:
    if platform.machine() != "x86_64":
        raise UnavailableError(f"it reads the faults of x86-64, and this is {platform.machine()}")


def _find_compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("nm") is None:
        raise UnavailableError("there is no C++ compiler (g++ and nm)")
    return compiler


def _built(compiler: str, torch: Torch | None, compile_into: Callable[[Path], None]) -> Path:
    """Return the folder of this state of the sources, having it filled if nobody has yet."""
    sources = sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])
    version = subprocess.check_output([compiler, "-dumpfullversion"], text=True)
    state = hashlib.sha256(repr((torch, version, FLAGS, Path(__file__).read_bytes())).encode())
    for path in sources:
        state.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    built = BUILDS / state.hexdigest()[:16]
    if built.is_dir():
        return built
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():
            with tempfile.TemporaryDirectory(dir=BUILDS, prefix="unfinished-") as unfinished:
                whole = Path(unfinished) / "whole"
                whole.mkdir()
                compile_into(whole)
                whole.rename(built)
    return built


def environment(*others: Path) -> dict[str, str]:
    """What the environment of a process must hold for a fake device, before it starts.

    The `others` are libraries that are preloaded as well.
    """
    return {
        "LD_PRELOAD": " ".join(map(str, (build() / DRIVER, *others))),
        # Kernels run side by side on threads of their own, and each would start others.
        "OMP_NUM_THREADS": "1",
    }


def symbols() -> list[str]:
    """The functions of CUDA that the fake does, by the names under which they are counted."""
    return (build() / SYMBOLS).read_text().split()


def _compile(compiler: str, torch: Torch, out: Path) -> None:
    """Compile every source, and link the two libraries."""
    includes = [f"-isystem{path}" for path in (torch.cuda, *torch.includes)]
    # Ours only where CUDA's own header is missing.
    includes += ["-idirafter", str(SOURCES / "include")]

    def compiled(source: Path) -> Path:
        target = out / f"{source.parent.name}-{source.stem}.o"
        _run([compiler, *FLAGS, *includes, f"-I{SOURCES / 'driver'}", "-c", source, "-o", target])
        return target

    parts = {
        name: sorted((SOURCES / name).glob("*.cpp"))
        for name in ("kernels", "driver", "runtime", "cufile", "machine")
    }
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = {
            name: list(files)
            for name, files in {
                name: pool.map(compiled, sources) for name, sources in parts.items()
            }.items()
        }
    own = [*objects["driver"], *objects["runtime"]]
    symbols = _functions_of(own)
    (out / SYMBOLS).write_text("".join(f"{name}\n" for name in symbols))
    others = out / "others.cpp"
    others.write_text(_refusals(torch, symbols))
    own.append(compiled(others))
    library = [compiler, "-shared", "-pthread"]
    _run([*library, f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER, *own, "-ldl"])
    libraries = [f"-L{torch.folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{out}", f"-l:{DRIVER}"]
    _run([*library, "-o", out / KERNELS, *objects["kernels"], *libraries])
    _run([*library, f"-Wl,-soname,{CUFILE}", "-o", out / CUFILE, *objects["cufile"]])
    _run([*library, "-o", out / MACHINE, *objects["machine"], "-ldl"])
    for path in out.iterdir():
        if path.name not in {DRIVER, KERNELS, CUFILE, MACHINE, SYMBOLS}:
            path.unlink()


def _compile_driver(compiler: str, out: Path) -> None:
    """Compile and link what stands in for the driver, with declarations of our own."""
    includes = [f"-I{SOURCES / 'include' / 'own'}", f"-I{SOURCES / 'driver'}"]
    sources = sorted((SOURCES / "driver").glob("*.cpp"))
    target = ["-shared", f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER]
    _run([compiler, *FLAGS, *includes, *target, *sources, "-ldl"])


def _functions_of(objects: list[Path]) -> list[str]:
    """The functions of CUDA that objects have a body for."""
    listed = subprocess.check_output(["nm", "--defined-only", *map(str, objects)], text=True)
    return sorted(set(re.findall(r" T (cu[A-Z]\w+|cuda[A-Z]\w+)$", listed, re.MULTILINE)))


def _refusals(torch: Torch, symbols: list[str]) -> str:
    """A body for every other function of CUDA: it says that it was called, and fails."""
    declared: set[str] = set()
    for header in ("cuda.h", "cuda_runtime_api.h"):
        text = (torch.cuda / header).read_text()
        # A function that has changed bears the number of its version: cuda.h renames it.
        renamed = dict(re.findall(r"#define\s+(cu[A-Z]\w+)\s+(?:__\w+\()?(cu[A-Z]\w+)\)?", text))
        for name in _DECLARED.findall(text):
            declared |= {name, renamed.get(name, name)}
    lines = ["namespace fake { int refuse(const char *name); }"]
    lines += [
        f'extern "C" int {name}() {{ return fake::refuse("{name}"); }}'
        for name in sorted(declared - set(symbols))
    ]
    return "\n".join(lines) + "\n"


def _run(command: list[str | Path]) -> None:
    """Run a tool; what it says against the sources is the error."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        try:
            folder = build()
        except UnavailableError as reason:
            sys.stderr.write(f"the fake driver alone: {reason}\n")
            folder = build_driver()
        sys.stdout.write(f"{folder}\n")
    except UnavailableError as reason:
        sys.stderr.write(f"no fake device: {reason}\n")
