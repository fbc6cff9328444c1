"""What a session says of itself in the log: how it begins, and why it did little, if it did."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from ssdtrain.config import OffloadConfig
from ssdtrain.notices import Notices, log
from ssdtrain.sizes import shown_bytes
from ssdtrain.stats import Stats

__all__ = ["say_begin", "say_end"]

FIGURE = re.compile(r"[\d.]+( [KMGT]i?B)?")
"""Another figure does not make a reason another one."""


def say_begin(config: OffloadConfig, engines: Sequence[tuple[str, str]]) -> None:
    """Say where saved tensors go, and which."""
    bound = config.max_resident_bytes
    log.info(
        "ssdtrain offloads saved tensors of at least %s to %s; %s",
        shown_bytes(config.min_bytes),
        ", ".join(f"{place} ({name})" for place, name in engines),
        f"at most {shown_bytes(bound)} of all stay in memory"
        if bound
        else "as much as the disk hides",
    )


def say_end(stats: Stats, said: Notices) -> None:
    """Say why little or nothing was offloaded; warn if something else could have been expected.

    Once where a block is entered for each step, which is what ``said`` remembers.
    """
    if stats.reason is not None and said.is_new(FIGURE.sub("", stats.reason)):
        level = logging.WARNING if stats.is_surprising else logging.INFO
        log.log(level, "ssdtrain offloaded little or nothing: %s", stats.reason)
