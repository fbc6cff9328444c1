"""Hooks on saved tensors that keep them in memory, checked as autograd does without any."""

from __future__ import annotations

import threading

from torch import Tensor

from ssdtrain.activations.hooks import Hooks
from ssdtrain.config import OffloadConfig, StoreConfig
from ssdtrain.planning.policy import Policy
from ssdtrain.planning.recompute import Choices
from ssdtrain.store import TensorStore
from ssdtrain.transfer.direct import DirectWay
from ssdtrain.transfer.host import HostTransfer

__all__ = ["Keeping", "keeping_hooks"]

EVERYTHING_IS_SMALL = 1 << 62


class Keeping(Hooks):
    """Hooks that say nothing of what they keep: nobody asked for more."""

    def _note_excluded(self, tensor: Tensor) -> None:
        pass


def keeping_hooks(store: TensorStore) -> Keeping:
    """Return hooks that write nothing to this store."""
    config = OffloadConfig(store=StoreConfig(dirs=(".",)), gds="disabled")
    transfer = HostTransfer(store._store, None, DirectWay(config))  # noqa: SLF001 - it needs one
    return Keeping(
        transfer,
        Policy(),
        threading.RLock(),
        min_bytes=EVERYTHING_IS_SMALL,
        max_resident_bytes=None,
        choices=Choices(),
    )
