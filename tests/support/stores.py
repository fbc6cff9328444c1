"""Stores for tests, and how what comes back is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssdtrain import StorageError, TensorStore, _core
from ssdtrain.store import PendingRead, StoredTensor


class SlowStore(TensorStore):
    """A store on a simulated disk; a paused one moves at ``disk.resume()`` or ``close``."""

    def __init__(self, directory: Path, *, verify: bool = False, **faults: Any) -> None:
        super().__init__(directory)
        self.disk = _core.SimulatedDisk(**{"seed": 1, **faults})
        self._store = _core.Store(
            [(str(directory), None)],
            backend="simulated",
            direct_io="optional",
            max_disk_bytes=None,
            verify=verify,
            simulated_disk=self.disk,
        )


class Refused:
    """What a read gives that the disk does not answer."""

    def result(self) -> Tensor:
        raise StorageError("the test failed this read")


class ChosenStore(SlowStore):
    """A store of whose reads some fail, by their numbers."""

    failing = range(0)
    reads_count = 0

    def read(self, stored: StoredTensor[Tensor]) -> PendingRead[Tensor]:  # type: ignore[override]
        self.reads_count += 1
        if self.reads_count in self.failing:
            return Refused()  # type: ignore[return-value]
        return super().read(stored)

    def fail_after(self, count: int, fails_count: int = 1) -> None:
        """Fail some reads after so many that go well."""
        first = self.reads_count + count + 1
        self.failing = range(first, first + fails_count)


def bits(array: Any) -> bytes:
    """Return the elements in order, byte for byte."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if not array.numel():
        return b""
    plain = array.detach().resolve_conj().resolve_neg()
    packed = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return bytes(packed.reshape(-1).view(torch.uint8).numpy())


def assert_same(result: Any, source: Any) -> None:
    """A new, writable thing of the same kind and with the same bits."""
    assert type(result) is (np.ndarray if isinstance(source, np.ndarray) else Tensor)
    assert result.dtype == source.dtype
    assert tuple(result.shape) == tuple(source.shape)
    assert bits(result) == bits(source)
    if isinstance(result, np.ndarray):
        assert result.flags.writeable
        assert not np.shares_memory(result, source)
    else:
        assert result.stride() == source.stride()
        assert not result.requires_grad
        assert source.numel() == 0 or result.data_ptr() != source.data_ptr()
