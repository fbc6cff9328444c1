"""Parses and formats sizes and counts for people.

Units are powers of 1024 (``KiB``, ``MiB``, ``GiB``, ``TiB``) or of 1000 (``kB``, ``MB``, ...), as
their names say. Messages use powers of 1024, as memory is counted so. Only `ssdtrain bench`,
`doctor` and `lifespan` use powers of 1000 for drives, as their makers do.
"""

from __future__ import annotations

import re
from typing import Final

from ssdtrain.errors import ConfigError

__all__ = ["SIZE_MAX", "in_bytes", "shown_bytes", "shown_count", "shown_rate"]

SIZE_MAX: Final = (1 << 63) - 1
"""The largest offset in a file."""

PREFIXES: Final = "KMGT"
UNITS: Final[dict[str, int]] = (
    {"": 1, "B": 1}
    | {f"{prefix}IB": 1 << 10 * power for power, prefix in enumerate(PREFIXES, 1)}
    | {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate(PREFIXES, 1)}
)
"""By the name in capitals: ``mib`` is ``MiB``."""
SHOWN_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
WRITTEN: Final = re.compile(r"\s*([\d_]{1,24}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def in_bytes(name: str, value: object) -> int:
    """Return the bytes of a size that was given for the option ``name``.

    It is a positive whole number, or text such as ``"8GiB"``, ``"1.5 GiB"`` or ``"500MB"``.
    """
    nbytes = 0
    if isinstance(value, str):
        nbytes = _parse(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    if nbytes < 1:
        raise ConfigError(
            f"{name} must be a positive whole number of bytes, or text such as '8GiB' or '500MB', "
            f"not {value!r}"
        )
    if nbytes > SIZE_MAX:
        raise ConfigError(f"{name} must be at most {SIZE_MAX} bytes, not {value!r}")
    return nbytes


def _parse(text: str) -> int:
    """Return the bytes of a size as text, or 0 if it is no size."""
    match = WRITTEN.fullmatch(text)
    if match is None:
        return 0
    number, unit = match.groups()
    # "8G" is refused: to some it means 8 GiB and to others 8 GB.
    factor = UNITS.get(unit.upper(), 0)
    whole, _, fraction = number.partition(".")
    if fraction and factor == 1:
        return 0  # "1.5" was perhaps meant with a unit: there is no half byte.
    try:
        return int(whole) * factor + int(float(f"0.{fraction or 0}") * factor)
    except ValueError:
        return 0  # Such as "1__0": underlines stand between digits.


def shown_bytes(nbytes: float) -> str:
    """Return a size as reports, errors and the log write it: ``"71.2 MiB"``, ``"8 GiB"``."""
    if nbytes < 1 << 10:
        return shown_count(round(nbytes), "byte")
    size, shown = float(nbytes), "bytes"
    for unit in SHOWN_UNITS:
        # By the rounded figure, so that no size is shown as 1024.0 of the smaller unit.
        if round(size, 1) < 1024:
            break
        size, shown = size / 1024, unit
    figure = f"{size:.1f}".removesuffix(".0")
    return f"{figure} {shown}"


def shown_count(count: int, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``"1 tensor"``, ``"2 tensors"``."""
    words = singular if count == 1 else plural or f"{singular}s"
    return f"{count} {words}"


def shown_rate(nbytes: float, seconds: float) -> str:
    """Return a rate in brackets, to follow a size: `` (1.2 GiB/s)``; empty if no time passed."""
    return f" ({shown_bytes(nbytes / seconds)}/s)" if seconds > 0 else ""
