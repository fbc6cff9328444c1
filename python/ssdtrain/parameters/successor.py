"""The bytes that a weight is to have, on the disk beside those that it has."""

from __future__ import annotations

from torch import Tensor

from ssdtrain.errors import SsdtrainError
from ssdtrain.geometry import checksum_of
from ssdtrain.store import StoredTensor, TensorStore

__all__ = ["Successor"]


class Successor:
    """An updated weight that takes its place later, or never."""

    __slots__ = ("source", "stored", "sum")

    def __init__(self, updated: Tensor, store: TensorStore) -> None:
        """Begin to write a tensor that nobody else has."""
        self.source: Tensor | None = updated
        """The bytes, until the disk has them in whole; for good if it does not take them."""
        self.sum = checksum_of(updated)
        self.stored: StoredTensor[Tensor] | None = None
        try:
            self.stored = store.write(updated)
        except SsdtrainError:
            # It stays in memory. Whether the disk takes it is asked again when it leaves.
            return

    def settle(self) -> None:
        """Wait for the write."""
        if self.source is None or self.stored is None:
            return
        try:
            self.stored.wait()
        except SsdtrainError:
            # As above: the bytes are in memory still.
            self.stored = None
        else:
            self.source = None

    def tensor(self, store: TensorStore) -> Tensor:
        """Return the bytes.

        Raises:
            StorageError: They could not be read.

        """
        self.settle()
        if self.source is not None:
            return self.source
        assert self.stored is not None, "what is not in memory is on the disk"
        return store.read(self.stored).result()
