"""Offload tensors of PyTorch training to NVMe SSDs, and bring them back bit for bit.

>>> import ssdtrain
>>> with ssdtrain.offload(dir="/mnt/nvme"):  # doctest: +SKIP
...     loss = model(batch)
...     loss.backward()
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from ssdtrain.machine.huge_pages import prefer_huge_pages

prefer_huge_pages()

from ssdtrain.errors import (  # noqa: E402 - the switch for huge pages comes before any tensor
    BudgetError,
    BusyError,
    CancelledError,
    ClosedError,
    ConfigError,
    CorruptError,
    CudaError,
    DiskBoundError,
    NoSpaceError,
    PoisonedError,
    SsdtrainError,
    StorageError,
    UnsupportedError,
)

try:
    from ssdtrain.checkpoint import checkpoint, remove_checkpoint
    from ssdtrain.checkpoints.loading import load
    from ssdtrain.checkpoints.saving import save
    from ssdtrain.offload import active, leave_all, offload
    from ssdtrain.optimizer.offload import offload_optimizer
    from ssdtrain.optimizer.whole_state import OptimizerStats
    from ssdtrain.parameters.offload import (
        offload_parameters,
        parameter_stats,
        parameters_in_memory,
    )
    from ssdtrain.parameters.stats import ParameterStats
    from ssdtrain.session import Session
    from ssdtrain.sharing import ClassStats
    from ssdtrain.stats import Stats
    from ssdtrain.store import PendingRead, StoredTensor, TensorStore
except (ImportError, OSError, UnsupportedError) as _error:
    # Mostly torch cannot be imported. The use of a name raises the reason; `ssdtrain doctor`, which
    # looks for the cause, needs a package that can be imported.
    _reason = _error

    if not TYPE_CHECKING:

        def __getattr__(name: str) -> object:
            """Raise the reason for which a name is missing."""
            if name not in __all__:
                raise AttributeError(f"module 'ssdtrain' has no attribute {name!r}")
            raise ImportError(
                f"ssdtrain.{name} cannot be used: {_reason}; `ssdtrain doctor DIR` says what next"
            ) from _reason


__version__ = version("ssdtrain")

__all__ = [
    "BudgetError",
    "BusyError",
    "CancelledError",
    "ClassStats",
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "CudaError",
    "DiskBoundError",
    "NoSpaceError",
    "OptimizerStats",
    "ParameterStats",
    "PendingRead",
    "PoisonedError",
    "Session",
    "SsdtrainError",
    "Stats",
    "StorageError",
    "StoredTensor",
    "TensorStore",
    "UnsupportedError",
    "active",
    "checkpoint",
    "leave_all",
    "load",
    "offload",
    "offload_optimizer",
    "offload_parameters",
    "parameter_stats",
    "parameters_in_memory",
    "remove_checkpoint",
    "save",
]
