"""An update of a weight that waits on the disk, beside the bytes that the weight has."""

from __future__ import annotations

from torch import Tensor

from ssdtrain.errors import SsdtrainError
from ssdtrain.geometry import checksum_of
from ssdtrain.store import StoredTensor, TensorStore

__all__ = ["ParkedUpdate"]


class ParkedUpdate:
    """An updated weight that is put in the place of the old bytes later, or never."""

    __slots__ = ("source", "stored", "sum")

    def __init__(self, updated: Tensor, store: TensorStore) -> None:
        """Begin to write a tensor that has no other user."""
        self.source: Tensor | None = updated
        """The bytes until their write has ended; for good if it fails."""
        self.sum = checksum_of(updated)
        self.stored: StoredTensor[Tensor] | None = None
        try:
            self.stored = store.write(updated)
        except SsdtrainError:
            # The bytes stay in memory. The weight is written again when it leaves.
            return

    def settle(self) -> None:
        """Wait for the write."""
        if self.source is None or self.stored is None:
            return
        try:
            self.stored.wait()
        except SsdtrainError:
            # As above: the bytes are still in memory.
            self.stored = None
        else:
            self.source = None

    def tensor(self, store: TensorStore) -> Tensor:
        """Return the bytes.

        Raises:
            StorageError: The read has failed.

        """
        self.settle()
        if self.source is not None:
            return self.source
        assert self.stored is not None, "what is not in memory is on the disk"
        return store.read(self.stored).result()
