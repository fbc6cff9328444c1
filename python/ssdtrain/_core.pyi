"""The compiled part of ssdtrain: bytes by address and length; tensors stay in Python."""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, Protocol, TypedDict, final

import torch
from torch import Tensor, UntypedStorage

from ssdtrain.activations.partners import Planning, SessionHooks, Writing
from ssdtrain.errors import SsdtrainError
from ssdtrain.stalls import Stalls

__all__ = [
    "Account",
    "Geometry",
    "Gpus",
    "Handle",
    "Holding",
    "HookPair",
    "Kept",
    "Learned",
    "Leaving",
    "Loading",
    "MasterCode",
    "Offloading",
    "Overwrite",
    "Pending",
    "PendingInto",
    "PlanMachine",
    "Planner",
    "Probe",
    "Record",
    "Records",
    "Reservation",
    "Round",
    "Rounds",
    "Rules",
    "SavedTensor",
    "SimulatedDisk",
    "Slot",
    "StepPlan",
    "Store",
    "Stored",
    "Tally",
    "Timeline",
    "Torch",
    "checksum",
    "hidden",
    "run_if_free",
    "try_cufile",
]

@final
class Account:
    """The bytes that are in memory because of us; see ``residency``."""

    def __new__(cls) -> Account:
        """Open an account in which nothing is held."""

    def hold(self, nbytes: int) -> Holding:
        """Count ``nbytes`` until the holding dies, or until it is freed."""

    def reserve(self, nbytes: int) -> Reservation:
        """Count ``nbytes`` that somebody may fill, until the reservation dies or is made none."""

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

    def limit_small(self, nbytes: int) -> None:
        """Let hook pairs keep what is small while not more than ``nbytes`` are in memory.

        At first it is none.
        """

    @property
    def weight_count(self) -> int:
        """How many weights hook pairs have packed."""

    @property
    def held_bytes(self) -> int:
        """The sum over all that is held, or reserved."""

    @property
    def reserved_bytes(self) -> int:
        """The part of it that is reserved."""

    @property
    def peak_bytes(self) -> int:
        """The most that was in memory at once."""

    @property
    def saved_peak_bytes(self) -> int:
        """The most that was in memory at once and not reserved."""

    @property
    def alive_peak_bytes(self) -> int:
        """The most that all holders needed at once, in memory or not."""

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
class Reservation:
    """Memory that somebody may fill, in an account; not among what ended there."""

    def resize(self, nbytes: int) -> None:
        """Count so many bytes from now on."""

    @property
    def nbytes(self) -> int:
        """How many bytes are counted."""

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
        find_gpu_keys: Callable[[Tensor], object],
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
        store: Store,
        gpus: Gpus | None,
        *,
        small_bytes: int,
        is_bounded: bool,
        offloading: Offloading,
        pack_unusual: Callable[[Tensor], object],
        pack_below: Callable[[HookPair, Tensor], object],
        untraced: Callable[..., object],
    ) -> HookPair:
        """Pack weights, and what is on a storage of fewer than ``small_bytes``, without Python.

        ``offloading`` packs the rest, and what finds no room below ``account.limit_small``; it
        unpacks what is not ``Kept``, or was changed since. ``pack_unusual`` takes what is no plain
        tensor of the CPU or a GPU, and ``pack_below`` what comes from inside an operation.
        ``untraced`` calls them where the compiler does not look. With ``is_bounded`` a detached
        part of a storage counts as the whole, which is what it keeps in memory.
        """

    @property
    def hooks(self) -> SessionHooks:
        """The hooks of the session that ``offloading`` belongs to."""

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return what autograd keeps in its place."""

    def pack_here(self, tensor: Tensor) -> object:
        """Pack a tensor without asking whether this is called from inside an operation."""

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""

@final
class Timeline:
    """When each saved tensor was where; noted once it was started."""

    def __new__(cls) -> Timeline:
        """Begin with none, and note nothing."""

    def start(self) -> None:
        """Note from now on what is packed."""

    @property
    def is_on(self) -> bool:
        """Whether it was started."""

    def lives(self) -> list[tuple[int, int, list[int]]]:
        """Return key, bytes and moments of each tensor that has ended, the first one first.

        The moments are nanoseconds since 1970, or 0: packed, write begun, memory freed, read begun,
        first needed, dropped.
        """

@final
class Tally:
    """Tensors of one kind, each pack counted."""

    def __new__(cls, count: int = 0, nbytes: int = 0, largest_bytes: int = 0) -> Tally:
        """Begin with so many."""

    def add(self, nbytes: int) -> None:
        """Count a tensor of ``nbytes``."""

    @property
    def count(self) -> int:
        """How many were counted."""

    @property
    def nbytes(self) -> int:
        """Their bytes."""

    @property
    def largest_bytes(self) -> int:
        """Of the largest."""

@final
class Torch:
    """Functions of torch that the compiled part calls for tensors that may leave memory."""

    def __new__(
        cls,
        *,
        empties: Mapping[torch.dtype, Tensor],
        make_empty: Callable[[torch.dtype, int | None], Tensor],
        frombuffer: Callable[..., Tensor],
        byte_type: torch.dtype,
        sequence_number: Callable[[], int],
        current_backward: Callable[[], int],
        current_node: Callable[[], Any],
        is_below_autograd: Callable[[], bool],
    ) -> Torch:
        """Take the functions; see ``geometry.TORCH``."""

    def storage_on(self, slot: Slot) -> UntypedStorage:
        """Return a storage on the memory of a slot, which lives as long as the storage does."""

@final
class Geometry:
    """Dtype, size, strides and offset of a tensor; strides too, because kernels choose by them."""

    def __new__(cls, torch: Torch, tensor: Tensor) -> Geometry:
        """Look at a tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def size(self) -> tuple[int, ...]:
        """Its size."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the storage."""

    def span_bytes(self) -> int:
        """Return the bytes from the first element to the end of the last, if there are some."""

    def build(self, storage: UntypedStorage, start: int) -> Tensor:
        """Return a tensor on ``storage``, whose first byte was at ``start`` of the original."""

