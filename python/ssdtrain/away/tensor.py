"""One tensor whose bytes may be in memory, on the disk, or on their way."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain._core import Leaving
from ssdtrain.away.classes import AwayTensor, attach, husk_of, is_away, plain_storage
from ssdtrain.away.threads import WAITING
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import (
    address_of,
    as_plain_tensors,
    count_users,
    is_foreign,
    is_shared,
    plainly,
)
from ssdtrain.store import PendingRead, StoredTensor, TensorStore, is_dense
from ssdtrain.watched import HOLDER, Watcher

if TYPE_CHECKING:
    from ssdtrain.away.tensors import OffloadedTensors

__all__ = ["HELD", "MIN_BYTES", "OffloadedTensor", "storage_key", "why_staying"]

MIN_BYTES = 64 << 10
"""Smaller tensors (biases, norms) stay in memory: a read costs more than their memory is worth."""

IN_USE = "{} are in use at once"
LEFT_ALONE = (
    "{} stay until the next forward or step, because the program may hold their address "
    "(data_ptr(), .data)"
)
HELD = (
    "{} share their memory with other tensors or arrays that are alive (a state_dict(), a view, an "
    "older graph), and can leave once those are gone"
)
BESIDE_A_THREAD = "{} may be in use by another thread"


@cache
def leaving_of(kind: type[AwayTensor]) -> Leaving:
    """Return the compiled object that takes the bytes out of tensors of a kind."""
    with plainly():
        # As `Parameter` does it: `as_subclass` would make a view, whose base has the storage too.
        alone = Tensor._make_subclass(kind.plain, torch.zeros(1, device="cpu"))  # noqa: SLF001
    return Leaving(
        {
            "plain": kind.plain,
            "away": kind,
            "count_users": count_users,
            "current_frames": sys._current_frames,  # noqa: SLF001 - there is no public name
            "thread": threading.get_ident,
            "idle": WAITING,
            "clock_of": time.pthread_getcpuclockid,
            "collector": gc,
        },
        alone,
    )


def why_staying(tensor: Tensor, plain: type[Tensor]) -> str | None:
    """Return why the bytes of a tensor cannot leave memory, or ``None``.

    ``plain`` is the class that such a tensor has to have.
    """
    if type(tensor) is not plain or tensor.is_inference():
        return f"of the class {type(tensor).__name__}"
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return f"on {tensor.device} with layout {tensor.layout}"
    if tensor.nbytes < MIN_BYTES:
        return "small"
    if tensor.is_conj() or tensor.is_neg() or not is_dense(tensor):
        return "not dense"
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.is_shared():
        return "a part of other memory"
    return None


def storage_key(tensor: Tensor) -> int:
    """Return a number that no other living storage has."""
    return address_of(plain_storage(tensor) if is_away(tensor) else tensor.untyped_storage())


class OffloadedTensor(Watcher):
    """The entry of a tensor that may be away. It is used under the lock of its owner.

    Either the tensor has its own class and its bytes, or it is away. Then ``source`` has the bytes
    while they are still in memory, and afterwards ``stored`` has them.
    """

    kind: ClassVar[type[AwayTensor]]
    """The class of such a tensor while it is away."""
    noun: ClassVar[str]
    """The noun for such a tensor in messages."""

    def __init__(self, owner: OffloadedTensors, tensor: Tensor, name: str, use_key: int) -> None:
        self.owner = owner
        self._tensor = weakref.ref(tensor)
        self._name = name
        self.use_key = use_key
        """The key in the order of uses, which is the same in each step."""
        self.husk = husk_of(tensor, self.kind)
        self.nbytes = tensor.nbytes
        self.source: Tensor | None = None
        self.stored: StoredTensor[Tensor] | None = None
        """The bytes on the disk, which may be older than those in memory."""
        self.sum: int | None = None
        """The checksum of ``stored``; ``None`` if a write of it may be incomplete."""
        self.written_sum: int | None = None
        """The checksum of the bytes that are being written."""
        self.pending: PendingRead[Tensor] | None = None
        """A read that has begun."""
        self.users = set[weakref.ref[object]]()
        """Objects that need the tensor in memory: for a forward of a module, a function, a block of
        the program. If an interrupt keeps a user from ``end_use``, its death ends the use."""
        self.stays = False
        """True if the tensor stays in memory, because its write has failed."""
        self._leaving = leaving_of(self.kind)
        self._memory = _identity_of(tensor)
        """The memory that the tensor was last known to have."""
        self.times_replaced = 0
        """How often the program gave the tensor other memory."""
        self.has_foreign_memory = False
        """True if the tensor has such memory, and ``may_leave`` has not yet checked it."""

    @property
    def name(self) -> str:
        """The name of this tensor in messages."""
        return self._name

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, or ``None`` if it is gone."""
        return self._tensor()

    def is_in_memory(self) -> bool:
        """Return whether it takes memory: attached, being written, or being read."""
        if self.source is not None or self.pending is not None:
            return True
        return self.is_attached()

    def is_attached(self) -> bool:
        """Return whether the tensor has its bytes."""
        tensor = self.tensor
        return tensor is not None and not is_away(tensor)

    def look(self, tensor: Tensor) -> None:  # noqa: ARG002 - there is only one
        """Bring the bytes back."""
        self.owner.look(self)

    def begin_look(
        self,
        tensor: Tensor,  # noqa: ARG002 - there is only one
        user: object,
        *,
        in_training: bool,
    ) -> Tensor | None:
        """Bring the bytes back for a function."""
        return self.owner.begin_look(self, user, in_training=in_training)

    def end_look(self, user: object, *, stays: bool) -> None:
        """Let the bytes go again, unless the function gave their address out (``stays``)."""
        self.owner.end_look(self, user, stays=stays)

    def note_user(self, user: object) -> None:
        """Have the bytes stay until ``end_use``, or until the user is gone."""
        self.users.add(weakref.ref(user, self.users.discard))

    def end_use(self, user: object) -> None:
        """Let the bytes go again, unless others use them."""
        self.users.discard(weakref.ref(user))

    def forget(self) -> None:
        """Note that the tensor is gone."""
        self.owner.forget(self)

    def note_memory(self) -> None:
        """Note that the program gave the tensor other memory (``tensor.data = ...``), if it did."""
        tensor = self.tensor
        if tensor is None or is_away(tensor) or self._memory.cdata == storage_key(tensor):
            return
        self._memory = _identity_of(tensor)
        self.times_replaced += 1
        self.has_foreign_memory = True

    def may_leave(self) -> bool:
        """Return whether the bytes can leave; take over a new form or new memory of the tensor."""
        tensor = self.tensor
        assert tensor is not None
        self.note_memory()
        self.nbytes = tensor.nbytes
        if self.has_foreign_memory or not self._has_form_of(tensor):
            is_of_others = self.has_foreign_memory and is_foreign(tensor)
            # defence: weights on memory of others stay
            if is_of_others or why_staying(tensor, self.kind.plain) is not None:
                return False
            self.has_foreign_memory = False
            self._take_form()
        # defence: shared weights stay
        return not tensor.untyped_storage().is_shared()

    def _has_form_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor still has its shape, strides and dtype (``tensor.t_()``)."""
        form = self.husk
        return (
            tensor.shape == form.shape
            and tensor.stride() == form.stride()
            and tensor.dtype is form.dtype
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def _take_form(self) -> None:
        """Take over the form of the tensor, and forget the bytes on the disk, which differ."""
        tensor = self.tensor
        assert tensor is not None
        self.husk = husk_of(tensor, self.kind)
        self.stored = self.sum = None

    def leave(self, *, shared: bool = False) -> bool:
        """Take the bytes out of the tensor, unless others use or have them.

        With ``shared`` others may have them, because ``source`` keeps the memory.
        """
        tensor = self.tensor
        assert tensor is not None
        return self._leaving.leave(tensor, self, self.husk, HOLDER, shared)

    def is_shared(self) -> bool:
        """Return whether another tensor or an array shares the memory of ``source``."""
        return self.source is not None and is_shared(self.source)

    def why_in_memory(self, *, in_look: bool) -> str:
        """Return why the tensor does not leave now; ``{}`` stands for a size."""
        if self.users:
            return IN_USE
        if self.is_held():
            return HELD
        # No other cause is left.
        return LEFT_ALONE if in_look else BESIDE_A_THREAD

    def is_held(self) -> bool:
        """Return whether others have the memory of this tensor, which has its bytes."""
        tensor = self.tensor
        assert tensor is not None
        return not self.may_leave() or is_shared(tensor)

    def copy(self, store: TensorStore) -> Tensor:
        """Return a copy of the tensor, wherever its bytes are, and change nothing.

        A signal handler may look at a tensor between two lines that move it; each line leaves the
        bytes in one place.
        """
        tensor = self.tensor
        assert tensor is not None, "it is looked at"
        memory: Tensor | None = self.source
        with plainly():
            if storage_key(tensor) != storage_key(self.husk):
                # It has its memory again, and not yet its class.
                memory = as_plain_tensors(Tensor.detach, (), (tensor,), {})
            if memory is None:
                assert self.stored is not None, "what is not in memory is on the disk"
                memory = store.read(self.stored).result()
            else:
                memory = memory.clone()
            return Tensor._make_subclass(self.kind.plain, memory, tensor.requires_grad)  # noqa: SLF001

    def checksum(self) -> int:
        """Return the checksum of ``source``."""
        assert self.source is not None
        return checksum_of(self.source)

    def return_to(self, tensor: Tensor, memory: Tensor) -> None:
        """Give the tensor its bytes."""
        # First: after an interrupt, unknown memory would be taken for memory of the program.
        self._memory = _identity_of(memory)
        attach(tensor, memory, self.kind)
        self.source = self.pending = None
        vars(tensor).pop(HOLDER, None)


def _identity_of(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that keeps the address of a storage from being used again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
