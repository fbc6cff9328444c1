"""Opens a store from its options, tuned to its drives, and says what had to be given up."""

from __future__ import annotations

import logging

from ssdtrain._core import Store
from ssdtrain.config import StoreConfig
from ssdtrain.machine import tuning
from ssdtrain.notices import PROCESS

__all__ = ["open_store"]


def open_store(config: StoreConfig, *, retain_bytes: int | None = None) -> Store:
    """Open a store and say what had to be given up, once per process.

    ``retain_bytes``: see ``_core.Store``.
    """
    backend, dirs = _tuned(config)
    store = Store(
        dirs,
        backend=backend,
        direct_io=config.direct_io,
        max_disk_bytes=config.max_disk_bytes,
        verify=config.verify,  # defence: verify
        retain_bytes=retain_bytes,
        simulated_disk=config.simulated_disk,
    )
    for note in store.notes():
        PROCESS.say(note, "%s", note)
    return store


def _tuned(config: StoreConfig) -> tuple[str, list[tuple[str, tuple[int, int] | None]]]:
    """Return the engine to ask for, and each directory with what is kept about its drive."""
    if config.backend == "simulated" or config.direct_io == "disabled":
        # A simulated disk has no drive. Through the page cache, the kernel chooses how many
        # requests of what size reach the drive, so what was measured without it does not hold.
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
        PROCESS.say(
            f"use of {directory} with {one.tuning}",
            "%s is used as `ssdtrain bench` found best: %s",
            directory,
            one.tuning,
            level=logging.INFO,
        )
    return backend, dirs
