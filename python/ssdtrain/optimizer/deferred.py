"""Updates that go on beside the next forward, on a thread of their own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ssdtrain.away.classes import is_away
from ssdtrain.away.known import known_of
from ssdtrain.away.threads import KnownThread
from ssdtrain.errors import StorageError
from ssdtrain.machine.torch_internals import (
    compiled_count,
    mode_count,
    with_default_device,
)
from ssdtrain.notices import Notices
from ssdtrain.optimizer.chunks import Part
from ssdtrain.optimizer.forward_order import ForwardOrder
from ssdtrain.optimizer.pending import (
    Holder,
    Updates,
    hold,
    in_update,
    is_pending,
    release,
    under_way,
    updating,
)
from ssdtrain.optimizer.shared_memory import (
    sharing_with_any,
    who_has_gradient,
    who_has_weight,
)
from ssdtrain.parameters.weights import weight_of
from ssdtrain.watched import look_at

__all__ = [
    "Deferred",
    "is_sparse",
    "join_all",
    "say_why_now",
    "settle_param",
    "why_none_later",
    "why_not_later",
    "why_not_of_another_thread",
]

AFTERWARDS = (
    "raised by an update of the last optimizer.step(), which goes on beside the next forward "
    '(overlap="forward"); the weights that come later in the forward were not updated'
)


def why_none_later(options: dict[str, Any]) -> str | None:
    """Return why a step has to be made at once, or ``None``.

    Another thread does not have what holds for this one only, and compiled code does not ask the
    classes of weights before each use.
    """
    if options:
        return "step() was given more than a closure"
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or mode_count():
        return "step() was called under autocast, inference mode or a mode of torch"
    if compiled_count():
        return "torch.compile was used, whose code does not wait for single weights"
    return None


def why_not_later(params: list[Tensor], bounded_by: object) -> list[str | None]:
    """Return for each parameter why it has to be updated at once, or ``None``.

    Only what is used through its own object can be waited for, and only gradients that are under no
    bound, or under that of ``bounded_by``, stay in memory for an update.
    """
    gradients = [param.grad for param in params]
    times_used = Counter(map(id, gradients))
    sharing = sharing_with_any(params)
    reasons: list[str | None] = []
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None and times_used[id(gradient)] > 1:
            reasons.append("several parameters have the same gradient")
        elif id(param) in sharing:
            reasons.append("they share memory with each other, or with those of another optimizer")
        else:
            reasons.append(_why_not_later(param, gradient, bounded_by))
    return reasons


def _why_not_later(param: Tensor, gradient: Tensor | None, bounded_by: object) -> str | None:
    if gradient is not None and (reason := _why_not_read_later(param, gradient)):
        return reason
    known = None if gradient is None else known_of(gradient)
    # defence: gradients that another optimizer bounds are used at once
    if known is not None and known.owner is not bounded_by:
        return "another optimizer bounds their gradients (max_gradient_bytes)"
    if weight_of(param) is not None:
        return "their bytes are on the disk, or may be (offload_parameters)"
    if type(param) not in (Tensor, Parameter) or param.is_inference():
        return "they are no plain parameters"
    return who_has_weight(param)


def _why_not_read_later(param: Tensor, gradient: Tensor) -> str | None:
    if not (param.requires_grad or param.dim()):
        # torch takes such a tensor in the place of a Python number, and asks no class then.
        return "they are single numbers that require no gradient"
    return why_not_of_another_thread(param, gradient)


def why_not_of_another_thread(param: Tensor, gradient: Tensor | None) -> str | None:
    """Return why no other thread may use a gradient as its own, or ``None``."""
    if gradient is not None and is_away(gradient):
        return "their gradients are on the disk (max_gradient_bytes)"
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return "their gradients are no plain dense tensors"
    if gradient.requires_grad:
        return "their gradients are part of a graph"
    return who_has_gradient(gradient, param)


def say_why_now(reasons: Sequence[str | None], notices: Notices) -> None:
    """Say once for each reason how many parameters are not updated beside the forward."""
    for reason in dict.fromkeys(filter(None, reasons)):
        notices.say(
            reason,
            "%d of %d parameters are updated in step(), and not beside the forward: %s",
            reasons.count(reason),
            len(reasons),
            reason,
            level=logging.INFO,
        )


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether a gradient has only some of its rows."""
    return gradient is not None and gradient.layout is not torch.strided


class PendingPart(Holder):
    """Parameters that are updated together; who looks at one waits for all of them."""

    def __init__(self, part: Part, updates: Deferred) -> None:
        super().__init__()
        self.part = part
        self.ended = threading.Event()
        self._updates = updates

    def look(self, tensor: Tensor) -> None:
        """Wait until this part is updated, or will never be; raise what went wrong."""
        self._updates.wait_for(self, tensor)


