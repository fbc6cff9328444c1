"""What is done around the forward of a module whose weights may be away, and for its backward.

Hooks of torch for all modules of the process bring a module's own weights, so nothing is added to
the module, and a copy or a pickle of it has nothing of us. Meanwhile a pair of hooks on saved
tensors stands on top of those that were on: it packs a weight as its name, so that the graph does
not hold its bytes, and hands all else on.
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
"""Modules that use the weights of modules in them without calling these: in C++, or on a way that
they choose by the classes of the weights."""


class Use:
    """One forward of a module with weights of its own."""

    __slots__ = ("__weakref__", "_pair", "_weights", "frame", "module")

    def __init__(self, module: nn.Module, weights: list[Weight], frame: FrameType) -> None:
        self.module = module
        self.frame = frame
        self._weights = weights
        self._pair: WeightPair | None = None

    def begin(self) -> None:
        """Bring the weights, and put the pair of hooks on."""
        for owner in {id(weight.owner): weight.owner for weight in self._weights}.values():
            owner.begin_use([weight for weight in self._weights if weight.owner is owner], self)
        if torch.is_grad_enabled():
            self._pair = pair = self._weights[0].owner.pair()
            install(pair)

    def end(self) -> None:
        """Take the hooks off, and let the weights go."""
        if self._pair is not None:
            uninstall(self._pair)
            self._pair.let_go()
            self._pair = None
        for weight in self._weights:
            weight.end_use(self)


class _Uses(threading.local):
    def __init__(self) -> None:
        self.stack: list[Use] = []


_uses = _Uses()


def uses_inner_weights(module: nn.Module) -> bool:
    """Whether a module uses the weights of the modules in it past their forwards.

    So does what ``torch.compile(module)`` returns.
    """
    inner = module._modules  # noqa: SLF001 - its own ones only, and fast
    return isinstance(module, READS_INNER_WEIGHTS) or "_orig_mod" in inner


def weights_in(module: nn.Module) -> list[Weight]:
    """Return the weights of a module and of all modules in it that may be away."""
    return [found for p in module.parameters() if (found := weight_of(p)) is not None]


def _before(module: nn.Module, _: Any) -> None:
    if is_dynamo_compiling():
        # What calls the code that is compiled now brings all weights in it.
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
    """Have the weights of a module in memory until the end of its forward, which a frame runs."""
    if (what := in_transform()) is not None:
        if all(weight.users for weight in weights):
            return
        raise UnsupportedError(IN_TRANSFORM.format("a forward", type(module).__name__, what))
    take_out_abandoned(frame)
    stack = _uses.stack
    if stack:
        _end_abandoned(stack, frame)
    # From here on `end_forward` finds it, also if the weights cannot be brought.
    use = Use(module, weights, frame)
    stack.append(use)
    use.begin()


def _after(module: nn.Module, _: Any, __: Any) -> None:
    if not is_dynamo_compiling():
        end_forward(module)


def end_forward(module: nn.Module) -> None:
    """Let the weights of a module's last forward go, if it used some."""
    stack = _uses.stack
    # No generator: Python loses an interrupt that comes while it drops one.
    modules = [use.module for use in stack]
    if module in modules:
        # Those above it were abandoned in its forward, which has caught what went wrong there.
        while stack[-1].module is not module:
            _end_last(stack)
        _end_last(stack)


def _end_abandoned(stack: list[Use], frame: FrameType) -> None:
    """End those whose forward has ended without a word: torch tells of errors, not of Ctrl-C."""
    running = running_frames(frame)
    while stack and id(stack[-1].frame) not in running:
        _end_last(stack)


def _end_last(stack: list[Use]) -> None:
    stack[-1].end()
    # Afterwards: who is interrupted above finds it again.
    stack.pop()


class _Watch:
    is_on = False


def watch_modules() -> None:
    """Have modules bring their weights from now on, in this process."""
    if not _Watch.is_on:
        _Watch.is_on = True
        register_module_forward_pre_hook(_before)
        register_module_forward_hook(_after, always_call=True)
