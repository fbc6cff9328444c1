"""The public ``TensorStore``: stores torch tensors and numpy arrays in files without names.

>>> with ssdtrain.TensorStore("/mnt/nvme") as store:  # doctest: +SKIP
...     stored = store.write(x)  # returns at once; x must not change before stored.wait()
...     stored.wait()  # raises the error of the write
...     y = store.read(stored).result()  # a new tensor, bit for bit
...     store.overwrite(stored, x + 1)  # the old bytes stay until the new ones are written
...     store.read_into(stored, y).result()  # into the memory of y
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ssdtrain._core import Geometry, Overwrite, Pending, PendingInto, Slot, Store, Stored
from ssdtrain.config import (
    Backend,
    DirectIo,
    Directories,
    Size,
    StoreConfig,
    directories,
    optional_bytes,
)
from ssdtrain.errors import ClosedError, ConfigError
from ssdtrain.geometry import TORCH
from ssdtrain.machine.torch_internals import is_wrapped
from ssdtrain.open_store import open_store

__all__ = ["PendingRead", "StoredTensor", "TensorStore", "is_dense"]

T = TypeVar("T", bound="Tensor | np.ndarray[Any, Any]")


class StoredTensor(Generic[T]):
    """A tensor on its way to the disk, or there; its release or its death gives the space back."""

    def __init__(self, source: T, stored: Stored | None, form: _Form) -> None:
        self._source: T | None = source
        self._stored = stored
        self._form = form
        self._overwrite: Overwrite | None = None
        self._released = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, without the widening to the drive's blocks."""
        return self._form.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a read takes, with the widening to the drive's blocks."""
        return 0 if self._stored is None else self._stored.slot_bytes

    def done(self) -> bool:
        """Return whether the write, and an overwrite after it, has ended, well or not."""
        stored, overwrite = self._stored, self._overwrite
        if self._released or stored is None:
            return True
        return stored.done() and (overwrite is None or overwrite.done())

    def wait(self) -> None:
        """Wait for the write, and for an overwrite after it.

        Raises ``StorageError``, ``NoSpaceError`` or ``ClosedError``. The error of an overwrite is
        raised once; the old bytes are there then.
        """
        self.refuse_released()
        stored, overwrite = self._stored, self._overwrite
        if stored is not None:
            stored.wait()
        if overwrite is not None:
            try:
                overwrite.wait()
            finally:
                has_ended = overwrite.done()
                # Another thread may have begun the next overwrite, which must not be dropped: no
                # thread runs between these two lines, as they call nothing.
                if has_ended and self._overwrite is overwrite:
                    self._overwrite = None
        if self._overwrite is None:
            self._source = None

    def refuse_released(self) -> None:
        """Raise ``ClosedError`` if this tensor was released."""
        if self._released:
            raise ClosedError("this tensor was released; write it again to read it again")


class PendingRead(Generic[T]):
    """A tensor on its way back, to memory of its own or that of another tensor."""

    def __init__(
        self, store: Store, stored: StoredTensor[T], into: _Target[T] | None = None
    ) -> None:
        self._store = store
        self._stored = stored
        self._into = into
        self._pending: Pending | PendingInto | None = None
        self._result: T | None = None
        self._is_begun = False
        # Several threads may ask for the result: the first begins the read and makes the result. A
        # signal handler may ask while this thread makes the result: the last result counts.
        self._lock = threading.RLock()
        self._process = os.getpid()
        if stored.done():
            self._begin()

    def done(self) -> bool:
        """Return whether ``result`` would not wait."""
        if self._result is not None:
            return True
        if self._stored.done():
            self._begin()
        pending = self._pending
        return self._is_begun and (pending is None or pending.done())

    def result(self) -> T:
        """Wait for the bytes; return a new tensor or array, or the one given to ``read_into``.

        Raises:
            StorageError: The write or the read failed; no wrong byte is returned.
            CorruptError: The bytes differ from those that were written (``verify=True``).
            ClosedError: The tensor was released, the store closed, or this process was forked.

        """
        if self._result is None:
            self._begin()
            pending = self._pending
            slot = pending.wait() if pending is not None else None
            with self._lock:
                if self._result is None:
                    self._result = self._made_of(slot)
        return self._result

    def _made_of(self, slot: Slot | None) -> T:
        into = self._into
        if into is None:
            made: T = self._stored._form.build(slot)  # noqa: SLF001 - two halves of one thing
            return made
        into.note_change()
        return into.tensor

    def _begin(self) -> None:
        """Begin the read once; raise the error of the write."""
        if os.getpid() != self._process:
            # The lock may be held for ever, by a thread that is in the other process.
            raise ClosedError("this read belongs to the process that was forked")
        self._stored.wait()
        with self._lock:
            if self._is_begun:
                return
            stored = self._stored._stored  # noqa: SLF001 - two halves of one thing
            # Released by another thread meanwhile: that sets the mark before it takes the handle.
            self._stored.refuse_released()
            into = self._into
            if stored is not None and into is None:
                self._pending = self._store.read(stored)
            elif stored is not None and into is not None:
                into.note_change()
                self._pending = self._store.read_into(stored, into.address, into.nbytes, into.owner)
            self._is_begun = True


