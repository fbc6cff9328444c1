"""What happens when I/O goes wrong: the same faults for ssdtrain and for other libraries.

    python benches/compare/peer_faults.py --dir /mnt/nvme --peers-python PEERS/bin/python

Each fault runs in a fresh process, which may crash or hang without taking the table along. A cell
says what the library reported, and whether the bytes that were written came back: by its own read,
compared with a copy made before the write. It prints a table in Markdown. The full disk is a small
ext4 image and needs root; without it the limit on file sizes stands in for it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
IMAGE_BYTES = 160 << 20
"""ssdtrain refuses to open a store where less than 64 MiB are free."""
FILE_LIMIT_BYTES = 1 << 20
WORDS_MAX = 110
MIB = 1 << 20
FLOAT_BYTES = 4

LIBRARIES = {
    "ssdtrain": "ssdtrain.TensorStore",
    "deepspeed": "DeepSpeed aio_handle, plain",
    "deepspeed-pinned": "DeepSpeed aio_handle, pinned",
    "tensornvme-uring": "TensorNVMe, uring",
    "tensornvme-aio": "TensorNVMe, aio",
}


class Library(ABC):
    """One library, as a test of its faults needs it. Runs in the child process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, nbytes: int) -> Any:
        """Return memory of the library's own choice for `nbytes` bytes."""
        import torch  # noqa: PLC0415 - the parent needs no torch

        return torch.empty(nbytes, dtype=torch.uint8)

    @abstractmethod
    def begin_write(self, tensor: Any) -> None:
        """Begin to write `tensor`."""

    @abstractmethod
    def wait_writes(self) -> None:
        """Wait the way the library says."""

    @abstractmethod
    def read_back(self) -> list[Any]:
        """Read everything that was written, wait the way the library says, and return it."""

    def on_disk(self) -> str | None:
        """Tell what the files hold, where that tells more than the read."""
        return None


class _Ssdtrain(Library):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = importlib.import_module("ssdtrain").TensorStore(str(folder))
        self._stored: list[Any] = []

    def begin_write(self, tensor: Any) -> None:
        self._stored.append(self._store.write(tensor))

    def wait_writes(self) -> None:
        for stored in self._stored:
            stored.wait()

    def read_back(self) -> list[Any]:
        pending = [self._store.read(stored) for stored in self._stored]
        return [one.result() for one in pending]


class _DeepSpeed(Library):
    pinned = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Its builder calls ninja, which lies beside the interpreter of an environment.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        builders = importlib.import_module("deepspeed.ops.op_builder")
        self._handle = builders.AsyncIOBuilder().load(verbose=False).aio_handle()
        self._written: list[Any] = []
        self._pending_count = 0

    def source(self, nbytes: int) -> Any:
        plain = super().source(nbytes)
        return self._handle.new_cpu_locked_tensor(nbytes, plain[:0]) if self.pinned else plain

    def begin_write(self, tensor: Any) -> None:
        self._written.append(tensor)
        self._check(self._handle.async_pwrite(tensor, self._path(len(self._written) - 1)))

    def wait_writes(self) -> None:
        self._wait()

    def read_back(self) -> list[Any]:
        results = []
        for index, tensor in enumerate(self._written):
            back = self.source(tensor.nbytes).view(tensor.dtype)
            back.zero_()
            self._check(self._handle.async_pread(back, self._path(index)))
            results.append(back)
        self._wait()
        return results

    def on_disk(self) -> str | None:
        for index, tensor in enumerate(self._written):
            path = Path(self._path(index))
            size = path.stat().st_size if path.exists() else 0
            if size != tensor.nbytes:
                return f"its file has {size:,} of {tensor.nbytes:,} bytes"
        return None

    def _path(self, index: int) -> str:
        return str(self.folder / f"{index}.swp")

    def _wait(self) -> None:
        # With nothing pending it aborts the process.
        if self._pending_count:
            expected, self._pending_count = self._pending_count, 0
            answer = self._handle.wait()
            if answer != expected:
                raise OSError(f"wait() returned {answer} for {expected} requests")

    def _check(self, answer: int) -> None:
        if answer != 0:
            raise OSError(f"the call returned {answer}")
        self._pending_count += 1


class _DeepSpeedPinned(_DeepSpeed):
    pinned = True


class _TensorNvme(Library):
    backend = "uring"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        offloader = importlib.import_module("tensornvme").DiskOffloader
        self._offloader = offloader(str(folder), 16, backend=self.backend)
        self._written: list[Any] = []
        self._waited = False

    def begin_write(self, tensor: Any) -> None:
        self._written.append(tensor)
        self._offloader.async_write(tensor)

    def wait_writes(self) -> None:
        self._offloader.sync_write_events()
        self._waited = True

    def read_back(self) -> list[Any]:
        for tensor in self._written:
            self._offloader.async_read(tensor)
        if self._waited:
            self._offloader.sync_read_events()
        else:
            self._offloader.synchronize()  # Writes and reads.
        return self._written


