"""The options of a session and of a store, checked where they are given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ssdtrain.errors import ConfigError
from ssdtrain.sizes import in_bytes, shown_bytes

if TYPE_CHECKING:
    from ssdtrain._core import SimulatedDisk

__all__ = [
    "MIN_BYTES_DEFAULT",
    "PINNED_BYTES_DEFAULT",
    "Backend",
    "DirectIo",
    "Directories",
    "Gds",
    "OffloadConfig",
    "Rematerialize",
    "Size",
    "StoreConfig",
    "device_bytes",
    "directories",
    "optional_bytes",
]

Backend = Literal["auto", "io_uring", "psync"]
"""``auto`` takes io_uring where the kernel allows it, else threads that call pread and pwrite."""

DirectIo = Literal["required", "optional", "disabled"]
"""``required`` bypasses the page cache (O_DIRECT); ``optional`` uses it if a file system refuses
that; ``disabled`` always uses it."""

Gds = Literal["optional", "required", "disabled"]
Rematerialize = Literal["auto", "never", "always"]
"""``required`` sends tensors of a GPU past the CPU's memory (GPUDirect Storage, cuFile);
``optional`` takes pinned memory if that does not work; ``disabled`` always takes it."""

INTERNAL = {"simulated", "compat"}
"""Choices for tests, which messages do not offer."""

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

Size = int | str
"""A number of bytes, or text such as ``"8GiB"``, ``"256 KiB"`` or ``"500MB"``."""

MIN_BYTES_DEFAULT = 256 << 10

PINNED_BYTES_DEFAULT = 2 << 30
"""Four times the longest tensor that may leave a GPU. 512 MiB is enough for a block of Llama with a
width of 4,096 over 16,384 tokens in bfloat16: its longest tensor has 344 MiB."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The options of a store. Sizes in bytes."""

    dirs: tuple[str, ...]
    """The directories; each gets a spill file. Without one nothing is written."""
    max_disk_bytes: int | None = None
    """Upper bound on the bytes reserved over all directories."""
    backend: str = "auto"
    direct_io: str = "required"
    verify: bool = False
    """Checksum (xxh3) before each write, and compare after each read."""
    simulated_disk: SimulatedDisk | None = None
    """The disk of ``backend="simulated"``, for tests."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a value that is not allowed."""
        check_choice("backend", self.backend, (*get_args(Backend), "simulated"))
        check_choice("direct_io", self.direct_io, get_args(DirectIo))
        if not isinstance(self.verify, bool):
            raise ConfigError(f"verify must be True or False, not {self.verify!r}")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The options of ``ssdtrain.offload``. Sizes in bytes."""

    store: StoreConfig
    min_bytes: int = MIN_BYTES_DEFAULT
    """Smaller saved tensors stay in memory: they cost more calls than they free."""
    max_resident_bytes: int | None = None
    """Upper bound on the saved bytes in memory; threads wait for the disk."""
    pinned_bytes: int = PINNED_BYTES_DEFAULT
    """Memory of the CPU through which tensors of a GPU go to the disk, for each GPU. By GPUDirect
    Storage half as much of the GPU's memory."""
    max_host_bytes: int | None = None
    """More pinned memory of the CPU, in which tensors of all GPUs may stay by plan."""
    max_device_bytes: int | Literal["auto"] | None = None
    """The bytes that torch should have allocated on the GPU at the peak of a step, at most."""
    gds: str = "optional"
    """``"compat"`` is cuFile's compatibility mode, for tests."""
    rematerialize: str = "auto"
    """``"auto"``: a plan chooses the saved tensors that are made again from others."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a value that is not allowed."""
        check_choice("gds", self.gds, (*get_args(Gds), "compat"))
        check_choice("rematerialize", self.rematerialize, get_args(Rematerialize))
        if self.max_device_bytes is not None and self.max_resident_bytes is not None:
            raise ConfigError(
                "max_device_bytes and max_resident_bytes exclude each other: the first bounds all "
                "memory of the GPU and lets no step fail, the second bounds the saved tensors "
                "wherever they are, and may fail; for a GPU give max_device_bytes"
            )
        if not self.store.dirs:
            self._refuse_options_of_disks()
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        pinned = {"pinned_bytes": self.pinned_bytes} if self.store.dirs else {}
        if self.max_host_bytes is not None:
            pinned["max_host_bytes"] = self.max_host_bytes
        if sum(pinned.values()) > memory_bytes:
            words = " and ".join(f"{name}={shown_bytes(size)}" for name, size in pinned.items())
            raise ConfigError(
                f"{words} are more than the {shown_bytes(memory_bytes)} of this machine, and "
                f"pinned memory cannot be swapped; give less"
            )

    def _refuse_options_of_disks(self) -> None:
        """Raise ``ConfigError`` if an option was given that needs a directory."""
        given = {field.name: getattr(self.store, field.name) for field in fields(self.store)}
        defaults = {field.name: field.default for field in fields(self.store)}
        options = [name for name in given if name != "dirs" and given[name] != defaults[name]]
        if self.max_resident_bytes is not None:
            options.append("max_resident_bytes")
        if self.gds == "required":
            options.append("gds='required'")
        if options:
            verb = "needs" if len(options) == 1 else "need"
            raise ConfigError(
                f"{' and '.join(options)} {verb} a directory: ssdtrain.offload(dir, ...), or "
                "ssdtrain run --dir DIR; without a directory nothing is written"
            )

    def as_given(self) -> str:
        """Return directories and options other than defaults, as arguments in a program."""
        dirs = self.store.dirs
        words = [repr(dirs[0] if len(dirs) == 1 else list(dirs))] if dirs else []
        for config in (self, self.store):
            for field in fields(config):
                value = getattr(config, field.name)
                if field.name not in ("store", "dirs") and value != field.default:
                    words.append(f"{field.name}={value!r}")
        return ", ".join(words)


