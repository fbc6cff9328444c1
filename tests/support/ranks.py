"""Two processes that train together over gloo, started by a test and watched by it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from support import pause

RANKS = 2
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "ssdtrain",
]
"""Modules that the server imports once, before it forks ranks: a rank would take seconds for them.

It ends with the process of the tests that started it.
"""
HANG_S = 90.0
"""No test takes a tenth of it; a rank that does not end is told to show its stacks, and killed."""
COLLECTIVE_S = 60.0
RAISED = 1
"""The exit code of a rank whose function raised."""

Function = Callable[..., None]


class Ranks:
    """The processes of one run; each prints into a file of its own."""

    def __init__(self, function: Function, folder: Path, *arguments: object) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.processes = [
            context.Process(target=_run, args=(rank, function, folder, arguments), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        file = self.folder / f"output-{rank}"
        return file.read_text() if file.exists() else ""

    def wait(self) -> list[int | None]:
        """Wait for the ends of all ranks, and return their exit codes."""
        deadline_s = monotonic() + HANG_S
        for process in self.processes:
            process.join(max(0.0, deadline_s - monotonic()))
        codes = [one.exitcode for one in self.processes]
        assert None not in codes, f"no end in {HANG_S} s, {codes}\n{self.outputs()}"
        return codes

    def wait_for(self, word: str) -> None:
        """Wait until every rank has printed ``word``."""
        deadline_s = monotonic() + HANG_S
        while not all(word in self.output(rank) for rank in range(RANKS)):
            alive = all(one.exitcode is None for one in self.processes)
            assert alive, f"a rank ended early\n{self.outputs()}"
            assert monotonic() < deadline_s, f"no {word!r} in {HANG_S} s\n{self.outputs()}"
            pause()

    def outputs(self) -> str:
        """Return what all ranks have printed so far."""
        return "\n".join(f"rank {rank}:\n{self.output(rank)}" for rank in range(RANKS))

    def kill(self) -> None:
        """End whatever still runs."""
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


@contextmanager
def ranks(function: Function, folder: Path, *arguments: object) -> Iterator[Ranks]:
    """Run ``function(rank, *arguments)`` in two processes of one group."""
    started = Ranks(function, folder, *arguments)
    try:
        yield started
    finally:
        started.kill()


def run_ranks(function: Function, folder: Path, *arguments: object) -> None:
    """Run ``function(rank, *arguments)`` in two processes; both must return."""
    with ranks(function, folder, *arguments) as started:
        codes = started.wait()
        assert codes == [0] * RANKS, started.outputs()


def _run(rank: int, function: Function, folder: Path, arguments: tuple[object, ...]) -> None:
    file = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    # Before the test gives up, so that its message has the stacks.
    faulthandler.dump_traceback_later(HANG_S - 10, exit=False)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    function(rank, *arguments)
    dist.destroy_process_group()
