"""A process that ends has made the updates of every step, also of one in ``atexit``."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys
import torch
import ssdtrain
from torch import nn

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
ssdtrain.offload_optimizer(optimizer, sys.argv[1], overlap="forward", buffer_bytes="1MiB")

def last_step():
    model(torch.ones(3, 512)).sum().backward()
    optimizer.step()

atexit.register(last_step)
"""


def test_a_step_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, tmp_path], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert not list(tmp_path.iterdir())
