"""Checks the version of an unpacked tensor; packs tensors that ssdtrain leaves alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ssdtrain._core import Kept
from ssdtrain.activations.names import describe
from ssdtrain.machine.torch_internals import current_node

__all__ = ["check_version", "exclude", "give_back", "version_of"]

NO_VERSION = -1
"""Inference tensors have no version counter."""


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor, which each change in place raises."""
    return NO_VERSION if tensor.is_inference() else tensor._version  # noqa: SLF001


def exclude(tensor: Tensor) -> Kept:
    """Return the packed object of a tensor that stays in memory and is not counted."""
    return Kept(tensor.detach(), version_of(tensor))


def give_back(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor that was kept at this version; raise if it was changed in place since."""
    check_version(tensor, version, lambda: _describe(tensor))
    # `detach` brings a weight that is away.
    return tensor.detach()


def check_version(counter: Tensor, version: int, shown: Callable[[], str]) -> None:
    """Raise as autograd does if a saved tensor was changed in place.

    With hooks set autograd itself no longer checks, and the gradient would be silently wrong.
    """
    if version not in (NO_VERSION, counter._version):  # noqa: SLF001
        # `grad_fn._saved_...` may be read outside of a backward: then there is no current node.
        node = current_node()
        saver = f", which {node.name()} needs," if node is not None else ""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {shown()}{saver} is at version {counter._version}; "  # noqa: SLF001
            f"expected version {version} instead. Clone the tensor before it is changed in place, "
            "or use the out-of-place operation; torch.autograd.set_detect_anomaly(True) shows the "
            "line that saved it."
        )


def _describe(tensor: Tensor) -> str:
    # A nested tensor raises when it is asked for its shape, which would hide the real error.
    return f"[nested {tensor.dtype}]" if tensor.is_nested else describe(tensor.dtype, tensor.shape)
