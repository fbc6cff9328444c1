"""Weights, masters and AdamW's state on the disk: ssdtrain, its peers, and what faults leave.

    python benches/compare/compare_training.py --dir DIR --peers-python PEERS/bin/python

Each way trains the same bfloat16 model in a process of its own, and all of them take turns, a step
each. Printed are the median of a step over that of `plain`, which has everything in memory and
never imports ssdtrain, in the same turn; for ours also over that of `imported`, which has
imported it and does the same; the most memory above what the libraries take; the bytes that lie on
the disk, in files with and without a name; the loss of the last step; what SIGKILL leaves; and what
happens on a file system that is too small, an ext4 image that only root may mount.

PEERS is an environment with torch and `pip install deepspeed torchao` (which need libaio's headers
and a C++ compiler). A way that does not run says why.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from peer_faults import last_words, small_disk
from ssdtrain.demo import without
from ssdtrain.demo.machine import machine_facts

PROGRAM = Path(__file__).with_name("training_ways.py")
WAYS = {
    "plain": "all in memory",
    "imported": "all in memory, ssdtrain imported",
    "ssdtrain": "ssdtrain, a quarter of the weights in memory",
    "ssdtrain-backward": 'the same, overlap="backward"',
    "deepspeed": "DeepSpeed ZeRO-3, parameters and optimizer on NVMe",
    "fsdp2": "FSDP2, CPUOffloadPolicy",
    "torchao": "torchao, CPUOffloadOptimizer",
}
OURS = ("plain", "imported", "ssdtrain", "ssdtrain-backward", "fsdp2")
"""Run by this interpreter."""
MIB = 1 << 20
FULL_STEPS = 4
END_LIMIT_S = 60


class WayEndedError(Exception):
    """The process of a way has ended, with these last words."""


class Process:
    """A way's process."""

    def __init__(self, name: str, python: str, directory: Path, options: dict[str, int]) -> None:
        self.name = name
        self.directory = directory
        directory.mkdir()
        # Open as long as the process.
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [python, "-W", "ignore", str(PROGRAM), name, str(directory), json.dumps(options)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            cwd=directory,
            env=without.environment(),
        )

    def answer(self) -> dict[str, Any]:
        """Return its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WayEndedError(self._ended())
        found: dict[str, Any] = json.loads(line)
        return found

    def step(self, number: int) -> dict[str, Any]:
        """Have it make a step."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WayEndedError(self._ended()) from None
        return self.answer()

    def disk_bytes(self) -> int:
        """Return what its files take: those in its directory, and those without a name."""
        open_files = Path(f"/proc/{self._process.pid}/fd").iterdir()
        unnamed = (one for one in open_files if one.readlink().name.endswith(" (deleted)"))
        inside = (one for one in unnamed if str(one.readlink()).startswith(str(self.directory)))
        found = {one.stat().st_ino: one.stat().st_blocks * 512 for one in inside}
        return sum(found.values()) + named_bytes(self.directory)

    def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._words.close()

    def _ended(self) -> str:
        code = self._process.wait(END_LIMIT_S)
        self._words.seek(0)
        words = last_words(self._words.read())
        self._words.close()
        return f"killed by {signal.Signals(-code).name}: {words}" if code < 0 else words


def named_bytes(directory: Path) -> int:
    """Return what the files of a directory take."""
    files = (one for one in directory.rglob("*") if one.is_file())
    return sum(one.stat().st_blocks * 512 for one in files)


def begun(names: list[str], place: Path, options: Any) -> tuple[list[Process], dict[str, str]]:
    """Start the ways one after the other; return those that run, and why the others do not."""
    running, refused = [], {}
    sizes = {name: getattr(options, name) for name in ("layers", "width", "tokens", "threads")}
    for name in names:
        python = sys.executable if name in OURS else options.peers_python
        process = Process(name, python, place / name, sizes)
        try:
            process.answer()
        except WayEndedError as error:
            refused[name] = str(error)
        else:
            running.append(process)
    return running, refused


