"""``ssdtrain.offload_optimizer``: an optimizer whose state lies on SSDs.

The optimizer stays the object it was; its class becomes one of ours that is derived from its own.
So schedulers, scalers and trainers that hold it go on as before, and nobody has an older object
left whose state is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
from ssdtrain.optimizer.undo import (
    LOST,
    NOT_UNDONE,
    UNDONE,
    UNDONE_LATE,
    WHAT_NEXT,
    Undo,
    named,
)
from ssdtrain.sizes import in_bytes
from ssdtrain.store import TensorStore

__all__ = [
    "OptimizerStats",
    "give_state",
    "note_loaded",
    "offload_optimizer",
    "own_kind",
    "refuse_half_done",
]

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
    undo: bool = False,
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
        undo: A step that fails or is interrupted in its middle is undone, so that model and
            optimizer are those of the last whole step. Costs a write of the weights in each step,
            and space on the disk for the state twice and the weights once.

    Raises:
        ConfigError: No optimizer of torch, one that is offloaded already, or whose ``step`` was
            replaced; a directory that cannot be used.
        UnsupportedError: The optimizer couples its parameters (LBFGS), or they are not on the CPU.
        StorageError: In ``step``: state could not be read back. With ``undo`` nothing has changed,
            and the step can be made again. Without, every other parameter was updated; the
            optimizer refuses further steps until a state is loaded, or that of each of its
            ``lost_parameters`` is given up with ``optimizer.state.pop(parameter)``.

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
    offloaded._begin(kind, disk, part_bytes, Undo(disk) if undo else None)  # noqa: SLF001 - its constructor
    return optimizer


class _Offloaded(Optimizer):
    """What an offloaded optimizer has before its own class: the step, and ways to its state."""

    _own_kind: type[Optimizer]
    _disk: Disk
    _part_bytes: int
    _undo: Undo | None
    _lost: dict[Tensor, SsdtrainError]
    _step_count_done: int
    _step_s: float

    def _begin(self, kind: type[Optimizer], disk: Disk, part_bytes: int, undo: Undo | None) -> None:
        self._own_kind = kind
        self._disk = disk
        self._part_bytes = part_bytes
        self._undo = undo
        self._lost = {}
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
        if self._undo is not None and self._undo.is_kept:
            self._restore()
            raise StorageError(UNDONE_LATE)
        self._refuse_lost()
        began_s = perf_counter()
        self._opt_called = True  # for schedulers, which ask whether a step came before theirs
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = own_step(self._own_kind)
        settings = Settings()
        parts = list(chunks_of(self.param_groups, self._bytes_of, self._part_bytes))
        with self._undone_if_it_fails():
            self._prefetch(parts[0])
            for part, following in pairwise([*parts, None]):
                assert part is not None, "only the last of the pairs ends with None"
                if following is not None:
                    self._prefetch(following)
                found = self._bring(part)
                if found.params or not part.params:
                    update(self, own, found, settings, options)
                self._send(part)
        settings.apply()
        self._step_count_done += 1
        self._step_s += perf_counter() - began_s
        self._refuse_lost()
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
        self._note_loaded()
        self._take_over_state()

    def _note_loaded(self) -> None:
        self._lost = {}
        if self._undo is not None:
            self._undo.forget()

    def _give_state(self, param: Tensor, values: Iterable[tuple[Any, Any]]) -> None:
        self.state[param] = state = ParameterState(values)
        state.send(self._disk)
        self._disk.make_room()

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
        for state in self._states_of(part):
            # What cannot be read is asked for again when it is brought, and told then.
            with suppress(SsdtrainError):
                state.prefetch()
        if self._undo is not None:
            self._undo.expect(part)

    def _bring(self, part: Chunk) -> Chunk:
        """Have the state of a part in memory; return what of the part can be updated."""
        if self._undo is not None:
            self._undo.remember(part, self.state)
        readable = []
        for param in part.params:
            state = self.state.get(param)
            if param.grad is not None and isinstance(state, ParameterState):
                try:
                    state.bring()
                except SsdtrainError as error:
                    if self._undo is not None and self._undo.is_kept:
                        raise
                    self._lost[param] = error
                    continue
            readable.append(param)
        if self._undo is not None:
            self._undo.note_begun(part)
        return Chunk(part.group, readable)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """Leave model and optimizer as they were before a step that raises, with ``undo``."""
        undo = self._undo
        if undo is None:
            yield
            return
        undo.begin()
        try:
            yield
        except BaseException as error:
            if undo.is_kept:
                self._restore()
                if isinstance(error, SsdtrainError):
                    raise StorageError(f"{UNDONE}: {error}") from error
                error.add_note(UNDONE)
            raise
        undo.forget()

    def _restore(self) -> None:
        assert self._undo is not None, "asked for with undo only"
        lost = self._undo.restore(self.state)
        if lost:
            cause = next(iter(lost.values()))
            raise StorageError(
                f"{NOT_UNDONE} {named(self.param_groups, list(lost))}: {cause}"
            ) from cause

    @property
    def lost_parameters(self) -> list[Tensor]:
        """The parameters whose state could not be read back; empty if all is well.

        As long as there are some, ``step`` raises. ``load_state_dict`` gives them a state;
        ``optimizer.state.pop(parameter)`` gives one up, so that the next step begins it anew.
        """
        return [param for param in self._lost if self.state.get(param)]

    def _refuse_lost(self) -> None:
        lost = self.lost_parameters
        if lost:
            cause = self._lost[lost[0]]
            raise StorageError(
                f"{LOST} {named(self.param_groups, lost)}. {WHAT_NEXT}: {cause}"
            ) from cause
        self._lost = {}

    def _refuse_half_done(self) -> None:
        if self._undo is not None and self._undo.is_kept:
            raise StorageError(f"{NOT_UNDONE} all that the step has updated")
        self._refuse_lost()

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


def own_kind(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of an optimizer, the one from before if it is offloaded."""
    if isinstance(optimizer, _Offloaded):
        return optimizer._own_kind  # noqa: SLF001 - of the class above
    return type(optimizer)


def give_state(
    optimizer: Optimizer, param: Tensor, values: Iterable[tuple[Any, Any]] | None
) -> None:
    """Give one parameter another state, or none; an offloaded optimizer's goes to the disk."""
    if values is None:
        optimizer.state.pop(param, None)
    elif isinstance(optimizer, _Offloaded):
        optimizer._give_state(param, values)  # noqa: SLF001 - of the class above
    else:
        optimizer.state[param] = dict(values)


def note_loaded(optimizer: Optimizer) -> None:
    """Let an offloaded optimizer go on whose state has been replaced in whole."""
    if isinstance(optimizer, _Offloaded):
        optimizer._note_loaded()  # noqa: SLF001 - of the class above


def refuse_half_done(optimizer: Optimizer) -> None:
    """Raise ``StorageError`` if the last step failed and left something that is not whole."""
    if isinstance(optimizer, _Offloaded):
        optimizer._refuse_half_done()  # noqa: SLF001 - of the class above


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
