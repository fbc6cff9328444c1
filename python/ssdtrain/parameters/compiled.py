"""Weights of modules whose forward is compiled (``module.compile()``).

Compiled code uses weights past Python, and runs only those hooks of modules that were compiled into
it. So the call of the compiled forward brings all weights in the module, and lets them leave at its
end. For autograd such a call is a single operation, so hooks on saved tensors see what it saves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from ssdtrain.parameters.hooks import begin_forward, end_forward, weights_in

__all__ = ["bring_before_compiled", "is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """Return whether the forward of a module was compiled, with all modules in it."""
    return getattr(module, "_compiled_call_impl", None) is not None


class CompiledCall:
    """Calls the compiled forward of a module with the weights in memory."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        # No cycle that was not there: the compiled forward has the module, too.
        self._module = module
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward; a compiler of a module around this module sees only that."""
        if is_dynamo_compiling():
            return self._compiled(*args, **kwargs)
        weights = weights_in(self._module)
        if not weights:
            return self._compiled(*args, **kwargs)
        frame = sys._getframe()  # noqa: SLF001 - the public way lists them all
        try:
            begin_forward(self._module, weights, frame)
            return self._compiled(*args, **kwargs)
        finally:
            end_forward(self._module)


def bring_before_compiled(model: nn.Module) -> None:
    """Let the compiled modules of a model bring their weights, also if compiled from now on."""
    for module in model.modules():
        _bring_before(module)
    _Watch.begin()


def _bring_before(module: nn.Module) -> None:
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is not None and not isinstance(compiled, CompiledCall):
        called = CompiledCall(module, compiled)
        module._compiled_call_impl = called  # noqa: SLF001 - as torch's own compile() does


class _Watch:
    """Wraps ``Module.compile``, because torch has no hook for it."""

    is_on = False

    @classmethod
    def begin(cls) -> None:
        if cls.is_on:
            return
        cls.is_on = True
        own = nn.Module.compile

        @wraps(own)
        def compile_and_bring(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            own(module, *args, **kwargs)
            if weights_in(module):
                _bring_before(module)

        nn.Module.compile = compile_and_bring  # type: ignore[assignment, method-assign]
