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
    """The bytes in memory because of ssdtrain; see ``residency``."""

    def __new__(cls) -> Account:
        """Open an account in which nothing is held."""

    def hold(self, nbytes: int) -> Holding:
        """Count ``nbytes`` until the holding is freed or dies."""

    def reserve(self, nbytes: int) -> Reservation:
        """Count ``nbytes`` that a tenant may fill, until it resizes or drops the reservation."""

    def keep(self, tensor: Tensor, nbytes: int, storage_bytes: int, is_from_below: bool) -> Kept:
        """Hold a tensor in memory, and count ``nbytes`` of it.

        All kept tensors on one storage count together at most as much as the storage. With
        ``is_from_below`` the tensor is packed inside an operation, and unpacked there.
        """

    def shared_more_bytes(self, identity: int, nbytes: int, storage_bytes: int) -> int:
        """Return the bytes that ``keep`` would add; ``identity`` is the address of the storage."""

    def note_peak(self, transfer_bytes: int) -> None:
        """Raise the peak to the held bytes and ``transfer_bytes``, if their sum is larger."""

    def take_recent_peak(self) -> int:
        """Return the peak since the last call of this."""

    def limit_softly(self, nbytes: int) -> None:
        """Set the bytes in memory beyond which memory should be let go before more is held."""

    def soft_room_bytes(self, transfer_bytes: int) -> int:
        """Return the bytes that may still be held below that limit, with those of transfers."""

    def begin_saved_peaks(self) -> None:
        """Begin the peaks of saved bytes anew: of those in memory, and of those needed at once."""

    def forget_peak(self) -> None:
        """Forget the peak until now."""

    def ended(self) -> dict[str, tuple[int, int]]:
        """Return bytes and number of holdings that ended "offloaded", "forwarded" and "kept"."""

    def small(self) -> tuple[int, int, int]:
        """Return number, bytes and largest size of the small tensors that hook pairs kept."""

    def limit_small(self, nbytes: int) -> None:
        """Let hook pairs keep small tensors while at most ``nbytes`` are in memory.

        The limit is 0 at first.
        """

    @property
    def weight_count(self) -> int:
        """The number of weights that hook pairs have packed."""

    @property
    def held_bytes(self) -> int:
        """The bytes that are held or reserved."""

    @property
    def reserved_bytes(self) -> int:
        """The bytes that are reserved."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in memory at once."""

    @property
    def saved_peak_bytes(self) -> int:
        """The most bytes that were in memory at once, without reserved ones."""

    @property
    def alive_peak_bytes(self) -> int:
        """The most bytes that all holders needed at once, in memory or not."""

@final
class Holding:
    """The entry of one holder in an account; it ends when it dies."""

    def free(self) -> None:
        """Note that the bytes are on the disk, and in memory no more."""

    def lend(self) -> None:
        """Note that the program holds the bytes, so that they do not count."""

    def take_back(self) -> None:
        """Note that the program no longer holds the bytes, so that they count again."""

    def forward(self) -> None:
        """Note that the bytes were needed while they were still in memory."""

    def keep(self) -> None:
        """Note that the bytes stay in memory."""

@final
class Reservation:
    """Memory in an account that a tenant may fill; ``Account.ended`` does not count it."""

    def resize(self, nbytes: int) -> None:
        """Count ``nbytes`` from now on."""

    @property
    def nbytes(self) -> int:
        """The bytes that are counted."""

@final
class Kept:
    """Autograd holds this object in the place of a tensor that stays in memory."""

    def __new__(cls, tensor: Tensor, version: int) -> Kept:
        """Hold ``tensor``, saved at ``version`` (-1 if it has none), and count nothing."""

    @property
    def tensor(self) -> Tensor:
        """The tensor; if a node made it, a tensor without history on the same bytes."""

    @property
    def version(self) -> int:
        """The version at which it was saved."""

