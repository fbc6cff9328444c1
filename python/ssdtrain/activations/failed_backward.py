"""Drops the nodes that a backward that raised has left in its thread.

On the CPU a backward keeps the nodes that are ready in a queue of its thread, highest sequence
number first. When a node raises, the other nodes stay there with their graph and its saved tensors
until the thread ends. The main thread ends after the interpreter: torch then drops the packed
objects, needs Python for it, and the process may die (torch 2.15, with any hooks).

The next backward drops the nodes above its own, and ends with its own last node. So a backward
whose last node has the lowest number of all drops everything.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ssdtrain.machine.torch_internals import current_backward

__all__ = ["Probe", "drop_failed_backwards", "prepare_to_drop", "probe_backward"]

_lowest: list[tuple[Tensor, Tensor]] = []
"""A leaf, and the result of the node with the lowest number."""
_making = threading.Lock()


@dataclass(frozen=True)
class Probe:
    """Torch's count of backwards, read by a backward of ssdtrain."""

    number: int
    """The number of that backward; -1 if none was run, because the thread is in a backward."""
    here_count: int
    """Backwards of ssdtrain that this thread has run so far, this one included."""
    all_count: int
    """The same in all threads."""


class _Runs(threading.local):
    """Backwards of ssdtrain that this thread has run."""

    def __init__(self) -> None:
        self.count = 0


_runs_here = _Runs()
_runs = itertools.count(1)
"""Counts them in all threads. It needs no lock, which a forked child might find taken."""


def prepare_to_drop() -> None:
    """Register the drop at the end of the interpreter; called before hooks are used."""
    with _making:
        if not _lowest:
            # A new thread, because each thread numbers its nodes from 0. It has a name, so that the
            # default names of the program's threads do not change.
            maker = threading.Thread(target=_make_lowest, name="ssdtrain")
            maker.start()
            maker.join()
            atexit.register(drop_failed_backwards)


def drop_failed_backwards() -> None:
    """Drop the nodes that failed backwards of this thread left; in a backward do nothing."""
    probe_backward()


def probe_backward() -> Probe:
    """Drop them, and return how many backwards this process has run by torch's count."""
    if not _lowest or current_backward() != -1:  # defence: what a refused backward left is dropped
        return Probe(-1, 0, 0)
    leaf, made = _lowest[0]
    numbers: list[int] = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        last = made.neg()
        last.register_hook(  # type: ignore[no-untyped-call]
            lambda _: numbers.append(current_backward())
        )
        torch.autograd.grad(last, leaf)
    _runs_here.count += 1
    return Probe(numbers[0], _runs_here.count, next(_runs))


def _make_lowest() -> None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True)
        _lowest.append((leaf, leaf.neg()))
