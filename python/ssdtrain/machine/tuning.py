"""Settings of a drive's engine that `ssdtrain bench` found, in a file of the user's cache.

A cache may be deleted, copied to another machine or damaged at any time: a file that does not fit
the drive, or makes no sense, is ignored with one line in the log, and the defaults serve.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ssdtrain._core import Probe
from ssdtrain.machine.drive import drive_of, mount_of
from ssdtrain.notices import PROCESS
from ssdtrain.sizes import shown_bytes

__all__ = ["DEFAULT", "Engine", "SavedTuning", "Tuning", "cache_file", "forget", "load", "save"]

Engine = Literal["io_uring", "psync"]

FORMAT = 1
FILE_BYTES_MAX = 1 << 16
QUEUE_DEPTH_MAX = 128
PIECE_BYTES_MIN = 64 << 10
PIECE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings by which the engine of a directory splits and overlaps its I/O."""

    engine: Engine
    queue_depth: int
    """Pieces in flight."""
    piece_bytes: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for settings out of range; a file may say anything."""
        if self.engine not in get_args(Engine):
            raise ValueError(f"no engine is called {self.engine!r}")
        for name, low, high in (
            ("queue_depth", 1, QUEUE_DEPTH_MAX),
            ("piece_bytes", PIECE_BYTES_MIN, PIECE_BYTES_MAX),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}, not a number from {low} to {high}")

    def __str__(self) -> str:
        """Return the settings as reports write them."""
        size = shown_bytes(self.piece_bytes)
        return f"{self.engine}, {self.queue_depth} pieces of {size} in flight"


DEFAULT = Tuning(
    engine="io_uring",
    queue_depth=Probe.QUEUE_DEPTH_DEFAULT,
    piece_bytes=Probe.PIECE_BYTES_DEFAULT,
)
"""The settings without a file; ``rust/core/src/config.rs`` has the reasons."""


@dataclass(frozen=True, kw_only=True)
class SavedTuning:
    """The content of the file of a drive."""

    tuning: Tuning
    measured: str
    """The day, ISO 8601."""
    write_bytes_per_s: float
    read_bytes_per_s: float


def cache_file(directory: str) -> Path:
    """Return the path of the file for the directory's drive; it need not exist."""
    words = json.dumps(_identity(directory), sort_keys=True).encode()
    return _folder() / f"tuning-{hashlib.sha256(words).hexdigest()[:32]}.json"


def save(directory: str, saved: SavedTuning) -> Path:
    """Write a tuning; readers see the old file or the new, never a part. Raises ``OSError``."""
    path = cache_file(directory)
    for folder in reversed((path.parent, *path.parent.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            # A umask may take permissions from the owner.
            folder.chmod(0o700)
    document = {"format": FORMAT, "drive": _identity(directory), **asdict(saved)}
    descriptor, temporary = tempfile.mkstemp(prefix=".tuning-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load(directory: str) -> SavedTuning | None:
    """Return the content of the file for the directory's drive; never raise."""
    try:
        if not _folder().is_dir():
            return None
        path = cache_file(directory)
        text = _read_own(path)
        return None if text is None else _parse(text, _identity(directory))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        PROCESS.say(
            f"tuning of {directory}",
            "the tuning of the drive below %s is ignored: %s; make it again with "
            "`ssdtrain bench %s`",
            directory,
            error,
            directory,
        )
        return None


def forget(directory: str) -> Path | None:
    """Delete the file for the directory's drive; return its path if there was a file."""
    path = cache_file(directory)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    return path


def _read_own(path: Path) -> str | None:
    """Return the content of a file that the user wrote; ``None`` if there is none."""
    try:
        # O_NONBLOCK: if a named pipe is in its place, opening it must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user")
        # A single read of a regular file returns all of it, up to that size.
        content = os.read(descriptor, FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"{path} is larger than any tuning")
    return content.decode()


def _parse(text: str, identity: dict[str, object]) -> SavedTuning:
    document: Any = json.loads(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    if document.get("drive") != identity:
        raise ValueError("it is of another drive")
    rates: list[Any] = [document.get("write_bytes_per_s"), document.get("read_bytes_per_s")]
    if not all(type(rate) in {int, float} and 0 < rate < math.inf for rate in rates):
        raise ValueError(f"its rates are {rates}")
    return SavedTuning(
        tuning=Tuning(**document.get("tuning", {})),
        measured=str(document.get("measured"))[:32],
        write_bytes_per_s=rates[0],
        read_bytes_per_s=rates[1],
    )


def _folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".cache")
    return base / "ssdtrain"


def _identity(directory: str) -> dict[str, object]:
    """Return the identity of a drive, with its file system and the kernel."""
    drive, mount = drive_of(directory), mount_of(directory)
    facts = {
        "device": "" if drive is None else drive.number,
        "model": "" if drive is None else drive.model,
        "serial": "" if drive is None else drive.serial,
        "size_bytes": 0 if drive is None else drive.size_bytes,
        "file_system": "" if mount is None else mount.kind,
        "kernel": os.uname().release,
    }
    # Without a device of its own (overlay, a pool of drives) only the mount identifies it.
    if drive is None and mount is not None:
        facts["device"] = f"{mount.source} at {mount.point}"
    return facts
