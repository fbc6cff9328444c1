"""ssdtrain's store under load: timed passes of writes and reads at steady state.

Steady state is what training sees from its second step on: writes go over extents that were written
before, and reads land in arena memory that is resident already. To keep it so, a window of reads
slides over the pass: the older half is waited for and dropped while the newer half is under way.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ssdtrain  # isort: skip - first, so that torch's tensors lie on huge pages
import torch

from compare_cases import DEFAULT_DEPTH, PIECE_BYTES, Case, Sample, Setting
from ssdtrain import _core

READ_WINDOW_BYTES = 128 << 20
WRITE_WINDOW_BYTES = 512 << 20
WINDOW_COUNT_MAX = 4096
"""The queue of an engine holds 16,384 requests; a window stays well below."""
SOURCE_BYTES_MAX = 1 << 30


class Source:
    """The memory that is written: random bytes, on huge pages or on small ones."""

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        if huge:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        else:
            memory = mmap.mmap(-1, nbytes)
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.tensor.view(torch.int64).random_()

    def huge_share(self) -> float:
        """Return how much of the memory lies on huge pages, as the kernel tells it."""
        first = self.tensor.data_ptr()
        last = first + self.tensor.nbytes
        huge_bytes, covered = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if "-" in word and not word.endswith(":"):
                low, high = (int(part, 16) for part in word.split("-"))
                covered = low < last and first < high
            elif covered and word == "AnonHugePages:":
                huge_bytes += int(rest.split()[0]) << 10
        return min(1.0, huge_bytes / self.tensor.nbytes)


class OurStore:
    """One open store, public or internal, and the tensors of a pass in it."""

    def __init__(self, setting: Setting, directory: Path, pass_bytes: int) -> None:
        self._pass_bytes = pass_bytes
        self._dirs = [directory / f"store-{index}" for index in range(setting.directory_count)]
        for one in self._dirs:
            one.mkdir(exist_ok=True)
        self._public: ssdtrain.TensorStore | None = None
        self._core: _core.Store | None = None
        if setting.depth is None:
            self._public = ssdtrain.TensorStore(
                [str(one) for one in self._dirs], backend=setting.engine, verify=setting.verify
            )
        else:
            self._core = _core.Store(
                [(str(one), (setting.depth, PIECE_BYTES)) for one in self._dirs],
                backend=setting.engine,
                direct_io="required",
                max_disk_bytes=None,
                verify=setting.verify,
            )
        self._held: list[Any] = []

    def settle(self, source: Source, tensor_bytes: int) -> None:
        """Go over the blocks once and read them back, untimed; the bytes must be right."""
        self.write(source, tensor_bytes)
        parts = _parts(source, tensor_bytes)
        for index, stored in enumerate(self._held):
            back = torch.frombuffer(self._read_slot(stored), dtype=torch.uint8)
            if not torch.equal(back, parts[index % len(parts)]):
                raise AssertionError(
                    f"tensor {index} of {tensor_bytes} bytes came back with other bytes; a rate "
                    "of wrong bytes means nothing. Report this with the JSON of the run"
                )

    def write(self, source: Source, tensor_bytes: int) -> Sample:
        """Write one pass over the extents of the pass before; timed until the last is answered."""
        parts = _parts(source, tensor_bytes)
        count = self._pass_bytes // tensor_bytes
        # What the pass before wrote is released first, as training releases it step by step.
        self._held.clear()
        with _quiet():
            meter = _Meter(count * tensor_bytes)
            submit = self._writer(parts, tensor_bytes)
            held = self._held
            waited = 0
            half = max(1, min(WRITE_WINDOW_BYTES // tensor_bytes, WINDOW_COUNT_MAX) // 2)
            for index in range(count):
                held.append(submit(index))
                if index + 1 - waited >= 2 * half:
                    # The newest of the older half first: one sleep, and the others are answered.
                    for stored in reversed(held[waited : waited + half]):
                        stored.wait()
                    waited += half
            for stored in reversed(held[waited:]):
                stored.wait()
            return meter.stop()

    def read(self, tensor_bytes: int) -> Sample:
        """Read one pass back, in the order in which it was written; timed likewise."""
        count = len(self._held)
        half = max(1, min(READ_WINDOW_BYTES // tensor_bytes, WINDOW_COUNT_MAX) // 2)
        begin, end = self._reader()
        with _quiet():
            meter = _Meter(count * tensor_bytes)
            window: deque[Any] = deque()
            for stored in self._held:
                window.append(begin(stored))
                if len(window) >= 2 * half:
                    end(window[half - 1])
                    for _ in range(half):
                        end(window.popleft())
            while window:
                end(window.popleft())
            return meter.stop()

    def files(self) -> list[Path]:
        """Return names for the spill files, which have none, by which fio can open them."""
        folders = {one.resolve() for one in self._dirs}
        # The number that lists this folder is gone by the time it is looked at: no file, any more.
        found = [
            Path(f"/proc/{os.getpid()}/fd/{one.name}")
            for one in Path("/proc/self/fd").iterdir()
            if one.is_file() and folders & set(one.readlink().parents)
        ]
        if len(found) != len(self._dirs):
            raise AssertionError(
                f"{len(self._dirs)} stores have {len(found)} files open; without them fio has no "
                "yardstick. Report this"
            )
        return found

    def written_bytes(self) -> int:
        """Return what the store has written so far."""
        store = self._public if self._public is not None else self._core
        assert store is not None
        return int(store.stats()["bytes_written"])

    def close(self) -> None:
        """Close the store and remove its folders; its files have no names."""
        self._held.clear()
        for store in (self._public, self._core):
            if store is not None:
                store.close()
        for one in self._dirs:
            one.rmdir()

    def _writer(self, parts: list[torch.Tensor], tensor_bytes: int) -> Callable[[int], Any]:
        public, core, modulus = self._public, self._core, len(parts)
        if public is not None:
            return lambda index: public.write(parts[index % modulus])
        assert core is not None
        owner, base = parts[0], parts[0].data_ptr()
        return lambda index: core.write(base + index % modulus * tensor_bytes, tensor_bytes, owner)

    def _reader(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        if self._public is not None:
            return self._public.read, lambda pending: pending.result()
        assert self._core is not None
        return self._core.read, lambda pending: pending.wait()

    def _read_slot(self, stored: Any) -> Any:
        if self._public is not None:
            return self._public.read(stored).result().numpy()
        assert self._core is not None
        return self._core.read(stored).wait()


def measure(store: OurStore, source: Source, case: Case, tensor_bytes: int) -> Sample:
    """Run the pass that `case` describes; a read takes what the write before it left."""
    if case.direction == "write":
        return store.write(source, tensor_bytes)
    return store.read(tensor_bytes)


class _Meter:
    """Wall and CPU time of this process, its I/O threads included."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._cpu_s = _cpu_s()
        self._began_s = time.perf_counter()

    def stop(self) -> Sample:
        seconds = time.perf_counter() - self._began_s
        return Sample(total_bytes=self._total_bytes, seconds=seconds, cpu_s=_cpu_s() - self._cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _quiet() -> Iterator[None]:
    """No collection of garbage while a pass is timed: its handles are many and none is garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parts(source: Source, tensor_bytes: int) -> list[torch.Tensor]:
    return list(torch.split(source.tensor, tensor_bytes))


assert DEFAULT_DEPTH * PIECE_BYTES <= READ_WINDOW_BYTES