class _TensorNvmeAio(_TensorNvme):
    backend = "aio"


CLASSES: dict[str, type[Library]] = {
    "ssdtrain": _Ssdtrain,
    "deepspeed": _DeepSpeed,
    "deepspeed-pinned": _DeepSpeedPinned,
    "tensornvme-uring": _TensorNvme,
    "tensornvme-aio": _TensorNvmeAio,
}


# --- the faults, in the child -------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault: its row in the table, and what the child does."""

    name: str
    text: str
    make: Callable[[Library], list[Any]]
    """Returns the tensors to write, filled."""
    waits: bool = True
    """Whether the write is waited for before the read begins."""
    file_limit_bytes: int | None = None
    small_disk: bool = False
    run_count: int = 1
    """More than one where the outcome is a race."""


def _filled(library: Library, nbytes: int, dtype: str = "uint8") -> Any:
    import torch  # noqa: PLC0415

    source = library.source(nbytes)
    source.random_()
    return source if dtype == "uint8" else source.view(getattr(torch, dtype))


def _odd_size(library: Library) -> list[Any]:
    return [_filled(library, 1_000_003)]


def _misaligned(library: Library) -> list[Any]:
    return [_filled(library, MIB + 4096)[3 : 3 + MIB]]


def _floats(library: Library, nbytes: int, count: int = 1) -> list[Any]:
    # Bits of floats, since not every library takes bytes: NaN compare by their bits below.
    return [_filled(library, nbytes, "float32") for _ in range(count)]


def _bfloat16(library: Library) -> list[Any]:
    return [_filled(library, 8 * MIB, "bfloat16")]


FAULTS = (
    Fault("none", "no fault: 8 MiB of float32", lambda one: _floats(one, 8 * MIB)),
    Fault("odd_size", "1,000,003 bytes: no multiple of a block", _odd_size),
    Fault("misaligned", "source at an address that is no multiple of 512", _misaligned),
    Fault(
        "file_limit",
        "limit on file sizes (1 MiB) reached by 8 MiB",
        lambda one: _floats(one, 8 * MIB),
        file_limit_bytes=FILE_LIMIT_BYTES,
    ),
    Fault(
        "full_disk",
        "full disk: 192 MiB into a file system of 160 MiB",
        lambda one: _floats(one, 192 * MIB),
        small_disk=True,
    ),
    Fault(
        "early_read",
        "32 tensors of 4 MiB read without waiting for their writes",
        lambda one: _floats(one, 4 * MIB, 32),
        waits=False,
        run_count=5,
    ),
    Fault(
        "many",
        "32 tensors of 4 MiB, compared right after the library's wait for reads",
        lambda one: _floats(one, 4 * MIB, 32),
    ),
    Fault("large", "one tensor of 2.5 GiB", lambda one: _floats(one, 2560 * MIB)),
    Fault("bfloat16", "8 MiB of bfloat16", _bfloat16),
)


