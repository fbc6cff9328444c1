"""The version check of what is unpacked, and the packed object of what is not managed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ssdtrain._core import Kept
from ssdtrain.machine.torch_internals import current_node

__all__ = ["NO_VERSION", "check_version", "exclude"]

NO_VERSION = -1
"""Inference tensors have no version counter."""


def exclude(tensor: Tensor) -> Kept:
    """Return the packed object of a tensor that is not managed: not counted, kept."""
    version = NO_VERSION if tensor.is_inference() else tensor._version  # noqa: SLF001
    return Kept(tensor.detach(), version)


def check_version(counter: Tensor, version: int, describe: Callable[[], str]) -> None:
    """Raise as autograd does if a saved tensor was changed in place.

    With hooks set autograd itself no longer checks, and the gradient would be silently wrong.
    """
    if version not in (NO_VERSION, counter._version):  # noqa: SLF001
        # `grad_fn._saved_...` may be read outside of a backward: then there is no current node.
        node = current_node()
        saver = f", which {node.name()} needs," if node is not None else ""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {describe()}{saver} is at version {counter._version}; "  # noqa: SLF001
            f"expected version {version} instead. Clone the tensor before it is changed in place, "
            "or use the out-of-place operation; torch.autograd.set_detect_anomaly(True) shows the "
            "line that saved it."
        )
