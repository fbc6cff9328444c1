"""Reads the text that the demo trains on, and cuts batches from its bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

TEXT_BYTES_MAX = 16 << 20
"""Enough for every step of every run."""
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders inside of the standard library's folder that are not part of it."""


def standard_library_text(*, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """Read the sources of Python's standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if FOREIGN_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= bytes_max:
            break
    if not text:
        raise FileNotFoundError(
            f"there are no *.py files under {root}: this Python was installed without the sources "
            "of its standard library; give a text of your own with --data FILE"
        )
    return bytes(text[:bytes_max])


def load_text(path: str | None) -> bytes:
    """Read the first `TEXT_BYTES_MAX` bytes of the user's own text, or the standard library."""
    if path is None:
        return standard_library_text()
    with open(path, "rb") as file:
        return file.read(TEXT_BYTES_MAX)


class ByteBatches:
    """Batches of token ids (the bytes themselves), which depend on seed and step alone."""

    def __init__(self, text: bytes, *, batch: int, sequence: int, seed: int) -> None:
        if len(text) <= sequence:
            raise ValueError(
                f"the text has {len(text)} bytes, a sequence of {sequence} needs at least "
                f"{sequence + 1}; give a longer text with --data or a shorter --sequence"
            )
        # A bytearray, because torch warns about tensors over memory that must not be written.
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._sequence = sequence
        self._seed = seed

    def at(self, step: int) -> torch.Tensor:
        """Return the batch of a step: int64, (batch, sequence + 1), each row a piece of text."""
        # A generator of its own: a batch must not change the random numbers of dropout. It takes in
        # 32 bits of its seed; a large prime keeps neighbours apart.
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % (1 << 32))
        starts = torch.randint(
            len(self._text) - self._sequence, (self._batch, 1), generator=generator
        )
        return self._text[starts + torch.arange(self._sequence + 1)].long()