class Deferred(Updates):
    """The updates of one step, on a thread of their own, part after part.

    Everything that is not ``None`` here is used by one thread at a time: by the updating one until
    a part has ended, by others then.
    """

    def __init__(
        self,
        parts: list[Part],
        run: Callable[[list[Part]], Iterator[Part]],
        order: ForwardOrder,
        notices: Notices,
    ) -> None:
        self._pending = [PendingPart(part, self) for part in parts]
        self._run: Callable[[list[Part]], Iterator[Part]] | None = run
        self._order = order
        self._notices = notices
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # a handler of a signal may look while another raises
        self._process = os.getpid()
        self._threads = torch.get_num_threads()
        self._default_device = torch.get_default_device()
        self._decision: SimpleQueue[bool] = SimpleQueue()
        """Whether to begin."""
        self._held = threading.Event()
        self._is_begun = False
        self._done = threading.Event()
        """Set last. A thread's own word is not enough: before Python 3.13 a ``join`` that is
        interrupted takes it for ended."""
        self._thread = KnownThread(self._work, "ssdtrain-update")
        self.waited_s = 0.0
        """How long others waited for updates."""

    def start(self) -> None:
        """Begin; on return every parameter is pending.

        An interrupt leaves a step that is not begun, or one that goes on.
        """
        under_way.add(self)
        try:
            begins = self._thread.begins()
            self._is_begun = True
            self._decision.put(True)
            if not begins:
                self._work()
            self._held.wait()
        except BaseException:
            # The first decision counts, so this one does only if the step has not begun.
            self._decision.put(False)
            if self._is_begun:
                self._held.wait()
            raise

    def wait_for(self, part: PendingPart, tensor: Tensor) -> None:
        """Wait for a part; raise what went wrong before it."""
        if any(tensor is param for param in part.part.params):
            self._order.note(tensor)
        self._wait(part.ended)
        self._raise()

    def join(self) -> None:
        """Wait until all have ended, well or not, and nothing of the thread is left."""
        if self._process == os.getpid():
            began_s = perf_counter()
            if self._is_begun:
                # A signal handler may join in `start`, just before this is put there.
                self._decision.put(True)
                self._done.wait()
                self._thread.end()
            self.waited_s += perf_counter() - began_s

    def settle(self) -> None:
        """Wait until all have ended; raise what went wrong, once."""
        self._refuse_fork()
        self.join()
        self._raise()

    def has_ended(self) -> bool:
        """Whether nothing is left to wait for or to raise."""
        is_done = self._done.is_set() or not self._is_begun
        return is_done and self._error is None

    def _wait(self, event: threading.Event) -> None:
        if event.is_set():
            return
        self._refuse_fork()
        began_s = perf_counter()
        try:
            event.wait()
        finally:
            self.waited_s += perf_counter() - began_s

    def _refuse_fork(self) -> None:
        if self._process != os.getpid():
            raise StorageError(
                "this process was forked while an optimizer was updating weights; call "
                "optimizer.synchronize() before os.fork()"
            )

    def _raise(self) -> None:
        """Raise the error of an update, once; the weights that it left out may be used again."""
        if self._error is None:
            return
        with self._lock:
            error, self._error = self._error, None
        if error is None:
            return
        for pending in self._pending:
            _release(pending)
        under_way.discard(self)
        raise error

    def _work(self) -> None:
        run, self._run = self._run, None
        assert run is not None, "a thread runs once"
        try:
            if not self._decision.get():
                return
            with updating(), with_default_device(self._default_device):
                self._hold()
                if torch.get_num_threads() != self._threads:
                    # How sums are cut among threads decides their last bits.
                    torch.set_num_threads(self._threads)
                for pending, _ in zip(self._pending, run(self._parts()), strict=True):
                    _release(pending)
                    pending.ended.set()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            self._fail(error)
        finally:
            del run
            if self._error is None:
                under_way.discard(self)
            self._held.set()
            for pending in self._pending:
                pending.ended.set()
            self._done.set()

    def _parts(self) -> list[Part]:
        return [pending.part for pending in self._pending]

    def _hold(self) -> None:
        for pending in self._pending:
            for param in pending.part.params:
                hold(param, pending)
        self._held.set()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, StorageError):
            error.add_note(AFTERWARDS)
        # The frames would keep the optimizer and its state until somebody looks.
        self._error = error.with_traceback(None) if isinstance(error, StorageError) else error
        self._notices.say(
            "failed update",
            "an update beside the forward failed, which the next use of a weight or of the "
            "optimizer raises: %s",
            error,
            level=logging.ERROR,
        )


def _release(pending: PendingPart) -> None:
    for param in pending.part.params:
        release(param)


def settle_param(param: Tensor) -> None:
    """Wait for a parameter that another optimizer still updates."""
    if is_pending(param):
        look_at(param)


def join_all() -> None:
    """Have no update under way.

    A forked child has no thread that would end it, and a process that ends would abort in its
    middle (after a step in ``atexit``; Python itself waits for the threads of those before).
    """
    if not in_update():
        for updates in list(under_way):
            updates.join()


os.register_at_fork(before=join_all)
atexit.register(join_all)