@final
class Handle:
    """A range of a storage on its way to the store, or there; its death gives the space back."""

    @property
    def address(self) -> int:
        """Where it was written from: torch can move the memory of a live storage."""

    @property
    def slot_bytes(self) -> int:
        """The memory that a read of it takes."""

    def is_here(self) -> bool:
        """Whether a read would take no more memory: one is under way, or its bytes are in use."""

    def done(self) -> bool:
        """Whether the write has ended, well or not."""

    def wait(self) -> None:
        """Wait for the write; raises what went wrong.

        Of a GPU's memory, until it may be let go in the order of its streams, or a CUDA graph that
        is being captured holds it.
        """

    def cancel(self) -> bool:
        """Give the write up; ``True`` if it had not begun."""

@final
class Loading:
    """A read that was begun, or bytes that are here; whoever holds this holds its memory."""

    def done(self) -> bool:
        """Whether the bytes are there, or will never be."""

    def wait(self) -> None:
        """Wait for the bytes with the GIL released; raises what went wrong."""

@final
class Record:
    """One saved storage at one version: its bytes in memory, on the way, or on the disk."""

    @property
    def nbytes(self) -> int:
        """Of the part of the storage that it covers."""

    @property
    def sequence(self) -> int:
        """Autograd's sequence number when it was packed: the gate."""

    @property
    def key(self) -> int:
        """The policy's name for the tensor."""

    @property
    def source(self) -> Tensor | None:
        """The tensor itself, for as long as its bytes may be needed from memory."""

    @property
    def handle(self) -> Handle | None:
        """Its bytes in the store, from the beginning of a write until the write is given up."""

    @property
    def is_lent(self) -> bool:
        """Whether somebody else holds its memory anyway; see ``lender``."""

    @property
    def was_found(self) -> bool:
        """Whether a backward has found its bytes in memory.

        The tensor that it was given then lies on the storage too, and must not be taken for
        somebody else's.
        """

    def storage(self) -> UntypedStorage | None:
        """Return the storage, while somebody uses it."""

    def is_leaving(self) -> bool:
        """Whether it is in memory now, but may have to be read when its turn comes.

        Its write has not been seen to end, or somebody else still has its memory.
        """

    def lend(self) -> None:
        """Note that somebody else holds the bytes; they no longer count."""

    def take_back(self) -> None:
        """Note that nobody else holds the bytes any more; they count again."""

