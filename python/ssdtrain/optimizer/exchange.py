"""What checkpoints ask of optimizers, offloaded or not.

An offloaded optimizer keeps the names of its own class free, so what it has for this is private.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.optimizer.offloaded import Offloaded

__all__ = ["give_state", "has_masters", "note_loaded", "own_kind", "refuse_half_done"]


def own_kind(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of an optimizer, the one from before if it is offloaded."""
    return optimizer._own_kind if isinstance(optimizer, Offloaded) else type(optimizer)


def has_masters(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps float32 masters of its parameters of 16 bits."""
    return isinstance(optimizer, Offloaded) and optimizer._masters is not None


def give_state(
    optimizer: Optimizer, param: Tensor, values: Iterable[tuple[Any, Any]] | None
) -> None:
    """Give one parameter another state, or none; an offloaded optimizer's goes to the disk."""
    if values is None:
        optimizer.state.pop(param, None)
    elif isinstance(optimizer, Offloaded):
        optimizer._give_state(param, values)
    else:
        optimizer.state[param] = dict(values)


def note_loaded(optimizer: Optimizer) -> None:
    """Let an offloaded optimizer go on whose state has been replaced in whole."""
    if isinstance(optimizer, Offloaded):
        optimizer._note_loaded()


def refuse_half_done(optimizer: Optimizer) -> None:
    """Raise if a step is under way, or the last one failed and left what is not whole."""
    if isinstance(optimizer, Offloaded):
        optimizer._refuse_half_done("ssdtrain.save()")
