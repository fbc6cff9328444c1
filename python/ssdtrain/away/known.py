"""Which tensors may be away, of all owners."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ssdtrain.away.tensor import OffloadedTensor
from ssdtrain.watched import User

__all__ = ["KNOWN", "in_use", "known_of"]

KNOWN: dict[int, tuple[weakref.ref[Tensor], OffloadedTensor]] = {}
"""By the number of the tensor: those of all owners. An entry goes with its tensor."""


def known_of(tensor: Tensor) -> OffloadedTensor | None:
    """Return what is known of a tensor, if it may be away."""
    entry = KNOWN.get(id(tensor))
    if entry is None:
        return None
    there, one = entry
    if there() is tensor:
        return one
    # Of a tensor that is gone: an interrupt kept it from being forgotten.
    KNOWN.pop(id(tensor), None)
    one.forget()
    return None


@contextmanager
def in_use(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Have tensors in memory while a block runs, on a thread that says what it uses."""
    user = User()
    found = [one for tensor in tensors if (one := known_of(tensor)) is not None]
    try:
        for one in found:
            one.note_user(user)
            one.owner.bring(one)
        yield
    finally:
        for one in found:
            one.end_use(user)
