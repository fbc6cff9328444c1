"""Offload what PyTorch training keeps in memory to NVMe SSDs, and bring it back bit for bit.

>>> import ssdtrain
>>> with ssdtrain.offload(dir="/mnt/nvme"):  # doctest: +SKIP
...     loss = model(batch)
...     loss.backward()
"""

from importlib.metadata import version

from ssdtrain.memory import keep_spare_heap, prefer_huge_pages

prefer_huge_pages()
keep_spare_heap()

from ssdtrain.errors import (  # noqa: E402 - the switch for huge pages comes before any tensor
    BudgetError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    SsdtrainError,
    StorageError,
    UnsupportedError,
)
from ssdtrain.offload import Session, offload  # noqa: E402
from ssdtrain.stats import Stats  # noqa: E402
from ssdtrain.store import PendingRead, StoredTensor, TensorStore  # noqa: E402

__version__ = version("ssdtrain")

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptError",
    "NoSpaceError",
    "PendingRead",
    "Session",
    "SsdtrainError",
    "Stats",
    "StorageError",
    "StoredTensor",
    "TensorStore",
    "UnsupportedError",
    "offload",
]