@final
class Rules:
    """Classes and functions of torch, which the compiled part does not import."""

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
        """Pack weights, and tensors on a storage of fewer than ``small_bytes``, without Python.

        ``offloading`` packs other plain tensors, and small tensors that find no room below
        ``account.limit_small``; it unpacks all objects but a ``Kept`` that has not changed.
        ``pack_unusual`` packs a tensor that is no plain tensor of the CPU or a GPU, and
        ``pack_below`` a tensor that is saved inside an operation. ``untraced`` calls these
        functions so that the compiler does not trace them. With ``is_bounded`` a detached part of a
        storage counts as the whole storage, which it keeps in memory.
        """

    @property
    def hooks(self) -> SessionHooks:
        """The hooks of the session that ``offloading`` belongs to."""

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return the object that autograd keeps in its place."""

    def pack_here(self, tensor: Tensor) -> object:
        """Pack a tensor without a look for an operation around the call."""

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""

@final
class Timeline:
    """The moments of each saved tensor, noted once the timeline is started."""

    def __new__(cls) -> Timeline:
        """Begin with no tensor, and note nothing."""

    def start(self) -> None:
        """Note tensors that are packed from now on."""

    @property
    def is_on(self) -> bool:
        """True if it was started."""

    def lives(self) -> list[tuple[int, int, list[int]]]:
        """Return key, bytes and moments of each tensor that has ended, the first one first.

        The moments are nanoseconds since 1970, or 0: packed, write begun, memory freed, read begun,
        first needed, dropped.
        """

@final
class Tally:
    """Tensors of one kind, each pack counted."""

    def __new__(cls, count: int = 0, nbytes: int = 0, largest_bytes: int = 0) -> Tally:
        """Begin with these counts."""

    def add(self, nbytes: int) -> None:
        """Count a tensor of ``nbytes``."""

    @property
    def count(self) -> int:
        """The number of tensors."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest tensor."""

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
        """Return the bytes from the first element to the end of the last."""

    def build(self, storage: UntypedStorage, start: int) -> Tensor:
        """Return a tensor on ``storage``, whose first byte was at ``start`` of the original."""

@final
class Handle:
    """A range of a storage on its way to the store, or there. Its death gives the space back."""

    @property
    def address(self) -> int:
        """The address that was written: torch can move the memory of a live storage."""

    @property
    def slot_bytes(self) -> int:
        """The memory that a read of it takes."""

    def is_here(self) -> bool:
        """True if a read takes no more memory: a read is under way, or its bytes are in use."""

    def done(self) -> bool:
        """True if the write has ended, well or not."""

    def wait(self) -> None:
        """Wait for the write; raise its error.

        For memory of a GPU, wait until it may be let go in the order of its streams, or until it is
        known that a capture of a CUDA graph holds it.
        """

    def cancel(self) -> bool:
        """Give the write up; ``True`` if it had not begun."""

@final
class Loading:
    """A read that was begun, or bytes that are here; it holds their memory."""

    def done(self) -> bool:
        """True if the bytes are there, or will never be."""

    def wait(self) -> None:
        """Wait for the bytes with the GIL released; raise the error of the read."""

@final
class Record:
    """One saved storage at one version: its bytes in memory, on the way, or on the disk."""

    @property
    def nbytes(self) -> int:
        """The bytes of the part of the storage that it covers."""

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
        """True if the program holds its memory anyway; see ``lender``."""

    @property
    def was_found(self) -> bool:
        """True if a backward has found its bytes in memory.

        The tensor that backward got then lies on the storage too, and must not be taken for a
        tensor of the program.
        """

    @property
    def recipe(self) -> Any | None:
        """The recipe by which its bytes are made again, if they are neither kept nor written."""

    def storage(self) -> UntypedStorage | None:
        """Return the storage, while it lives."""

    def is_leaving(self) -> bool:
        """True if it is in memory now, but may have to be read when its node needs it.

        Its write has not been seen to end, or the program still has its memory.
        """

    def lend(self) -> None:
        """Note that the program holds the bytes; they no longer count."""

    def take_back(self) -> None:
        """Note that the program no longer holds the bytes; they count again."""

