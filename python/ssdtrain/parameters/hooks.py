"""Hooks around the forward of each module: they bring its weights, and pack them by name.

The hooks are torch's hooks for all modules of the process. So nothing is added to the module, and a
copy or a pickle of it has nothing of us. During the forward a pair of hooks on saved tensors stands
on top of the pair that was on: it packs a weight as its name, so that the graph does not hold its
bytes, and hands all other tensors on.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ssdtrain.activations.installed import install, uninstall
from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import in_transform
from ssdtrain.parameters.saved_weight import WeightPair, running_frames, take_out_abandoned
from ssdtrain.parameters.weight import Weight
from ssdtrain.parameters.weights import weight_of

__all__ = ["begin_forward", "end_forward", "uses_inner_weights", "watch_modules", "weights_in"]

IN_TRANSFORM = (
    "{} of {} has weights on the disk (ssdtrain.offload_parameters), which {} cannot wait for; "
    "do it inside `with ssdtrain.parameters_in_memory(model):`"
)

READS_INNER_WEIGHTS = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    torch.jit.ScriptModule,
)
"""Modules that use the weights of modules in them without calling these modules: in C++, or on a
path that they choose by the classes of the weights."""


class Forward:
    """A forward of a module with weights of its own; it is a user of these weights."""

    __slots__ = ("__weakref__", "_pair", "_weights", "frame", "module")

    def __init__(self, module: nn.Module, weights: list[Weight], frame: FrameType) -> None:
        self.module = module
        self.frame = frame
        self._weights = weights
        self._pair: WeightPair | None = None

    def begin(self) -> None:
        """Bring the weights, and install the pair of hooks."""
        for owner in {id(weight.owner): weight.owner for weight in self._weights}.values():
            owner.begin_use([weight for weight in self._weights if weight.owner is owner], self)
        if torch.is_grad_enabled():
            self._pair = pair = self._weights[0].owner.pair()
            install(pair)

    def end(self) -> None:
        """Remove the hooks, and let the weights leave."""
        if self._pair is not None:
            uninstall(self._pair)
            self._pair.let_go()
            self._pair = None
        for weight in self._weights:
            weight.end_use(self)


class _Forwards(threading.local):
    def __init__(self) -> None:
        self.stack: list[Forward] = []


_forwards = _Forwards()


def uses_inner_weights(module: nn.Module) -> bool:
    """Return whether a module uses the weights of modules in it past their forwards.

    The module that ``torch.compile(module)`` returns does, too.
    """
    inner = module._modules  # noqa: SLF001 - its own ones only, and fast
    return isinstance(module, READS_INNER_WEIGHTS) or "_orig_mod" in inner


def weights_in(module: nn.Module) -> list[Weight]:
    """Return the weights of a module and of all modules in it that may be away."""
    return [found for p in module.parameters() if (found := weight_of(p)) is not None]


def _before(module: nn.Module, _: Any) -> None:
    if is_dynamo_compiling():
        # The call of the compiled code brings all weights in it; see compiled.py.
        return
    own = module._parameters  # noqa: SLF001 - as above
    if uses_inner_weights(module):
        weights = weights_in(module)
    elif own:
        weights = [
            found for p in own.values() if p is not None and (found := weight_of(p)) is not None
        ]
    else:
        return
    if weights:
        frame = sys._getframe(1)  # noqa: SLF001 - the public way lists them all
        begin_forward(module, weights, frame)


def begin_forward(module: nn.Module, weights: list[Weight], frame: FrameType) -> None:
    """Bring the weights of a module until the end of its forward, which ``frame`` runs."""
    if (what := in_transform()) is not None:
        if all(weight.users for weight in weights):
            return
        raise UnsupportedError(IN_TRANSFORM.format("a forward", type(module).__name__, what))
    take_out_abandoned(frame)
    stack = _forwards.stack
    if stack:
        _end_abandoned(stack, frame)
    # On the stack first: if the weights cannot be brought, `end_forward` finds it.
    forward = Forward(module, weights, frame)
    stack.append(forward)
    forward.begin()


def _after(module: nn.Module, _: Any, __: Any) -> None:
    if not is_dynamo_compiling():
        end_forward(module)


def end_forward(module: nn.Module) -> None:
    """Let the weights of the last forward of a module leave."""
    stack = _forwards.stack
    # A list, no generator: Python loses an interrupt that comes while it drops a generator.
    modules = [forward.module for forward in stack]
    if module in modules:
        # Forwards above it were abandoned: they raised, and this forward caught the error.
        while stack[-1].module is not module:
            _end_last(stack)
        _end_last(stack)


def _end_abandoned(stack: list[Forward], frame: FrameType) -> None:
    """End forwards whose frame is gone: torch calls no hook after Ctrl-C."""
    running = running_frames(frame)
    while stack and id(stack[-1].frame) not in running:
        _end_last(stack)


def _end_last(stack: list[Forward]) -> None:
    stack[-1].end()
    # Last: after an interrupt above, the next call ends it again.
    stack.pop()


class _Watch:
    is_on = False


def watch_modules() -> None:
    """Let all modules of this process bring their weights from now on."""
    if not _Watch.is_on:
        _Watch.is_on = True
        register_module_forward_pre_hook(_before)
        register_module_forward_hook(_after, always_call=True)
