"""Gradients that an update has taken in a backward, and what stands in their place.

The stand-in raises when a function of torch gets it. So a clip, an unscale or a print finds out
that it comes too late. A gradient of ``None`` would be passed over in silence.
"""

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

__all__ = ["INSTEAD", "LOOKED", "Taken", "TakenGradient", "take"]

INSTEAD = 'To clip, unscale, change or look at gradients before step(), use overlap="step"'
LOOKED = (
    'this gradient is gone: with overlap="backward" a gradient is freed in the backward that '
    f"completes it, by the update that uses it. {INSTEAD}. No weight was changed since the last "
    "step(); optimizer.zero_grad() discards what this backward began"
)
AGAIN = (
    'a second backward would add to a gradient that an update has used already: overlap="backward" '
    "takes each gradient as soon as it is there. With several micro-batches in a step call "
    "optimizer.set_is_last_backward(False) before those that are not the last, and (True) before "
    'the last; a trainer that accumulates by itself needs overlap="step". A block of '
    "checkpoint(use_reentrant=True) that uses a weight twice needs use_reentrant=False. If "
    "gradients are clipped before step(), or those of several steps added, "
    'use overlap="step". No weight was changed since the last step(); call '
    "optimizer.zero_grad() and begin this step again"
)
FREED = (
    "a backward would add to a gradient that was freed by its update: call zero_grad() of the "
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
    """Stands in ``param.grad`` for a gradient that an update has taken."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse every look at the bytes; the compiler describes also the gradients of weights."""
        if func in DESCRIBED:
            return as_plain_tensors(func, types, args, kwargs or {})
        if func is Tensor.cpu or (func == SET_DATA and args[0] is args[1]):
            # `module.cpu()` moves gradients as well, and Lightning calls it when training ends.
            return args[0]
        raise UnsupportedError(LOOKED)

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refuse to give it other memory, for which torch asks no class."""
        raise UnsupportedError(LOOKED)


@dataclass(eq=False)
class Taken:
    """A parameter whose update is made before ``step()`` puts it in place."""

    param: Tensor
    group: dict[str, Any]
    gradient: Tensor | None
    """Until its update is made."""
    gradient_user: User | None = None
    """Keeps the gradient in memory as long."""
    stands_in: TakenGradient | None = None
    """What is in ``param.grad`` meanwhile, and until somebody sets it to something else."""
    version: int = 0
    memory: tuple[Any, ...] = ()
    """With the version: whether somebody has changed the parameter since."""
    sum: int | None = None
    """The checksum of the weight that its update began with, once it has begun."""
    updated: Tensor | ParkedUpdate | None = None
    """The weight after the update, until ``step()`` puts it into the parameter."""
    before: dict[Any, Any] | None = None
    """The older state, where the update has made a new one."""
    is_state_new: bool = False
    """Whether there was no older one."""
    is_published: bool = False
    is_refused: bool = False
    """Whether a backward wanted to add to it, whose other gradients may be there in part."""
    _node: Any = None
    _hook: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.version = self.param._version  # noqa: SLF001 - torch has no other name for it
        self.memory = _memory_of(self.param)

    def let_gradient_go(self) -> None:
        """Note that the update is made."""
        self.gradient = self.gradient_user = None

    @property
    def is_in_place(self) -> bool:
        """Whether nobody has set the parameter's gradient to something else."""
        return self.stands_in is not None and self.param.grad is self.stands_in

    @property
    def is_gradient_taken(self) -> bool:
        """Whether something stands in for the gradient.

        If not, `step()` makes the update, and makes it anew if it is called again: whoever changed
        the weight in between has it counted.
        """
        return self.stands_in is not None

    @property
    def is_spent(self) -> bool:
        """Whether the gradient is gone, and no update of it waits to be put in place."""
        return self.gradient is None and self.updated is None

    @property
    def is_weight_unchanged(self) -> bool:
        """Whether the weight is the one that the update began with."""
        param = self.param
        now = (param._version, _memory_of(param))  # noqa: SLF001 - as above
        return now == (self.version, self.memory)

    def note_bytes(self) -> None:
        """Note what the weight is before its update, which is made of more than one look at it."""
        self.sum = _sum_of(self.param)

    @property
    def has_other_bytes(self) -> bool:
        """Whether the weight was changed past its version counter since its update began."""
        if self.sum is None:
            return False
        now = _sum_of(self.param)
        return now is not None and now != self.sum

    def stand_in(
        self, when_replaced: Callable[[Taken], None], name_of: Callable[[Tensor], str]
    ) -> None:
        """Take the gradient away, and stop what would add to it.

        ``when_replaced`` is called before a backward adds to what the user has set in its place,
        and ``name_of`` tells what messages call a parameter.
        """
        param = self.param
        wrong = torch.full((), torch.nan, dtype=param.dtype, device="cpu").expand(param.shape)
        self.stands_in = wrong.as_subclass(TakenGradient)
        weak = weakref.ref(self)

        def before(_: Any) -> None:
            alive = weak()
            if alive is None:
                return
            if alive.is_in_place:
                alive.is_refused = True
                raise UnsupportedError(
                    f"{name_of(alive.param)}: {FREED if alive.is_published else AGAIN}"
                )
            when_replaced(alive)

        self._node = get_gradient_edge(param).node
        self._hook = self._node.register_prehook(before)
        param.grad = self.stands_in

    def leave(self) -> None:
        """Let backwards add to the gradient again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._node = None


def _memory_of(param: Tensor) -> tuple[Any, ...]:
    """Return what changes if a parameter is given other memory or another form on it.

    (``param.data = ...``) Of what may be away the address tells nothing.
    """
    weight = weight_of(param)
    place = param.data_ptr() if weight is None else weight.owner.times_replaced(weight)
    return place, param.shape, param.stride(), param.dtype, param.is_conj(), param.is_neg()


def _sum_of(param: Tensor) -> int | None:
    """Return the checksum of the bytes of a parameter, if it is known."""
    weight = weight_of(param)
    return checksum_of(param) if weight is None else weight.owner.sum_of(weight)


def take(param: Tensor, group: dict[str, Any], user: User | None = None) -> Taken:
    """Return a record for a parameter with its gradient, which stays where it is."""
    return Taken(param, group, param.grad, user)