@final
class SavedTensor:
    """What autograd holds instead of a tensor whose bytes a record manages."""

    @property
    def record(self) -> Record:
        """Its bytes."""

    @property
    def sequence(self) -> int:
        """Autograd's sequence number when it was packed."""

    @property
    def version(self) -> int:
        """The version at which it was saved."""

    @property
    def counter(self) -> Tensor:
        """A tensor without bytes that shares the version counter of the saved one."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the saved tensor."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of the saved tensor."""

    @property
    def is_ahead(self) -> bool:
        """Whether its read was begun before it was asked for."""

    def mates(self) -> list[SavedTensor]:
        """Return the other tensors of its node, which needs all of them at once."""

    def note_stall(self, stall_s: float) -> None:
        """Count a wait for this tensor to its round."""

    def on_memory(self, torch: Torch, storage: UntypedStorage) -> Tensor:
        """Return a tensor like the saved one on memory that is still there."""

@final
class Records:
    """The records of one session, their gates and their writes.

    ``writing`` is the ``Writeback`` that holds these records: it handles failed writes, the bound
    and memory of others.
    """

    def __new__(
        cls,
        store: Store,
        gpus: Gpus | None,
        account: Account,
        timeline: Timeline,
        *,
        is_bounded: bool,
        batch_bytes: int,
        give_back_bytes: int,
        threads: threading.local,
        count_users: Callable[[int], int],
    ) -> Records:
        """Open the books.

        ``batch_bytes`` are given to the disk together; once writes have freed ``give_back_bytes``,
        ``writing.give_memory_back`` is called. ``count_users`` tells how many tensors lie on the
        storage at an address of C++.
        """

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound on what is in memory."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, where the disk is not ours."""

    @property
    def writing_count(self) -> int:
        """How many writes were begun and not seen to end."""

    def leave_to_parent(self) -> None:
        """Note that this is a forked child."""

    def alive(self) -> list[Record]:
        """Return every record that is alive, but for those of changed and regained storages."""

    def under_way(self) -> list[Handle]:
        """Return the writes that were begun and not seen to end, the oldest first."""

    def begin_write(self, record: Record, writing: Writing) -> bool:
        """Give a record to the disk, or keep it; ``False`` if the disk can take no more now."""

    def begin_all(self, writing: Writing) -> None:
        """Begin the writes of this thread's nodes, which it has passed all."""

    def open_gate(self, writing: Writing, sequence: int) -> None:
        """Begin the writes of this thread's nodes before ``sequence``, once there is a batch."""

    def write_later(self, record: Record) -> None:
        """Write this record once its node has been passed."""

    def write_if_short(self, record: Record) -> None:
        """Write this record only if room is short: it will be needed in a moment.

        That is so for what a reentrant checkpoint computes again. Under a bound a whole region may
        not fit, and its backward begins with what was packed last: the oldest is needed last.
        """

    def cancel_queued(self) -> None:
        """Keep what is still in the queue, unless there is a bound."""

    def end_all(self, writing: Writing) -> None:
        """Free the memory of all that has reached the disk, however much it is."""

    def end_oldest(self, writing: Writing) -> bool:
        """Wait for the oldest write and end it; ``False`` if there is none."""

    def has_waiting_gate(self) -> bool:
        """Whether more may be written once some thread says that it has passed another node."""

    def wait_for_transfer(self, writing: Writing) -> bool:
        """Wait for the oldest write, or for what nobody wants any more; ``False`` without one."""

    def wait_for_room(self, writing: Writing) -> bool:
        """Wait for something that frees memory when it ends; ``False`` if there is nothing."""

