"""The errors of ssdtrain. A message names the object, the place, the cause and a remedy."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "CudaError",
    "DiskBoundError",
    "NoSpaceError",
    "PoisonedError",
    "SsdtrainError",
    "StorageError",
    "UnsupportedError",
]


class SsdtrainError(RuntimeError):
    """The base of all errors of this package."""

    errno: int | None = None
    """The kernel's error number, if the kernel refused."""


class ConfigError(SsdtrainError, ValueError):
    """An option or a directory is not usable as given."""


class StorageError(SsdtrainError):
    """The kernel or the device failed an operation; no wrong byte was handed out."""


class NoSpaceError(StorageError):
    """The disk, a quota or ``max_disk_bytes`` has no room."""


class DiskBoundError(NoSpaceError):
    """``max_disk_bytes`` has no room: the disk has not failed."""


class CorruptError(StorageError):
    """Other bytes came back than were written (``verify=True``)."""


class CudaError(SsdtrainError):
    """The CUDA driver refused or failed a call, which the message names."""


class UnsupportedError(SsdtrainError):
    """The kernel, the file system, torch or an object does not support the request."""


class ClosedError(SsdtrainError):
    """The store was closed, or belongs to the process that forked this one."""


class PoisonedError(SsdtrainError):
    """An I/O worker died; bytes that it held cannot be trusted."""


class CancelledError(SsdtrainError):
    """The operation was cancelled before it ended."""


class BusyError(SsdtrainError):
    """More requests wait for the disk than the queue holds."""


class BudgetError(SsdtrainError, MemoryError):
    """``max_resident_bytes`` cannot be kept: tensors that cannot leave memory need more at once.

    A forward whose saved tensors do not fit goes on without keeping them, and its backward raises
    this error: so it can name a bound that is enough for all of them. Gradients are partial then:
    zero them before you try again.

    Searches for a batch size take it for a lack of memory, by words of its message: Accelerate's,
    and so ``Trainer(auto_find_batch_size=True)``, and Lightning's.
    """
