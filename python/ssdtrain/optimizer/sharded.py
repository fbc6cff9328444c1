"""State of parameters that several processes have in shards (DTensor, as FSDP2 makes them).

Each process has the state of its own shard. That is what goes to its disk; on its return it is put
into a tensor like the one that the optimizer made, so the optimizer's own code sees no difference.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.errors import UnsupportedError
from ssdtrain.machine.torch_internals import in_shards, is_in_shards, own_shard
from ssdtrain.optimizer.disk import Away, Disk

__all__ = ["ShardAway", "has_shards", "refuse_options"]


class ShardAway(Away):
    """Stands in a state for a tensor in shards, of which this process has one on the disk."""

    __slots__ = ("_spec",)

    def __init__(self, disk: Disk, whole: Any) -> None:
        super().__init__(disk, None, own_shard(whole))
        self._spec = whole._spec  # noqa: SLF001 - the way of torch itself to make another such tensor

    def settled(self) -> Away | Tensor:
        """Wait for the write; return this, or the tensor itself if it had to stay in memory."""
        settled = super().settled()
        return settled if isinstance(settled, Away) else in_shards(settled, self._spec)

    def tensor(self) -> Tensor:
        """Wait for the shard, and return the tensor of which it is one."""
        return in_shards(super().tensor(), self._spec)

    def copy(self) -> Tensor:
        """Return a tensor of its own with a copy of the shard, which stays where it is."""
        return in_shards(super().copy(), self._spec)


def has_shards(optimizer: Optimizer) -> bool:
    """Whether some parameters of an optimizer are in shards."""
    return any(is_in_shards(param) for group in optimizer.param_groups for param in group["params"])


def refuse_options(
    optimizer: Optimizer,
    *,
    overlap: str,
    has_masters: bool,
    has_gradient_bound: bool,
    was_tried: bool = True,
) -> None:
    """Raise ``UnsupportedError`` for options that parameters in shards cannot have.

    ``was_tried`` says whether there were some when the optimizer's step was tried, if it was.
    """
    if not has_shards(optimizer):
        return
    if not was_tried:
        raise UnsupportedError(
            f"{type(optimizer).__name__} was offloaded without parameters in shards (DTensor), and "
            "whether its update communicates was not tried; give it some before offload_optimizer"
        )
    refused = {
        f"overlap={overlap!r}": overlap != "step",
        "master_dtype": has_masters,
        "max_gradient_bytes": has_gradient_bound,
    }
    for option, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has parameters in shards (DTensor, as FSDP2 makes "
                f"them), which cannot be offloaded with {option} so far; use overlap='step', "
                "without master_dtype and max_gradient_bytes"
            )