class TensorStore:
    """An asynchronous store of torch CPU tensors and numpy arrays on one or more directories.

    Args:
        dir: A directory on a local file system, or a list of them.
        max_disk_bytes: Upper bound on the bytes reserved, also as ``"8GiB"``; beyond it ``write``
            raises ``NoSpaceError``.
        backend: ``"auto"``, ``"io_uring"`` or ``"psync"``.
        direct_io: ``"required"``, ``"optional"`` or ``"disabled"``.
        verify: Checksum (xxh3) each tensor before its write, and compare after its read.

    Raises:
        ConfigError: An option or a directory cannot be used.

    """

    def __init__(
        self,
        dir: Directories,  # noqa: A002 - as in ssdtrain.offload
        *,
        max_disk_bytes: Size | None = None,
        backend: Backend = "auto",
        direct_io: DirectIo = "required",
        verify: bool = False,
    ) -> None:
        self._store = open_store(
            StoreConfig(
                dirs=directories(dir),
                max_disk_bytes=optional_bytes("max_disk_bytes", max_disk_bytes),
                backend=backend,
                direct_io=direct_io,
                verify=verify,
            )
        )
        self._opening_notes = self._store.notes()

    @classmethod
    def over(cls, store: Store) -> Self:
        """Return a store of tensors over an open store of bytes; for users inside of ssdtrain.

        It lives as long as either is in use.
        """
        made = cls.__new__(cls)
        made._store = store  # noqa: SLF001 - its constructor
        made._opening_notes = store.notes()  # noqa: SLF001 - likewise
        return made

    def has_lost_directories(self) -> bool:
        """Return whether a directory went out of use since the store was opened."""
        return self._store.notes() != self._opening_notes

    def write(self, tensor: T) -> StoredTensor[T]:
        """Begin to write ``tensor`` and return at once.

        Its memory is read in place, from its first element to its last with all bytes between: none
        may change before ``wait()`` has returned on the result. Strides are kept; a numpy array
        that is not contiguous is copied first.

        Raises:
            ConfigError: Not a dense CPU tensor, or an array of Python objects.
            NoSpaceError: ``max_disk_bytes`` has no room; ``wait()`` raises it for a full disk.
            BusyError: More writes wait than the queue holds; wait for some.
            ClosedError: The store is closed.

        """
        form, owner, address, nbytes = _take_apart(tensor)
        stored = self._store.write(address, nbytes, owner) if nbytes else None
        return StoredTensor(tensor, stored, form)

    def overwrite(self, stored: StoredTensor[T], tensor: T) -> None:
        """Begin to write ``tensor`` in the place of the bytes of ``stored``, and return at once.

        It must have the same type, shape and strides, and must not change before
        ``stored.wait()`` has returned. The old bytes stay on the disk until the new bytes are
        written in whole, so for a while both take space; if the overwrite fails,
        ``stored.wait()`` raises, and reads give the old bytes. Reads that were begun before give
        the old or the new bytes; reads that are begun after wait for the new bytes.

        Raises:
            ConfigError: Another shape or type, or the write of ``stored`` has not ended.
            BusyError: An overwrite before has not ended; ``stored.wait()`` first.
            NoSpaceError: ``max_disk_bytes`` has no room for both.
            ClosedError: The tensor was released, or the store is closed.

        """
        form, owner, address, nbytes = _take_apart(tensor)
        _refuse_other_handle("overwrite", stored)
        stored.refuse_released()
        stored._form.refuse_other(form, "overwritten by")  # noqa: SLF001 - two halves of one thing
        handle = stored._stored  # noqa: SLF001
        if handle is None:
            return
        if handle.done() and stored.done():
            # Raises an error that no call has raised yet.
            stored.wait()
        stored._overwrite = self._store.overwrite(  # noqa: SLF001
            handle, address, nbytes, owner
        )
        stored._source = tensor  # noqa: SLF001

    def read_into(self, stored: StoredTensor[T], tensor: T) -> PendingRead[T]:
        """Begin to read the bytes of ``stored`` into the memory of ``tensor``.

        It must have the same type, shape and strides, without holes, and be writable. Do not use it
        before ``result()`` has returned it; after an error its content is unspecified. If
        ``result()`` was interrupted, or the read was dropped, the disk may write there until the
        store is closed: call ``result()`` again before you use the memory. The version counter is
        raised, so that autograd knows of the change. The bytes need no copy if the tensor begins at
        the same offset within a block of the disk as the one that was written, as large tensors of
        the same allocator mostly do.

        Raises:
            ConfigError: The memory of ``tensor`` cannot take the bytes; the message says why.

        """
        _refuse_other_handle("read_into", stored)
        return PendingRead(self._store, stored, _Target(stored, tensor))

    def read(self, stored: StoredTensor[T]) -> PendingRead[T]:
        """Begin to read the bytes of ``stored``, as soon as their write has ended."""
        _refuse_other_handle("read", stored)
        return PendingRead(self._store, stored)

    def release(self, stored: StoredTensor[T]) -> None:
        """Give the space of ``stored`` back; a write that has not begun is cancelled."""
        _refuse_other_handle("release", stored)
        stored._released = True  # noqa: SLF001 - two halves of one thing
        stored._stored = None  # noqa: SLF001
        stored._overwrite = None  # noqa: SLF001
        stored._source = None  # noqa: SLF001

    def trim(self) -> int:
        """Give disk space that no stored tensor needs back to the file system; return its bytes.

        Freed space is otherwise kept for the next write, which is faster in blocks that exist
        already: call this between phases, not between steps. It ends each file after its last
        stored tensor. Reads and writes may go on meanwhile.

        Raises:
            ClosedError: The store is closed.
            StorageError: The file system refused.

        """
        return self._store.trim()

    def stats(self) -> dict[str, Any]:
        """Return counts: bytes and requests written and read, busy nanoseconds, space in use."""
        return self._store.stats()

    def close(self) -> None:
        """Refuse new work, end I/O that has begun; waits raise ``ClosedError``. Idempotent.

        Tensors that were read stay valid.
        """
        self._store.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()