def directories(given: Directories) -> tuple[str, ...]:
    """Return the directories as absolute paths; the store checks that they can be used."""
    if isinstance(given, str | os.PathLike):
        given = [given]
    try:
        dirs = tuple(os.path.expanduser(os.fspath(path)) for path in given)
    except TypeError:
        dirs = ()
    if callable(given):
        raise ConfigError(
            f"dir must be a path or a list of paths to directories, not {given!r}; to decorate a "
            "function, name the directory: @ssdtrain.offload(dir)"
        )
    if not dirs or not all(isinstance(path, str) and path for path in dirs):
        raise ConfigError(f"dir must be a path or a list of paths to directories, not {given!r}")
    if any("\0" in path for path in dirs):
        raise ConfigError(f"dir contains a zero byte, which no path can: {given!r}")
    dirs = tuple(map(_absolute, dirs))
    if len({os.path.realpath(path) for path in dirs}) < len(dirs):
        raise ConfigError(f"dir names the same directory twice: {list(dirs)}; name each one once")
    return dirs


def _absolute(given: str) -> str:
    """Return a path that still leads to the directory after the process has changed its own."""
    if os.path.isabs(given):
        return given
    try:
        # Unlike os.path.abspath it keeps "..", which leads elsewhere after a symbolic link.
        absolute = str(Path(given).absolute())
    except FileNotFoundError as error:
        raise ConfigError(
            f"dir is {given!r}, and the working directory of this process was deleted; pass an "
            "absolute path"
        ) from error
    # A user may be in a directory without the right to come there from the root.
    is_closed = os.path.isdir(given) and not os.path.isdir(absolute)
    return given if is_closed else absolute


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices if choice not in INTERNAL)
        raise ConfigError(f"{name} must be one of {allowed}, not {value!r}")


def device_bytes(value: Size | None) -> int | Literal["auto"] | None:
    """Return the bytes of ``max_device_bytes``, or ``"auto"``."""
    name = "max_device_bytes, unless it is 'auto',"
    return "auto" if value == "auto" else optional_bytes(name, value)


def optional_bytes(name: str, value: Size | None) -> int | None:
    """Return the bytes of a bound, or ``None`` if none was given."""
    return None if value is None else in_bytes(name, value)
