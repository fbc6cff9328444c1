"""Updates in backward at the end of a process."""

from __future__ import annotations

from pathlib import Path

from children import forked_python

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
    ended = forked_python(PROGRAM, str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
