"""What the demo needs of a model to train it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

BYTE_VALUES_COUNT = 256

ContextPair = tuple[AbstractContextManager[object], AbstractContextManager[object]]
ContextFunction = Callable[[], ContextPair]
"""As in `torch.utils.checkpoint`: makes the contexts of the forward and of the recomputation."""


class Trainee(Protocol):
    """A model with the one loss it is trained on."""

    module: nn.Module

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss of a batch of text, int64, (batch, sequence + 1)."""
        ...

    def recompute_blocks(self, context_function: ContextFunction) -> None:
        """Recompute every block in backward, with `torch.utils.checkpoint`."""
        ...
