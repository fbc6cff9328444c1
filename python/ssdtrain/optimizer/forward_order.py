"""In which order a forward needs the weights, learned from modules as they are called."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from ssdtrain.optimizer.pending import is_pending, under_way
from ssdtrain.watched import look_at

__all__ = ["ForwardOrder"]

READS_INNER_WEIGHTS = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    torch.jit.ScriptModule,
)
"""Modules that use the weights of modules in them without calling these: in C++, or on a way that
they choose by the classes of the weights."""


class ForwardOrder:
    """Notes which weights are asked for between two steps, and lets modules wait for theirs.

    A module waits before its forward for the weights that it owns itself, so that also code past
    torch's Python functions, such as an extension in C++, finds them updated.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._noted: dict[int, None] = {}
        self._is_learned = False
        _watch(weakref.ref(self))

    def begin_round(self) -> None:
        """Take over what was learned since the last step."""
        unknown = [number for number in self._noted if number not in self._places]
        if not self._is_learned:
            if self._noted:
                others = [number for number in self._places if number not in self._noted]
                self._places = {
                    number: place for place, number in enumerate([*self._noted, *others])
                }
                self._is_learned = True
        elif unknown:
            # No module has it as its own: it comes where it is asked for in the next round.
            self._is_learned = False
        self._noted = {}

    def sort(self, params: Iterable[Any], of: Any) -> list[Any]:
        """Return things by the places of the parameters that ``of`` gives for them."""
        last = len(self._places)
        return sorted(params, key=lambda one: self._places.get(id(of(one)), last))

    def note(self, param: Tensor) -> None:
        """Remember that a parameter was asked for."""
        self._noted.setdefault(id(param))

    def before_forward(self, module: nn.Module) -> None:
        """Wait for what a module is about to use."""
        if self._is_learned and not under_way:
            return
        for param in module._parameters.values():  # noqa: SLF001 - its own ones only, and fast
            if param is None:
                continue
            if not self._is_learned:
                self.note(param)
            if is_pending(param):
                look_at(param)
        if isinstance(module, READS_INNER_WEIGHTS):
            for param in module.parameters():
                if is_pending(param):
                    look_at(param)


def _watch(order: weakref.ref[ForwardOrder]) -> None:
    """Have modules wait as long as the order lives.

    Compiled code is compiled anew when hooks of modules come and go, so this one stays. A module
    takes it away again, and no finalizer: that may run while torch goes through the hooks.
    """

    def before(module: nn.Module, _: Any) -> None:
        if is_dynamo_compiling():
            # Updates are made in `step()` from now on: compiled code does not wait (Deferred).
            return
        alive = order()
        if alive is None:
            handle.remove()
        else:
            alive.before_forward(module)

    handle = register_module_forward_pre_hook(before)
