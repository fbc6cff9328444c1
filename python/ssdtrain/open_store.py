"""Opens a store from its options, tuned to its drives, and says what had to be given up."""

from __future__ import annotations

import logging

from ssdtrain import _core
from ssdtrain.config import StoreConfig
from ssdtrain.machine import tuning

__all__ = ["open_store"]

log = logging.getLogger("ssdtrain")

_said: set[str] = set()


def open_store(config: StoreConfig, *, retain_bytes: int | None = None) -> _core.Store:
    """Open a store and say what had to be given up, once per process.

    ``retain_bytes``: see ``_core.Store``.
    """
    backend, dirs = _tuned(config)
    store = _core.Store(
        dirs,
        backend=backend,
        direct_io=config.direct_io,
        max_disk_bytes=config.max_disk_bytes,
        verify=config.verify,
        retain_bytes=retain_bytes,
        simulated_disk=config.simulated_disk,
    )
    for note in store.notes():
        _say(logging.WARNING, note)
    return store


def _tuned(config: StoreConfig) -> tuple[str, list[tuple[str, tuple[int, int] | None]]]:
    """Return the engine to ask for, and each directory with what is kept about its drive."""
    if config.backend == "simulated" or config.direct_io == "disabled":
        # No drive is behind the one, and the page cache is between the drive and the other.
        return config.backend, [(one, None) for one in config.dirs]
    kept = {one: tuning.load(one) for one in config.dirs}
    backend = config.backend
    if backend == "auto" and all(one and one.tuning.engine == "psync" for one in kept.values()):
        backend = "psync"
    engine = "psync" if backend == "psync" else "io_uring"
    dirs: list[tuple[str, tuple[int, int] | None]] = []
    for directory, one in kept.items():
        if one is None or one.tuning.engine != engine:
            dirs.append((directory, None))
            continue
        dirs.append((directory, (one.tuning.queue_depth, one.tuning.piece_bytes)))
        _say(logging.INFO, f"{directory} is used as `ssdtrain bench` found best: {one.tuning}")
    return backend, dirs


def _say(level: int, line: str) -> None:
    if line not in _said:
        _said.add(line)
        log.log(level, "%s", line)
