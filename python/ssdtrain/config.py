"""The options of a session and of a store, checked where they are given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ssdtrain.errors import ConfigError
from ssdtrain.sizes import in_bytes

if TYPE_CHECKING:
    from ssdtrain._core import SimulatedDisk

__all__ = [
    "MIN_BYTES_DEFAULT",
    "Backend",
    "DirectIo",
    "Directories",
    "OffloadConfig",
    "Size",
    "StoreConfig",
    "directories",
    "optional_bytes",
]

Backend = Literal["auto", "io_uring", "psync"]
"""``auto`` takes io_uring where the kernel allows it, else threads that call pread and pwrite."""

DirectIo = Literal["required", "optional", "disabled"]
"""Whether the page cache is bypassed (O_DIRECT); ``optional`` uses the page
cache where a file system refuses to be without it."""

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

Size = int | str
"""A number of bytes, or text such as ``"8GiB"``, ``"256 KiB"`` or ``"500MB"``."""

MIN_BYTES_DEFAULT = 256 << 10


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """What a store is opened with. Sizes in bytes."""

    dirs: tuple[str, ...]
    """One spill file is kept in each."""
    max_disk_bytes: int | None = None
    """Upper bound on the bytes reserved over all directories."""
    backend: str = "auto"
    direct_io: str = "required"
    verify: bool = False
    """Checksum (xxh3) before each write, and compare what is read."""
    simulated_disk: SimulatedDisk | None = None
    """What ``backend="simulated"`` writes to, for tests."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a value that cannot be meant."""
        check_choice("backend", self.backend, (*get_args(Backend), "simulated"))
        check_choice("direct_io", self.direct_io, get_args(DirectIo))
        if not isinstance(self.verify, bool):
            raise ConfigError(f"verify must be True or False, not {self.verify!r}")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What ``ssdtrain.offload`` was asked for. Sizes in bytes."""

    store: StoreConfig
    min_bytes: int = MIN_BYTES_DEFAULT
    """Smaller saved tensors stay in memory: they cost more calls than they free."""
    max_resident_bytes: int | None = None
    """Upper bound on the saved bytes in memory, at whatever time the disk needs."""


def directories(given: Directories) -> tuple[str, ...]:
    """Return the directories as strings; whether they are usable, the store says."""
    if isinstance(given, str | os.PathLike):
        given = [given]
    try:
        dirs = tuple(os.path.expanduser(os.fspath(one)) for one in given)
    except TypeError:
        dirs = ()
    if callable(given):
        raise ConfigError(
            f"dir must be a path or a list of paths to directories, not {given!r}; to decorate a "
            "function, name the directory: @ssdtrain.offload(dir)"
        )
    if not dirs or not all(isinstance(one, str) and one for one in dirs):
        raise ConfigError(f"dir must be a path or a list of paths to directories, not {given!r}")
    if any("\0" in one for one in dirs):
        raise ConfigError(f"dir contains a zero byte, which no path can: {given!r}")
    if len({os.path.realpath(one) for one in dirs}) < len(dirs):
        raise ConfigError(f"dir names the same directory twice: {list(dirs)}; name each one once")
    return dirs


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        allowed = ", ".join(repr(one) for one in choices if one != "simulated")
        raise ConfigError(f"{name} must be one of {allowed}, not {value!r}")


def optional_bytes(name: str, value: Size | None) -> int | None:
    """Return the bytes of a bound, or ``None`` where none was given."""
    return None if value is None else in_bytes(name, value)
