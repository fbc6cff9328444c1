"""Other libraries under the same load, one per process: the half of `compare.py` that runs there.

`compare.py` starts it with the interpreter of `--peers-python` and asks with one JSON object per
line on standard input; each gets one JSON object on standard output. What the libraries print goes
to standard error. It imports nothing of ssdtrain, so that its tensors lie where plain torch puts
them, and it needs only the standard library until a library is opened.

    {"do": "open", "library": "deepspeed", "folder": "..."}  ->  {"version": "...", "note": "..."}
    {"do": "prepare", "engine": "...", "tensor_bytes": 1048576, "pass_bytes": 1073741824}  ->  {}
    {"do": "write"}, {"do": "read"}  ->  {"total_bytes": ..., "seconds": ..., "cpu_s": ...}
    {"do": "check"}  ->  {"equal": true, "written_bytes": ...}
    {"do": "finish"}  ->  {}

What cannot be done is answered with {"error": "..."}. Each pass ends with the bytes on the drive:
what goes through the page cache is synchronized in the timed part, and dropped from the cache
before it is read.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from importlib import metadata
from pathlib import Path
from typing import Any

WINDOW_BYTES = 256 << 20
TUNING_BYTES = 256 << 20
DEFAULT_AIO = (1 << 20, 128, False, False, 1)
"""DeepSpeed's own: block size, queue depth, single submit, overlap events, parallelism."""
TUNED_AIO = tuple(
    (block_bytes, 32, False, True, parallelism)
    for block_bytes in (1 << 20, 8 << 20)
    for parallelism in (1, 2, 4)
)
FLOAT_BYTES = 4


