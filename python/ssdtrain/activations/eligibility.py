"""Which saved tensors are not ours to write: weights, odd tensors, and the memory of others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ssdtrain.machine.torch_internals import dispatch_keys, storage_users

__all__ = ["is_memory_of_others", "is_plain", "is_weight"]

PASSES_WEIGHTS_ON = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "RedistributeBackward",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsafeSplitBackward0",
        "UnsafeSplitWithSizesBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        "_ToTorchTensorBackward",
    }
)
"""Nodes that change the shape or the type of a weight (autocast does) and make no activation.

Two are of distributed tensors: shards are gathered, and a plain tensor is taken out.
"""

DERIVATION_DEPTH_MAX = 8
"""Bounds the work of a pack; views and casts of a weight are a few nodes away from it."""

PLAIN_KEYS = dispatch_keys(torch.from_numpy(np.empty(0)))
"""The keys of an ordinary tensor. Its memory comes from numpy: when torch allocates its first own
tensor it reads the switch for huge pages, and at import that would be too early."""

FRESH_USERS_MAX = 3
"""As many users as a storage has that nobody else needs: the result of an operation, the detached
tensor that a selective checkpoint packs, and the Python object of the storage."""


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a dense, strided CPU tensor whose bytes say everything about it.

    Subclasses (DTensor, fake tensors) are not, and of those nothing but the type may be touched.
    Of the others torch's own list of what handles a tensor tells: sparse, nested and quantised
    tensors, lazy conjugates, tensors without bytes, of inference mode, of function transforms and
    of other devices each have an entry more, or one less, than a plain one.
    """
    kind = type(tensor)
    return (
        (kind is Tensor or kind is Parameter)
        and dispatch_keys(tensor) == PLAIN_KEYS  # defence: what a plain tensor is
    )


def is_weight(tensor: Tensor) -> bool:
    """Whether a plain saved tensor is a parameter, a leaf that asks for a gradient, or made of one.

    Views are found by their base (a linear layer saves ``weight.t()``), cast copies (autocast), and
    parts of these, by the nodes between them and the parameter. Such tensors stay alive for the
    optimizer anyway, so writing them would free nothing.
    """
    # Not `isinstance`, which for parameters is a slow function in Python: `is_plain` has found that
    # this is a `Tensor` or a `Parameter` and no other class.
    if type(tensor) is Parameter or (tensor.is_leaf and tensor.requires_grad):
        return True
    base = tensor._base  # noqa: SLF001 - the only way to ask a view for its base
    # defence: provenance: the base of a view
    if base is not None and (isinstance(base, Parameter) or (base.is_leaf and base.requires_grad)):
        return True
    node = tensor.grad_fn
    if node is None:
        # Autograd calls pack with grad mode off. If it is on, a selective checkpoint hands over
        # a tensor of its cache, which has no history to look at. It may be a view of a weight, and
        # FSDP2 empties its weights after their forward, even while they are being written. Such a
        # view is told by the other users of its storage.
        # defence: weights without history
        return torch.is_grad_enabled() and storage_users(tensor) > FRESH_USERS_MAX
    for _ in range(DERIVATION_DEPTH_MAX):  # defence: provenance: the walk to the parameter
        if node is None or node.name() not in PASSES_WEIGHTS_ON:
            break
        node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return _is_no_larger(tensor, getattr(node, "variable", None))
    return False


def is_memory_of_others(storage: UntypedStorage, owns: Callable[[int], bool]) -> bool:
    """Whether its memory is neither torch's nor ours: an array's, or that of a mapped file.

    Whoever owns it may change it when torch's storage is long gone, and keeps it anyway. ``owns``
    tells whether an address is in memory that a transfer gave out.
    """
    # defence: memory of others stays
    return not storage.resizable() and not owns(storage.data_ptr())


def _is_no_larger(tensor: Tensor, leaf: object) -> bool:
    """Whether this was made of a parameter, and is not one row of it repeated for a whole batch."""
    if not isinstance(leaf, Parameter):
        return False
    # defence: what is larger than its parameter
    return tensor.untyped_storage().nbytes() <= leaf.numel() * tensor.itemsize