@final
class SavedTensor:
    """Autograd holds this object in the place of a tensor whose bytes a record manages."""

    @property
    def record(self) -> Record:
        """The record of its bytes."""

    @property
    def sequence(self) -> int:
        """Autograd's sequence number when it was packed."""

    @property
    def version(self) -> int:
        """The version at which it was saved."""

    @property
    def counter(self) -> Tensor:
        """A tensor without bytes that shares the version counter of the saved tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the saved tensor."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of the saved tensor."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the saved tensor, in items."""

    @property
    def offset(self) -> int:
        """Bytes from the start of its storage to the tensor."""

    @property
    def is_ahead(self) -> bool:
        """True if its read was begun before a node needed it."""

    def mates(self) -> list[SavedTensor]:
        """Return the other tensors of its node, which needs all of them at once."""

    def note_stall(self, stall_s: float) -> None:
        """Count a wait for this tensor in its round."""

    def on_memory(self, torch: Torch, storage: UntypedStorage) -> Tensor:
        """Return a tensor like the saved tensor, on memory that is still there."""

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
        ``writing.give_memory_back`` is called. ``count_users`` returns the number of tensors on the
        storage at an address of C++.
        """

    @property
    def is_bounded(self) -> bool:
        """True if there is a bound on the bytes in memory."""

    @property
    def is_forked(self) -> bool:
        """True in a forked child, which does not own the disk."""

    @property
    def writing_count(self) -> int:
        """The number of writes that were begun and not seen to end."""

    def leave_to_parent(self) -> None:
        """Note that this is a forked child."""

    def owns(self, saved: SavedTensor) -> bool:
        """Return whether a saved tensor is of this session."""

    def alive(self) -> list[Record]:
        """Return the records that are alive; of each storage, the newest ones."""

    def under_way(self) -> list[Handle]:
        """Return the writes that were begun and not seen to end, the oldest first."""

    def begin_write(self, record: Record, writing: Writing) -> bool:
        """Give a record to the disk, or keep it; ``False`` if the disk can take no more now."""

    def begin_all(self, writing: Writing) -> None:
        """Begin the writes of all nodes of this thread, which has passed them."""

    def open_gate(self, writing: Writing, sequence: int) -> None:
        """Begin the writes of this thread's nodes before ``sequence``, once there is a batch."""

    def write_later(self, record: Record) -> None:
        """Write this record once its node has been passed."""

    def write_if_short(self, record: Record) -> None:
        """Write this record only if room is short, because a node needs it in a moment.

        This is for tensors that a reentrant checkpoint computes again. Under a bound a whole region
        may not fit, and its backward begins with the newest tensor: the oldest is needed last.
        """

    def cancel_queued(self) -> None:
        """Cancel the writes that are still in the queue, unless there is a bound."""

    def end_all(self, writing: Writing) -> None:
        """Free the memory of all writes that have ended, however many."""

    def end_oldest(self, writing: Writing) -> bool:
        """Wait for the oldest write and end it; ``False`` if there is none."""

    def has_waiting_gate(self) -> bool:
        """True if records wait for some thread to pass another node."""

    def wait_for_transfer(self, writing: Writing) -> bool:
        """Wait for the oldest write or an abandoned transfer; ``False`` if there is none."""

    def wait_for_room(self, writing: Writing) -> bool:
        """Wait for a write or transfer that frees memory as it ends; ``False`` if there is none."""

@final
class Round:
    """The tensors that are packed between two backwards."""

    @property
    def count(self) -> int:
        """The number of its tensors."""

    @property
    def is_asked_for(self) -> bool:
        """True if its backward has begun."""

    @property
    def is_finished(self) -> bool:
        """True if each of its tensors was needed, or is dead."""

    @property
    def phase(self) -> int:
        """The backward in which it was packed, or -1 for a forward."""

    @property
    def signature(self) -> int:
        """A number that rounds with the same tensors have in common."""

    @property
    def opening(self) -> int:
        """The key of its first tensor, which alone is known when the round begins."""

    @property
    def plan_count(self) -> int:
        """The number of plans that had been made when it began."""

    @property
    def is_skimmed(self) -> bool:
        """True if only its first tensor was followed: nothing is learned from the round."""

    @property
    def is_partial(self) -> bool:
        """True if tensors that stayed by plan were not followed: nothing is learned of them."""

    @property
    def hooks_s(self) -> float:
        """The time of the hooks' calls, without their waits for the disk."""

    @property
    def span_s(self) -> tuple[float, float]:
        """The moments of the first pack and of the last need, on a clock without stalls."""

    def learned_items(self) -> list[tuple[int, int, float, float, int | None]]:
        """Return the items that the policy learns from: the fields of ``planning.policy.Item``."""

    def heaviest_node(self) -> tuple[int, int, int]:
        """Return bytes and tensors of the node that saved most, and the bytes of all nodes."""

