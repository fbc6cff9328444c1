"""The raw tensor store against fio and other libraries, in turns on one directory.

    python benches/compare/compare.py --dir /mnt/nvme --markdown --json

Each row is a pass of writes or reads through ssdtrain's store (by engine, depth, number of
directories and size of tensors) or through a peer, and the pass of fio that ran directly before it
is its yardstick: shared and virtual disks change within minutes. fio runs at the best of a stated
set of settings, found at the beginning. A full run takes some minutes and says how much it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import ssdtrain  # isort: skip - first, so that torch's tensors lie on huge pages
import compare_cases as cases
from compare_cases import Row
from compare_fio import CALIBRATION_REPEAT_COUNT, HUGE_PAGES_SWITCH, Fio, FioError
from compare_ours import (
    READ_WINDOW_BYTES,
    SOURCE_BYTES_MAX,
    WINDOW_COUNT_MAX,
    WRITE_WINDOW_BYTES,
    OurStore,
    Source,
    measure,
)
from compare_peers import LIBRARIES, PeerError, PeerProcess
from compare_report import RESULTS, markdown
from ssdtrain.demo.machine import busy_cpu_s, machine_facts

ROOT = Path(__file__).resolve().parents[2]
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PEER_BYTES_MAX = 512 << 20
FREE_FACTOR = 3
"""Room that a run needs, in passes: fio's file, the store's (or a peer's), and some to spare."""
MARKED = "a default place"
BEGAN_S = time.monotonic()


class Comparison:
    """One run: what it measures with, and the rows it has so far."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.quick: bool = options.quick
        self.pass_bytes = cases.QUICK_PASS_BYTES if self.quick else options.gib * cases.GIB
        self.peer_bytes = min(self.pass_bytes, PEER_BYTES_MAX)
        self.rows: list[Row] = []
        self.our_bytes = 0
        self.peer_written_bytes = 0
        self.peer_versions: dict[str, str] = {}
        self.fio = Fio(directory, self.pass_bytes)
        source_bytes = min(self.pass_bytes, SOURCE_BYTES_MAX)
        self.sources: dict[str, Source] = {
            "huge": Source(source_bytes, huge=True),
            "4 KiB": Source(source_bytes, huge=False),
        }

    def run(self) -> None:
        """Measure everything."""
        say(f"fio: finding the best setting on {cases.shown(self.pass_bytes)}")
        self.fio.prepare()
        self.fio.calibrate()
        for setting in cases.settings():
            self._run_setting(setting)
        for library, (label, engines) in LIBRARIES.items():
            self._run_library(library, label, engines)
        self.fio.close()

    def tensor_bytes(self, case: cases.Case) -> int:
        """Return the size that is measured, which a quick run divides."""
        return case.tensor_bytes // (cases.QUICK_DIVISOR if self.quick else 1)

    def _run_setting(self, setting: cases.Setting) -> None:
        rows = [Row(case) for case in cases.cases(setting)]
        self.rows += rows
        say(
            f"{setting.label}: {setting.engine}, depth {setting.depth or 'default'}, "
            f"{setting.directory_count} directories"
        )
        try:
            store = OurStore(setting, self.directory, self.pass_bytes)
        except ssdtrain.UnsupportedError as error:
            for row in rows:
                row.reason = str(error)
            return
        try:
            store.settle(self.sources["huge"], self.tensor_bytes(rows[0].case))
            files = store.files()
            for _ in range(self.options.runs):
                for row in rows:
                    fio = self.fio.neighbour(row.case.direction, files, may_reuse=self.quick)
                    source = self.sources[row.case.pages]
                    ours = measure(store, source, row.case, self.tensor_bytes(row.case))
                    row.pairs.append((ours, fio))
            self.our_bytes += store.written_bytes()
        finally:
            store.close()

    def _run_library(self, library: str, label: str, engines: tuple[str, ...]) -> None:
        say(f"{label}: {', '.join(engines)}")
        peer: PeerProcess | None = None
        try:
            for engine in engines:
                rows = [Row(case) for case in cases.peer_cases(label, engine)]
                self.rows += rows
                try:
                    if peer is None:
                        peer = PeerProcess(self.options.peers_python, library, self.directory)
                        self.peer_versions[library] = peer.version
                    self._run_peer(peer, rows)
                except PeerError as error:
                    for row in rows:
                        if len(row.pairs) < self.options.runs:
                            row.reason, row.pairs = str(error), []
                    if peer is not None:
                        # The next engine starts afresh, whatever state this one left.
                        peer.close()
                        peer = None
        finally:
            if peer is not None:
                peer.close()

    def _run_peer(self, peer: PeerProcess, rows: list[Row]) -> None:
        """Measure one engine of a peer; `rows` come as a write and its read, size by size."""
        for write, read in zip(rows[::2], rows[1::2], strict=True):
            prepared = peer.ask(
                do="prepare",
                engine=write.case.engine,
                tensor_bytes=self.tensor_bytes(write.case),
                pass_bytes=self.peer_bytes,
            )
            write.note = prepared["note"]
            for _ in range(self.options.runs):
                for row in (write, read):
                    fio = self.fio.neighbour(row.case.direction, may_reuse=self.quick)
                    row.pairs.append((peer.sample(row.case), fio))
            checked = peer.ask(do="check")
            self.peer_written_bytes += checked["written_bytes"]
            if not checked["equal"]:
                read.note = "the bytes that came back were not those that were written"
            peer.ask(do="finish")

    def result(self, *, elapsed_s: float, other_cores_busy: float) -> dict[str, Any]:
        """Return everything there is to tell, in terms of JSON."""
        machine = machine_facts(self.directory) | {
            "directory": None,
            "huge_pages": HUGE_PAGES_FILE.read_text().strip()
            if HUGE_PAGES_FILE.exists()
            else "unknown",
            "huge_share": self.sources["huge"].huge_share(),
            "ssdtrain": ssdtrain.__version__,
            "fio": self.fio.version(),
            "libc": " ".join(platform.libc_ver()),
            "peers": self.peer_versions,
            "other_cores_busy": other_cores_busy,
        }
        written = {
            "ssdtrain": self.our_bytes,
            "fio": self.fio.written_bytes,
            "peers": self.peer_written_bytes,
        }
        best = self.fio.best
        return {
            "format": 1,
            "command": command_line(self.options),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "quick": self.quick,
            "elapsed_s": elapsed_s,
            "machine": machine,
            "how": {
                "pass_bytes": self.pass_bytes,
                "peer_bytes": self.peer_bytes,
                "run_count": self.options.runs,
                "source_bytes": self.sources["huge"].tensor.nbytes,
                "write_window_bytes": WRITE_WINDOW_BYTES,
                "read_window_bytes": READ_WINDOW_BYTES,
                "window_count_max": WINDOW_COUNT_MAX,
            },
            "fio": {
                "tunables": HUGE_PAGES_SWITCH,
                "command": "fio --ioengine=io_uring --direct=1 --overwrite=1",
                "repeat_count": CALIBRATION_REPEAT_COUNT,
                "best": {direction: str(setting) for direction, setting in best.items()},
                "calibration": self.fio.calibration,
            },
            "written_bytes": written | {"total": sum(written.values())},
            "rows": [row.as_json() for row in self.rows],
        }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the page, and write what was asked for."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)
    place = Path(options.dir) if options.dir is not None else ROOT / "target"
    if options.dir is None:
        place.mkdir(exist_ok=True)
    if not place.is_dir():
        return refuse(f"{place} is not a directory; name one on the disk to measure with --dir")
    needed = FREE_FACTOR * (cases.QUICK_PASS_BYTES if options.quick else options.gib * cases.GIB)
    free = shutil.disk_usage(place).free
    if free < needed:
        return refuse(
            f"{place} has {free / cases.GIB:.1f} GiB free and the run needs "
            f"{needed / cases.GIB:.1f}; choose a smaller --gib or another --dir"
        )
    began_busy_s, began_own_s = busy_cpu_s(), _own_cpu_s()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-compare-", dir=place) as folder:
        try:
            comparison = Comparison(options, Path(folder))
            comparison.run()
        except (FioError, ssdtrain.SsdtrainError) as error:
            return refuse(str(error))
        elapsed_s = time.monotonic() - BEGAN_S
        busy_s = busy_cpu_s()
        others_s = 0.0
        if busy_s is not None and began_busy_s is not None:
            others_s = busy_s - began_busy_s - (_own_cpu_s() - began_own_s)
        result = comparison.result(
            elapsed_s=elapsed_s, other_cores_busy=max(0.0, others_s / elapsed_s)
        )
    page = markdown(result)
    print(page)
    for given, suffix, text in (
        (options.markdown, "md", page),
        (options.json, "json", json.dumps(result, indent=1) + "\n"),
    ):
        if given is not None:
            path = ROOT / RESULTS / f"compare.{suffix}" if given == MARKED else Path(given)
            path.write_text(text)
            say(f"wrote {path}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="directory on the disk to measure (default: the build's)")
    parser.add_argument("--runs", type=positive_int, help="timed passes per row (default 3)")
    parser.add_argument("--gib", type=positive_int, default=4, help="GiB per pass (default 4)")
    parser.add_argument(
        "--peers-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter of an environment with DeepSpeed or TensorNVMe (default: this one)",
    )
    for name in ("json", "markdown"):
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const=MARKED,
            metavar="FILE",
            help=f"write it too; without FILE to {RESULTS}/compare",
        )
    parser.add_argument(
        "--quick", action="store_true", help="every row with little data: shows that it works"
    )
    options = parser.parse_args(arguments)
    if options.runs is None:
        options.runs = 1 if options.quick else 3
    return options


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def command_line(options: argparse.Namespace) -> str:
    """Return the command without the paths of this machine."""
    words = ["python", "benches/compare/compare.py", "--runs", str(options.runs)]
    words += ["--quick"] if options.quick else ["--gib", str(options.gib)]
    words += (
        [] if options.peers_python == sys.executable else ["--peers-python", "PEERS/bin/python"]
    )
    return shlex.join(words)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:5.0f} s  {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> int:
    say(f"compare.py: {text}")
    return 2


def _own_cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _end(_number: int, _frame: object) -> NoReturn:
    """Leave by an exception, which removes the files."""
    say("compare.py: ended by SIGTERM; nothing was measured to the end")
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
