"""``ssdtrain.offload_optimizer``: an optimizer whose state lies on SSDs.

The optimizer stays the object it was; its class becomes one of ours that is derived from its own.
So schedulers, scalers and trainers that hold it go on as before, and nobody has an older object
left whose state is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.config import Directories, Size
from ssdtrain.errors import ConfigError, SsdtrainError, StorageError, UnsupportedError
from ssdtrain.optimizer.chunks import Chunk, Settings, chunks_of, own_step, update
from ssdtrain.optimizer.state import Disk, ParameterState, States
from ssdtrain.optimizer.trial import refuse_coupled
from ssdtrain.sizes import in_bytes
from ssdtrain.store import TensorStore

__all__ = ["OptimizerStats", "offload_optimizer"]

BUFFER_BYTES_DEFAULT = 256 << 20
BUFFER_PARTS = 4
"""One is updated, one is read, one is written, and one is room for what does not fit evenly."""
STATE_MIN_BYTES = 64 << 10
"""Smaller tensors of a state (biases, counts of steps) stay in memory."""
STATE_PER_PARAM = 2
"""A guess, until the first step has made the state: Adam has two tensors for each parameter."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@dataclass(frozen=True)
class OptimizerStats:
    """What an offloaded optimizer did so far. Bytes and seconds."""

    on_disk_bytes: int
    """State that is on the disk only."""
    resident_bytes: int
    """State that is in memory now: small tensors, what somebody looked at or holds, what is still
    on its way to the disk, what the disk refused."""
    written_bytes: int
    read_bytes: int
    step_count: int
    step_s: float
    """Time in ``step``, all steps together."""
    stall_s: float
    """Time of that in which the update waited for the disk."""
    write_failed_count: int
    """Tensors that stayed in memory for a while because the disk did not take them."""