@final
class Round:
    """What is packed between two backwards."""

    @property
    def count(self) -> int:
        """How many tensors were entered."""

    @property
    def is_asked_for(self) -> bool:
        """Whether its backward has begun."""

    @property
    def is_finished(self) -> bool:
        """Whether each of its tensors was asked for, or is dead."""

    @property
    def phase(self) -> int:
        """The backward in which it was packed, or -1 for a forward."""

    @property
    def signature(self) -> int:
        """What rounds of the same kind have in common."""

    @property
    def opening(self) -> int:
        """The name of its first tensor: all that is known of a round when it begins."""

    @property
    def is_skimmed(self) -> bool:
        """Whether most of its tensors were not followed: nothing is learned from it."""

    @property
    def is_partial(self) -> bool:
        """Whether tensors that stayed by plan were not followed: nothing is learned of them."""

    @property
    def hooks_s(self) -> float:
        """The time of the calls of the hooks, without the waits for the disk."""

    @property
    def span_s(self) -> tuple[float, float]:
        """When the first tensor was packed, and when one was asked for last; without stalls."""

    def learned_items(self) -> list[tuple[int, int, float, float, int | None]]:
        """Return what the policy learns from: the fields of ``planning.policy.Item``."""

    def heaviest_node(self) -> tuple[int, int, int]:
        """Return bytes and tensors of the node that saved most, and the bytes of all nodes."""

@final
class Learned:
    """What an ended round teaches.

    Times are in seconds, on the clock of the GPU that it was on, or on that of the hooks; both
    stand still in waits for the disk.
    """

    @property
    def items(self) -> list[tuple[int, int, float, float, int | None]]:
        """Of each storage that was needed: the fields of ``planning.policy.Item``."""

    @property
    def began_s(self) -> float:
        """When the first tensor was packed."""

    @property
    def ended_s(self) -> float:
        """When one was needed last."""

    @property
    def stall_s(self) -> float:
        """The waits for its tensors: of its GPU, or else of threads."""

    @property
    def is_of_gpu(self) -> bool:
        """Whether the times are those of a GPU."""

@final
class Rounds:
    """The rounds of one session, the order of return, and what is read ahead."""

    def __new__(
        cls,
        store: Store,
        gpus: Gpus | None,
        account: Account,
        *,
        limit_bytes: int | None,
        policy: Planning,
        stalls: Stalls,
    ) -> Rounds:
        """Open the books; ``policy`` has the plans, and ``stalls`` the waits of the session."""

    @property
    def current(self) -> Round | None:
        """The round that is packed now."""

    @property
    def now_s(self) -> float:
        """Seconds on the clock of the rounds, which stands still while threads wait for I/O."""

    def take_ended(self) -> list[Round]:
        """Return the rounds that have ended, with that of now if no more of it is needed."""

    def is_awaited(self, ended: Round) -> bool:
        """Whether an ended round cannot be learned from yet: a GPU has not come to its end.

        Raises:
            CudaError: The GPU failed before.

        """

    def learned(self, ended: Round) -> Learned:
        """Return what an ended round teaches, which is not awaited; ask once."""

    def set_guide(self, ended: Round) -> None:
        """Make a round that was followed in whole the guide of those that begin as it did."""

    def give_way(self) -> None:
        """Give up what was read ahead."""

class _Given(TypedDict):
    """What ``Leaving`` is given of Python and of torch."""

    plain: type
    """The class of weights."""
    away: type
    """The class of those that are away."""
    count_users: Callable[[int], int]
    current_frames: Callable[[], dict[int, Any]]
    """A function of ``sys``."""
    thread: Callable[[], int]
    """A function of ``threading``."""
    idle: set[Any]
    """The code in which a thread waits and calls nothing of torch."""
    known: set[int]
    """The numbers of threads that say which weights they use."""
    clock_of: Callable[[int], int]
    """A function of ``time``."""
    collector: ModuleType
    """The module ``gc``."""

class _Entry(Protocol):
    """The entry of a weight or gradient that may be away: an ``away.tensor.OffloadedTensor``."""

    source: Tensor | None
    """The bytes of the tensor, once they have left it."""
    @property
    def users(self) -> set[Any]:
        """The objects that need the bytes in memory."""

