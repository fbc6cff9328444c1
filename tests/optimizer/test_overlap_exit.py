"""Updates beside a forward are waited for: at the end of a process, and after an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from children import forked_python
from ssdtrain.away.threads import KnownThread
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
ssdtrain.offload_optimizer(optimizer, sys.argv[1], overlap=sys.argv[2], buffer_bytes="1MiB")

def last_step():
    model(torch.ones(3, 512)).sum().backward()
    optimizer.step()

atexit.register(last_step)
"""


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_step_at_the_end_of_the_interpreter(overlap: str, tmp_path: Path) -> None:
    """When from Python 3.12 on no thread begins any more."""
    ended = forked_python(PROGRAM, str(tmp_path), overlap)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_where_no_thread_begins_the_updates_are_made_at_once(
    overlap: Literal["forward", "backward"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(is_offloaded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        if is_offloaded:
            ssdtrain.offload_optimizer(optimizer, tmp_path, overlap=overlap, buffer_bytes="256KiB")
        for _ in range(3):
            model(torch.ones(3, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    plain = trained(is_offloaded=False)
    monkeypatch.setattr(KnownThread, "start", no_thread)
    assert all(map(torch.equal, trained(is_offloaded=True), plain))


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
