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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ssdtrain.activations.installed import install, uninstall
from ssdtrain.activations.names import describe
from ssdtrain.activations.saved_tensor import check_version
from ssdtrain.away.classes import AwayParameter
from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import Hooks, hide_hooks, in_transform, top_hooks
from ssdtrain.optimizer.forward_order import READS_INNER_WEIGHTS
from ssdtrain.parameters.weight import Weight
from ssdtrain.parameters.weights import on_storage_of, weight_of

__all__ = ["begin_forward", "end_forward", "uses_inner_weights", "watch_modules", "weights_in"]

IN_TRANSFORM = (
    "{} of {} has weights on the disk (ssdtrain.offload_parameters), which {} cannot wait for; "
    "do it inside `with ssdtrain.parameters_in_memory(model):`"
)


REPLACED = (
    "the weight {} was given other memory (weight.data = ...) after a forward had used it, and the "
    "backward of that forward needs what it was, which is gone (ssdtrain.offload_parameters). "
    "Change it in place, or give it other memory between backward and the next forward"
)


class SavedWeight:
    """What a graph holds in the place of a weight, or of a view of it."""

    __slots__ = (
        "_is_itself",
        "_offset",
        "_size",
        "_stride",
        "_times_replaced",
        "_version",
        "_weight",
    )

    def __init__(self, weight: Weight, param: Tensor, tensor: Tensor) -> None:
        weight.note_memory()
        self._weight = weight
        self._is_itself = tensor is param
        self._times_replaced = weight.times_replaced
        self._version = param._version  # noqa: SLF001 - it has no public name
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> Tensor:
        """Bring the weight back, and return the view that was saved."""
        param = self._weight.tensor
        assert param is not None, "the graph has the parameter"
        check_version(  # defence: version of a saved weight
            param,
            self._version,
            lambda: f"the weight {self._weight.name} {describe(param.dtype, self._size)}",
        )
        weight = self._weight
        weight.look(param)
        weight.note_memory()
        with torch.no_grad():
            saved = param.detach()
            if self._is_itself:
                # Autograd too has the parameter as it is now.
                return saved
            # defence: other memory of a saved weight
            if weight.times_replaced != self._times_replaced:
                raise RuntimeError(REPLACED.format(weight.name))
            return saved.as_strided(self._size, self._stride, self._offset)


class WeightPair(saved_tensors_hooks):
    """Hooks on saved tensors, above those that are on."""

    def __init__(self, below: Hooks | None, keeping: Hooks) -> None:
        pack_below, unpack_below = keeping if below is None else below
        # Not found through `self`, which has the hooks: a graph without such a cycle is freed as
        # soon as nobody has it, also the part of it that the hooks of a checkpoint lead to.
        packs_below: list[Any] = [pack_below]
        self._below = packs_below

        def pack(tensor: Tensor) -> object:
            if type(tensor) in (Tensor, Parameter, AwayParameter) and not tensor.is_sparse:
                weight = on_storage_of(tensor)
                param = None if weight is None else weight.tensor
                if weight is not None and param is not None and _is_view(tensor, param):
                    return SavedWeight(weight, param, tensor)
            return packs_below[0](tensor)

        def unpack(packed: object) -> Tensor:
            if type(packed) is SavedWeight:
                return packed.tensor()
            unpacked: Tensor = unpack_below(packed)
            return unpacked

        hide_hooks(pack, below)
        super().__init__(pack, unpack)

    def let_go(self) -> None:
        """Hold the hooks below no more than the graph must: they may reach back to it."""
        self._below.clear()
        hide_hooks(self.pack_hook, None)


def _is_view(tensor: Tensor, param: Tensor) -> bool:
    return tensor.dtype == param.dtype and not (tensor.is_conj() or tensor.is_neg())


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
            below = top_hooks(True)
            self._pair = WeightPair(below, below or self._weights[0].owner.keeping_pair())
            install(self._pair)

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
    stack = _uses.stack
    if stack:
        _end_abandoned(stack)
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


def _end_abandoned(stack: list[Use]) -> None:
    """End those whose forward has ended without a word: torch tells of errors, not of Ctrl-C."""
    running = set[int]()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as above
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
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
