"""What autograd holds instead of a saved tensor.

The packed object is the lifetime: autograd drops it when its node has run, when the graph is
dropped, or after an exception, and with its last user a record gives up its memory, its write and
its extent. Nobody counts steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Pending, Slot, Stored
from ssdtrain.errors import SsdtrainError
from ssdtrain.machine.torch_internals import current_node

if TYPE_CHECKING:
    from ssdtrain.stats import Holding, Ledger

__all__ = [
    "ExcludedTensor",
    "Geometry",
    "KeptTensor",
    "Loading",
    "Record",
    "SavedTensor",
    "counts_apart",
    "part_of",
    "root_of",
    "span_bytes",
]

SPAN_GRANULE: Final = 16
"""Parts begin on a multiple of the largest item, so that tensors of any dtype can share them."""
SLOT_OVERHEAD_BYTES: Final = 2 * 4096
NO_VERSION: Final = -1
"""Inference tensors have no version counter."""
UNUSUAL: Final = ("torch.q", "torch.complex32", "torch.bcomplex32")
"""Quantised types, which are not managed, and those that torch warns of at their first use."""


with torch.inference_mode(mode=False):
    EMPTY: Final = {
        dtype: torch.empty(0, dtype=dtype, device="cpu")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(UNUSUAL)
    }
"""Made before any mode of torch's is on, under which they would be something else."""


class Geometry:
    """How a tensor lies in its storage; strides too, because kernels choose by them."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset: int = int(tensor.storage_offset()) * tensor.itemsize
        """Bytes from the start of the storage."""

    def build(self, storage: UntypedStorage, start: int) -> Tensor:
        """Return a tensor on ``storage``, whose first byte was at ``start`` of the original."""
        offset = (self.offset - start) // self.dtype.itemsize
        return _empty(self.dtype).data.set_(storage, offset, self.size, self.stride)


def part_of(tensor: Tensor, storage_bytes: int) -> tuple[int, int]:
    """Return start and length, in bytes, of the part of its storage that is kept for ``tensor``.

    The whole storage if the tensor spans half of it or more: the slices of a fused projection are
    saved one after the other, and one write serves them all. A small view of something large (a
    batch of a data set in memory) takes its own part only.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return 0, 0
    span = nbytes if tensor.is_contiguous() else span_bytes(tensor)
    if 2 * span >= storage_bytes:
        return 0, storage_bytes
    offset = int(tensor.storage_offset()) * tensor.itemsize
    start = offset - offset % SPAN_GRANULE
    return start, offset + span - start


def root_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter this one shares: what it is a view of, or itself.

    Not all tensors on one storage share one: ``.data`` counts for itself, and so does each part
    that ``unsafe_chunk`` returns, which torch's LSTM cells fill one after the other.
    """
    base = tensor._base  # noqa: SLF001 - the only way to ask a view for its base
    return tensor if base is None else base


def counts_apart(tensor: Tensor, storage_bytes: int) -> bool:
    """Whether this is a part of a storage whose other parts may change without its counter.

    Bytes around it could not be told from its own once they are on the disk.
    """
    return root_of(tensor).nbytes < storage_bytes


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    size, stride = tensor.size(), tensor.stride()
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (reach + 1) * tensor.itemsize


class Loading:
    """A read that was begun; whoever holds this holds its memory."""

    __slots__ = ("__weakref__", "_pending", "_slot", "has_failed")

    def __init__(self, pending: Pending | None, slot: Slot | None) -> None:
        assert (pending is None) != (slot is None)
        self._pending = pending
        self._slot = slot
        self.has_failed = False
        """Nobody joins it any more: the next user reads anew."""

    def done(self) -> bool:
        """Whether the bytes are there, or will never be."""
        pending = self._pending
        return pending is None or pending.done()

    def wait(self) -> Slot:
        """Return the bytes, waiting if they are not there; raises what went wrong."""
        # Another thread may wait for the same read, and end it between these lines.
        pending = self._pending
        if pending is not None:
            try:
                self._slot = pending.wait()
            except SsdtrainError:
                self.has_failed = True
                raise
            self._pending = None
        slot = self._slot
        assert slot is not None
        return slot


class Record:
    """One saved storage at one version: its bytes in memory, on the way, or on the disk."""

    __slots__ = (
        "__weakref__",
        "_ledger",
        "holding",
        "key",
        "loading",
        "nbytes",
        "root",
        "sequence",
        "slot",
        "source",
        "start",
        "storage",
        "stored",
        "version",
        "written_at",
    )

    def __init__(
        self,
        tensor: Tensor,
        start: int,
        nbytes: int,
        sequence: int,
        *,
        ledger: Ledger,
        registry: dict[int, Holding[Record]],
    ) -> None:
        storage = tensor.untyped_storage()
        self.source: Tensor | None = tensor.detach()
        """The tensor itself, for as long as its bytes may be needed from memory."""
        self.storage: weakref.ref[UntypedStorage] = weakref.ref(storage)
        """Dead means: the memory is gone, whoever else may have used it."""
        self.root: weakref.ref[Tensor] = weakref.ref(root_of(tensor))
        """Whose version counter is meant; see ``root_of``."""
        self.start = start
        """First byte of the storage that is kept; a multiple of 16, so every dtype can index it."""
        self.nbytes = nbytes
        self.version = tensor._version  # noqa: SLF001 - the identity of the content
        self.sequence = sequence
        """Autograd's sequence number when this was packed: the gate (see ``Tracker``)."""
        self.stored: Stored | None = None
        self.written_at = 0
        """The address that was written from: torch can move the memory of a live storage."""
        self.loading: weakref.ref[Loading] | None = None
        self.slot: weakref.ref[Slot] | None = None
        self.key = 0
        """The policy's name for this tensor (see ``prefetch.next_key``)."""
        self._ledger = ledger
        self.holding = ledger.hold(self, nbytes, id(storage), registry)
        """The reference to this record for everybody who must not keep it alive."""

    def address(self) -> int:
        """Return the address of the first byte; only while the source is held."""
        assert self.source is not None
        return self.source.untyped_storage().data_ptr() + self.start

    def slot_bytes(self) -> int:
        """Return the most that a read of this record takes: widened, and rounded to pages."""
        return self.nbytes + SLOT_OVERHEAD_BYTES

    def is_leaving(self) -> bool:
        """Whether it is in memory now, but may have to be read when its turn comes.

        Its write has not been seen to end, or somebody else still has its memory.
        """
        in_memory = self.source is not None or self.storage() is not None
        return in_memory and self.stored is not None

    def reading(self) -> Loading | None:
        """Return the read that is under way, which another user of this record can join."""
        loading = self.loading() if self.loading is not None else None
        return None if loading is None or loading.has_failed else loading

    def is_whole(self) -> bool:
        """Whether the storage still has the bytes to keep (``resize_`` may have taken them)."""
        assert self.source is not None
        return self.source.untyped_storage().nbytes() >= self.start + self.nbytes

    def is_unchanged(self) -> bool:
        """Whether the bytes that were written are those that were saved.

        Neither changed in place on the way, nor moved: sharing a tensor with another process swaps
        the memory of its storage and frees the old one, without a word to the version counter.
        """
        assert self.source is not None
        same_version = self.source._version == self.version  # noqa: SLF001
        return same_version and self.is_whole() and self.address() == self.written_at

    def covers(self, start: int, end: int) -> bool:
        """Whether the bytes ``[start, end)`` of the storage are among those kept."""
        return self.start <= start and end <= self.start + self.nbytes

    def free_source(self) -> None:
        """Let the memory go: the bytes are on the disk."""
        assert self.source is not None
        assert self.stored is not None
        self.source = None
        self._ledger.free(self.holding)