@final
class Learned:
    """The times of an ended round.

    They are in seconds, on the clock of its GPU or on that of the hooks; both stand still in waits
    for the disk.
    """

    @property
    def items(self) -> list[tuple[int, int, float, float, int | None]]:
        """For each storage that was needed, the fields of ``planning.policy.Item``."""

    @property
    def copied(self) -> list[tuple[int, float]]:
        """Keys of tensors that left its GPU, each with the end of its copy, waits included."""

    @property
    def began_s(self) -> float:
        """The moment of the first pack."""

    @property
    def ended_s(self) -> float:
        """The moment of the last need."""

    @property
    def load_stall_s(self) -> float:
        """The waits of its GPU, or else of threads, for its tensors to come back."""

    @property
    def stall_s(self) -> float:
        """The same with the waits of its GPU for copies that should have ended by the plan."""

    @property
    def is_of_gpu(self) -> bool:
        """True if the times are those of a GPU."""

    @property
    def waits_for_python(self) -> bool:
        """Whether that GPU had done all work as soon as Python gave it."""

@final
class Rounds:
    """The rounds of one session, their order of return, and the reads ahead."""

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
        """Return the rounds that have ended, with the current round if no more of it is needed."""

    def is_awaited(self, ended: Round) -> bool:
        """True if a GPU has not come to the end of an ended round, so that nothing can be learned.

        Raises:
            CudaError: The GPU failed before.

        """

    def learned(self, ended: Round) -> Learned:
        """Return the times of an ended round that is not awaited; call this once for each round."""

    def set_guide(self, ended: Round) -> None:
        """Make a round, followed in whole, the guide of rounds with the same first tensor."""

    def give_way(self) -> None:
        """Give up all reads ahead."""

class _Given(TypedDict):
    """The classes and functions of Python and torch that ``Leaving`` needs."""

    plain: type
    """The class of weights."""
    away: type
    """The class of weights that are away."""
    count_users: Callable[[int], int]
    current_frames: Callable[[], dict[int, Any]]
    """The function ``_current_frames`` of ``sys``."""
    thread: Callable[[], int]
    """The function ``get_ident`` of ``threading``."""
    idle: set[Any]
    """Code objects in which a thread waits and calls nothing of torch."""
    clock_of: Callable[[int], int]
    """The function ``pthread_getcpuclockid`` of ``time``."""
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
    """Take weights and gradients out of memory, each in a call without other threads of Python.

    ``alone`` is a weight whose storage nobody else has.
    """

    def __new__(cls, given: _Given, alone: Tensor) -> Leaving: ...
    def leave(
        self, weight: Tensor, entry: _Entry, husk: Tensor, attribute: str, shared: bool
    ) -> bool:
        """Take the bytes out of a weight, and give them to ``entry.source``.

        The weight is then of the class ``away``, lies on the storage of ``husk``, and has ``entry``
        as ``attribute``. Returns ``False``, and changes nothing, if ``entry.users`` is not empty,
        if somebody else has the storage of the weight, if another thread may be using it, or if it
        is not of the class ``plain``.
        """

