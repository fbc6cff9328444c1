"""Opens a store from its options, and says what had to be given up."""

from __future__ import annotations

import logging

from ssdtrain import _core
from ssdtrain.config import StoreConfig

__all__ = ["open_store"]

log = logging.getLogger("ssdtrain")

_said: set[str] = set()


def open_store(config: StoreConfig) -> _core.Store:
    """Open a store and say what had to be given up, once per process."""
    store = _core.Store(
        [(one, None) for one in config.dirs],
        backend=config.backend,
        direct_io=config.direct_io,
        max_disk_bytes=config.max_disk_bytes,
        verify=config.verify,
        faults=config.faults,
    )
    for note in store.notes():
        if note not in _said:
            _said.add(note)
            log.warning("%s", note)
    return store
