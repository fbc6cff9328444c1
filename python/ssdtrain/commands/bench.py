"""`ssdtrain bench DIR`: finds the best setting for a drive, and keeps it for the store."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ssdtrain._core import Probe
from ssdtrain.commands.search import Measure, Outcome, Rates, find_best, sweep
from ssdtrain.errors import NoSpaceError, SsdtrainError, UnsupportedError
from ssdtrain.machine import tuning
from ssdtrain.machine.drive import drive_of, mount_of
from ssdtrain.machine.tuning import DEFAULT, Engine, SavedTuning, Tuning
from ssdtrain.sizes import shown_bytes

__all__ = ["add_arguments", "run"]

MIB = 1 << 20
QUEUE_DEPTHS = (4, 8, 16, 32)
PIECES_MIB = (1, 2, 4, 8)
FILE_BYTES_MAX = 512 * MIB
"""Twice the bytes that the largest setting has in flight."""
FREE_PART_MAX = 4
"""At most this fraction (a quarter) of the free space, and of the free memory, is used."""
FILL_SHARE = 0.15
"""Share of the time for the first, slow writing of the file."""
SWEEP_PASSES = 7
SWEEP_SAMPLE_SHARE = 0.01
SECONDS_MAX = 600.0

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells expect after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench`."""
    parser.add_argument("dir", nargs="+", metavar="DIR", help="directory on the drive to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=10.0,
        metavar="N",
        help="time for each directory (default: 10)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="then measure every setting equally, and tell how good the choice was",
    )
    parser.add_argument(
        "--forget", action="store_true", help="measure nothing; delete what an earlier run kept"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        if arguments.forget:
            return _forget(arguments.dir)
        return _bench_all(arguments)
    except KeyboardInterrupt:
        print("ssdtrain bench: interrupted; nothing of this directory was kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (SsdtrainError, OSError) as error:
        print(f"ssdtrain bench: {error}", file=sys.stderr)
        return EXIT_FAILED


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result for a directory."""

    directory: str
    outcome: Outcome
    default: Tuning
    note: str | None
    """Why an engine was not measured."""
    swept: dict[Tuning, Rates]
    """Empty without `--sweep`."""
    bytes_written: int
    """Without the sweep."""
    sweep_bytes_written: int
    seconds: float
    """Without the sweep."""
    kept_in: str | None
    problem: str | None
    """Why the choice could not be kept."""

    @property
    def behind_best(self) -> float | None:
        """The share by which the choice is slower than the best of the sweep."""
        if not self.swept:
            return None
        best = max(rates.both for rates in self.swept.values())
        return 1 - self.swept[self.outcome.choice].both / best


class Workplace:
    """A file in the directory, on which settings are measured."""

    def __init__(self, directory: str, *, fill_s: float) -> None:
        request_bytes = Probe.REQUEST_BYTES
        room = min(_free_bytes(directory), _free_memory_bytes()) // FREE_PART_MAX
        count = min(FILE_BYTES_MAX, room) // request_bytes
        if count == 0:
            raise NoSpaceError(
                f"a measurement in {directory} may take a quarter of the free space and memory, "
                f"and that is less than {shown_bytes(request_bytes)}; free some"
            )
        self._probe = Probe(directory, count)
        self.bytes_written = 0
        self.note: str | None = None
        self.default = DEFAULT
        try:
            self._seconds(DEFAULT, "write", 0, 1)
        except UnsupportedError as error:
            self.note = str(error)
            self.default = Tuning(
                engine="psync",
                queue_depth=DEFAULT.queue_depth,
                piece_bytes=DEFAULT.piece_bytes,
            )
        self._count = self._fill(count, fill_s)
        self._next = {"write": 0, "read": self._count // 2}
        self._rates = {way: self._rate(way) for way in self._next}

    @property
    def settings(self) -> list[Tuning]:
        """All settings; psync has only one depth, as its threads are few."""
        engines: list[tuple[Engine, int]] = [("psync", DEFAULT.queue_depth)]
        if self.note is None:
            engines = [("io_uring", depth) for depth in QUEUE_DEPTHS] + engines
        return [
            Tuning(engine=engine, queue_depth=depth, piece_bytes=piece * MIB)
            for engine, depth in engines
            for piece in PIECES_MIB
        ]

    def measure(self, setting: Tuning, seconds: float) -> Rates:
        """Write, then read, for about so many seconds each; all settings move the same bytes."""
        found = {}
        for way, rate in self._rates.items():
            count = round(seconds * rate / Probe.REQUEST_BYTES)
            count = min(max(count, 1), self._count)
            # Each sample begins where the last has ended, so that the drive's cache does not help.
            first = self._next[way] if self._next[way] + count <= self._count else 0
            self._next[way] = first + count
            taken = self._seconds(setting, way, first, count)
            found[way] = count * Probe.REQUEST_BYTES / taken
        return Rates(**found)

    def _fill(self, count: int, seconds: float) -> int:
        """Write every request once, or as many as the time allows; return how many."""
        end = time.monotonic() + seconds
        done = 1  # The request that tried the engine.
        while done < count and time.monotonic() < end:
            step = min(4, count - done)
            self._seconds(self.default, "write", done, step)
            done += step
        return done

    def _rate(self, way: str) -> float:
        """Measure a first rate, which gives the samples their size."""
        count = min(8, self._count)
        return count * Probe.REQUEST_BYTES / self._seconds(self.default, way, 0, count)

    def _seconds(self, setting: Tuning, way: str, first: int, count: int) -> float:
        taken = self._probe.seconds(
            way,
            first,
            count,
            backend=setting.engine,
            queue_depth=setting.queue_depth,
            piece_bytes=setting.piece_bytes,
        )
        if way == "write":
            self.bytes_written += count * Probe.REQUEST_BYTES
        return taken


def bench(directory: str, *, seconds: float, with_sweep: bool) -> Result:
    """Measure the drive of a directory and keep the best setting."""
    begin = time.monotonic()
    place = Workplace(directory, fill_s=FILL_SHARE * seconds)
    settings, measure = place.settings, place.measure
    outcome = find_best(
        settings,
        place.default,
        measure,
        seconds=seconds - (time.monotonic() - begin),
        clock=time.monotonic,
    )
    taken_s, bytes_written = time.monotonic() - begin, place.bytes_written
    kept_in, problem = _keep(directory, outcome)
    swept = _sweep(settings, measure, seconds) if with_sweep else {}
    return Result(
        directory=directory,
        outcome=outcome,
        default=place.default,
        note=place.note,
        swept=swept,
        bytes_written=bytes_written,
        sweep_bytes_written=place.bytes_written - bytes_written,
        seconds=taken_s,
        kept_in=kept_in,
        problem=problem,
    )


def _sweep(settings: Sequence[Tuning], measure: Measure, seconds: float) -> dict[Tuning, Rates]:
    sample_s = SWEEP_SAMPLE_SHARE * seconds
    return sweep(settings, measure, pass_count=SWEEP_PASSES, sample_s=sample_s)


def _keep(directory: str, outcome: Outcome) -> tuple[str | None, str | None]:
    """Return the file of the choice, or why it could not be kept."""
    if not outcome.complete:
        return None, "the drive is too slow to compare settings in this time; give more --seconds"
    rates = outcome.rates[outcome.choice]
    kept = SavedTuning(
        tuning=outcome.choice,
        measured=date.today().isoformat(),
        write_bytes_per_s=rates.write,
        read_bytes_per_s=rates.read,
    )
    try:
        return str(tuning.save(directory, kept)), None
    except OSError as error:
        return None, f"{error}; set XDG_CACHE_HOME to a directory that can be written to"


def _bench_all(arguments: argparse.Namespace) -> int:
    results: list[Result] = []
    seen: dict[Path, str] = {}
    for directory in arguments.dir:
        key = tuning.cache_file(directory)
        if key in seen:
            print(f"{directory} is on the drive of {seen[key]}: measured once", file=sys.stderr)
            continue
        seen[key] = directory
        result = bench(directory, seconds=arguments.seconds, with_sweep=arguments.sweep)
        results.append(result)
        if not arguments.json:
            print(_text(result), flush=True)
    if arguments.json:
        print(json.dumps({"format": 1, "directories": [_document(result) for result in results]}))
    return 0


def _forget(directories: Sequence[str]) -> int:
    for directory in directories:
        path = tuning.forget(directory)
        print(f"{directory}: nothing was kept" if path is None else f"{directory}: deleted {path}")
    return 0


def _text(result: Result) -> str:
    """Lay a result out for a person."""
    outcome, default = result.outcome, result.default
    lines = [
        f"{result.directory}: {_place(result.directory)}",
        "",
        "engine    in flight  piece    write     read     both  samples",
        "                              GB/s      GB/s     GB/s",
    ]
    for setting in outcome.rates:
        mark = " *" if setting == outcome.choice else ""
        row = _row(setting, outcome.rates[setting])
        lines.append(f"{row}  {outcome.sample_counts[setting]:7d}{mark}")
    how = " (the default)" if outcome.choice == default else ""
    lines += ["", f"choice     {outcome.choice}{how}"]
    if default in outcome.rates and outcome.choice != default:
        gain = outcome.rates[outcome.choice].both / outcome.rates[default].both - 1
        lines.append(f"gain       {gain:.1%} over the default: {default}")
    if result.note is not None:
        lines.append(f"left out   io_uring: {result.note}")
    lines.append(f"took       {result.seconds:.1f} s")
    lines.append(f"written    {result.bytes_written / 1e9:.1f} GB, which wears the drive")
    if result.kept_in is not None:
        lines.append(f"kept in    {result.kept_in}; stores on this drive use it from now on")
    else:
        lines.append(f"not kept   {result.problem}")
    if result.swept:
        lines += _sweep_text(result)
    return "\n".join([*lines, ""])


def _sweep_text(result: Result) -> list[str]:
    lines = ["", f"sweep: every setting {SWEEP_PASSES} times, best first"]
    by_rate = sorted(result.swept, key=lambda setting: -result.swept[setting].both)
    for setting in by_rate:
        mark = " *" if setting == result.outcome.choice else ""
        lines.append(_row(setting, result.swept[setting]) + mark)
    assert result.behind_best is not None
    lines.append(f"written for the sweep: {result.sweep_bytes_written / 1e9:.1f} GB")
    lines.append(f"the choice is {result.behind_best:.1%} behind the best of the sweep")
    return lines


def _row(setting: Tuning, rates: Rates) -> str:
    piece = shown_bytes(setting.piece_bytes)
    return (
        f"{setting.engine:<8}  {setting.queue_depth:9d}  {piece:>5}  {rates.write / 1e9:7.2f}  "
        f"{rates.read / 1e9:7.2f}  {rates.both / 1e9:7.2f}"
    )


def _document(result: Result) -> dict[str, Any]:
    """Return a result for JSON; the layout is stable."""

    def table(rates_of: dict[Tuning, Rates]) -> list[dict[str, Any]]:
        return [
            {
                **asdict(setting),
                "write_bytes_per_s": round(rates.write),
                "read_bytes_per_s": round(rates.read),
            }
            for setting, rates in rates_of.items()
        ]

    return {
        "directory": result.directory,
        "place": _place(result.directory),
        "choice": asdict(result.outcome.choice),
        "default": asdict(result.default),
        "settings": table(result.outcome.rates),
        "sweep": table(result.swept),
        "behind_best": result.behind_best,
        "left_out": result.note,
        "bytes_written": result.bytes_written,
        "sweep_bytes_written": result.sweep_bytes_written,
        "seconds": round(result.seconds, 3),
        "kept_in": result.kept_in,
        "problem": result.problem,
    }


def _place(directory: str) -> str:
    mount, drive = mount_of(directory), drive_of(directory)
    return ", ".join(str(part) for part in (mount, drive) if part is not None) or "unknown"


def _free_bytes(directory: str) -> int:
    try:
        facts = os.statvfs(directory)
    except OSError:
        return FILE_BYTES_MAX * FREE_PART_MAX  # The core raises the better error.
    return facts.f_bavail * facts.f_frsize


def _free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {SECONDS_MAX:g}")
    return value
