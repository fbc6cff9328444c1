"""Gradients that an update in backward has taken, and the tensors that stand in their places."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ssdtrain.errors import UnsupportedError
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import are_same_type, as_plain_tensors
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.weights import weight_of
from ssdtrain.watched import METADATA, User

__all__ = ["INSTEAD", "LOOKED", "Taken", "TakenGradient"]

INSTEAD = 'To clip, unscale, change or look at gradients before step(), use overlap="step"'
LOOKED = (
    'this gradient is gone: with overlap="backward" a gradient is freed in the backward that '
    f"completes it, by the update that uses it. {INSTEAD}. No weight was changed since the last "
    "step(); optimizer.zero_grad() discards the updates of this backward"
)
AGAIN = (
    "a second backward would add to a gradient that an update has used already: "
    'overlap="backward" takes each gradient as soon as it is complete. With several micro-batches '
    "in a step call optimizer.set_is_last_backward(False) before those that are not the last, and "
    '(True) before the last; a trainer that accumulates by itself needs overlap="step". A block of '
    "checkpoint(use_reentrant=True) that uses a weight twice needs use_reentrant=False. If "
    'gradients are clipped before step(), or those of several steps added, use overlap="step". No '
    "weight was changed since the last step(); call optimizer.zero_grad() and begin this step again"
)
FREED = (
    "a backward would add to a gradient that its update has freed: call zero_grad() of the "
    "optimizer that updates this parameter between its step() and this backward. If a backward for "
    "another optimizer comes here (two models that train each other), call it right after the "
    'step(); to keep gradients over a step(), use overlap="step"'
)
DESCRIBED = METADATA | {
    getattr(Tensor, name).__get__
    for name in ("_version", "_base", "grad", "grad_fn", "retains_grad", "_backward_hooks")
}
DESCRIBED |= {Tensor.untyped_storage, are_same_type}
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]  # not known to be a descriptor


class TakenGradient(Tensor):
    """Stands in ``param.grad`` for a gradient that an update has taken; functions of torch raise.

    A gradient of ``None`` would be skipped: a clip or an unscale that comes too late would not see
    it, and training would go on with other bits.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse uses of the bytes. The compiler describes the gradients of weights as well."""
        if func in DESCRIBED:
            return as_plain_tensors(func, types, args, kwargs or {})
        if func is Tensor.cpu or (func == SET_DATA and args[0] is args[1]):
            # `module.cpu()` moves gradients too; Lightning calls it when training ends.
            return args[0]
        raise UnsupportedError(LOOKED)

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refuse to give it other memory; torch calls no ``__torch_function__`` for that."""
        raise UnsupportedError(LOOKED)


@dataclass(eq=False)
class Taken:
    """A parameter whose update is computed on a copy, until ``step()`` puts it in place."""

    param: Tensor
    group: dict[str, Any]
    """The copy of its group that the update uses."""
    gradient: Tensor | None
    """``None`` once the update is computed."""
    gradient_user: User | None = None
    """Keeps the bytes of the gradient in memory."""
    stand_in: TakenGradient | None = None
    """The tensor in ``param.grad`` meanwhile. Updates that ``step()`` itself computes have none."""
    sum: int | None = None
    """The checksum of the weight that the update has used, if it is known."""
    updated: Tensor | ParkedUpdate | None = None
    """The weight after the update, until it is put in place."""
    before: dict[Any, Any] | None = None
    """The older state, if the update has made a new one."""
    is_state_new: bool = False
    """True if there was no older state."""
    is_published: bool = False
    is_refused: bool = False
    """True if a second backward was refused, which may have added to other gradients."""
    _node: Any = None
    _hook: Any = field(default=None, repr=False)

    @property
    def is_in_place(self) -> bool:
        """True if the stand-in is the parameter's gradient still."""
        return self.stand_in is not None and self.param.grad is self.stand_in

    @property
    def is_spent(self) -> bool:
        """True if the gradient is gone, and no update of it waits to be put in place."""
        return self.gradient is None and self.updated is None

    def note_bytes(self) -> None:
        """Note the checksum of the weight before its update, if its gradient was taken."""
        self.sum = None if self.stand_in is None else _sum_of(self.param)

    @property
    def has_other_bytes(self) -> bool:
        """True if the weight was changed since its update began."""
        return self.sum is not None and _sum_of(self.param) not in (None, self.sum)

    def take_gradient(self, name_of: Callable[[Tensor], str]) -> None:
        """Put the stand-in into the parameter, and refuse backwards that would add to it."""
        param = self.param
        wrong = torch.full((), torch.nan, dtype=param.dtype, device="cpu").expand(param.shape)
        self.stand_in = wrong.as_subclass(TakenGradient)
        weak = weakref.ref(self)

        def before(_: Any) -> None:
            alive = weak()
            if alive is not None and alive.is_in_place:
                alive.is_refused = True
                text = FREED if alive.is_published else AGAIN
                raise UnsupportedError(f"{name_of(alive.param)}: {text}")

        # A hook lives as long as its node, which the parameter does not keep alive.
        self._node = get_gradient_edge(param).node
        self._hook = self._node.register_prehook(before)
        param.grad = self.stand_in

    def leave(self) -> None:
        """Let backwards add to the gradient again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._node = None


def _sum_of(param: Tensor) -> int | None:
    weight = weight_of(param)
    return checksum_of(param) if weight is None else weight.owner.sum_of(weight)
