"""Parsers of arguments that several commands take: sizes, directories, shares."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ssdtrain.config import directories
from ssdtrain.errors import ConfigError
from ssdtrain.sizes import in_bytes

__all__ = ["check_count", "directory", "not_negative", "option", "positive", "share", "size"]

COUNT_MAX = 1_000_000_000
"""The limit of counts of sequences, layers, drives: larger products have more than 64 bits."""


def option(name: str) -> str:
    """Return the name of an option as the command line writes it."""
    return "--" + name.replace("_", "-")


def check_count(name: str, count: int | None) -> None:
    """Raise ``ConfigError`` if a count was given and is out of range."""
    if count is not None and not 1 <= count <= COUNT_MAX:
        raise ConfigError(
            f"{option(name)} must be 1 or more, and at most {COUNT_MAX:,}, not {count}"
        )


def size(name: str) -> Callable[[str], int]:
    """Return a parser of sizes, such as ``8GiB``, for the option ``name``."""

    def parse(text: str) -> int:
        try:
            return in_bytes(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def directory(text: str) -> str:
    """Parse the path of a directory; a store checks later that it is usable."""
    try:
        return directories(text)[0]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number of 0 or more, that of a share."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of 0 or more, such as 0.02 for 2 %"
        )
    return value


def share(text: str) -> float:
    """Parse a share of a whole, above 0."""
    value = _finite(text)
    if value is None or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share above 0 and at most 1, such as 0.02 for 2 %"
        )
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