@final
class Leaving:
    """How weights and gradients leave memory, each in one call without other threads of Python.

    ``alone`` is a weight whose storage nobody else has.
    """

    def __new__(cls, given: _Given, alone: Tensor) -> Leaving: ...
    def leave(
        self, weight: Tensor, entry: _Entry, husk: Tensor, attribute: str, shared: bool
    ) -> bool:
        """Take the bytes out of a weight, and give them to ``entry.source``.

        The weight is then of the class ``away``, lies on the storage of ``husk``, and has
        ``entry`` as ``attribute``. Returns ``False``, and changes nothing, if ``entry.users`` has
        some, if somebody else has its storage, if another thread may be using it, or if it is not
        of the class ``plain``.
        """

@final
class MasterCode:
    """What is known of float32 masters that were packed, besides their payload.

    A payload is what bfloat16 weights, which are the masters rounded to the nearest, do not say of
    them. All memory is given by its address: ``count`` weights of 2 bytes, masters of 4 bytes, and
    the payload's numbers of 2 bytes, each in one piece and in the same order. Nobody may change it
    meanwhile; the GIL is released.
    """

    @staticmethod
    def payload_len_max(count: int) -> int:
        """Return how many int16 a payload for so many weights has at most."""

    @staticmethod
    def is_rounded(weights: int, masters: int, count: int) -> bool:
        """Whether the weights are the masters, rounded; any NaN is the rounding of any other."""

    @staticmethod
    def pack(weights: int, masters: int, payload: int, count: int) -> MasterCode | None:
        """Write the payload, of ``payload_len_max``.

        Returns ``None`` if a weight is not its master, rounded, or a NaN that cannot be told.
        """

    @property
    def payload_len(self) -> int:
        """How many int16 of the payload are needed, from its first on."""

    def unpack(self, weights: int, payload: int, masters: int) -> bool:
        """Write the masters, and return whether these are the weights they were packed with.

        A checksum tells. If not, what was written is of no use.
        """

