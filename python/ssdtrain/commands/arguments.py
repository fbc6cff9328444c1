"""Words of the command line that several commands take: sizes and directories."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ssdtrain.config import check_share, directories
from ssdtrain.errors import ConfigError
from ssdtrain.sizes import in_bytes

__all__ = ["directory", "not_negative", "positive", "share", "size"]


def size(name: str) -> Callable[[str], int]:
    """Return what parses a size, such as ``8GiB``, for the option ``name``."""

    def parse(text: str) -> int:
        try:
            return in_bytes(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def share(name: str) -> Callable[[str], float]:
    """Return what parses a share of a whole, such as ``0.02``, for the option ``name``."""

    def parse(text: str) -> float:
        try:
            value: float | str = float(text)
        except ValueError:
            value = text
        try:
            check_share(name, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return float(value)

    return parse


def directory(text: str) -> str:
    """Parse the path of a directory; whether it is usable, a store says later."""
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
    """Parse a finite number of 0 or more."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