@final
class MasterCode:
    """The metadata of packed float32 masters, whose payload lies elsewhere.

    bfloat16 weights are the masters, rounded to the nearest; a payload is the difference of both.
    All memory is given by its address: ``count`` weights of 2 bytes, masters of 4 bytes, and the
    payload's numbers of 2 bytes, each in one piece and in the same order. Nobody may change the
    memory during a call; the GIL is released.
    """

    @staticmethod
    def payload_len_max(count: int) -> int:
        """Return the most int16 that a payload for ``count`` weights has."""

    @staticmethod
    def is_rounded(weights: int, masters: int, count: int) -> bool:
        """True if the weights are the masters, rounded; each NaN is the rounding of any NaN."""

    @staticmethod
    def pack(weights: int, masters: int, payload: int, count: int) -> MasterCode | None:
        """Write the payload, of ``payload_len_max``.

        Returns ``None`` if a weight is not its master, rounded, or a NaN that cannot be restored.
        """

    @property
    def payload_len(self) -> int:
        """The number of int16 at the start of the payload that are needed."""

    def unpack(self, weights: int, payload: int, masters: int) -> bool:
        """Write the masters; return ``True`` if the weights are those of ``pack``.

        A checksum tells. If it returns ``False``, the written masters are of no use.
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
        """Take the parts of a session; ``hooks`` packs and unpacks tensors in rare cases."""

    def pack(self, tensor: Tensor) -> object:
        """Take a tensor that a node saves; return the object that autograd keeps in its place."""

    def unpack(self, packed: object) -> Tensor:
        """Give a node its saved tensor back."""

    def pack_narrow(self, tensor: Tensor) -> object | None:
        """Pack a narrow copy of a tensor, during the pack of that tensor; ``None`` if it is small.

        Rounds with and without it are of one kind.
        """

    def unpack_source(self, packed: object) -> Tensor:
        """Unpack a tensor from which another is made; what was read stays for its own node."""

    def bring(self, packed: object) -> Tensor:
        """Return a saved tensor from which a proof makes another; no round has a need of it."""

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
        may_pin_now: Callable[[], bool],
    ) -> Gpus:
        """Take the functions, and how much memory each GPU's tensors go through.

        A thread that waits for a GPU releases ``lock``, the lock of the session, meanwhile.
        ``down_bytes`` and ``up_bytes`` are memory of the CPU. ``choose_direct`` returns the path of
        cuFile for a GPU and ``True`` if its compatibility mode is allowed; such a GPU has twice
        ``ring_bytes`` of its own memory instead. Tensors of all GPUs may stay in ``tier_bytes_max``
        of pinned memory, beside that; ``may_pin_now`` tells whether it may grow within a step.
        """

    def loaded_bytes(self) -> int:
        """Return the bytes of the GPUs' memory that loads hold."""

    def pinned_bytes(self) -> tuple[int, int]:
        """Return the bytes of pinned memory, and how many of them are in use."""

    def ring_bytes(self) -> tuple[int, int]:
        """Return the bytes of GPUs' memory for GPUDirect Storage, and how many are in use."""

    def full_ring(self) -> tuple[float, float, int]:
        """Return the cost of full rings.

        These are the seconds of waits because a GPU was behind, and because the disk was, and the
        number of tensors that stayed on their GPU for either reason.
        """

    def staying_bytes(self) -> int:
        """Return the bytes copied from GPUs that were to stay in pinned memory."""

    def pin_for_tier(self, nbytes: int) -> None:
        """Pin memory, so that ``nbytes`` of tensors of all GPUs can stay there, up to the limit.

        Does nothing if the tensors of all GPUs go past the CPU's memory. Raises ``CudaError`` if
        the memory cannot be pinned.
        """

    @property
    def waiting_count(self) -> int:
        """The number of threads that wait now until a GPU comes to the copies."""

    def copied_bytes(self) -> tuple[int, int]:
        """Return the bytes that were copied from and to GPUs."""

    def copy_seconds(self) -> tuple[float, float]:
        """Return the seconds that these copies took, without their waits."""

    def copy_rates(self) -> list[tuple[int, float | None, float | None, int]]:
        """Return each GPU whose tensors go through the CPU's memory, and bytes per second.

        The rates are those of recent copies from it and to it, in the time that they took; ``None``
        before enough was copied to tell. The last number is the bytes of its longest tensor that
        can go to the disk.
        """

    def take_refusals(self) -> list[tuple[SsdtrainError, int]]:
        """Return errors of writes whose bytes stay in pinned memory, with the number of tensors.

        They are errors since the last call, at most one of each kind.
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
        """Open one unnamed file and one engine per directory; without one refuse every write.

        A directory may come with its tuning: pieces in flight, and bytes per piece. Up to
        ``retain_bytes`` (128 MiB unless given) of the memory of ended reads stays resident for the
        next reads. ``backend="simulated"`` writes to ``simulated_disk``. Raises ``ConfigError``,
        ``NoSpaceError``, ``UnsupportedError`` or ``StorageError``.
        """

    def beside(self, *, retain_bytes: int | None = None) -> Store:
        """Return another store on the same files, queues and quota.

        Its transfers hold memory of their own. Each store can read the bytes that the other has
        written; both are closed together, or with the last of them.
        """

    def write(self, address: int, nbytes: int, owner: object) -> Stored:
        """Queue a write of ``nbytes`` bytes at ``address``, which ``owner`` keeps alive."""

    def overwrite(self, stored: Stored, address: int, nbytes: int, owner: object) -> Overwrite:
        """Queue a write of ``nbytes`` that replaces the bytes of ``stored``, which must be as many.

        The old bytes stay readable until the new ones are written in whole, and if they never are.
        Raises ``BusyError`` if another overwrite of ``stored`` has not ended.
        """

    def read(self, stored: Stored) -> Pending:
        """Queue a read of the bytes of ``stored``, whose write must have ended well."""

    def read_into(self, stored: Stored, address: int, nbytes: int, owner: object) -> PendingInto:
        """Queue a read of ``stored`` into ``nbytes`` writable bytes at ``address``.

        ``owner`` keeps them alive, and nobody else may use them before the read has ended.
        """

    def trim(self) -> int:
        """Give the space beyond stored bytes back to the disks; return its size in bytes."""

    def resident_bytes(self) -> int:
        """Return the bytes of slots in use, and of memory lent to abandoned transfers under way.

        Slots are in use while they are read, and then until their last user is gone.
        """

    def owns(self, address: int) -> bool:
        """True if the memory at an address is a slot of this store."""

    def wait_for_abandoned(self, *, limit_s: float | None = None) -> bool:
        """Wait until an abandoned transfer has ended; ``False`` if there is none.

        With ``limit_s``, wait at most so many seconds; return ``False`` if the time is over.

        An abandoned transfer is an object that died after it had begun; it holds memory until its
        last piece has ended.
        """

    def has_directory(self) -> bool:
        """True if the store has a directory; otherwise it refuses every write."""

    def rates(self) -> tuple[float | None, float | None]:
        """Return the recent bytes per second of writes and of reads, while the disks were busy.

        The rates are sums over directories, which work in parallel; ``None`` before enough has
        moved to tell, 0 without a directory.
        """

    def notes(self) -> list[str]:
        """Return fallbacks of the opening, and directories out of use, one sentence each."""

    def stats(self) -> dict[str, Any]:
        """Return traffic in bytes and counts, busy times in nanoseconds, engines by directory."""

    def close(self) -> None:
        """Refuse new transfers, end those that have begun, answer the rest with ``ClosedError``."""

@final
class Stored:
    """Bytes on their way to the disk, or there; its death gives the space back."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def slot_bytes(self) -> int:
        """The memory that a read takes: the blocks on the disk, in whole pages."""

    def done(self) -> bool:
        """True if the write has ended, well or not."""

    def wait(self) -> None:
        """Wait for the write with the GIL released; raise its error."""

    def cancel(self) -> bool:
        """Cancel the write; ``True`` if it had not begun."""

