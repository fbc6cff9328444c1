"""Says each thing once: a warning that comes back with every step is not read."""

from __future__ import annotations

import logging

__all__ = ["PROCESS", "Notices", "log"]

log = logging.getLogger("ssdtrain")


class Notices:
    """What was said already, by topic."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def say(
        self, topic: str, message: str, *arguments: object, level: int = logging.WARNING
    ) -> None:
        """Log ``message % arguments``, unless something was said about this topic before."""
        if self.is_new(topic):
            text = message % arguments
            # Where logging is not set up, Python prints the bare text, without the logger's name.
            if not log.hasHandlers():
                text = f"ssdtrain: {text}"
            # A log record may be kept, and an error in it would keep its frames and their tensors.
            log.log(level, "%s", text)

    def is_new(self, topic: str) -> bool:
        """Whether this is asked for the first time."""
        is_new = topic not in self._topics
        self._topics.add(topic)
        return is_new


PROCESS = Notices()
"""For what holds for the whole process, such as how a directory is used."""