class SavedTensor:
    """The packed object of a tensor whose bytes a record manages."""

    __slots__ = (
        "__weakref__",
        "ahead",
        "counter",
        "geometry",
        "ordinal",
        "record",
        "round",
        "sequence",
        "version",
    )

    def __init__(self, tensor: Tensor, geometry: Geometry, record: Record, sequence: int) -> None:
        self.geometry = geometry
        self.record = record
        self.version = record.version
        self.counter = version_counter(tensor)
        self.sequence = sequence
        self.ahead: Loading | None = None
        """A read begun before it was asked for."""
        self.round: object = None
        self.ordinal = 0

    def build(self, storage: UntypedStorage, start: int) -> Tensor:
        """Return the tensor on ``storage``, with the version counter of the original.

        So a backward that changes what it got in place, or a change between a backward and the
        backward of that, is noticed by every other node that saved the same tensor.
        """
        tensor = self.counter.detach()
        tensor.data = self.geometry.build(storage, start)
        return tensor


class KeptTensor:
    """The packed object of a tensor that stays in memory, and is counted there.

    It is too small to be worth a write, counts apart, or lies in memory that is somebody else's.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor, nbytes: int, storage_bytes: int, ledger: Ledger) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version  # noqa: SLF001 - autograd's own check, see check_version
        ledger.hold_kept(self, id(tensor.untyped_storage()), nbytes, storage_bytes)


class ExcludedTensor:
    """The packed object of a weight, or of a tensor we do not manage: not counted, kept."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = NO_VERSION if tensor.is_inference() else tensor._version  # noqa: SLF001


def version_counter(tensor: Tensor) -> Tensor:
    """Return a tensor without bytes that shares the version counter of ``tensor``."""
    counter = tensor.detach()
    counter.data = _empty(tensor.dtype)
    return counter


def _empty(dtype: torch.dtype) -> Tensor:
    made = EMPTY.get(dtype)
    return torch.empty(0, dtype=dtype, device="cpu") if made is None else made


def check_version(counter: Tensor, version: int, describe: Callable[[], str]) -> None:
    """Raise as autograd does if a saved tensor was changed in place.

    With hooks set autograd itself no longer checks, and the gradient would be silently wrong.
    """
    if version not in (NO_VERSION, counter._version):  # noqa: SLF001
        # Outside of a backward anybody may ask a node for what it saved; then no node runs.
        node = current_node()
        saver = f", which {node.name()} needs," if node is not None else ""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {describe()}{saver} is at version {counter._version}; "  # noqa: SLF001
            f"expected version {version} instead. Clone the tensor before it is changed in place, "
            "or use the out-of-place operation; torch.autograd.set_detect_anomaly(True) shows the "
            "line that saved it."
        )