def offload_optimizer(
    optimizer: AnyOptimizer,
    dir: Directories | TensorStore,  # noqa: A002 - as in ssdtrain.offload
    *,
    buffer_bytes: Size = BUFFER_BYTES_DEFAULT,
    max_disk_bytes: Size | None = None,
    verify: bool = False,
) -> AnyOptimizer:
    """Keep the state of an optimizer on SSDs, and return the same optimizer.

    Its ``step`` runs the optimizer's own code over one part of the parameters after the other,
    while the state of the next part is read and that of the last one is written: the update has the
    same bits as the plain one. State is made part by part in the first step, and is never in memory
    as a whole. ``state[param]``, ``state_dict()`` and ``load_state_dict()`` work as ever. The idea
    of an optimizer whose state lives on SSDs is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou
    (arXiv 2403.06504).

    Args:
        optimizer: One whose update is per parameter: AdamW, SGD with momentum, Adafactor, RMSprop
            and the like, also of classes that torch does not know. That is tried on small tensors.
        dir: A directory on a local file system, a list of them, or an open ``TensorStore``.
        buffer_bytes: Memory for the state that is read, updated and written at the same time. What
            a single parameter needs is taken in any case.
        max_disk_bytes: Upper bound on the bytes reserved on disk; what does not fit stays in
            memory.
        verify: Checksum each tensor before its write and after its read.

    Raises:
        ConfigError: No optimizer of torch, one that is offloaded already, or whose ``step`` was
            replaced; a directory that cannot be used.
        UnsupportedError: The optimizer couples its parameters (LBFGS), or they are not on the CPU.
        StorageError: In ``step``: state could not be read back. The parameters that were to be
            updated after it were not; the optimizer refuses further steps until a state is loaded.

    """
    _refuse_unfit(optimizer)
    refuse_coupled(optimizer)
    store_given = isinstance(dir, TensorStore)
    if store_given and (max_disk_bytes is not None or verify):
        raise ConfigError(
            "max_disk_bytes and verify are options of the store: give them to TensorStore(...)"
        )
    buffer = in_bytes("buffer_bytes", buffer_bytes)
    store = (
        dir
        if isinstance(dir, TensorStore)
        else TensorStore(dir, max_disk_bytes=max_disk_bytes, verify=verify)
    )
    part_bytes = max(1, buffer // BUFFER_PARTS)
    disk = Disk(store, in_flight_bytes_max=part_bytes, min_bytes=STATE_MIN_BYTES)
    _take_over_step(optimizer)
    kind: type[Optimizer] = type(optimizer)
    optimizer.__class__ = cast("type[AnyOptimizer]", _offloaded(kind))  # type: ignore[arg-type]
    offloaded = cast("_Offloaded", optimizer)
    offloaded._begin(kind, disk, part_bytes)  # noqa: SLF001 - its constructor
    return optimizer


class _Offloaded(Optimizer):
    """What an offloaded optimizer has before its own class: the step, and ways to its state."""

    _own_kind: type[Optimizer]
    _disk: Disk
    _part_bytes: int
    _lost: SsdtrainError | None
    _step_count_done: int
    _step_s: float

    def _begin(self, kind: type[Optimizer], disk: Disk, part_bytes: int) -> None:
        self._own_kind = kind
        self._disk = disk
        self._part_bytes = part_bytes
        self._lost = None
        self._step_count_done = 0
        self._step_s = 0.0
        self._take_over_state()
        # torch's own wrapper around `step`, which runs the hooks, now goes around ours.
        self._patch_step_function()

    @property
    def offload_stats(self) -> OptimizerStats:
        """What was done so far, and where the state is now."""
        sizes = [state.nbytes() for state in self._states()]
        disk = self._disk
        return OptimizerStats(
            on_disk_bytes=sum(on_disk for _, on_disk in sizes),
            resident_bytes=sum(resident for resident, _ in sizes),
            written_bytes=disk.written_bytes,
            read_bytes=disk.read_bytes,
            step_count=self._step_count_done,
            step_s=self._step_s,
            stall_s=disk.stall_s,
            write_failed_count=disk.failed_count,
        )

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run the optimizer's own step, part by part, and return what the closure returned."""
        if self._lost is not None:
            raise _refusal(self._lost) from self._lost
        began_s = perf_counter()
        self._opt_called = True  # for schedulers, which ask whether a step came before theirs
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = own_step(self._own_kind)
        settings = Settings()
        parts = list(chunks_of(self.param_groups, self._bytes_of, self._part_bytes))
        self._prefetch(parts[0])
        for part, following in pairwise([*parts, None]):
            assert part is not None, "only the last of the pairs ends with None"
            if following is not None:
                self._prefetch(following)
            self._bring(part)
            update(self, own, part, settings, options)
            self._send(part)
        settings.apply()
        self._step_count_done += 1
        self._step_s += perf_counter() - began_s
        return loss

    # A scheduler puts nothing around a step that has this mark.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ever; what is on the disk is read into tensors of its own."""
        states = self.state
        self.state = cast("Any", {key: _copied(state) for key, state in states.items()})
        try:
            return super().state_dict()
        finally:
            self.state = states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as ever, and let it go to the disk."""
        super().load_state_dict(state_dict)
        self._lost = None
        self._take_over_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: two optimizers cannot share the state on the disk."""
        raise TypeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a pickle of the optimizer would lack what is on the disk."""
        raise TypeError(NO_COPY)

    def _take_over_state(self) -> None:
        states = States()
        states.adopt(self.state)
        self.state = states
        for state in self._states():
            state.send(self._disk)
            self._disk.make_room()

    def _states(self) -> list[ParameterState]:
        return [state for state in self.state.values() if isinstance(state, ParameterState)]

    def _states_of(self, part: Chunk) -> list[ParameterState]:
        """Return the states that an update of this part will ask for."""
        found = (self.state.get(param) for param in part.params if param.grad is not None)
        return [state for state in found if isinstance(state, ParameterState)]

    def _bytes_of(self, param: Tensor) -> int:
        state = self.state.get(param)
        if isinstance(state, ParameterState) and len(state):
            return sum(state.nbytes())
        return STATE_PER_PARAM * param.nbytes

    def _prefetch(self, part: Chunk) -> None:
        with self._nothing_lost():
            for state in self._states_of(part):
                state.prefetch()

    def _bring(self, part: Chunk) -> None:
        """Have the state of a part in memory before any of its parameters is changed."""
        with self._nothing_lost():
            for state in self._states_of(part):
                state.bring()

    @contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """Refuse further steps after an error of the disk: this one was made in part."""
        try:
            yield
        except SsdtrainError as error:
            self._lost = error
            raise _refusal(error) from error

    def _send(self, part: Chunk) -> None:
        for param in part.params:
            state = self.state.get(param)
            if not isinstance(state, ParameterState):
                continue
            if param.grad is not None and param.grad.layout is not torch.strided:
                self._disk.notices.say(
                    "sparse gradients",
                    "the optimizer state of parameters with sparse gradients stays in memory: a "
                    "step changes a few rows, and would read and write all of them",
                    level=logging.INFO,
                )
            else:
                state.send(self._disk)
        self._disk.make_room()


NO_COPY = (
    "an optimizer whose state is on the disk cannot be copied or pickled; save "
    "optimizer.state_dict(), and load it into an optimizer that is made anew"
)


@cache
def _offloaded(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of the offloaded optimizers of this kind."""
    return type(f"Offloaded{kind.__name__}", (_Offloaded, kind), {"__doc__": kind.__doc__})


def _copied(state: Any) -> Any:
    return state.copied() if isinstance(state, ParameterState) else state


def _refusal(error: SsdtrainError) -> StorageError:
    return StorageError(
        "the state of some parameters could not be read back in a step: those before them in "
        "param_groups were updated, they and those after them were not. Load the last checkpoint "
        f"into model and optimizer (load_state_dict) before the next step: {error}"
    )


def _refuse_unfit(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"offload_optimizer takes a torch.optim.Optimizer, not {type(optimizer)!r}: "
            "offload_optimizer(torch.optim.AdamW(model.parameters()), dir)"
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, _Offloaded):
        raise ConfigError(f"this {name} is offloaded already; use it as it is")
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UnsupportedError(
                f"{name}(differentiable=True) cannot be offloaded: autograd would need each state"
            )
        for param in group["params"]:
            if not param.is_cpu or type(param) not in (Tensor, Parameter):
                raise UnsupportedError(
                    f"{name} has a parameter of {type(param).__name__} on {param.device}: the "
                    "state of plain CPU tensors can be offloaded so far"
                )


def _take_over_step(optimizer: Optimizer) -> None:
    """Take away what a scheduler put on ``step``; refuse what others did."""
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return
    if not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"the step of this {type(optimizer).__name__} was replaced by other code, which would "
            "go past the state on the disk; call offload_optimizer before that"
        )
    # Ours tells the scheduler by itself that a step was made.
    del optimizer.step
