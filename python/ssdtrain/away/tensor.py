"""One tensor whose bytes may be in memory, on the disk, or on their way."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssdtrain._core import Leaving
from ssdtrain.away.classes import AwayTensor, attach, husk_of, is_away, plain_storage
from ssdtrain.away.threads import KNOWN_THREADS, WAITING
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import as_plain_tensors, count_users, is_shared, plainly
from ssdtrain.store import PendingRead, StoredTensor, TensorStore, is_dense
from ssdtrain.watched import HOLDER, Watcher

__all__ = ["HELD", "MIN_BYTES", "OffloadedTensor", "Owner", "storage_key", "why_staying"]

MIN_BYTES = 64 << 10
"""Smaller tensors (biases, norms) stay in memory: to bring one costs more than it frees."""

IN_USE = "{} in use at once"
LEFT_ALONE = (
    "{} that stay until the next forward or step, because their address may have been asked for "
    "(data_ptr(), .data)"
)
HELD = (
    "{} on whose memory others have tensors or arrays (a state_dict() that is held, a view, an "
    "older graph), and which cannot leave before these are gone"
)
BESIDE_A_THREAD = "{} that another thread, which is busy, may be using"


@cache
def leaving_of(kind: type[AwayTensor]) -> Leaving:
    """Return what takes the bytes out of tensors of one kind."""
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
            "known": KNOWN_THREADS,
            "clock_of": time.pthread_getcpuclockid,
            "collector": gc,
        },
        alone,
    )


def why_staying(tensor: Tensor, plain: type[Tensor]) -> str | None:
    """Return why the bytes of a tensor that should be of a class cannot leave, or ``None``."""
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
    """Return what tells the storage of a tensor from all others that are alive."""
    storage = plain_storage(tensor) if is_away(tensor) else tensor.untyped_storage()
    address: int = storage._cdata  # noqa: SLF001 - its address in C++
    return address


class Owner(Protocol):
    """What such a tensor asks of all those under the same bound."""

    max_resident_bytes: int

    @property
    def kept_bytes_max(self) -> int:
        """So many bytes may wait in memory for updates in backward."""

    def look(self, one: OffloadedTensor) -> None:
        """Bring one back."""

    def begin_look(self, one: OffloadedTensor, user: object, *, in_training: bool) -> Tensor | None:
        """Bring one back for a function, or return a copy of it."""

    def end_look(self, one: OffloadedTensor, user: object, *, stays: bool) -> None:
        """Let one leave again that a function has used."""

    def begin_use(self, some: Iterable[OffloadedTensor], user: object) -> None:
        """Bring several back, and have them stay."""

    def bring(self, one: OffloadedTensor) -> None:
        """Bring one back that is in use, and expect no more of it."""

    def note_use(self, one: OffloadedTensor) -> None:
        """Note that one, which is in memory, was used."""

    def forget(self, one: OffloadedTensor) -> None:
        """Forget one whose tensor is gone."""


class OffloadedTensor(Watcher):
    """A tensor, and where its bytes are. All of it is used under the lock of its owner.

    Either the tensor has its own class and its bytes, or it is away. Then ``source`` has the bytes
    as long as they are in memory still; without it ``stored`` has them.
    """

    kind: ClassVar[type[AwayTensor]]
    """The class of such a tensor while it is away."""
    noun: ClassVar[str]
    """What messages call it."""

    def __init__(self, owner: Owner, tensor: Tensor, name: str, place: int) -> None:
        self.owner = owner
        self._tensor = weakref.ref(tensor)
        self._name = name
        self.place = place
        """What it is in the order of uses: the same number in each step."""
        self.husk = husk_of(tensor, self.kind)
        self.nbytes = tensor.nbytes
        self.source: Tensor | None = None
        self.stored: StoredTensor[Tensor] | None = None
        """Where the disk has bytes of it, of this moment or an earlier one."""
        self.sum: int | None = None
        """The checksum of what the disk has; ``None`` where it is not known to have it in whole."""
        self.written_sum: int | None = None
        """That of what is being written."""
        self.pending: PendingRead[Tensor] | None = None
        """A read that has begun."""
        self.users = set[weakref.ref[object]]()
        """Who needs it in memory: modules in their forward, functions, and blocks of the user. An
        interrupt may keep one from saying that it has ended, but not from going."""
        self.stays = False
        """Whether it stays in memory, because the disk did not take it."""
        self._leaving = leaving_of(self.kind)
        self._memory = _identity_of(tensor)
        """The memory that the tensor was given last, by us or, as far as we know, by others."""
        self.times_replaced = 0
        """How often others gave it memory."""
        self.has_foreign_memory = False
        """Whether it lies on such memory, at which nobody has looked yet."""

    @property
    def name(self) -> str:
        """What messages call this one."""
        return self._name

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, as long as somebody has it."""
        return self._tensor()

    def is_in_memory(self) -> bool:
        """Whether it takes memory: attached, being written, or being read."""
        if self.source is not None or self.pending is not None:
            return True
        return self.is_attached()

    def is_attached(self) -> bool:
        """Whether the tensor has its bytes."""
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
        """Let the bytes go again, unless somebody may have kept their address."""
        self.owner.end_look(self, user, stays=stays)

    def note_user(self, user: object) -> None:
        """Have the bytes stay until ``end_use``, or until nobody has the user any more."""
        self.users.add(weakref.ref(user, self.users.discard))

    def end_use(self, user: object) -> None:
        """Let the bytes go again, unless others use them."""
        self.users.discard(weakref.ref(user))

    def forget(self) -> None:
        """Note that the tensor is gone."""
        self.owner.forget(self)

    def note_memory(self) -> None:
        """Note whether somebody gave the tensor other memory (``tensor.data = ...``)."""
        tensor = self.tensor
        if tensor is None or is_away(tensor) or self._memory.cdata == storage_key(tensor):
            return
        self._memory = _identity_of(tensor)
        self.times_replaced += 1
        self.has_foreign_memory = True

    def may_leave(self) -> bool:
        """Whether the tensor still is one whose bytes can leave; takes over what it is now."""
        tensor = self.tensor
        assert tensor is not None
        self.note_memory()
        if self.has_foreign_memory or not self._has_form_of(tensor):
            why = why_staying(tensor, self.kind.plain)
            # Of memory of a file, of numpy or of another library torch cannot tell who has it.
            is_whose = self.has_foreign_memory and not tensor.untyped_storage().resizable()
            # defence: weights on memory of others stay
            if why is not None or is_whose:
                return False
            self.has_foreign_memory = False
            self._take_form()
        # defence: shared weights stay
        return not tensor.untyped_storage().is_shared()

    def _has_form_of(self, tensor: Tensor) -> bool:
        """Whether a tensor still lies on its memory as it did (``tensor.t_()``)."""
        form = self.husk
        return (
            tensor.shape == form.shape
            and tensor.stride() == form.stride()
            and tensor.dtype is form.dtype
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def _take_form(self) -> None:
        """Forget what the disk has, which is of another form than the tensor is now."""
        tensor = self.tensor
        assert tensor is not None
        self.husk = husk_of(tensor, self.kind)
        self.nbytes = tensor.nbytes
        self.stored = self.sum = None

    def leave(self, *, shared: bool = False) -> bool:
        """Take the bytes out of the tensor, unless others may be using them, or have them.

        ``shared``: others may have them, as long as ``source`` does.
        """
        tensor = self.tensor
        assert tensor is not None
        return self._leaving.leave(tensor, self, self.husk, HOLDER, shared)

    def is_shared(self) -> bool:
        """Return whether another tensor or an array shares the memory of ``source``."""
        return self.source is not None and is_shared(self.source)

    def why_in_memory(self, *, in_look: bool) -> str:
        """Return why a tensor does not leave now; it has a place for a size."""
        if self.users:
            return IN_USE
        if self.is_held():
            return HELD
        # Nothing else forbids it.
        return LEFT_ALONE if in_look else BESIDE_A_THREAD

    def is_held(self) -> bool:
        """Whether others have the memory of this tensor, which has its bytes."""
        tensor = self.tensor
        assert tensor is not None
        return not self.may_leave() or is_shared(tensor)

    def copy(self, store: TensorStore) -> Tensor:
        """Return a copy of the tensor, wherever its bytes are, and change nothing.

        For whoever comes between two lines of what moves it: each of them leaves it whole.
        """
        tensor = self.tensor
        assert tensor is not None, "it is looked at"
        memory: Tensor | None = self.source
        with plainly():
            if storage_key(tensor) != storage_key(self.husk):
                # It is about to get its class back.
                memory = as_plain_tensors(Tensor.detach, (), (tensor,), {})
            if memory is None:
                assert self.stored is not None, "what is not in memory is on the disk"
                memory = store.read(self.stored).result()
            else:
                memory = memory.clone()
            return Tensor._make_subclass(self.kind.plain, memory, tensor.requires_grad)  # noqa: SLF001

    def checksum(self) -> int:
        """Return that of the bytes, which have left the tensor and are in memory still."""
        assert self.source is not None
        return checksum_of(self.source)

    def return_to(self, tensor: Tensor, memory: Tensor) -> None:
        """Give the tensor its bytes."""
        # First: memory that an interrupt left unknown would be taken for that of others.
        self._memory = _identity_of(memory)
        attach(tensor, memory, self.kind)
        self.source = self.pending = None
        vars(tensor).pop(HOLDER, None)


def _identity_of(tensor: Tensor) -> StorageWeakRef:
    """Return what tells the memory of a tensor; its address is nobody else's meanwhile."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
