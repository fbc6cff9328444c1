"""Gradients that lie on the disk between the micro-batches of a step, to keep a bound.

Autograd adds the same tensors to the same gradients, so the sums have the bits of the plain run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayGradient
from ssdtrain.away.known import known_of
from ssdtrain.away.tensor import MIN_BYTES, OffloadedTensor, why_staying
from ssdtrain.away.tensors import OffloadedTensors
from ssdtrain.errors import ConfigError
from ssdtrain.machine.torch_internals import (
    current_backward,
    is_given,
    outside_compiler,
    queue_callback,
    trains_with_others,
)
from ssdtrain.optimizer.chunks import name_of
from ssdtrain.sharing import Budget, Room
from ssdtrain.sizes import shown_bytes
from ssdtrain.store import TensorStore
from ssdtrain.watched import User

__all__ = ["NAME", "Gradients", "gradients_of"]

NAME = "gradients"
"""The name in the report of a session."""
PARTS = 2
"""Gradients of one part of the parameters are used, and those of the next one are read."""
WANTED = "offload_optimizer, whose gradients share this bound,"
ADVICE = "give offload_optimizer a smaller max_gradient_bytes"


class Gradient(OffloadedTensor):
    """A gradient whose bytes may leave memory."""

    kind = AwayGradient
    noun = "gradient"

    def __init__(self, owner: Gradients, gradient: Tensor, param: Tensor) -> None:
        # Keyed by its parameter: the gradient of the next step is another object.
        super().__init__(owner, gradient, "", id(param))
        self._optimizer = owner.optimizer
        self.param = weakref.ref(param)
        """The parameter that had it after the last addition."""

    @property
    def name(self) -> str:
        """The name in messages."""
        optimizer, param = self._optimizer(), self.param()
        if optimizer is None or param is None:
            return f"of shape {tuple(self.husk.shape)}"
        return name_of(vars(optimizer)["param_groups"], param)

    def leave(self, *, shared: bool = False) -> bool:
        """Take the bytes out of the gradient, unless other code has them."""
        # defence: gradients stay that a graph or another library has
        return not self._is_given() and super().leave(shared=shared)

    def is_held(self) -> bool:
        """Return whether other code has the memory of this gradient."""
        return self._is_given() or super().is_held()

    def _is_given(self) -> bool:
        tensor, param = self.tensor, self.param()
        assert tensor is not None
        # Its parameter has it.
        return is_given(tensor, expected_count=param is not None and param.grad is tensor)


class Adding:
    """The gradient to which a backward adds now; it dies with the backward."""

    def __init__(self, owner: Gradients) -> None:
        self._owner = weakref.ref(owner)
        self.user: User | None = None

    def end(self) -> None:
        """Let gradients leave that autograd has used until now."""
        self.user = None
        owner = self._owner()
        if owner is not None:
            owner.end_backward()


class Gradients(OffloadedTensors):
    """The gradients of one optimizer's parameters, under a bound."""

    name = NAME
    too_many = "more than max_gradient_bytes=%s of gradients are in memory"

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        max_bytes: int,
        room: Room | None,
        *,
        in_backward: bool,
    ) -> None:
        super().__init__(store, max_bytes, room)
        self.optimizer = weakref.ref(optimizer)
        self._in_backward = in_backward
        """True if ``InBackward`` calls ``end_adding``, in the place of a hook."""
        self._largest_bytes = 0
        self._watched: dict[int, tuple[weakref.ref[Tensor], list[Any]]] = {}
        # Not when the optimizer dies: its gradients may be away, and backwards go on.
        weakref.finalize(self, _remove_all, self._watched).atexit = False
        self._adding: weakref.WeakValueDictionary[int, Adding] = weakref.WeakValueDictionary()
        """By the number of the backward."""
        self.part_bytes = max_bytes // PARTS
        """The most bytes of gradients in one part of an update."""

    @property
    def kept_bytes_max(self) -> int:
        """The most bytes that may wait in memory for updates in backward.

        Backward itself uses two gradients at once.
        """
        left_bytes = self.max_resident_bytes - 2 * self._largest_bytes
        return max(0, min(super().kept_bytes_max, left_bytes))

    def watch(self) -> None:
        """Put hooks on all parameters, also on new and unfrozen parameters."""
        optimizer = self.optimizer()
        assert optimizer is not None, "it is the one who calls"
        for number in [one for one, (there, _) in self._watched.items() if there() is None]:
            del self._watched[number]
            self._order.forget(number)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and param.is_leaf and id(param) not in self._watched:
                    self._watch(param)

    def _watch(self, param: Any) -> None:
        if param.nbytes * least_count(in_backward=self._in_backward) > self.max_resident_bytes:
            self._notices.say(
                "too large",
                "max_gradient_bytes=%s does not hold the gradients of some parameters, which were "
                "added or unfrozen later; they stay in memory",
                shown_bytes(self.max_resident_bytes),
            )
            return
        self._largest_bytes = max(self._largest_bytes, param.nbytes)
        handles = [param.register_hook(_before(weakref.ref(self), weakref.ref(param)))]
        if not self._in_backward:
            handles.append(param.register_post_accumulate_grad_hook(_after(weakref.ref(self))))
        self._watched[id(param)] = weakref.ref(param), handles

    def begin_adding(self, param: Tensor) -> None:
        """Bring the gradient of a parameter, to which autograd is about to add."""
        number = current_backward()
        adding = self._adding.get(number)
        if adding is None:
            self._adding[number] = adding = Adding(self)
            queue_callback(adding.end)
        # A node without a gradient to add never ends its addition; the next one does.
        adding.user = None
        gradient = param.grad
        if gradient is not None and known_of(gradient) is not None:
            adding.user = user = User()
            self.bring_for(user, gradient)
        else:
            self.expect(param)

    def expect(self, param: Tensor) -> None:
        """Make room for a gradient that autograd or other code is about to make."""
        if param.nbytes >= MIN_BYTES and not trains_with_others():
            with self._lock:
                self._make_room(param.nbytes)

    def end_adding(self, param: Tensor, user: User | None = None) -> None:
        """Let gradients leave, now that an addition has ended; a user keeps this one."""
        adding = self._adding.get(current_backward())
        if adding is not None:
            adding.user = None
        gradient = param.grad
        if gradient is None or id(param) not in self._watched or not self._may_leave(gradient):
            return
        with self._lock:  # two backwards may end here with the same gradient
            one = known_of(gradient)
            if one is None:
                one = Gradient(self, gradient, param)
                self.take(one)
        if user is not None:
            one.note_user(user)
        if isinstance(one, Gradient):
            one.param = weakref.ref(param)
        # Another optimizer of this parameter may be its owner.
        one.owner.note_use(one)

    def bring_for(self, user: User, gradient: Tensor) -> None:
        """Bring a gradient, and keep it in memory as long as the user lives."""
        one = known_of(gradient)
        if one is not None:
            one.owner.begin_use([one], user)

    def _may_leave(self, gradient: Tensor) -> bool:
        if trains_with_others():
            self._notices.say(
                "processes",
                "gradients stay in memory beyond max_gradient_bytes: they are exchanged with other "
                "processes past Python",
            )
            return False
        if known_of(gradient) is not None:
            return True
        if gradient.requires_grad or why_staying(gradient, Tensor) is not None:
            return False
        # Torch does not know the users of memory of numpy or of another library.
        # defence: gradients on memory of others stay
        return gradient.untyped_storage().resizable()

    def end_backward(self) -> None:
        """Let gradients leave that a backward has used until now."""
        with self._lock:
            self._make_room(0)

    @property
    def failed_count(self) -> int:
        """Failed writes."""
        return self._failed_count

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at once, of gradients that may leave it."""
        return self._peak_bytes


def _before(
    gradients: weakref.ref[Gradients], there: weakref.ref[Tensor]
) -> Callable[[Tensor], None]:
    def before(_: Tensor) -> None:
        owner, param = gradients(), there()
        if owner is not None and param is not None:
            # Compiled autograd looks into the hooks of parameters.
            outside_compiler(partial(owner.begin_adding, param))

    return before


def _after(gradients: weakref.ref[Gradients]) -> Callable[[Tensor], None]:
    def after(param: Tensor) -> None:
        owner = gradients()
        if owner is not None:
            outside_compiler(partial(owner.end_adding, param))

    return after


def _remove_all(watched: dict[int, tuple[weakref.ref[Tensor], list[Any]]]) -> None:
    for _, handles in watched.values():
        for handle in handles:
            handle.remove()


def least_count(*, in_backward: bool) -> int:
    """Return how many of the largest gradient a bound has to hold.

    Updates in backward still use one gradient when the next one comes.
    """
    return 2 if in_backward else 1


def gradients_of(
    optimizer: Optimizer,
    store: TensorStore,
    budget: Budget | None,
    max_bytes: int,
    *,
    in_backward: bool,
) -> Gradients:
    """Return the gradients of an optimizer, under a bound.

    Raises:
        ConfigError: The bound does not hold the largest gradient.
        BudgetError: A session has no such room.

    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    largest = max(params, key=lambda param: param.nbytes, default=torch.empty(0, device="cpu"))
    if max_bytes < MIN_BYTES:
        raise ConfigError(
            f"max_gradient_bytes={shown_bytes(max_bytes)} is less than {shown_bytes(MIN_BYTES)}; "
            "smaller gradients stay in memory anyway"
        )
    count = least_count(in_backward=in_backward)
    if max_bytes < count * largest.nbytes:
        raise ConfigError(
            f"max_gradient_bytes={shown_bytes(max_bytes)} does not hold the gradient of "
            f"{name_of(groups, largest)}, of {shown_bytes(largest.nbytes)}"
            + (
                ', twice: with overlap="backward" the last one is still in use when the next comes'
                if in_backward
                else "; give more, twice that if the next one is to be read meanwhile"
            )
        )
    room = None
    if budget is not None and budget.limit_bytes is not None:
        left_bytes = budget.left_bytes
        assert left_bytes is not None
        if max_bytes > left_bytes:
            raise ConfigError(
                f"max_gradient_bytes={shown_bytes(max_bytes)} is more than the session's "
                f"max_resident_bytes={shown_bytes(budget.limit_bytes)} leaves "
                f"({shown_bytes(left_bytes)}); raise that of the session, or give less here"
            )
        room = budget.set_aside(max_bytes, lambda: WANTED, ADVICE)
    return Gradients(optimizer, store, max_bytes, room, in_backward=in_backward)
