"""One weight whose bytes may be in memory, on the disk, or on their way."""

from __future__ import annotations

import gc
import queue
import selectors
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import thread as futures_thread
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain._core import Leaving
from ssdtrain.machine.torch_internals import count_users, plainly
from ssdtrain.parameters.away import AwayParameter, attach, husk_of, is_away
from ssdtrain.store import PendingRead, StoredTensor, is_dense
from ssdtrain.watched import HOLDER, Watcher

__all__ = ["MIN_BYTES", "Weight", "storage_key", "why_staying"]

MIN_BYTES = 64 << 10
"""Smaller weights (biases, norms) stay in memory: to bring one costs more than it frees."""

WAITING = frozenset(
    function.__code__
    for function in (
        *(threading.Condition.wait, threading.Thread.join, queue.Queue.get, queue.Queue.put),
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join),
        *(selectors.EpollSelector.select, selectors.PollSelector.select),
        futures_thread._worker,  # noqa: SLF001 - it has no public name
    )
)
"""The code of Python's library in which threads wait: from it no function of torch is called. A
thread in any other code may be inside of one, with a weight among its arguments."""


def _leaving() -> Leaving:
    with plainly():
        alone = Parameter(torch.zeros(1))
    return Leaving(
        plain=Parameter,
        away=AwayParameter,
        count_users=count_users,
        current_frames=sys._current_frames,  # noqa: SLF001 - there is no public name
        thread=threading.get_ident,
        idle=WAITING,
        collector=gc,
        alone=alone,
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
    if storage.nbytes() != param.nbytes or storage.is_shared() or not storage.resizable():
        return "a part of other memory"
    return None


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from all others that are alive."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its address in C++
    return address


class Owner(Protocol):
    """What a weight asks of all those of its model."""

    def look(self, weight: Weight) -> None:
        """Bring one back."""

    def begin_use(self, weights: Iterable[Weight], user: object) -> None:
        """Bring several back, and have them stay."""

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
        self.users = set[object]()
        """Who needs it in memory: modules in their forward, functions, and blocks of the user."""
        self.stays = False
        """Whether it stays in memory, because the disk did not take it."""
        self._leaving = LEAVING

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
        self.users.add(user)
        self.owner.look(self)

    def end_use(self, user: object) -> None:
        """Let the bytes go again, unless others use them."""
        self.users.discard(user)

    def forget(self) -> None:
        """Note that the parameter is gone."""
        self.owner.forget(self)

    def has_changed_form(self) -> bool:
        """Whether somebody gave the parameter other memory: of another shape, type or device."""
        param = self.param
        assert param is not None
        return (
            param.shape != self.husk.shape
            or param.stride() != self.husk.stride()
            or param.dtype != self.husk.dtype
            or param.device != self.husk.device
        )

    def take_form(self) -> None:
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
        attach(param, memory)
        self.source = self.pending = None
        vars(param).pop(HOLDER, None)


LEAVING = _leaving()
