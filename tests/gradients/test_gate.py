"""When the writes of saved tensors begin: once their nodes are passed, and small ones together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disks import MIB
from support import Rig

pytestmark = pytest.mark.usefixtures("one_thread")

# On a disk that moves nothing no write ends.
PAUSED: dict[str, Any] = {"backend": "simulated", "faults": {"paused": True}}


@pytest.mark.parametrize(
    ("nbytes", "min_bytes", "batch_count"),
    [(MIB // 2, MIB // 4, 8), (4096, 1024, 4), (4 * MIB, 4 * MIB, 1), (8 * MIB, 6 * MIB, 1)],
)
def test_small_tensors_are_given_to_the_disk_in_batches(
    nbytes: int, min_bytes: int, batch_count: int, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, min_bytes=min_bytes, **PAUSED)
    given, expected = [], []
    with rig.context():
        y = torch.randn(nbytes // 4, requires_grad=True)
        for packed_count in range(20):
            y = y.exp()
            given.append(rig.writes_count())
            # The pack after a batch passes its last node.
            expected.append(packed_count - packed_count % batch_count)
        assert given == expected
        rig.disk.resume()
        y.sum().backward()
    del y
    rig.assert_empty()


def test_under_a_bound_each_is_given_to_the_disk_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, min_bytes=MIB // 4, max_resident_bytes=1 << 30, **PAUSED)
    with rig.context():
        y = torch.randn(MIB // 4, requires_grad=True)
        for packed_count in range(5):
            y = y.exp()
            assert rig.writes_count() == packed_count
    del y
    rig.assert_empty()
