"""What the callbacks of all trainers share: the block around training, and what it counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ssdtrain import ConfigError, Session, Stats, offload
from ssdtrain.notices import log

__all__ = ["Coverage", "the_only_one"]

T = TypeVar("T")

DONE = ("bytes_offloaded", "bytes_kept", "bytes_written", "bytes_read", "stall_s")
"""What is plotted as it was done from one log to the next."""
NOW = ("resident_bytes", "resident_bytes_peak")
"""What is plotted as it is when it is logged."""


class Coverage:
    """Puts a block around each training of one callback, and counts for its log.

    It can be pickled, as trainers do that start processes: then the options travel.
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
        """Whether training is covered in this thread."""
        return self._block.is_on

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Offload in the body, once: a training inside a training is covered by the outer block."""
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
        """Return what was done since the last call, and what is resident now, for a log."""
        session = self.session
        if session is None or not self.is_on:
            return {}
        stats = session.stats
        done = stats if self._logged is None else stats.since(self._logged)
        self._logged = stats
        values = {name: getattr(done, name) for name in DONE}
        values.update({name: getattr(stats, name) for name in NOW})
        return {f"ssdtrain/{name}": value for name, value in values.items()}


def the_only_one(callbacks: Iterable[object], kind: type[T]) -> T | None:
    """Return the callback of this kind that a trainer has, or raise if it has several."""
    found = [one for one in callbacks if isinstance(one, kind)]
    if len(found) > 1:
        raise ConfigError(
            f"this trainer has {len(found)} callbacks of type {kind.__name__}, each of which would "
            "offload everything; take out all but one (in a notebook the cell ran twice)"
        )
    return found[0] if found else None
