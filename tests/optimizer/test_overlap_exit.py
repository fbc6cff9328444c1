"""Updates in backward at the end of a process, when no thread begins any more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from children import forked_python
from ssdtrain.away.threads import KnownThread

PROGRAM = """
import atexit, sys
import torch
import ssdtrain
from torch import nn

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
ssdtrain.offload_optimizer(optimizer, sys.argv[1], overlap="backward", buffer_bytes="1MiB")

def last_step():
    model(torch.ones(3, 512)).sum().backward()
    optimizer.step()

atexit.register(last_step)
"""


def test_a_step_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """When from Python 3.12 on no thread begins any more."""
    ended = forked_python(PROGRAM, str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_where_no_thread_begins_the_updates_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(is_offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        if is_offloaded:
            ssdtrain.offload_optimizer(
                optimizer, tmp_path, overlap="backward", buffer_bytes="256KiB"
            )
        for _ in range(3):
            model(torch.ones(3, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    plain = trained(is_offloaded=False)
    monkeypatch.setattr(KnownThread, "start", no_thread)
    assert all(map(torch.equal, trained(is_offloaded=True), plain))