@final
class Offloading:
    """Pack and unpack of tensors whose bytes may leave memory."""

    def __new__(
        cls,
        torch: Torch,
        records: Records,
        rounds: Rounds,
        *,
        min_bytes: int,
        lock: threading.RLock,
        hooks: SessionHooks,
        eligible: Tally,
        planned: Tally,
    ) -> Offloading:
        """Take the parts of one session; ``hooks`` packs and unpacks what is rare."""

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return what autograd keeps in its place."""

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""

@final
class Gpus:
    """The GPUs of one session, each opened at its first tensor; see ``transfer.staged``."""

    def __new__(
        cls,
        store: Store,
        *,
        lock: threading.RLock,
        down_bytes: int,
        up_bytes: int,
        ring_bytes: int,
        tier_bytes_max: int,
        choose_direct: Callable[[int], tuple[str | None, bool] | None],
        direct_refused: Callable[[int, str], object],
        current_stream: Callable[[int], int],
        stream_object: Callable[[int, int], object],
        allocate: Callable[[int, int, int], UntypedStorage],
        out_of_memory: type[Exception],
    ) -> Gpus:
        """Take the functions, and how much memory each GPU's tensors go through.

        Whoever waits for a GPU lets go of ``lock``, which is the session's, meanwhile.
        ``down_bytes`` and ``up_bytes`` are of the CPU, and twice ``ring_bytes`` of the GPU where
        ``choose_direct`` says where cuFile is, and whether its compatibility mode may serve.
        Tensors of all GPUs may stay in ``tier_bytes_max`` of pinned memory, beside that.
        """

    def loaded_bytes(self) -> int:
        """Return the bytes of the GPUs' memory that loads hold."""

    def pinned_bytes(self) -> tuple[int, int]:
        """Return the bytes of pinned memory, and how many of them are in use."""

    def ring_bytes(self) -> tuple[int, int]:
        """Return the bytes of GPUs' memory for GPUDirect Storage, and how many are in use."""

    def full_ring(self) -> tuple[float, float, int]:
        """Return what it cost that all memory of a ring was in use.

        Seconds of waits because a GPU was behind, and because the disk was; and how many tensors
        stayed on their GPU because of either.
        """

    def staying_bytes(self) -> int:
        """Return the bytes copied from GPUs that were to stay in pinned memory."""

    def pin_for_tier(self, gpu: int, nbytes: int) -> None:
        """Pin memory, so that so many bytes of a GPU's tensors can stay there, if that is allowed.

        Nothing where they go past the CPU's memory. Raises `CudaError` if it cannot be pinned.
        """

    @property
    def waiting_count(self) -> int:
        """How many threads wait now until a GPU comes to the copies."""

    def copied_bytes(self) -> tuple[int, int]:
        """Return the bytes that were copied from and to GPUs."""

    def copy_seconds(self) -> tuple[float, float]:
        """Return the seconds that these copies took, without what they waited for."""

    def copy_rates(self) -> list[tuple[int, float | None, float | None]]:
        """Return each GPU whose tensors go through the CPU's memory, and its bytes per second.

        Those of the copies from it and to it, of late, in the time that they took; ``None`` before
        enough was copied to tell.
        """

    def take_refusals(self) -> list[tuple[SsdtrainError, int]]:
        """Return why bytes were not written that stay in pinned memory, and for how many tensors.

        Since this was called last, and at most one error of each kind.
        """

    def away_bytes_peaks(self) -> list[tuple[int, int]]:
        """Return each GPU in use, and the most saved bytes that were away from it at once."""

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

    def beside(self, *, retain_bytes: int | None = None) -> Store:
        """Return another store on the same files, queues and quota.

        Its transfers hold memory of their own. What one has written, the other can read; both are
        closed together, or with the last of them.
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

    def wait_for_abandoned(self, *, limit_s: float | None = None) -> bool:
        """Wait until a transfer that nobody wants any more has ended; ``False`` if there is none.

        With ``limit_s``, at most so many seconds; ``False`` too if the time is over.

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
class PlanMachine:
    """Capacities in bytes and rates in bytes per second of a machine that steps are planned for."""

    def __new__(
        cls,
        *,
        device_bytes: int,
        host_bytes: int,
        ssd: tuple[float, float],
        bus: tuple[float, float],
        host: tuple[float, float],
        latency_s: float,
        duplex_share: float,
        sizes: tuple[tuple[int, float], ...],
        price: tuple[float, float],
        in_flight_bytes: int | None,
    ) -> PlanMachine:
        """Take rates as pairs: away from the device's memory, and back.

        ``bus`` is shared by drives and host. ``sizes`` are four pairs of bytes, rising, and the
        share of their rate that drives have for such transfers. ``price`` is the computing, in
        seconds, that is lost for each byte that moves. With ``in_flight_bytes`` writes go to the
        drives as sessions give them: so many bytes at once, which nobody can cancel. ``None``: one
        tensor at a time. Raises ``ValueError``.
        """

@final
class StepPlan:
    """A plan, and what the simulator says of its last step."""

    @property
    def step_s(self) -> float:
        """How long the step takes."""

    @property
    def stall_s(self) -> float:
        """How long its kernels wait, of that."""

    @property
    def recompute_s(self) -> float:
        """How long it takes to compute tensors again, of that."""

    @property
    def bound_s(self) -> float:
        """Below this no step comes with this memory, if nothing is computed again."""

    @property
    def bound_bytes(self) -> int:
        """Below this no peak comes within the slow-down that was asked for."""

    @property
    def device_bytes(self) -> int:
        """The memory that the step was planned for."""

    @property
    def peak_bytes(self) -> int:
        """The most that is in the device's memory."""

    @property
    def class_peak_bytes(self) -> list[int]:
        """The same of each class, at its own peak, in the order of ``planning.trace.CLASSES``."""

    @property
    def host_peak_bytes(self) -> int:
        """The most that is in the host's memory."""

    @property
    def moved_bytes(self) -> list[int]:
        """To the drives, to the host, back from the drives, back from the host."""

    @property
    def recomputed(self) -> list[int]:
        """Tensors that are computed again."""

    @property
    def resident(self) -> list[tuple[float, int]]:
        """Bytes in the device's memory from each of these seconds of the step on."""

    @property
    def moves(self) -> list[tuple[int, str, int, float]]:
        """Tensor, ``"ssd"``, ``"host"`` or ``"fetch"``, the kernel after which, and priority.

        A number beyond the step's tensors is the second life of one that is computed again.
        """

