"""Gives an optimizer the class of offloaded ones, which is derived from its own class, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import outside_compiler
from ssdtrain.optimizer.chunks import own_step
from ssdtrain.optimizer.contract import take_over_step
from ssdtrain.optimizer.offloaded import Offloaded
from ssdtrain.optimizer.whole_state import WholeState

__all__ = ["become_offloaded"]


def become_offloaded(optimizer: Optimizer, begin: Callable[..., object]) -> Offloaded:
    """Give an optimizer the class of offloaded ones; a failure leaves it as it was."""
    kind: type[Optimizer] = type(optimizer)
    attributes = dict(vars(optimizer))
    _refuse_names(kind, set(attributes))
    try:
        take_over_step(optimizer)
        optimizer.__class__ = _offloaded_class(kind)  # type: ignore[arg-type]
        begin(optimizer, kind)
    except BaseException:
        optimizer.__class__ = kind
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        raise
    return cast("Offloaded", optimizer)


def _refuse_names(kind: type[Optimizer], attributes: set[str]) -> None:
    """Refuse an optimizer that has an attribute or a method with a name of ours."""
    ours = {
        name
        for base in (Offloaded, WholeState)
        for name in (*base.__annotations__, *vars(base))
        if not (name.startswith("__") or hasattr(Optimizer, name))
    } - {"param_groups", "state"}
    own = {name for base in kind.__mro__ if base is not Optimizer for name in vars(base)}
    taken = sorted(ours & (own | attributes))
    if taken:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: it has {taken[0]!r}, a name that an offloaded "
            "optimizer needs for itself; give it another name"
        )


@cache
def _offloaded_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of the offloaded optimizers of this kind."""

    def step(self: Any, *given: Any, **named: Any) -> Any:
        # Around it torch puts the hooks on steps, into which the compiler may look.
        return outside_compiler(partial(Offloaded.step, self._itself(), *given, **named))

    step.__doc__ = kind.step.__doc__
    # What asks which arguments a step takes (`GradScaler`) is told those of its own.
    vars(step)["__signature__"] = inspect.signature(own_step(kind))
    vars(step).update(vars(Offloaded.step))
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "step": step}

    class OffloadedFirst(type(kind)):  # type: ignore[misc]
        """Looks methods up in our class first, though the optimizer's own is the first base.

        Python lets an object change its class only where the first bases lead to the same memory
        layout. They would not if ours came first and `kind` had `ABC` or `Generic` as first base.
        """

        def mro(cls) -> list[type]:
            if Offloaded not in cls.__bases__:
                return cast("list[type]", super().mro())
            return [cls, Offloaded, WholeState, *kind.__mro__]

    made: type[Optimizer] = OffloadedFirst(f"Offloaded{kind.__name__}", (kind, Offloaded), names)
    return made
