"""Opens a store with its options and the tuning of its drives; logs fallbacks."""

from __future__ import annotations

import logging

from ssdtrain._core import Store
from ssdtrain.config import StoreConfig
from ssdtrain.machine import tuning
from ssdtrain.notices import PROCESS

__all__ = ["open_store"]


def open_store(config: StoreConfig, *, retain_bytes: int | None = None) -> Store:
    """Open a store, and log each fallback once per process.

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
    """Return the engine to ask for, and each directory with the settings of its drive."""
    if config.backend == "simulated" or config.direct_io == "disabled":
        # A simulated disk has no drive. With the page cache the kernel chooses the count and the
        # sizes of requests, so figures that were measured without it do not hold.
        return config.backend, [(directory, None) for directory in config.dirs]
    saved = {directory: tuning.load(directory) for directory in config.dirs}
    backend = config.backend
    if backend == "auto" and all(
        found and found.tuning.engine == "psync" for found in saved.values()
    ):
        backend = "psync"
    engine = "psync" if backend == "psync" else "io_uring"
    dirs: list[tuple[str, tuple[int, int] | None]] = []
    for directory, found in saved.items():
        if found is None or found.tuning.engine != engine:
            dirs.append((directory, None))
            continue
        dirs.append((directory, (found.tuning.queue_depth, found.tuning.piece_bytes)))
        PROCESS.say(
            f"use of {directory} with {found.tuning}",
            "%s is used as `ssdtrain bench` found best: %s",
            directory,
            found.tuning,
            level=logging.INFO,
        )
    return backend, dirs
