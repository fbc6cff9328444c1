"""The few functions of torch that we need and that have no public name.

They are looked up by name: a torch that lacks one is refused at import, with a clear error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ssdtrain.errors import UnsupportedError

__all__ = [
    "current_backward",
    "current_node",
    "dispatch_keys",
    "is_below_autograd",
    "is_traced",
    "is_wrapped",
    "pop_hooks",
    "push_hooks",
    "sequence_number",
    "share_counters",
    "storage_users",
    "top_hooks",
    "tracer",
    "untraced",
]


def _find(path: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = attrgetter(path)(torch)
    except AttributeError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.{path}; ssdtrain needs torch 2.11 or newer"
        ) from error
    return found


sequence_number: Callable[[], int] = _find("_C._autograd._get_sequence_nr")
"""The number that the next node made in this thread will get."""

current_backward: Callable[[], int] = _find("_C._current_graph_task_id")
"""The number of the backward that runs in this thread, or -1."""

current_node: Callable[[], Any] = _find("_C._current_autograd_node")
"""The node that a backward runs in this thread, or None."""

push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _find(
    "_C._autograd._push_saved_tensors_default_hooks"
)
"""Puts a pair of hooks on top of those of this thread."""

pop_hooks: Callable[[], None] = _find("_C._autograd._pop_saved_tensors_default_hooks")

top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = _find(
    "_C._autograd._top_saved_tensors_default_hooks"
)
"""The pair of hooks that is used in this thread; with ``True`` also while the compiler has switched
it off."""

dispatch_keys: Callable[[Tensor], object] = _find("_C._dispatch_keys")
"""Which parts of torch handle the operations of this tensor, as a set that compares by value."""

is_wrapped: Callable[[Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor")
"""Whether a function transform stands between this tensor and its bytes."""

_count_users: Callable[[int], int] = _find("_C._storage_Use_Count")


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors lie on the storage of this one; one Python object counts as well."""
    return _count_users(tensor.untyped_storage()._cdata)  # noqa: SLF001 - its address in C++


_is_excluded: Callable[[object], bool] = _find("_C._dispatch_tls_is_dispatch_key_excluded")
_exclude: Callable[[object, bool], AbstractContextManager[None]] = _find(
    "_C._SetExcludeDispatchKeyGuard"
)
_KEEPS_COUNTERS: object = _find("_C.DispatchKey.ADInplaceOrView")


is_below_autograd: Callable[[], bool] = partial(_is_excluded, _KEEPS_COUNTERS)
"""Whether we are called from inside an operation, where `detach` gives a tensor with a version
counter of its own."""


def share_counters() -> AbstractContextManager[None]:
    """Return a context in which a detached tensor shares its version counter there too."""
    return _exclude(_KEEPS_COUNTERS, False)


tracer: Callable[[], object] = _find("_C._dynamo.eval_frame.get_eval_frame_callback")
"""The compiler's function that sees each call of this thread before it runs; ``None`` or ``False``
if there is none."""


def is_traced() -> bool:
    """Whether the compiler looks into this call, or would into the calls that it makes."""
    return is_dynamo_compiling() or bool(tracer())


untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = _find("_disable_dynamo")
"""Makes a function that the compiler calls and does not look into; unlike the public
``torch.compiler.disable`` it does not import the compiler."""