class _Form:
    """The form of a tensor or an array, which makes it from bytes again."""

    def __init__(self, nbytes: int, start: int, form: Geometry | np.ndarray[Any, Any]) -> None:
        self.nbytes = nbytes
        self._start = start
        self._form = form

    def build(self, slot: Slot | None) -> Any:
        form = self._form
        if isinstance(form, Geometry):
            if slot is None:
                return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="cpu")
            return form.build(TORCH.storage_on(slot), self._start)
        if slot is None:
            return np.empty_like(form)
        return np.ndarray(form.shape, form.dtype, memoryview(slot), 0, form.strides)

    def refuse_other(self, other: _Form, verb: str) -> None:
        """Raise ``ConfigError`` if a tensor of another form is given for this one."""
        if self._layout()[0] != other._layout()[0]:
            raise ConfigError(
                f"a {self._layout()[0]} was written, which cannot be {verb} a "
                f"{other._layout()[0]}; torch.from_numpy(array) and tensor.numpy() convert them"
            )
        if self._facts() != other._facts():
            raise ConfigError(
                f"{self._shown()} cannot be {verb} {other._shown()}; give the same type, shape and "
                "strides"
            )

    def _facts(self) -> tuple[object, ...]:
        kind, dtype, size, stride = self._layout()
        # The stride of a dimension with a single element means nothing.
        steps = [step for n, step in zip(size, stride, strict=True) if n > 1]
        return kind, dtype, size, steps if self.nbytes else []

    def _shown(self) -> str:
        kind, dtype, size, stride = self._layout()
        return f"a {kind} of {dtype}, shape {size} and strides {stride}"

    def _layout(self) -> tuple[str, object, tuple[int, ...], tuple[int, ...]]:
        form = self._form
        if isinstance(form, Geometry):
            return "tensor", form.dtype, tuple(form.size), form.stride
        return "numpy array", form.dtype, form.shape, form.strides


