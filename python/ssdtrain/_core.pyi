"""The compiled part of ssdtrain: bytes by address and length; tensors stay in Python."""

from collections.abc import Callable
from typing import Any, Final, final

from torch import Tensor

__all__ = [
    "Account",
    "Holding",
    "HookPair",
    "Kept",
    "Overwrite",
    "Pending",
    "PendingInto",
    "Probe",
    "Rules",
    "SimulatedDisk",
    "Slot",
    "Store",
    "Stored",
]

@final
class Account:
    """The bytes that are in memory because of us; see ``residency``."""

    def __new__(cls) -> Account:
        """Open an account in which nothing is held."""

    def hold(self, nbytes: int) -> Holding:
        """Count ``nbytes`` until the holding dies, or until it is freed."""

    def keep(self, tensor: Tensor, nbytes: int, storage_bytes: int, is_from_below: bool) -> Kept:
        """Hold a tensor in memory, and count ``nbytes`` of it.

        All that is kept on one storage counts together at most as much as the storage.
        ``is_from_below`` says that it is packed from inside an operation, and asked for there.
        """

    def shared_more_bytes(self, identity: int, nbytes: int, storage_bytes: int) -> int:
        """Return the bytes that ``keep`` would add; ``identity`` is the address of the storage."""

    def note_peak(self, transfer_bytes: int) -> None:
        """Compare what is held, and what transfers hold beside it, with the peak."""

    def forget_peak(self) -> None:
        """Forget the peak until now."""

    def ended(self) -> dict[str, tuple[int, int]]:
        """Return bytes and number of what ended "offloaded", "forwarded" and "kept"."""

    def small(self) -> tuple[int, int, int]:
        """Return number and bytes of what hook pairs kept for its size, and the largest of them."""

    @property
    def weight_count(self) -> int:
        """How many weights hook pairs have packed."""

    @property
    def held_bytes(self) -> int:
        """The sum over all that is held."""

    @property
    def peak_bytes(self) -> int:
        """The most that was in memory at once."""

@final
class Holding:
    """The entry of one holder in an account; it ends when it dies."""

    def free(self) -> None:
        """Note that the bytes are on the disk, and in memory no more."""

    def lend(self) -> None:
        """Note that somebody else holds the bytes: they are not in memory because of us."""

    def take_back(self) -> None:
        """Note that nobody else holds the bytes any more."""

    def forward(self) -> None:
        """Note that they were needed while they were still in memory."""

    def keep(self) -> None:
        """Note that they stay in memory."""

@final
class Kept:
    """What autograd holds in the place of a tensor that stays in memory."""

    def __new__(cls, tensor: Tensor, version: int) -> Kept:
        """Hold ``tensor``, which was saved at ``version`` (-1: it has none), and count nothing."""

    @property
    def tensor(self) -> Tensor:
        """The tensor; if a node had made it, one without history on the same bytes."""

    @property
    def version(self) -> int:
        """The version at which it was saved."""

@final
class Rules:
    """What the hooks know of torch, which the compiled part does not import."""

    def __new__(
        cls,
        *,
        tensor_type: type[Tensor],
        parameter_type: type[Tensor],
        dispatch_keys: Callable[[Tensor], object],
        plain_keys: object,
        passes_weights_on: frozenset[str],
        is_below_autograd: Callable[[], bool],
        is_grad_enabled: Callable[[], bool],
        storage_users: Callable[[Tensor], int],
        tracer: Callable[[], object],
        float32: object,
    ) -> Rules:
        """Take the functions; see ``activations.eligibility.RULES``."""

@final
class HookPair:
    """The two functions that autograd calls for each saved tensor."""

    def __new__(
        cls,
        rules: Rules,
        account: Account,
        *,
        transfer_bytes: Callable[[], int],
        small_bytes: int,
        pack_other: Callable[[Tensor], object],
        pack_unusual: Callable[[Tensor], object],
        pack_below: Callable[[HookPair, Tensor], object],
        unpack_other: Callable[[object], Tensor],
        untraced: Callable[..., object],
    ) -> HookPair:
        """Pack weights, and what is on a storage of fewer than ``small_bytes``, without Python.

        ``pack_other`` takes the rest, ``pack_unusual`` what is no plain CPU tensor, ``pack_below``
        what comes from inside an operation, and ``unpack_other`` what is not ``Kept``, or was
        changed since. ``untraced`` calls them where the compiler does not look.
        """

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return what autograd keeps in its place."""

    def pack_here(self, tensor: Tensor) -> object:
        """Pack a tensor without asking whether this is called from inside an operation."""

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""

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
