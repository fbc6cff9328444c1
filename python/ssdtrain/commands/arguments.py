"""Words of the command line that several commands take: sizes and directories."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ssdtrain.config import directories
from ssdtrain.errors import ConfigError
from ssdtrain.sizes import in_bytes

__all__ = ["directory", "size"]


def size(name: str) -> Callable[[str], int]:
    """Return what parses a size, such as ``8GiB``, for the option ``name``."""

    def parse(text: str) -> int:
        try:
            return in_bytes(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def directory(text: str) -> str:
    """Parse the path of a directory; whether it is usable, a store says later."""
    try:
        return directories(text)[0]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
