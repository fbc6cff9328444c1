"""Where a class of training's memory goes: directories, a store, or the share of a session."""

from __future__ import annotations

from ssdtrain.config import Directories, Size
from ssdtrain.errors import ConfigError
from ssdtrain.offload import offload
from ssdtrain.session import Session
from ssdtrain.sharing import Share
from ssdtrain.store import TensorStore

__all__ = ["Place", "opened"]

Place = Directories | TensorStore | Session


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
    return TensorStore(place, max_disk_bytes=max_disk_bytes, verify=verify), None  # type: ignore[arg-type]