@final
class Overwrite:
    """New bytes on their way to take the place of stored ones; its death cancels the overwrite."""

    def done(self) -> bool:
        """True if the overwrite has ended, well or not."""

    def wait(self) -> None:
        """Wait with the GIL released; raise the error that left the old bytes in place."""

    def cancel(self) -> bool:
        """Cancel the overwrite; ``True`` if it had not begun."""

@final
class PendingInto:
    """A read on its way into the caller's memory; its death cancels the read."""

    def done(self) -> bool:
        """True if the read has ended, well or not."""

    def wait(self) -> None:
        """Wait for the read with the GIL released; raise its error."""

@final
class Pending:
    """A read on its way; its death cancels the read."""

    def done(self) -> bool:
        """True if the read has ended, well or not."""

    def wait(self) -> Slot:
        """Wait for the read with the GIL released; raise its error."""

@final
class Slot:
    """Bytes of a read: a writable buffer, freed when its last user is gone."""

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
        """The seconds that the step takes."""

    @property
    def stall_s(self) -> float:
        """The seconds of it in which its kernels wait."""

    @property
    def recompute_s(self) -> float:
        """The seconds of it in which tensors are computed again."""

    @property
    def bound_s(self) -> float:
        """A lower bound of the step with this memory, if nothing is computed again."""

    @property
    def bound_bytes(self) -> int:
        """A lower bound of the peak within the slow-down that was asked for."""

    @property
    def device_bytes(self) -> int:
        """The memory that the step was planned for."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes in the device's memory."""

    @property
    def class_peak_bytes(self) -> list[int]:
        """The most bytes of each class there, in the order of ``planning.trace.CLASSES``."""

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes in the host's memory."""

    @property
    def moved_bytes(self) -> list[int]:
        """The bytes moved to the drives, to the host, back from the drives, back from the host."""

    @property
    def recomputed(self) -> list[int]:
        """The tensors that are computed again."""

    @property
    def resident(self) -> list[tuple[float, int]]:
        """Pairs of a second of the step, and the bytes in the device's memory from then on."""

    @property
    def moves(self) -> list[tuple[int, str, int, float]]:
        """Tensor, ``"ssd"``, ``"host"`` or ``"fetch"``, the kernel before the move, and priority.

        A number beyond the step's tensors is the second life of a tensor that is computed again.
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

        Each tensor is its bytes, the place of its class in ``planning.trace.CLASSES``, ``True`` if
        it lives across steps, if it may go to the drives, and if it may go to the host, and the
        seconds that it takes to compute it again, if that can be done. Raises ``ConfigError``,
        ``IndexError`` or ``ValueError``.
        """

    @property
    def ideal_s(self) -> float:
        """The time of a step that never waits."""

    def live_bytes(self) -> list[int]:
        """Return the bytes that live while each kernel runs, if nothing is moved."""

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
        """Return the plan with the least peak found, within the slow-down.

        The machine's memory does not count. The step is longer than ``ideal_s`` by a share of
        ``slowdown_max`` at most.
        """

    def peaks_of(
        self, machine: PlanMachine, plan: StepPlan, groups: list[tuple[int, list[int]]]
    ) -> list[int]:
        """Return the most bytes of each group of tensors that a plan has in memory at once.

        Groups are given as budgets are; ``machine`` has to be that of the plan.
        """

    def judged(self, machine: PlanMachine, system: str) -> StepPlan:
        """Judge ``"keep"``, ``"recompute"`` (all that can be), ``"ssdtrain"`` or ``"teraio"``.

        The last two are those papers' plans (arXiv 2408.10013 and 2506.06472).
        """

    def judged_moves(
        self, machine: PlanMachine, moves: list[tuple[int, str, int, float]]
    ) -> StepPlan:
        """Judge moves as in ``StepPlan.moves``, which repeat in each step.

        Raises ``ValueError`` for moves with an unknown tensor or kernel, ``ConfigError`` if the
        step does not fit.
        """