@final
class Planner:
    """A step, ready to be planned, without the GIL. `docs/internals/planning.md` has the rules."""

    def __new__(
        cls,
        seconds: list[float],
        uses: list[list[int]],
        tensors: list[tuple[int, int, bool, bool, bool, float | None]],
    ) -> Planner:
        """Take the time of each kernel, above 0, and the tensors that it uses, each once.

        Each tensor is its bytes, the place of its class in ``planning.trace.CLASSES``, whether it
        lives across steps, whether it may go to the drives and to the host, and the seconds that it
        takes to compute it again, if that can be done. Raises ``ConfigError``, ``IndexError`` or
        ``ValueError``.
        """

    @property
    def ideal_s(self) -> float:
        """The time of a step that never waits."""

    def live_bytes(self) -> list[int]:
        """Return what lives while each kernel runs, if nothing is moved."""

    def least_step(
        self,
        machine: PlanMachine,
        *,
        budgets: list[tuple[int, list[int]]],
        drafts: int,
        tries: int,
        may_recompute: bool,
    ) -> StepPlan:
        """Return the plan with the shortest step found within the machine's memory.

        A budget is a limit in bytes and the tensors that count. ``tries`` look-aheads follow
        ``drafts`` of first plans. Raises ``ConfigError`` if a kernel does not fit.
        """

    def least_peak(
        self,
        machine: PlanMachine,
        *,
        budgets: list[tuple[int, list[int]]],
        drafts: int,
        tries: int,
        slowdown_max: float,
    ) -> StepPlan:
        """Return the plan with the least peak found whose step is at most so much longer.

        The machine's memory does not count. ``slowdown_max`` is a share of ``ideal_s``.
        """

    def peaks_of(
        self, machine: PlanMachine, plan: StepPlan, groups: list[tuple[int, list[int]]]
    ) -> list[int]:
        """Return the most bytes of each group of tensors that a plan has in memory at once.

        Groups are given as budgets are; ``machine`` has to be the one of the plan.
        """

    def judged(self, machine: PlanMachine, whose: str) -> StepPlan:
        """Judge ``"keep"``, ``"recompute"`` (all that can be), ``"ssdtrain"`` or ``"teraio"``.

        The last two are those papers' plans (arXiv 2408.10013 and 2506.06472).
        """

    def judged_moves(
        self, machine: PlanMachine, moves: list[tuple[int, str, int, float]]
    ) -> StepPlan:
        """Judge moves as in ``StepPlan.moves``, which repeat in each step.

        Raises ``ValueError`` for moves that name what is not there, ``ConfigError`` if the step
        does not fit.
        """

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

def checksum(address: int, item_bytes: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the xxh3 checksum of a strided tensor's elements, in the order of their addresses.

    Nobody may change them meanwhile. The GIL is released for a MiB and more.
    """

def hidden(
    items: Sequence[tuple[int, int, float, float, int | None]],
    *,
    write: float,
    read: float,
    copies: Sequence[tuple[int, float, float]],
    host_bytes: int,
    page_bytes: int,
    margin_s: float,
    round_trip_factor: float,
) -> dict[int, tuple[float, float | None, int | None]]:
    """Choose what leaves memory of a round, as ``planning.policy.plan`` says.

    ``items`` have the fields of ``planning.policy.Item``; ``copies`` are those of each GPU, from it
    and to it. Rates are in bytes per second.

    Returns, by the key of each item that leaves, the latest start of its way back; when it has been
    copied from its GPU, or ``None`` if no rate of that is known; and the bytes that it takes in
    pinned memory, or ``None`` if it does not stay there.
    """

def run_if_free(lock: threading.RLock, function: Callable[[], object]) -> bool:
    """Call a function under a lock, unless another thread has it; return whether it was called.

    An interrupt comes before or after, and never leaves the lock taken.
    """

def try_cufile(
    library: str | None, directory: str, gpu: int, allows_compat: bool
) -> tuple[bool, str]:
    """Return whether GPUDirect Storage works, and cuFile's version, or why it does not.

    Some versions of cuFile never return, or end the process: ask in a child process.
    """