class Peer(ABC):
    """One library: its tensors, its files, and how it moves one pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: list[Any] = []
        self.written_bytes = 0

    @abstractmethod
    def version(self) -> str:
        """Import the library and return its version; raises what keeps it from working."""

    @abstractmethod
    def prepare(self, engine: str, tensor_bytes: int, count: int) -> str | None:
        """Make the tensors of a pass; returns what was chosen, if anything was."""

    @abstractmethod
    def write(self) -> None:
        """Write every tensor and wait until the drive has it."""

    @abstractmethod
    def before_read(self) -> None:
        """Do what is no part of a read, such as to drop the page cache."""

    @abstractmethod
    def read(self) -> None:
        """Read every tensor and wait for the last."""

    @abstractmethod
    def equal(self) -> bool:
        """Whether the last read brought back what was written."""

    def finish(self) -> None:
        """Drop the tensors and remove the files."""
        self.tensors.clear()
        for path in self.folder.iterdir():
            path.unlink()


class _DeepSpeed(Peer):
    """`aio_handle` on one file per tensor, as DeepSpeed's own swapping does it."""

    def version(self) -> str:
        # Its builder calls ninja, which lies beside the interpreter of an environment.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        builders = importlib.import_module("deepspeed.ops.op_builder")

        self._handle_type = builders.AsyncIOBuilder().load(verbose=False).aio_handle
        return metadata.version("deepspeed")

    def prepare(self, engine: str, tensor_bytes: int, count: int) -> str | None:
        memory, _, tuning = engine.partition(", ")
        self._pinned = memory == "pinned"
        self._handle = self._handle_type(*DEFAULT_AIO)
        self._pending_count = 0
        self.tensors = [self._tensor(tensor_bytes) for _ in range(count)]
        self._results = [self._tensor(tensor_bytes) for _ in self._window(tensor_bytes)]
        for tensor in self.tensors:
            tensor.random_()
        if tuning == "default":
            return None
        return self._tune(tensor_bytes)

    def write(self) -> None:
        step = len(self._results)
        for start in range(0, len(self.tensors), step):
            for index in range(start, min(start + step, len(self.tensors))):
                self._ask(self._handle.async_pwrite(self.tensors[index], self._path(index)))
            self._wait()

    def before_read(self) -> None:
        pass  # Direct I/O: there is no cache to drop.

    def read(self) -> None:
        step = len(self._results)
        for start in range(0, len(self.tensors), step):
            self._first = start
            for index in range(start, min(start + step, len(self.tensors))):
                self._ask(self._handle.async_pread(self._results[index - start], self._path(index)))
            self._wait()

    def equal(self) -> bool:
        pairs = zip(self._results, self.tensors[self._first :], strict=False)
        return all(bool(back.equal(tensor)) for back, tensor in pairs)

    def finish(self) -> None:
        if self._pinned:
            for tensor in (*self.tensors, *self._results):
                self._handle.free_cpu_locked_tensor(tensor)
        self._results.clear()
        super().finish()

    def _tensor(self, tensor_bytes: int) -> Any:
        import torch  # noqa: PLC0415

        if self._pinned:
            like = torch.empty(0, dtype=torch.uint8)
            return self._handle.new_cpu_locked_tensor(tensor_bytes, like)
        return torch.empty(tensor_bytes, dtype=torch.uint8)

    def _window(self, tensor_bytes: int) -> range:
        return range(max(1, WINDOW_BYTES // tensor_bytes))

    def _path(self, index: int) -> str:
        return str(self.folder / f"{index}.swp")

    def _ask(self, answer: int) -> None:
        if answer != 0:
            raise OSError(f"DeepSpeed refused a request with {answer}")
        self._pending_count += 1

    def _wait(self) -> None:
        expected, self._pending_count = self._pending_count, 0
        answer = self._handle.wait()
        if answer != expected:
            raise OSError(f"wait() returned {answer} for {expected} requests")

    def _tune(self, tensor_bytes: int) -> str:
        """Choose the best of a small grid by one write and one read of a part of the pass."""
        every = self.tensors
        self.tensors = every[: max(1, TUNING_BYTES // tensor_bytes)]
        self.write()
        self.written_bytes += sum(tensor.nbytes for tensor in self.tensors)
        rates = {}
        pinning = self._handle
        for setting in TUNED_AIO:
            self._handle = self._handle_type(*setting)
            began_s = time.perf_counter()
            self.write()
            self.read()
            rates[setting] = time.perf_counter() - began_s
            self.written_bytes += sum(tensor.nbytes for tensor in self.tensors)
        self.tensors = every
        best = min(rates, key=lambda setting: rates[setting])
        # The handle that pinned the tensors stays alive as long as they do.
        self._pinning, self._handle = pinning, self._handle_type(*best)
        block_bytes, depth, _, _, parallelism = best
        return (
            f"block_size={block_bytes >> 20}M queue_depth={depth} overlap_events=True "
            f"intra_op_parallelism={parallelism}, the best of {len(TUNED_AIO)} settings"
        )


class _TensorNvme(Peer):
    """`DiskOffloader`: one file, through the page cache."""

    def version(self) -> str:
        self._module = importlib.import_module("tensornvme")
        return metadata.version("tensornvme")

    def prepare(self, engine: str, tensor_bytes: int, count: int) -> str | None:
        import torch  # noqa: PLC0415

        self._offloader = self._module.DiskOffloader(str(self.folder), 16, backend=engine)
        self.tensors = [torch.randn(tensor_bytes // FLOAT_BYTES) for _ in range(count)]
        self._expected = [tensor.clone() for tensor in self.tensors[:: max(1, count // 8)]]
        self._file = next(path for path in self.folder.iterdir())
        return "n_entries=16, its default"

    def write(self) -> None:
        # Writing frees the tensors and reading forgets the copy: the two must take turns.
        assert all(tensor.untyped_storage().nbytes() for tensor in self.tensors)
        for tensor in self.tensors:
            self._offloader.async_write(tensor)
        self._offloader.synchronize()
        _synchronize(self._file)

    def before_read(self) -> None:
        _drop_cache(self._file)

    def read(self) -> None:
        for tensor in self.tensors:
            self._offloader.async_read(tensor)
        self._offloader.synchronize()

    def equal(self) -> bool:
        found = self.tensors[:: max(1, len(self.tensors) // 8)]
        return all(
            bool(back.equal(tensor)) for back, tensor in zip(found, self._expected, strict=True)
        )

    def finish(self) -> None:
        del self._offloader
        super().finish()


class _TorchSave(Peer):
    """`torch.save` and `torch.load`, one file per tensor, through the page cache."""

    def version(self) -> str:
        import torch  # noqa: PLC0415

        return str(torch.__version__)

    def prepare(self, engine: str, tensor_bytes: int, count: int) -> str | None:
        import torch  # noqa: PLC0415

        del engine
        self._torch = torch
        self.tensors = [
            torch.empty(tensor_bytes, dtype=torch.uint8).random_() for _ in range(count)
        ]
        return None

    def write(self) -> None:
        for index, tensor in enumerate(self.tensors):
            with self._path(index).open("wb") as file:
                self._torch.save(tensor, file)
                file.flush()
                os.fsync(file.fileno())

    def before_read(self) -> None:
        for index in range(len(self.tensors)):
            _drop_cache(self._path(index))

    def read(self) -> None:
        for index in range(len(self.tensors)):
            # One at a time, as the hooks of PyTorch's tutorial do.
            self._last = self._torch.load(self._path(index), weights_only=True)

    def equal(self) -> bool:
        return bool(self._last.equal(self.tensors[-1]))

    def _path(self, index: int) -> Path:
        return self.folder / f"{index}.pt"


PEERS: dict[str, type[Peer]] = {
    "deepspeed": _DeepSpeed,
    "tensornvme": _TensorNvme,
    "torch.save": _TorchSave,
}


class Service:
    """Answers the questions of `compare.py`."""

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._pass_bytes = 0

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; an exception of the library becomes an answer."""
        try:
            return self._answer(question)
        except Exception as error:  # noqa: BLE001 - the table says what a library could not do
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        verb = question["do"]
        if verb == "open":
            self._peer = PEERS[question["library"]](Path(question["folder"]))
            return {"version": self._peer.version()}
        peer = self._peer
        assert peer is not None, "ask to open a library first"
        if verb == "prepare":
            count = max(1, question["pass_bytes"] // question["tensor_bytes"])
            self._pass_bytes = count * question["tensor_bytes"]
            note = peer.prepare(question["engine"], question["tensor_bytes"], count)
            # As for ssdtrain: the first pass over new blocks is not timed.
            peer.write()
            peer.written_bytes += self._pass_bytes
            peer.before_read()
            peer.read()
            return {"note": note}
        if verb in ("write", "read"):
            return self._timed(peer, verb)
        if verb == "check":
            return {"equal": peer.equal(), "written_bytes": peer.written_bytes}
        assert verb == "finish", verb
        peer.finish()
        return {}

    def _timed(self, peer: Peer, verb: str) -> dict[str, Any]:
        if verb == "read":
            peer.before_read()
        else:
            peer.written_bytes += self._pass_bytes
        cpu_s, began_s = _cpu_s(), time.perf_counter()
        getattr(peer, verb)()
        seconds = time.perf_counter() - began_s
        return {
            "total_bytes": self._pass_bytes,
            "seconds": seconds,
            "cpu_s": _cpu_s() - cpu_s,
        }


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Answer until the questions end."""
    if sys.stdin.isatty():
        raise SystemExit("peers.py answers compare.py; run `python benches/compare/compare.py`")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    service = Service()
    for line in sys.stdin:
        print(json.dumps(service.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
