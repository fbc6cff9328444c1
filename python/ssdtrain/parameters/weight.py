"""One weight whose bytes may be in memory, on the disk, or on their way."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ssdtrain._core import Leaving
from ssdtrain.machine.torch_internals import count_users, plainly
from ssdtrain.parameters.away import AwayParameter, attach, husk_of, is_away
from ssdtrain.parameters.successor import Successor
from ssdtrain.parameters.threads import KNOWN_THREADS, WAITING
from ssdtrain.store import PendingRead, StoredTensor, is_dense
from ssdtrain.watched import HOLDER, Watcher

__all__ = ["MIN_BYTES", "Weight", "storage_key", "why_staying"]

MIN_BYTES = 64 << 10
"""Smaller weights (biases, norms) stay in memory: to bring one costs more than it frees."""


def _leaving() -> Leaving:
    with plainly():
        alone = Parameter(torch.zeros(1))
    return Leaving(
        {
            "plain": Parameter,
            "away": AwayParameter,
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


def why_staying(param: Tensor) -> str | None:
    """Return why the bytes of a parameter cannot leave memory, or ``None``."""
    if type(param) is not Parameter or param.is_inference():
        return f"of the class {type(param).__name__}"
    if not param.is_cpu or param.layout is not torch.strided:
        return f"on {param.device} with layout {param.layout}"
    if param.nbytes < MIN_BYTES:
        return "small"
    if param.is_conj() or param.is_neg() or not is_dense(param):
        return "not dense"
    storage = param.untyped_storage()
    if storage.nbytes() != param.nbytes or storage.is_shared():
        return "a part of other memory"
    return None


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from all others that are alive."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its address in C++
    return address


class Owner(Protocol):
    """What a weight asks of all those of its model."""

    max_resident_bytes: int

    def look(self, weight: Weight) -> None:
        """Bring one back."""

    def begin_use(self, weights: Iterable[Weight], user: object) -> None:
        """Bring several back, and have them stay."""

    def bring(self, weight: Weight) -> None:
        """Bring one back that is in use, and expect no more of it."""

    def precede(self, updated: Tensor) -> Successor:
        """Begin to write the bytes that a weight is to have."""
        ...

    def succeed(self, weight: Weight, successor: Successor) -> None:
        """Put such bytes in the place of those that a weight has."""

    def forget(self, weight: Weight) -> None:
        """Forget one whose parameter is gone."""

    def keeping_pair(self) -> tuple[Any, Any]:
        """Return hooks on saved tensors that keep all."""
        ...


class Weight(Watcher):
    """A parameter, and where its bytes are. All of it is used under the lock of its owner.

    Either the parameter has its own class and its bytes, or it is away. Then ``source`` has the
    bytes as long as they are in memory still; without it ``stored`` has them.
    """

    def __init__(self, owner: Owner, param: Tensor, name: str) -> None:
        self.owner = owner
        self._param = weakref.ref(param)
        self.name = name
        self.husk = husk_of(param)
        self.nbytes = param.nbytes
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
        self._leaving = LEAVING
        self._memory = _identity_of(param)
        """The memory that the parameter was given last, by us or, as far as we know, by others."""
        self.times_replaced = 0
        """How often others gave it memory."""
        self.has_foreign_memory = False
        """Whether it lies on such memory, at which nobody has looked yet."""

    @property
    def param(self) -> Tensor | None:
        """The parameter, as long as somebody has it."""
        return self._param()

    def is_in_memory(self) -> bool:
        """Whether it takes memory: attached, being written, or being read."""
        if self.source is not None or self.pending is not None:
            return True
        param = self.param
        return param is not None and not is_away(param)

    def is_attached(self) -> bool:
        """Whether the parameter has its bytes."""
        param = self.param
        return param is not None and not is_away(param)

    def look(self, tensor: Tensor) -> None:  # noqa: ARG002 - there is only one
        """Bring the bytes back."""
        self.owner.look(self)

    def begin_use(self, tensor: Tensor, user: object) -> None:  # noqa: ARG002 - there is only one
        """Bring the bytes back, and have them stay until ``end_use``."""
        self.note_user(user)
        self.owner.look(self)

    def note_user(self, user: object) -> None:
        """Have the bytes stay until ``end_use``, or until nobody has the user any more."""
        self.users.add(weakref.ref(user, self.users.discard))

    def end_use(self, user: object) -> None:
        """Let the bytes go again, unless others use them."""
        self.users.discard(weakref.ref(user))

    def forget(self) -> None:
        """Note that the parameter is gone."""
        self.owner.forget(self)

    def note_memory(self) -> None:
        """Note whether somebody gave the parameter other memory (``param.data = ...``)."""
        param = self.param
        if param is None or is_away(param) or self._memory.cdata == storage_key(param):
            return
        self._memory = _identity_of(param)
        self.times_replaced += 1
        self.has_foreign_memory = True

    def may_leave(self) -> bool:
        """Whether the parameter still is one whose bytes can leave; takes over what it is now."""
        param = self.param
        assert param is not None
        self.note_memory()
        if self.has_foreign_memory:
            # Of memory of a file, of numpy or of another library torch cannot tell who has it.
            # defence: weights on memory of others stay
            if why_staying(param) is not None or not param.untyped_storage().resizable():
                return False
            self.has_foreign_memory = False
            self._take_form()
        # defence: shared weights stay
        return not param.untyped_storage().is_shared()

    def _take_form(self) -> None:
        """Forget what the disk has, which is of another form than the parameter is now."""
        param = self.param
        assert param is not None
        self.husk = husk_of(param)
        self.nbytes = param.nbytes
        self.stored = self.sum = None

    def leave(self) -> bool:
        """Take the bytes out of the parameter, unless others have or may be using them."""
        param = self.param
        assert param is not None
        return self._leaving.leave(param, self, self.husk, HOLDER)

    def checksum(self) -> int:
        """Return that of the bytes, which have left the parameter and are in memory still."""
        assert self.source is not None
        return Leaving.checksum(self.source.data_ptr(), self.nbytes)

    def return_to(self, param: Tensor, memory: Tensor) -> None:
        """Give the parameter its bytes."""
        # First: memory that an interrupt left unknown would be taken for that of others.
        self._memory = _identity_of(memory)
        attach(param, memory)
        self.source = self.pending = None
        vars(param).pop(HOLDER, None)


def _identity_of(param: Tensor) -> StorageWeakRef:
    """Return what tells the memory of a parameter; its address is nobody else's meanwhile."""
    return StorageWeakRef(param.untyped_storage())  # type: ignore[no-untyped-call]


LEAVING = _leaving()
