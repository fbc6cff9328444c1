"""What a backward that raised leaves in its thread, and how it is let go.

On the CPU a backward keeps the nodes that are ready in a queue of its thread, highest sequence
number first. When a node raises, the rest stays there with its graph and all that it saved, until
the thread ends. In the main thread that is after the interpreter has ended: torch then drops what
hooks packed, needs Python for it, and the process may die (torch 2.15, with any hooks).

The next backward drops what is left above its own nodes, and ends with its own last node. So one
whose last node has the lowest number drops everything.
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
"""A leaf, and what the node with the lowest number made of it."""
_making = threading.Lock()


@dataclass(frozen=True)
class Probe:
    """Where torch's count of backwards stands, told by a backward of our own."""

    number: int
    """Of that backward; -1 if there was none, because it would have been inside another one."""
    here_count: int
    """Backwards of our own that this thread has run so far, this one included."""
    all_count: int
    """The same in all threads."""


class _Runs(threading.local):
    """Backwards of our own that this thread has run."""

    def __init__(self) -> None:
        self.count = 0


_runs_here = _Runs()
_runs = itertools.count(1)
"""Of all threads. Not a number and a lock, which a forked child might find taken."""


def prepare_to_drop() -> None:
    """See to it that nothing is left when the interpreter ends; called before hooks are used."""
    with _making:
        if not _lowest:
            # Each thread numbers its nodes from 0.
            # With a name: the numbers in the names of the program's own threads stay as without.
            maker = threading.Thread(target=_make_lowest, name="ssdtrain")
            maker.start()
            maker.join()
            atexit.register(drop_failed_backwards)


def drop_failed_backwards() -> None:
    """Drop what failed backwards of this thread left; in a backward, leave it to the next call."""
    probe_backward()


def probe_backward() -> Probe:
    """Do the same, and return how many backwards this process has run, as torch numbers them."""
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
