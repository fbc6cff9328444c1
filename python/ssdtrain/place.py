"""Opens the store of a tenant: in directories, a user's own store, or a share of a session."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from ssdtrain.config import Directories, Size, StoreConfig, directories
from ssdtrain.errors import ConfigError
from ssdtrain.offload import offload
from ssdtrain.session import Session
from ssdtrain.sharing import Share
from ssdtrain.store import TensorStore

__all__ = ["Place", "opened"]

Place = Directories | TensorStore | Session

_stores: WeakValueDictionary[object, TensorStore] = WeakValueDictionary()
"""Stores that `_shared` has opened and that are in use, by process, options and directories."""


def opened(
    place: Place, max_disk_bytes: Size | None, verify: object, *, caller: str, name: str
) -> tuple[TensorStore, Share | None]:
    """Return the store of a place, and the share of the session if the place is a session.

    ``caller`` is the function that was given the place, ``name`` the name of the tenant.

    Raises:
        ConfigError: The place cannot be used, or options were given with an open store.

    """
    if isinstance(place, offload):
        raise ConfigError(
            f"{caller} takes a session, not ssdtrain.offload(dir) itself: `with "
            "ssdtrain.offload(dir) as session:` gives one, and a decorator has it as `.session` "
            "after the first call"
        )
    if place is None:
        raise ConfigError(
            f"{caller} takes a directory, a TensorStore or a session, not None; the `.session` of "
            "a decorator is None before the first call of its function"
        )
    if isinstance(place, TensorStore | Session):
        if max_disk_bytes is not None or verify:
            kind = "TensorStore" if isinstance(place, TensorStore) else "ssdtrain.offload"
            raise ConfigError(
                f"max_disk_bytes and verify are options of the store: give them to {kind}(...)"
            )
        if isinstance(place, TensorStore):
            return place, None
        share = place.share(name)
        return TensorStore.over(share.store), share
    if max_disk_bytes is not None:
        # The bound is on the bytes of this call, so its store is not shared.
        return TensorStore(place, max_disk_bytes=max_disk_bytes, verify=verify), None  # type: ignore[arg-type]
    return _shared(StoreConfig(dirs=directories(place), verify=verify)), None  # type: ignore[arg-type]


def _shared(config: StoreConfig) -> TensorStore:
    """Return the store that all users of the same directories and options in this process share.

    The last user closes it. A store has a file, threads and 64 MiB in each directory, which would
    be too much if each parameter has an optimizer of its own.
    """
    try:
        places = frozenset(map(_identity, config.dirs))
    except OSError:
        # The store raises the better error.
        return _open(config)
    # A forked process inherits stores that it cannot use.
    key = (os.getpid(), replace(config, dirs=()), places)
    store = _stores.get(key)
    if store is None or store.has_lost_directories():
        # Two threads at once may open two stores, which both work.
        store = _stores[key] = _open(config)
    return store


def _open(config: StoreConfig) -> TensorStore:
    return TensorStore(config.dirs, verify=config.verify)


def _identity(directory: str) -> tuple[int, int]:
    """Return the identity of a directory; a link to it has another identity."""
    # `Path` drops a slash or a dot at the end, which would follow the link.
    facts = os.lstat(Path(directory))
    return facts.st_dev, facts.st_ino
