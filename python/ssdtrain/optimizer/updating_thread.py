"""A thread for updates, there only as long as there are some, so that nobody has to stop it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ssdtrain.away.threads import KnownThread, is_held_here, uses_no_tensor

__all__ = ["Job", "UpdatingThread"]


@dataclass(frozen=True)
class Job:
    """Something to do; ``run`` gets what the job behind this one is about, to read it early."""

    about: list[Any]
    run: Callable[[list[Any]], None]


class UpdatingThread:
    """Does one job after the other, in their order."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.RLock()  # a handler of a signal may come in between
        self._turn = threading.RLock()
        """Held by the thread that works: an interrupted start may leave one more."""
        self._thread: KnownThread | None = None
        self._is_working = False
        self.note_threads()

    def note_threads(self) -> None:
        """Take the calling thread's count of threads, which decides how sums are cut.

        Not asked in a backward: torch gives a thread its count when it is asked for the first time.
        """
        self._threads = torch.get_num_threads()

    def add(self, job: Job) -> None:
        """Have a job done by ``join``, after those that are there.

        Until then this thread goes on alone, and later it waits: beside it weights leave.
        """
        with self._lock:
            self._jobs.append(job)

    def put(self, job: Job) -> None:
        """Have a job done after those that are there, beginning now."""
        self.add(job)
        self._work_on()

    def clear(self) -> None:
        """Leave out the jobs that have not begun."""
        with self._lock:
            self._jobs.clear()

    @uses_no_tensor
    def join(self) -> None:
        """Wait until all jobs are done, and nothing of the thread is left.

        A job of its own that forks, say, does not wait.
        """
        while not is_held_here(self._turn):
            self._work_on()
            thread = self._thread
            if thread is not None:
                thread.end()
            # Before Python 3.13 an interrupted join() takes a thread that goes on for one that has
            # ended, and an interrupted start() leaves one that nobody knows.
            with self._turn, self._lock:
                if not self._jobs:
                    return

    @uses_no_tensor
    def _work_on(self) -> None:
        """Start a thread if there are jobs and none works."""
        with self._lock:
            if not self._jobs or self._is_working:
                return
            thread = KnownThread(self._work, "ssdtrain-update")
            _working.add(self)
            self._is_working = True
            try:
                # Started by the thread of the backward: it inherits how that one rounds.
                begins = thread.begins()
            except BaseException:
                self._is_working = False
                raise
            self._thread = thread
        if not begins:
            self._work()

    def _work(self) -> None:
        with self._turn:
            try:
                if torch.get_num_threads() != self._threads:
                    # How sums are cut among threads decides their last bits.
                    torch.set_num_threads(self._threads)
                while self._next_is_done():
                    pass
            finally:
                self._is_working = False

    def _next_is_done(self) -> bool:
        with self._lock:
            if not self._jobs:
                # Within the lock: who comes next finds that nobody works, and starts a thread.
                self._is_working = False
                _working.discard(self)
                return False
            job = self._jobs.popleft()
            following = self._jobs[0].about if self._jobs else []
        job.run(following)
        return True


_working: weakref.WeakSet[UpdatingThread] = weakref.WeakSet()


def _join_all() -> None:
    """Have no update under way.

    A forked child has no thread that would end it, and a process that ends would abort in its
    middle (after a step in ``atexit``; Python itself waits for the threads of those before).
    """
    for thread in list(_working):
        thread.join()


os.register_at_fork(before=_join_all)
atexit.register(_join_all)
