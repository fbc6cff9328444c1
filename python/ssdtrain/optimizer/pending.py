"""Weights and gradients that an update on another thread still uses: whoever looks, waits.

They are watched (`watched.py`) until their update is done.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.nn import Parameter

from ssdtrain.machine.torch_internals import as_plain_tensors
from ssdtrain.watched import HOLDER, METADATA, Watched, Watcher, look_at

__all__ = [
    "Holder",
    "Updates",
    "hold",
    "in_update",
    "is_pending",
    "release",
    "under_way",
    "updating",
]

_thread = threading.local()
_gradient_lock = threading.RLock()


@contextmanager
def updating() -> Iterator[None]:
    """Let this thread use pending tensors: it updates them."""
    _thread.updates = True
    try:
        yield
    finally:
        _thread.updates = False


def in_update() -> bool:
    """Whether this thread updates pending tensors."""
    return getattr(_thread, "updates", False)


class Updates(ABC):
    """The updates of one step."""

    @abstractmethod
    def join(self) -> None:
        """Wait until all have ended, well or not."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all have ended; raise what went wrong, once."""


under_way: weakref.WeakSet[Updates] = weakref.WeakSet()
"""The updates of all optimizers of this process that have not ended, or have an error to raise."""


class Holder(Watcher):
    """What pending tensors wait for: a part of an update."""

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor | None] = {}
        """By the number of the parameter: what the update uses, whatever the user sets by now."""
        self.pending_gradients: dict[int, Tensor] = {}
        """What it has begun with."""
        self._hooks: dict[int, Any] = {}

    def begin_look(self, tensor: Tensor, user: object, *, in_training: bool) -> None:  # noqa: ARG002
        """Wait; an update that has ended does not begin again."""
        if not in_update():
            self.look(tensor)

    def end_look(self, user: object, *, stays: bool) -> None:
        """Do nothing: who uses an updated tensor is not counted."""

    def keep_hook(self, param: Tensor, handle: Any) -> None:
        """Remember what stands before the accumulation of a parameter's gradient."""
        self._hooks[id(param)] = handle

    def drop_hook(self, param: Tensor) -> None:
        """Take it away again."""
        handle = self._hooks.pop(id(param), None)
        if handle is not None:
            handle[1].remove()


def hold(param: Tensor, holder: Holder) -> None:
    """Make a parameter and its gradient pending."""
    gradient = param.grad
    holder.gradients[id(param)] = gradient
    if param.requires_grad:
        # A graph from before the step may still add to the gradient, past Python; the node lives
        # only as long as somebody has it.
        node = get_gradient_edge(param).node
        handle = node.register_prehook(lambda _: look_at(param))
        holder.keep_hook(param, (node, handle))
    # What such a graph has saved of the weight is out of date, as after a step that has ended.
    increment_version(param)
    if gradient is not None:
        holder.pending_gradients[id(param)] = gradient
        vars(gradient)[HOLDER] = holder
        _become(gradient, PendingGradient)
    vars(param)[HOLDER] = holder
    _become(param, PENDING_OF[type(param)])


def release(param: Tensor) -> None:
    """Let everybody use a parameter and its gradient again."""
    holder: Holder | None = vars(param).get(HOLDER)
    if holder is None:
        return
    holder.drop_hook(param)
    holder.gradients.pop(id(param), None)
    gradient = holder.pending_gradients.pop(id(param), None)
    if gradient is not None:
        _become(gradient, Tensor)
        del vars(gradient)[HOLDER]
    _become(param, PLAIN_OF[type(param)])
    del vars(param)[HOLDER]


def _become(tensor: Any, kind: type) -> None:
    tensor.__class__ = kind


def is_pending(value: object) -> bool:
    """Whether this is a tensor that has to be waited for."""
    return isinstance(value, _Pending)


class _Pending(Watched):
    """What the classes of pending tensors share."""

    @classmethod
    def _is_let_through(cls, func: Any, types: Iterable[type]) -> bool:
        if func in METADATA:
            return True
        # An update may have kept the gradient of an earlier step, which is away by now.
        return in_update() and all(issubclass(one, _Pending) for one in types)

    @classmethod
    def _look_everywhere(cls) -> None:
        for updates in list(under_way):
            updates.settle()

    def as_subclass(self, cls: Any) -> Any:
        """Return it as a tensor of another class."""
        # Not by super(): the update may have ended since this was looked up.
        return (Tensor if in_update() else Watched).as_subclass(self, cls)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Give it other memory."""
        kind: Any = Tensor if in_update() else Watched
        return kind.set_(self, *arguments, **options)


class PendingGradient(_Pending):
    """A gradient that an update still reads."""


_get: Any = attrgetter("grad.__get__")(Tensor)
_set: Any = attrgetter("grad.__set__")(Tensor)


def _as_plain(function: Any, *arguments: Any) -> Any:
    return as_plain_tensors(function, (), arguments, {})


class _PendingWeight(_Pending):
    """A parameter, of whatever class, that is not updated yet."""

    # torch reads and sets a gradient with the lock of Python released in between, so two threads
    # must not do it at once.

    @property
    def grad(self) -> Tensor | None:
        """The gradient: for the update that of the step, for others the one that is set now."""
        holder: Holder | None = vars(self).get(HOLDER)
        if holder is not None and in_update():
            return holder.gradients.get(id(self))
        with _gradient_lock:
            gradient: Tensor | None = _as_plain(_get, self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        holder: Holder | None = vars(self).get(HOLDER)
        with _gradient_lock:
            if holder is not None and in_update():
                is_unchanged = _as_plain(_get, self) is holder.gradients.get(id(self))
                holder.gradients[id(self)] = gradient
                if not is_unchanged:
                    return
            _as_plain(_set, self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class PendingTensor(_PendingWeight):
    """A leaf that is a plain tensor, and is not updated yet."""


class PendingParameter(_PendingWeight, Parameter):
    """A parameter that is not updated yet."""


PENDING_OF: dict[type, type] = {Parameter: PendingParameter, Tensor: PendingTensor}
PLAIN_OF: dict[type, type] = {pending: plain for plain, pending in PENDING_OF.items()}
