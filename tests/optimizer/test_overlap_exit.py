"""Updates beside a forward are waited for: at the end of a process, and after an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from children import forked_python
from ssdtrain.notices import Notices
from ssdtrain.optimizer.chunks import Chunk, Part
from ssdtrain.optimizer.deferred import Deferred
from ssdtrain.optimizer.forward_order import ForwardOrder

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
    ended = forked_python(PROGRAM, str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def test_updates_are_waited_for_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, done = threading.Event(), list[str]()

    def run(parts: list[Part]) -> Iterator[Part]:
        go_on.wait()
        done.append("update")
        yield from parts

    part = Part([Chunk({}, [nn.Parameter(torch.zeros(3))])])
    updates = Deferred([part], run, ForwardOrder(), Notices())
    updates.start()
    with monkeypatch.context() as patched:
        # Before Python 3.13 that is what a thread says of itself once join() was interrupted.
        patched.setattr(threading.Thread, "join", lambda _: None)
        patched.setattr(threading.Thread, "is_alive", lambda _: False)
        assert not updates.has_ended()
        threading.Timer(0.1, go_on.set).start()
        updates.join()
    assert done == ["update"]
    assert updates.has_ended()