def measured(names: list[str], place: Path, options: Any) -> dict[str, Any]:
    """Have the ways take turns; return the figures of each."""
    running, refused = begun(names, place, options)
    rows: dict[str, list[dict[str, Any]]] = {one.name: [] for one in running}
    found: dict[str, Any] = {name: {"error": why} for name, why in refused.items()}
    for turn in range(options.warm_up + options.turns):
        first = turn % len(running)
        for process in [*running[first:], *running[:first]]:
            if process.name in found:
                continue
            try:
                rows[process.name].append(process.step(turn))
            except WayEndedError as error:
                found[process.name] = {"error": str(error)}
    plain, imported = (
        [row["seconds"] for row in rows[name][options.warm_up :]] for name in ("plain", "imported")
    )
    for process in running:
        if process.name in found:
            continue
        own = rows[process.name]
        seconds = [row["seconds"] for row in own[options.warm_up :]]
        ratios = sorted(one / other for one, other in zip(seconds, plain, strict=True))
        over_imported = [one / other for one, other in zip(seconds, imported, strict=True)]
        found[process.name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "over_imported": statistics.median(over_imported),
            "ratio_low": ratios[len(ratios) // 4],
            "ratio_high": ratios[-1 - len(ratios) // 4],
            "peak_bytes": own[-1]["peak_bytes"],
            "disk_bytes": process.disk_bytes(),
            "losses": [row["loss"] for row in own],
        }
        process.kill()
        found[process.name]["left_bytes"] = named_bytes(process.directory)
    return found


def on_a_full_disk(name: str, place: Path, options: Any, losses: list[float]) -> str:
    """Train on a disk that is too small; return what a user sees."""
    with tempfile.TemporaryDirectory(dir=place) as folder, small_disk(Path(folder)) as small:
        if small is None:
            return "not run: a mounted image needs root and loop devices"
        running, refused = begun([name], small, options)
        if refused:
            return f"ends where it is made: {refused[name]}"
        seen: list[float] = []
        try:
            seen.extend(running[0].step(number)["loss"] for number in range(FULL_STEPS))
        except WayEndedError as error:
            return f"ends in step {len(seen) + 1}: {error}"
        running[0].kill()
        if seen == losses[:FULL_STEPS]:
            return "goes on, with the same losses"
        return f"**goes on with other losses** ({seen[-1]:.6f} for {losses[FULL_STEPS - 1]:.6f})"


def show(found: dict[str, Any]) -> None:
    """Print the table in Markdown."""
    heads = "step / plain | / imported | peak, MiB | on disk, MiB | last loss | left by SIGKILL"
    print(f"| | {heads} | full disk |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for name, one in ((name, found[name]) for name in WAYS if name in found):
        if "error" in one:
            print(f"| {WAYS[name]} | does not run: {one['error']} | | | | | | |")
            continue
        time = f"{one['ratio']:.2f} ({one['ratio_low']:.2f}-{one['ratio_high']:.2f})"
        cells = (
            f"{one['over_imported']:.2f}",
            f"{one['peak_bytes'] / MIB:,.0f}",
            f"{one['disk_bytes'] / MIB:,.0f}",
            f"{one['losses'][-1]:.6f}",
            f"{one['left_bytes'] / MIB:,.0f} MiB" if one["left_bytes"] else "nothing",
            one.get("full_disk", ""),
        )
        print(f"| {WAYS[name]} | {time} | {' | '.join(cells)} |")


def versions(python: str) -> dict[str, str]:
    """Return those of all that takes part."""
    code = (
        "import importlib.metadata as m, json\n"
        "names = [d.metadata['Name'] for d in m.distributions()]\n"
        "print(json.dumps({n: m.version(n) for n in ('deepspeed', 'torchao') if n in names}))"
    )
    told = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    peers: dict[str, str] = json.loads(told.stdout)
    return {"torch": metadata.version("torch"), **peers}


def main() -> int:
    """Measure and print; 1 if bits of ours differ from the plain run's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--peers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--only", nargs="*", choices=WAYS, help="ways to run beside plain ones")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    numbers = {"layers": 12, "width": 1024, "tokens": 512, "threads": 2, "turns": 9, "warm-up": 3}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    always = {"plain", "imported"}
    names = [name for name in WAYS if name in always or not options.only or name in options.only]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        place = Path(folder)
        found = measured(names, place, options)
        for name, one in found.items():
            if one.get("disk_bytes"):
                one["full_disk"] = on_a_full_disk(name, place, options, one["losses"])
    show(found)
    asked = {name: getattr(options, name.replace("-", "_")) for name in numbers}
    machine = machine_facts(options.dir) | {"directory": None}
    told = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": versions(options.peers_python),
        **asked,
        "ways": {name: found[name] for name in WAYS if name in found},
    }
    print(", ".join(f"{name} {version}" for name, version in told["versions"].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    ours = [one for name, one in found.items() if name.startswith("ssdtrain")]
    is_equal = all(one.get("losses") == found["plain"]["losses"] for one in ours)
    if ours:
        print(f"losses of ssdtrain bit-identical to plain: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