@final
class Probe:
    """A file and memory of its size, on which settings of the engines are timed."""

    REQUEST_BYTES: Final[int]
    QUEUE_DEPTH_DEFAULT: Final[int]
    PIECE_BYTES_DEFAULT: Final[int]

    def __new__(cls, directory: str, request_count: int) -> Probe:
        """Open an unnamed file for ``request_count`` requests, with direct I/O."""

    @property
    def alignment(self) -> int:
        """Addresses, offsets and lengths of direct I/O there are multiples of this number."""

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

    Nobody may change them during the call. The GIL is released for a MiB and more.
    """

def hidden(
    items: Sequence[tuple[int, int, float, float, int | None]],
    *,
    write: float,
    read: float,
    copies: Sequence[tuple[int, float, float, float]],
    host_bytes: int,
    page_bytes: int,
    margin_s: float,
    round_trip_factor: float,
) -> dict[int, tuple[float, int | None]]:
    """Choose the tensors of a round that leave memory, as ``planning.policy.plan`` says.

    ``items`` have the fields of ``planning.policy.Item``; ``copies`` are those of each GPU, from it
    and to it, with the bytes of the longest tensor that can go to the disk. Rates are in bytes per
    second.

    Returns, by the key of each item that leaves, the latest start of its way back, and the bytes
    that it takes in pinned memory, or ``None`` if it does not stay there.
    """

def run_if_free(lock: threading.RLock, function: Callable[[], object]) -> bool:
    """Call a function under a lock and return ``True``, unless another thread has the lock.

    An interrupt comes before or after, and never leaves the lock taken.
    """

def try_cufile(
    library: str | None, directory: str, gpu: int, allows_compat: bool
) -> tuple[bool, str]:
    """Return ``True`` and cuFile's version if GPUDirect Storage works, else ``False`` and why.

    Some versions of cuFile never return, or end the process: call this in a child process.
    """
