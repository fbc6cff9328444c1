"""The compiled part of ssdtrain: bytes by address and length; tensors stay in Python."""

from typing import Any, Final, final

__all__ = [
    "Overwrite",
    "Pending",
    "PendingInto",
    "Probe",
    "SimulatedDisk",
    "Slot",
    "Store",
    "Stored",
]

@final
class Store:
    """An asynchronous store of byte ranges; see ``ssdtrain.TensorStore`` for tensors and arrays."""

    def __new__(
        cls,
        dirs: list[tuple[str, tuple[int, int] | None]],
        *,
        backend: str,
        direct_io: str,
        max_disk_bytes: int | None,
        verify: bool,
        retain_bytes: int | None = None,
        simulated_disk: SimulatedDisk | None = None,
    ) -> Store:
        """Open one unnamed file and one engine per directory.

        A directory may come with its tuning: pieces in flight, and bytes per piece. Up to
        ``retain_bytes`` (128 MiB unless given) of the memory of ended reads stays resident for the
        next. ``simulated_disk`` is what ``backend="simulated"`` writes to. Raises ``ConfigError``,
        ``NoSpaceError``, ``UnsupportedError`` or ``StorageError``.
        """

    def write(self, address: int, nbytes: int, owner: object) -> Stored:
        """Queue a write of ``nbytes`` bytes at ``address``, which ``owner`` keeps alive."""

    def overwrite(self, stored: Stored, address: int, nbytes: int, owner: object) -> Overwrite:
        """Queue a write that replaces what ``stored`` holds, which must be as many bytes.

        The old bytes stay readable until the new ones are written in whole, and if they never are.
        Raises ``BusyError`` if another overwrite of ``stored`` has not ended.
        """

    def read(self, stored: Stored) -> Pending:
        """Queue a read of what ``stored`` holds; its write must have ended well."""

    def read_into(self, stored: Stored, address: int, nbytes: int, owner: object) -> PendingInto:
        """Queue a read of what ``stored`` holds into ``nbytes`` writable bytes at ``address``.

        ``owner`` keeps them alive, and nobody else may use them before the read has ended.
        """

    def trim(self) -> int:
        """Give the space beyond what is stored back to the disks; return its bytes."""

    def resident_bytes(self) -> int:
        """Bytes of slots in use, and of memory lent to abandoned transfers that have not ended.

        Slots are in use while they are read, and then until their last user is gone.
        """

    def owns(self, address: int) -> bool:
        """Whether the memory at an address is a slot's of this store."""

    def wait_for_abandoned(self) -> bool:
        """Wait until a transfer that nobody wants any more has ended; ``False`` if there is none.

        Abandoned is what died after it had begun; it holds memory until its last piece has ended.
        """

    def rates(self) -> tuple[float | None, float | None]:
        """Bytes per second of late, of writes and of reads, while the disks were busy.

        Summed over directories, which work in parallel; ``None`` before enough has moved to tell.
        """

    def notes(self) -> list[str]:
        """Fallbacks taken while opening, and directories out of use, one sentence each."""

    def stats(self) -> dict[str, Any]:
        """Traffic in bytes and counts, busy times in nanoseconds, engines by directory."""

    def close(self) -> None:
        """Refuse new work, end what has begun, answer the rest with ``ClosedError``."""

@final
class Stored:
    """Bytes on their way to the disk, or there; its death gives the space back."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a read of it takes: its blocks on the disk, in whole pages."""

    def done(self) -> bool:
        """Whether the write has ended, well or not."""

    def wait(self) -> None:
        """Wait for the write with the GIL released; raises what went wrong."""

    def cancel(self) -> bool:
        """Cancel the write; ``True`` if it had not begun."""

@final
class Overwrite:
    """New bytes on their way to take the place of stored ones; its death cancels the overwrite."""

    def done(self) -> bool:
        """Whether the overwrite has ended, well or not."""

    def wait(self) -> None:
        """Wait with the GIL released; raises why the old bytes are still there."""

    def cancel(self) -> bool:
        """Cancel the overwrite; ``True`` if it had not begun."""

@final
class PendingInto:
    """A read on its way into the caller's memory; its death cancels the read."""

    def done(self) -> bool:
        """Whether the read has ended, well or not."""

    def wait(self) -> None:
        """Wait with the GIL released; raises what went wrong."""

@final
class Pending:
    """A read on its way; its death cancels the read."""

    def done(self) -> bool:
        """Whether the read has ended, well or not."""

    def wait(self) -> Slot:
        """Wait for the read with the GIL released; raises what went wrong."""

@final
class Slot:
    """Bytes that came back: a writable buffer, freed when its last user is gone."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class SimulatedDisk:
    """A disk in memory that fails by a seeded plan, and its switch; for tests."""

    def __new__(cls, **faults: Any) -> SimulatedDisk:
        """Plan a disk by the fields of ``Faults`` (``rust/core/src/config.rs``), or ``paused``."""

    def pause(self) -> None:
        """Let nothing move any more: an infinitely slow disk."""

    def resume(self) -> None:
        """Let everything move again."""

@final
class Probe:
    """One file and memory of its size, on which settings of the engines are timed."""

    REQUEST_BYTES: Final[int]
    QUEUE_DEPTH_DEFAULT: Final[int]
    PIECE_BYTES_DEFAULT: Final[int]

    def __new__(cls, directory: str, request_count: int) -> Probe:
        """Open an unnamed file for ``request_count`` requests, with direct I/O."""

    @property
    def alignment(self) -> int:
        """Addresses, offsets and lengths of direct I/O there are multiples of this."""

    def seconds(
        self,
        direction: str,
        first: int,
        count: int,
        *,
        backend: str,
        queue_depth: int,
        piece_bytes: int,
    ) -> float:
        """Move ``count`` requests, the ``first`` and those after it, and return the time of it.

        All requests are given to a fresh engine at once. ``direction`` is ``"write"`` or
        ``"read"``, ``backend`` ``"io_uring"`` or ``"psync"``.
        """
