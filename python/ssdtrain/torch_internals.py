"""The few functions of torch that we need and that have no public name.

They are looked up by name: a torch that lacks one is refused at import, with a clear error.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ssdtrain.errors import UnsupportedError

__all__ = ["current_backward", "current_node", "is_wrapped", "sequence_number", "storage_users"]


def _find(path: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = attrgetter(path)(torch._C)  # noqa: SLF001
    except AttributeError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch._C.{path}; ssdtrain needs torch 2.11 or newer"
        ) from error
    return found


sequence_number: Callable[[], int] = _find("_autograd._get_sequence_nr")
"""The number that the next node made in this thread will get."""

current_backward: Callable[[], int] = _find("_current_graph_task_id")
"""The number of the backward that runs in this thread, or -1."""

current_node: Callable[[], Any] = _find("_current_autograd_node")
"""The node that a backward runs in this thread, or None."""

is_wrapped: Callable[[Tensor], bool] = _find("_functorch.is_functorch_wrapped_tensor")
"""Whether a function transform stands between this tensor and its bytes."""

_count_users: Callable[[int], int] = _find("_storage_Use_Count")


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors lie on the storage of this one; one Python object counts as well."""
    return _count_users(tensor.untyped_storage()._cdata)  # noqa: SLF001 - its address in C++
