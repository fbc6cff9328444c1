"""What autograd holds instead of a saved tensor.

The packed object is the lifetime: autograd drops it when its node has run, when the graph is
dropped, or after an exception, and with its last user a record gives up its memory, its write and
its extent. Nobody counts steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from torch import Tensor, UntypedStorage

from ssdtrain._core import Kept
from ssdtrain.geometry import Geometry, empty
from ssdtrain.machine.torch_internals import current_node, is_below_autograd
from ssdtrain.residency import Residency
from ssdtrain.transfer.base import Handle

__all__ = [
    "Record",
    "SavedTensor",
    "check_version",
    "exclude",
    "root_of",
    "shares_no_counter",
]

NO_VERSION: Final = -1
"""Inference tensors have no version counter."""


def root_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter this one shares: what it is a view of, or itself.

    Not all tensors on one storage share one: ``.data`` counts for itself, and so does each part
    that ``unsafe_chunk`` returns, which torch's LSTM cells fill one after the other.
    """
    base = tensor._base  # noqa: SLF001 - the only way to ask a view for its base
    return tensor if base is None else base


def shares_no_counter(tensor: Tensor, storage_bytes: int) -> bool:
    """Whether other tensors on its storage may change without the version counter of this one.

    Bytes around it could not be told from its own once they are on the disk.
    """
    return root_of(tensor).nbytes < storage_bytes  # defence: parts that count apart stay


class Record:
    """One saved storage at one version: its bytes in memory, on the way, or on the disk."""

    __slots__ = (
        "__weakref__",
        "handle",
        "holding",
        "is_lent",
        "key",
        "nbytes",
        "root",
        "sequence",
        "source",
        "start",
        "storage",
        "version",
        "was_found",
    )

    def __init__(
        self,
        tensor: Tensor,
        start: int,
        nbytes: int,
        *,
        sequence: int,
        key: int,
        residency: Residency,
    ) -> None:
        self.source: Tensor | None = tensor.detach()
        """The tensor itself, for as long as its bytes may be needed from memory."""
        self.storage: weakref.ref[UntypedStorage] = weakref.ref(tensor.untyped_storage())
        """Dead once nobody uses the storage any more: then its memory is gone."""
        self.root: weakref.ref[Tensor] = weakref.ref(root_of(tensor))
        """Whose version counter is meant; see ``root_of``."""
        self.start = start
        """First byte of the part of the storage that it covers; see ``geometry.part_of``."""
        self.nbytes = nbytes
        self.version = tensor._version  # noqa: SLF001 - the identity of the content
        self.sequence = sequence
        """Autograd's sequence number when this was packed: the gate (see ``Writeback``)."""
        self.key = key
        """The policy's name for this tensor (see ``prefetch.next_key``)."""
        self.handle: Handle | None = None
        """Its bytes in the store, from the beginning of a write until the write is given up."""
        self.is_lent = False
        """Whether somebody else holds its memory anyway; see ``lender``."""
        self.was_found = False
        """Whether a backward has found its bytes in memory. The tensor that it was given then lies
        on the storage too, and must not be taken for somebody else's."""
        self.holding = residency.account.hold(nbytes)
        """Its bytes in the account; they end with it."""

    def is_leaving(self) -> bool:
        """Whether it is in memory now, but may have to be read when its turn comes.

        Its write has not been seen to end, or somebody else still has its memory.
        """
        in_memory = self.source is not None or self.storage() is not None
        return in_memory and self.handle is not None

    def is_whole(self) -> bool:
        """Whether the storage still has the bytes it covers (``resize_`` may have taken them)."""
        assert self.source is not None
        return self.source.untyped_storage().nbytes() >= self.start + self.nbytes

    def is_unchanged(self) -> bool:
        """Whether the bytes that were written are those that were saved.

        Neither changed in place on the way, nor moved: sharing a tensor with another process swaps
        the memory of its storage and frees the old one, without a word to the version counter.
        """
        assert self.source is not None
        assert self.handle is not None
        same_version = self.source._version == self.version  # noqa: SLF001
        return (
            self.is_whole()
            and same_version  # defence: version at the end of the write
            and self._address() == self.handle.address  # defence: memory that moved
        )

    def covers(self, start: int, end: int) -> bool:
        """Whether the bytes ``[start, end)`` of the storage are in its part."""
        return self.start <= start and end <= self.start + self.nbytes

    def free_source(self) -> None:
        """Let the memory go: the bytes are on the disk."""
        assert self.source is not None
        assert self.handle is not None
        self.source = None
        self.holding.free()

    def _address(self) -> int:
        assert self.source is not None
        return self.source.untyped_storage().data_ptr() + self.start


class SavedTensor:
    """The packed object of a tensor whose bytes a record manages."""

    __slots__ = ("__weakref__", "counter", "geometry", "leaf", "record", "sequence", "version")

    def __init__(self, tensor: Tensor, geometry: Geometry, record: Record, sequence: int) -> None:
        self.geometry = geometry
        self.record = record
        self.version = record.version
        self.counter = version_counter(tensor)
        self.sequence = sequence
        # defence: a leaf in memory is handed out itself
        self.leaf = weakref.ref(tensor) if tensor.is_leaf else None

    def original(self, storage: UntypedStorage) -> Tensor | None:
        """Return the very tensor that was saved, if it is a leaf that still lies on ``storage``.

        Autograd would hand it out. A backward may return it as a gradient, and a gradient that
        nobody else holds becomes a parameter's own, to which others are added in place: a second
        tensor on the same bytes would let the user's own tensor change.
        """
        leaf = self.leaf() if self.leaf is not None else None
        if (
            leaf is None
            or is_below_autograd()
            or leaf.untyped_storage() is not storage
            or not self.geometry.is_of(leaf)
        ):
            return None
        return leaf

    def counted(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with the version counter of the original.

        So a backward that changes what it got in place, or a change between a backward and the
        backward of that, is noticed by every other node that saved the same tensor.
        """
        counted = self.counter.detach()  # defence: one counter for all who saved it
        counted.data = tensor
        return counted


def exclude(tensor: Tensor) -> Kept:
    """Return the packed object of a tensor that is not managed: not counted, kept."""
    version = NO_VERSION if tensor.is_inference() else tensor._version  # noqa: SLF001
    return Kept(tensor.detach(), version)


def version_counter(tensor: Tensor) -> Tensor:
    """Return a tensor without bytes that shares the version counter of ``tensor``."""
    counter = tensor.detach()
    counter.data = empty(tensor.dtype)
    return counter


def check_version(counter: Tensor, version: int, describe: Callable[[], str]) -> None:
    """Raise as autograd does if a saved tensor was changed in place.

    With hooks set autograd itself no longer checks, and the gradient would be silently wrong.
    """
    if version not in (NO_VERSION, counter._version):  # noqa: SLF001  # defence: version at unpack
        # `grad_fn._saved_...` may be read outside of a backward: then there is no current node.
        node = current_node()
        saver = f", which {node.name()} needs," if node is not None else ""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {describe()}{saver} is at version {counter._version}; "  # noqa: SLF001
            f"expected version {version} instead. Clone the tensor before it is changed in place, "
            "or use the out-of-place operation; torch.autograd.set_detect_anomaly(True) shows the "
            "line that saved it."
        )
