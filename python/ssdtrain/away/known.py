"""A table of all tensors of the process that may be away."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ssdtrain.away.tensor import OffloadedTensor
from ssdtrain.rematerialize.find import HELD_ELSEWHERE
from ssdtrain.watched import User

__all__ = ["KNOWN", "in_use", "known_of"]

KNOWN: dict[int, tuple[weakref.ref[Tensor], OffloadedTensor]] = {}
"""By the id of a tensor. An entry ends with its tensor."""


def known_of(tensor: Tensor) -> OffloadedTensor | None:
    """Return the entry of a tensor that may be away, or ``None``."""
    reference, entry = KNOWN.get(id(tensor), (None, None))
    if reference is None or entry is None:
        return None
    if reference() is tensor:
        return entry
    # The tensor of this entry is gone, and an interrupt has kept the entry from being forgotten.
    KNOWN.pop(id(tensor), None)
    entry.forget()
    return None


# A recipe would hold the bytes of a weight beside the bound.
HELD_ELSEWHERE.append(lambda leaf: known_of(leaf) is not None)


@contextmanager
def in_use(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Have tensors in memory while a block runs."""
    user = User()
    found = [entry for tensor in tensors if (entry := known_of(tensor)) is not None]
    try:
        for entry in found:
            entry.note_user(user)
            entry.owner.bring(entry)
        yield
    finally:
        for entry in found:
            entry.end_use(user)