class _Target(Generic[T]):
    """Memory that a read may write into."""

    def __init__(self, stored: StoredTensor[T], tensor: T) -> None:
        form, owner, address, nbytes = _take_apart(tensor)
        stored._form.refuse_other(form, "read into")  # noqa: SLF001 - two halves of one thing
        if isinstance(tensor, Tensor):
            self._refuse_unwritable(tensor)
        elif not tensor.flags.writeable:
            raise ConfigError("the array is read-only; read into a writable array")
        elif owner is not tensor:
            raise ConfigError("an array with holes cannot be read into; give a contiguous array")
        self.tensor = tensor
        self.owner = owner
        """Keeps the memory alive: the tensor's `.data` may be set to another tensor."""
        self.address = address
        self.nbytes = nbytes

    def _refuse_unwritable(self, tensor: Tensor) -> None:
        if tensor.is_conj() or tensor.is_neg():
            raise ConfigError("a conjugated or negated view has no bytes of its own to read into")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ConfigError("a tensor that requires grad is read into under torch.no_grad()")
        if not is_dense(tensor):
            raise ConfigError("a tensor with holes cannot be read into; give a dense tensor")

    def note_change(self) -> None:
        """Tell autograd that the bytes change."""
        if isinstance(self.tensor, Tensor):
            increment_version(self.tensor)


def _refuse_other_handle(verb: str, stored: object) -> None:
    """Raise ``ConfigError`` unless ``stored`` is a result of ``write``."""
    if not isinstance(stored, StoredTensor):
        raise ConfigError(
            f"{verb} takes a result of write, not {type(stored)!r}: stored = store.write(tensor)"
        )


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie one after the other, in some order of the dimensions."""
    expected = 1
    if not tensor.numel():
        return True
    for step, n in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if n > 1 and step != expected:
            return False
        expected *= n
    return True


def _take_apart(tensor: object) -> tuple[_Form, object, int, int]:
    """Return the form, the owner of the bytes, their address and their count."""
    if type(tensor) is Tensor or type(tensor) is Parameter:
        if is_wrapped(tensor) or tensor._is_zerotensor():  # noqa: SLF001 - it has no bytes
            raise ConfigError("a tensor inside a function transform has no bytes of its own yet")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise ConfigError("only dense tensors can be stored; convert with .to_dense() first")
        if not tensor.is_cpu:
            raise ConfigError(
                f"only CPU tensors can be stored, not {tensor.device}; copy it with .cpu() first"
            )
        source = tensor.detach().resolve_conj().resolve_neg()
        geometry = Geometry(TORCH, source)
        span = geometry.span_bytes() if source.numel() else 0
        form = _Form(tensor.nbytes, geometry.offset, geometry)
        return form, source, source.data_ptr(), span
    if type(tensor) is np.ndarray or type(tensor) is np.memmap:
        if tensor.dtype.hasobject:
            raise ConfigError("an array of Python objects has no bytes to store; use numbers")
        array = tensor
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)
        # Shape, type and strides without the bytes.
        template = np.lib.stride_tricks.as_strided(
            np.empty(1, array.dtype), array.shape, array.strides, writeable=False
        )
        return _Form(array.nbytes, 0, template), array, array.ctypes.data, array.nbytes
    if isinstance(tensor, Tensor | np.ndarray):
        raise ConfigError(
            f"only dense tensors and plain arrays can be stored, not {type(tensor)!r}: all but its "
            "bytes would be lost; convert it first"
        )
    raise ConfigError(f"only torch tensors and numpy arrays can be stored, not {type(tensor)!r}")
