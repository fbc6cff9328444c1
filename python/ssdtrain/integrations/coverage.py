"""Code that the callbacks of all trainers share: the block around training, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ssdtrain import ConfigError, Session, Stats, offload
from ssdtrain.notices import log

__all__ = ["Coverage", "single_callback"]

T = TypeVar("T")

DONE = ("bytes_offloaded", "bytes_kept", "bytes_written", "bytes_read", "stall_s")
"""Figures whose differences from log to log are plotted."""
NOW = ("resident_bytes", "resident_bytes_peak")
"""Figures that are plotted as they are."""


class Coverage:
    """Puts a block around each training of a callback, and returns figures for its log.

    It can be pickled, as by trainers that start processes: the options travel then.
    """

    def __init__(self, directory: Any, options: dict[str, Any]) -> None:
        self._block = offload(directory, **options)
        self._logged: Stats | None = None

    @property
    def session(self) -> Session | None:
        """The session of the last training, also when it has ended."""
        return self._block.session

    @property
    def is_on(self) -> bool:
        """True if training is covered in this thread."""
        return self._block.is_on

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Offload in the body; do nothing inside of another training of the same callback."""
        if self.is_on:
            yield
            return
        self._logged = None
        try:
            with self._block:
                yield
        finally:
            log.info("%s", self.session)

    def metrics(self) -> dict[str, int | float]:
        """Return figures for a log: some since the last call, some as they are now."""
        session = self.session
        if session is None or not self.is_on:
            return {}
        stats = session.stats
        done = stats if self._logged is None else stats.since(self._logged)
        self._logged = stats
        values = {name: getattr(done, name) for name in DONE}
        values.update({name: getattr(stats, name) for name in NOW})
        return {f"ssdtrain/{name}": value for name, value in values.items()}


def single_callback(callbacks: Iterable[object], kind: type[T]) -> T | None:
    """Return the trainer's callback of this kind, if any; raise if there are several."""
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) > 1:
        raise ConfigError(
            f"this trainer has {len(found)} callbacks of type {kind.__name__}, each of which would "
            "offload everything; take out all but one (in a notebook the cell ran twice)"
        )
    return found[0] if found else None
