"""The questions that the compiled part asks of Python; `_core.pyi` has them as types.

So mypy checks that `Hooks`, `Writeback`, `Prefetcher` and `Policy` answer them. In Rust,
`rust/py/src/partners.rs` and `planning.rs` ask them, and no other file.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

from ssdtrain._core import Kept, Loading, Offloading, Record, Round, SavedTensor
from ssdtrain.activations.followed import Scope
from ssdtrain.activations.rematerializer import Bring, RecipeInUse
from ssdtrain.errors import SsdtrainError
from ssdtrain.planning.policy import Plan
from ssdtrain.residency import Refused

__all__ = ["Planning", "Prefetching", "SessionHooks", "Writing"]


class SessionHooks(Protocol):
    """The hooks of one session, with the three objects behind them; see `Hooks`."""

    @property
    def writeback(self) -> Writing:
        """The object that handles failed writes, the bound and memory of others."""

    @property
    def prefetcher(self) -> Prefetching:
        """The object that learns from rounds, and makes room for reads."""

    @property
    def policy(self) -> Planning:
        """The object that has the plans."""

    @property
    def rematerializer(self) -> Rematerializing | None:
        """The object that makes saved tensors again; ``None`` if none is made again."""

    def exclude(self, tensor: Tensor) -> Kept:
        """Pack a tensor in a forked child, which has no disk."""

    def keep(
        self,
        tensor: Tensor,
        kind: Literal["small_here", "apart", "detached", "foreign"],
        nbytes: int,
        storage_bytes: int,
    ) -> Kept | Refused:
        """Pack a tensor that stays in memory; ``kind`` says why (see ``Seen``)."""

    def unpack_kept(self, packed: Kept | Refused) -> Tensor:
        """Unpack a tensor that was kept, and has changed or is needed inside an operation."""

    def refuse_changed(self, saved: SavedTensor) -> None:
        """Raise, because the program changed a saved tensor in place."""

    def from_memory(self, saved: SavedTensor) -> Tensor:
        """Unpack a saved tensor in a forked child, which has its memory but not its disk."""

    def wait_for(self, saved: SavedTensor, loading: Loading) -> None:
        """Wait for a read whose bytes a node needs now, and count the wait."""


class Writing(Protocol):
    """Failed writes, room under the bound, and memory of others; see `Writeback`.

    The compiled part asks while it holds the session's lock.
    """

    def make_room(
        self, tensor: Tensor, storage: UntypedStorage, nbytes: int, sequence: int
    ) -> bool | Refused:
        """Make room under the bound for a new record; return whether others may hold its bytes.

        Without room, return the ``Refused`` that is packed.
        """

    def let_go_for(self, nbytes: int) -> None:
        """Let memory of GPUs go, as far as it can, to make room for so many bytes."""

    def empty_caches(self) -> None:
        """Give the memory back that torch keeps for later allocations on GPUs."""

    def enter(self, record: Record, storage: UntypedStorage, may_be_lent: bool) -> None:
        """Note a new record under the bound."""

    def renewed(self, record: Record) -> None:
        """Note a record under the bound that was saved again after its write began."""

    def is_held_by_others(self, record: Record) -> bool:
        """Return whether tensors of the program still lie on the storage of a lent record."""

    def lends(self, record: Record) -> bool:
        """Return whether the program holds the bytes, so that to write them frees nothing."""

    def learn_held(self, record: Record, storage: UntypedStorage) -> None:
        """Remember that the program holds a storage, if it does."""

    def note_busy(self, reason: str) -> None:
        """Say that the disk could take no more, so that a tensor stays in memory."""

    def note_failure(self, error: SsdtrainError) -> None:
        """Count a write that failed, and say why its tensor stays in memory."""

    def wait_for_transfer(self) -> bool:
        """Wait for the oldest write or an abandoned transfer; ``False`` if there is none."""

    def give_memory_back(self) -> None:
        """Give free memory back to the system."""

    def sequence_number(self) -> int:
        """Return the sequence number that the next node of this thread will get."""


class Rematerializing(Protocol):
    """Recipes of saved tensors; see `Rematerializer`."""

    def recipe(
        self, saved: SavedTensor, tensor: Tensor, is_new: bool, offloading: Offloading
    ) -> tuple[RecipeInUse, bool] | None:
        """Return the recipe of a tensor that was saved now, and whether it replaces the bytes."""

    def rematerialize(self, saved: SavedTensor, use: RecipeInUse, unpack: Bring) -> Tensor:
        """Make a saved tensor again; ``unpack`` brings the tensors that it is made from."""

    def prove(self, saved: SavedTensor, use: RecipeInUse, tensor: Tensor, bring: Bring) -> None:
        """Compare the result of a recipe with the bytes that were saved."""


class Prefetching(Protocol):
    """Learning from rounds, and room for reads; see `Prefetcher`."""

    def learn(self, finished: list[Round]) -> None:
        """Let the policy plan with rounds that have ended."""

    def scope(self, opening: int) -> Scope:
        """Return how much is followed of a round that begins with the tensor of this key."""

    def begin_backward(self) -> None:
        """Have the peak of a GPU read when the backward that begins now has ended."""

    def make_room(self, saved: SavedTensor, nbytes: int) -> None:
        """Make room under the bound for the read of a tensor that a node needs now."""

    def make_room_to_make(self, saved: SavedTensor) -> None:
        """Make room under the bound for a tensor that is made again, and for its sources."""

    def note_refused(self, error: SsdtrainError | torch.OutOfMemoryError) -> None:
        """Log that a read could not begin ahead of its need."""


class Planning(Protocol):
    """The plans of a session; see `Policy`. The compiled part reads these collections."""

    @property
    def plans(self) -> dict[int, Plan]:
        """The plan of each signature."""

    @property
    def keep(self) -> set[int]:
        """The keys of tensors that stay in memory."""

    @property
    def pinned(self) -> set[int]:
        """The keys of tensors that stay in pinned memory."""

    @property
    def rematerialized(self) -> set[int]:
        """The keys of tensors that are made again."""

    @property
    def sources(self) -> set[int]:
        """The keys of tensors that others are made from."""

    @property
    def made_count(self) -> int:
        """The number of plans that were made so far."""

    @property
    def moments(self) -> dict[int, tuple[float, float, float | None]]:
        """By the key of a tensor on a GPU, seconds since the first pack of its round there.

        The three are its pack, its need and, if it leaves, the end of its copy from the GPU.
        """

    def knows(self, key: int) -> bool:
        """Return whether a plan was made with this key in it."""