def _child(
    library_name: str, fault_name: str, folder: Path, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Run one fault; what is told says how far it came and what the bytes were."""
    import torch  # noqa: PLC0415

    fault = next(one for one in FAULTS if one.name == fault_name)
    told: dict[str, Any] = {"step": "open", "waited": fault.waits}
    tensors: list[Any] = []
    expected: list[Any] = []
    library: Library | None = None
    try:
        library = CLASSES[library_name](folder)
        tensors = fault.make(library)
        expected = [tensor.clone() for tensor in tensors]
        with _file_limit(fault.file_limit_bytes):
            told["step"] = "write"
            for tensor in tensors:
                library.begin_write(tensor)
            if fault.waits:
                library.wait_writes()
            told["on_disk"] = library.on_disk() if fault.waits else None
            told["step"] = "read"
            tell(told)  # The read may end the process.
            results = library.read_back()
        told["step"] = "done"
        told["wrong"] = sum(
            not _same_bits(torch, back, copy) for back, copy in zip(results, expected, strict=True)
        )
        told["count"] = len(expected)
    except Exception as error:  # noqa: BLE001 - every error of a library is a result here
        told["error"] = f"{type(error).__name__}: {error}"
        told["kept"] = bool(expected) and all(
            _same_bits(torch, tensor, copy) for tensor, copy in zip(tensors, expected, strict=True)
        )
    tell(told)


def _same_bits(torch: Any, first: Any, second: Any) -> bool:
    if first.untyped_storage().nbytes() == 0 or first.nbytes != second.nbytes:
        return False
    first, second = (one.contiguous().view(torch.uint8) for one in (first, second))
    return bool(torch.equal(first, second))


@contextlib.contextmanager
def _file_limit(limit_bytes: int | None) -> Iterator[None]:
    if limit_bytes is None:
        yield
        return
    # Without this the kernel ends the process instead of failing the write.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the table, in the parent -------------------------------------------------


def verdict(told: dict[str, Any]) -> str:
    """Say in a cell what a child told; bold is what loses bytes without a word, or a process."""
    on_disk = f", {told['on_disk']}" if told.get("on_disk") else ""
    if "died" in told:
        wrote = f"write reported ok{on_disk}; " if told.get("waited") else ""
        before = f"{wrote}read: " if told.get("step") == "read" else ""
        return f"**{before}{told['died']}**"
    if "error" in told:
        words = told["error"].replace("|", "/").replace("\n", " ")
        short = words if len(words) <= WORDS_MAX else words[: WORDS_MAX - 1] + "…"
        if told["step"] == "open":
            return f"not run: {short}"
        kept = "source intact" if told["kept"] else "**source gone**"
        return f"error in {told['step']} ({short}); {kept}"
    if told["wrong"]:
        wrong = f"{told['wrong']} of {told['count']} tensors" if told["count"] > 1 else "the bytes"
        return f"**ok reported, {wrong} came back wrong{on_disk}**"
    return f"ok, equal{on_disk}"


def run(python: str, library: str, fault: Fault, place: Path) -> dict[str, Any]:
    """Run one fault in a fresh process."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        command = [python, "-W", "ignore", __file__, "--child", library, fault.name, folder]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
            return _told(out, folder) | {"died": f"hangs: ended after {LIMIT_S} s"}
    told = _told(done.stdout, folder)
    if done.returncode == 0 and told:
        return told
    words = last_words(done.stderr)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return told | {"died": f"process killed by {name}: {words}"}
    return told | {"died": f"process ended with {done.returncode}: {words}"}


def _told(out: str, folder: str) -> dict[str, Any]:
    """Return the last thing a child told."""
    lines = out.splitlines()
    return dict(json.loads(lines[-1].replace(folder, "DIR"))) if lines else {}


def last_words(text: str) -> str:
    """Return the last line without the folders of this machine; of an assertion, what it says."""
    line = (text.strip() or "no word").splitlines()[-1].replace("|", "/")
    line = re.sub(r"\S*/", "", line)
    if "Assertion" in line:
        line = line[line.index("Assertion") :]
    return line if len(line) <= WORDS_MAX else line[: WORDS_MAX - 1] + "…"


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """Mount a small ext4 image below `place`, or yield None where that needs root."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        yield None
        return
    image, mounted = place / "small.img", place / "small"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, mounted], capture_output=True, check=False)
    if done.returncode != 0:
        yield None
        return
    try:
        yield mounted
    finally:
        # The kernel lets go of the files of a ring some time after its process has ended.
        subprocess.run(["umount", "--lazy", mounted], check=True)


def table(options: argparse.Namespace, place: Path) -> str:
    """Run everything and return the table."""
    names = [name for name in LIBRARIES if not options.only or name in options.only]
    lines = [
        "| fault | " + " | ".join(LIBRARIES[name] for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    with small_disk(place) as small:
        for fault in FAULTS:
            cells = [fault.text]
            for name in names:
                python = sys.executable if name == "ssdtrain" else options.peers_python
                print(f"{fault.name}: {name}", file=sys.stderr, flush=True)
                if fault.small_disk and small is None:
                    cells.append("not run: a mounted image needs root and loop devices")
                else:
                    where = small if fault.small_disk and small is not None else place
                    found = [
                        verdict(run(python, name, fault, where)) for _ in range(fault.run_count)
                    ]
                    counts = Counter(found)
                    cells.append(
                        found[0]
                        if len(counts) == 1
                        else "; ".join(f"{n} of {len(found)}: {one}" for one, n in counts.items())
                    )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the child that was asked for, or all of them for the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="directory to write to (default: the build's)")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--only", nargs="*", choices=LIBRARIES, help="libraries to run")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # What the libraries print is not the answer.
        library, fault, folder = options.child
        _child(
            library,
            fault,
            Path(folder),
            lambda told: print(json.dumps(told), file=answers, flush=True),
        )
        # Some libraries crash while they are torn down, long after the answer.
        os._exit(0)
    place = Path(options.dir) if options.dir is not None else ROOT / "target"
    if options.dir is None:
        place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-faults-", dir=place) as folder:
        print(table(options, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
