"""Where a class of training's memory goes: directories, a store, or the share of a session."""

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
"""What `_shared` opened, by process, options and directories, as long as somebody uses it."""


def opened(
    place: Place, max_disk_bytes: Size | None, verify: object, *, caller: str, name: str
) -> tuple[TensorStore, Share | None]:
    """Return the store, and what it shares with a session, if one is given.

    ``caller`` is the function that was given the place, ``name`` what is to go there.

    Raises:
        ConfigError: It cannot be used, or options of a store are given with one that is open.

    """
    if isinstance(place, offload):
        raise ConfigError(
            f"{caller} takes the session, not what makes it: `with ssdtrain.offload(dir) as "
            "session:` gives one, and a decorator has it as `.session` after the first call"
        )
    if place is None:
        raise ConfigError(
            f"{caller} takes a directory, a TensorStore or a session, not None; the `.session` of "
            "a decorator is None before the first call of what it decorates"
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
        # The bound is one on the bytes of this call.
        return TensorStore(place, max_disk_bytes=max_disk_bytes, verify=verify), None  # type: ignore[arg-type]
    return _shared(StoreConfig(dirs=directories(place), verify=verify)), None  # type: ignore[arg-type]


def _shared(config: StoreConfig) -> TensorStore:
    """Return the store that all users of the same directories and options in this process share.

    The last of them closes it. Each store has a file, threads and 64 MiB of each directory, which
    would be too much for one optimizer for each parameter.
    """
    try:
        places = frozenset(map(_identity, config.dirs))
    except OSError:
        # Nobody has it, and the store says what is wrong with it.
        return _open(config)
    # A forked process has the stores of the other one, and can use none of them.
    key = (os.getpid(), replace(config, dirs=()), places)
    store = _stores.get(key)
    if store is None or store.has_lost_directories():
        # Two threads may come here at once: then there are two stores, which both work.
        store = _stores[key] = _open(config)
    return store


def _open(config: StoreConfig) -> TensorStore:
    return TensorStore(config.dirs, verify=config.verify)


def _identity(directory: str) -> tuple[int, int]:
    """Return what tells a directory from all others, also from a link to it."""
    # The path without a slash or a dot at its end, which would lead through a link.
    facts = os.lstat(Path(directory))
    return facts.st_dev, facts.st_ino
