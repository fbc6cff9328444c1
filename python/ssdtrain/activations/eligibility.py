"""Rules for saved tensors that are never written: weights and tensors of unusual classes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain._core import Rules
from ssdtrain.machine.torch_internals import (
    dispatch_keys,
    is_below_autograd,
    plainly,
    storage_users,
    tracer,
)

__all__ = ["RULES"]

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
"""Nodes that change the shape or the type of a weight (as autocast does) and make no activation.

Two are of distributed tensors: shards are gathered, and a plain tensor is taken out.
"""

PLAIN_KEYS = dispatch_keys(torch.from_numpy(np.empty(0)))
"""The keys of an ordinary tensor. Its memory comes from numpy: when torch allocates its first own
tensor it reads the switch for huge pages, and at import that would be too early."""


def find_gpu_keys(tensor: Tensor) -> object:
    """Return the dispatch keys of an ordinary tensor on the GPU of ``tensor``."""
    with plainly():
        return dispatch_keys(torch.empty(0, device=tensor.device))


RULES = Rules(
    tensor_type=Tensor,
    parameter_type=Parameter,
    dispatch_keys=dispatch_keys,
    plain_keys=PLAIN_KEYS,
    find_gpu_keys=find_gpu_keys,
    passes_weights_on=PASSES_WEIGHTS_ON,
    is_below_autograd=is_below_autograd,
    is_grad_enabled=torch.is_grad_enabled,
    storage_users=storage_users,
    tracer=tracer,
    float32=torch.float32,
)
"""The compiled part tells weights and unusual tensors from all others by these rules.

Weights are parameters, leaves that ask for a gradient, and tensors that are made of them: views
(known by their base: a linear layer saves ``weight.t()``), cast copies (autocast), and parts of
these (known by the nodes between them and the parameter). Weights stay alive for the optimizer
anyway, so to write them would free nothing.
"""
