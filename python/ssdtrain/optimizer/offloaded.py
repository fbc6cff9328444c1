"""``ssdtrain.offload_optimizer``: an optimizer whose state lies on SSDs.

The optimizer stays the object it was; its class becomes one of ours that is derived from its own.
So schedulers, scalers and trainers that hold it go on as before, and nobody has an older object
left whose state is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssdtrain.config import Directories, Size
from ssdtrain.errors import ConfigError, SsdtrainError, StorageError
from ssdtrain.optimizer.chunks import (
    Chunk,
    Part,
    Settings,
    chunks_of,
    own_step,
    parts_in_order,
    update,
)
from ssdtrain.optimizer.deferred import (
    Deferred,
    is_sparse,
    kept,
    say_why_now,
    settle_param,
    why_none_later,
    why_not_later,
)
from ssdtrain.optimizer.forward_order import ForwardOrder
from ssdtrain.optimizer.lost import Lost
from ssdtrain.optimizer.state import Disk, ParameterState, States
from ssdtrain.optimizer.stats import OptimizerStats
from ssdtrain.optimizer.trial import Habits, refuse_habits, refuse_unfit, take_over_step, tried
from ssdtrain.optimizer.undo import NOT_UNDONE, UNDONE_LATE, Undo, restore, undone_if_it_fails
from ssdtrain.sizes import in_bytes
from ssdtrain.store import TensorStore

__all__ = ["Offloaded", "offload_optimizer"]

BUFFER_BYTES_DEFAULT = 256 << 20
BUFFER_PARTS = 4
"""One is updated, one is read, one is written, and one is room for what does not fit evenly."""
STATE_MIN_BYTES = 64 << 10
"""Smaller tensors of a state (biases, counts of steps) stay in memory."""
STATE_PER_PARAM = 2
"""A guess, until the first step has made the state: Adam has two tensors for each parameter."""

PARTS_MIN = 16
"""So many at least, if parameters are updated beside the forward: the first ones soon."""
PART_BYTES_MIN = 1 << 20
Overlap = Literal["step", "forward"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def offload_optimizer(
    optimizer: AnyOptimizer,
    dir: Directories | TensorStore,  # noqa: A002 - as in ssdtrain.offload
    *,
    overlap: Overlap = "step",
    buffer_bytes: Size = BUFFER_BYTES_DEFAULT,
    max_disk_bytes: Size | None = None,
    verify: bool = False,
    undo: bool = False,
) -> AnyOptimizer:
    """Keep the state of an optimizer on SSDs, and return the same optimizer.

    Its ``step`` runs the optimizer's own code over one part of the parameters after the other,
    while the state of the next part is read and that of the last one is written: the update has the
    same bits as the plain one. ``state[param]``, ``state_dict()`` and ``load_state_dict()`` work as
    ever. The idea is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou (arXiv 2403.06504).

    Args:
        optimizer: One whose update is per parameter: AdamW, SGD with momentum, Adafactor and the
            like, also of classes that torch does not know. That is tried on small tensors.
        dir: A local directory, a list of them, or a ``TensorStore``, to be kept open meanwhile.
        overlap: When updates are made. ``"step"``: in ``step()``. ``"forward"``: ``step()`` returns
            at once, and they go on beside what comes next, in the order in which the forward needs
            the weights. Whoever uses a weight, the state or the optimizer waits for what they use;
            ``optimizer.synchronize()`` waits for all. An error of an update is raised there.
        buffer_bytes: Memory for the state that is read, updated and written at the same time, in
            bytes or text such as ``"256MiB"``. A single parameter takes what it needs.
        max_disk_bytes: Bound on the bytes reserved on disk; what does not fit stays in memory.
        verify: Checksum each tensor before its write and after its read.
        undo: A step that fails or is interrupted is undone, so that model and optimizer are those
            of the last whole step. Costs a write of the weights in each step, and space on the
            disk for the state twice and the weights once. For ``overlap="step"`` alone.

    Returns:
        The same optimizer, now also with ``offload_stats``, ``synchronize()``, ``lost_parameters``.

    Raises:
        ConfigError: No optimizer of torch, one that is offloaded already, or whose ``step`` was
            replaced; a directory or options that cannot be used.
        UnsupportedError: The optimizer couples its parameters (LBFGS), or they are not on the CPU;
            ``overlap="forward"`` of one whose step draws random numbers or changes its attributes.
        StorageError: In ``step``: state could not be read back. With ``undo`` nothing has changed,
            and the step can be made again. Without, every other parameter was updated; the
            optimizer refuses further steps until a state is loaded, or that of each of its
            ``lost_parameters`` is given up with ``optimizer.state.pop(parameter)``.

    """
    refuse_unfit(optimizer)
    if isinstance(optimizer, Offloaded):
        name = type(optimizer).__name__
        raise ConfigError(f"this {name} is offloaded already; use it as it is")
    if overlap not in ("step", "forward"):
        raise ConfigError(f'overlap is "step" or "forward", not {overlap!r}')
    if undo and overlap == "forward":
        raise ConfigError(
            'undo=True needs overlap="step": beside a forward, weights that were updated are used '
            "before the step has ended"
        )
    habits = tried(optimizer)
    if overlap == "forward":
        refuse_habits(type(optimizer).__name__, habits)
    if isinstance(dir, TensorStore) and (max_disk_bytes is not None or verify):
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
    take_over_step(optimizer)
    kind: type[Optimizer] = type(optimizer)
    optimizer.__class__ = cast("type[AnyOptimizer]", _offloaded(kind))  # type: ignore[arg-type]
    offloaded = cast("Offloaded", optimizer)
    offloaded._begin(kind, disk, part_bytes, overlap, habits)  # noqa: SLF001 - its constructor
    if undo:
        offloaded._undo = Undo(disk)  # noqa: SLF001 - likewise
    return optimizer


class Offloaded(Optimizer):
    """What an offloaded optimizer has before its own class: the step, and ways to its state."""

    _own_kind: type[Optimizer]
    _disk: Disk
    _part_bytes: int
    _undo: Undo | None
    _lost: Lost
    _step_count_done: int
    _step_s: float
    _waited_s: float
    _order: ForwardOrder | None
    _updates: Deferred | None
    _changes_groups: bool

    def _begin(
        self,
        kind: type[Optimizer],
        disk: Disk,
        part_bytes: int,
        overlap: Overlap,
        habits: Habits,
    ) -> None:
        self._own_kind = kind
        self._disk = disk
        self._part_bytes = part_bytes
        self._undo = None
        self._lost = Lost()
        self._step_count_done = 0
        self._step_s = self._waited_s = 0.0
        self._updates = None
        self._changes_groups = overlap == "forward" and habits.changes_groups
        self._order = ForwardOrder() if overlap == "forward" else None
        if self._order is not None:
            self._order.begin_round()
        self._take_over_state()
        # torch's own wrapper around `step`, which runs the hooks, now goes around ours.
        self._patch_step_function()

    @property
    def state(self) -> Any:
        """The state of each parameter, after the updates that are under way."""
        self.synchronize()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self.synchronize()
        vars(self)["state"] = states

    @property
    def _states(self) -> Any:
        """The state, for those who update it, or have waited."""
        return vars(self)["state"]

    @property
    def param_groups(self) -> Any:
        """The groups of parameters, with the options that the next step will use."""
        if self._changes_groups:
            self.synchronize()
        return vars(self)["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        vars(self)["param_groups"] = groups

    def synchronize(self) -> None:
        """Wait until all updates are made; raise what went wrong with them.

        With ``overlap="forward"`` every use of a weight or of its gradient through torch waits for
        them by itself. This is for what torch does not see: code in C++ that gets a weight of a
        module other than the one called, ``torch.func``, ``torch.tensor(weight)`` and the like.

        Raises:
            StorageError: State could not be read back; see ``step``.

        """
        updates = self._updates
        if updates is None:
            return
        try:
            updates.settle()
        finally:
            if updates.has_ended():
                self._waited_s += updates.waited_s
                self._updates = None

    @property
    def lost_parameters(self) -> list[Tensor]:
        """The parameters whose state could not be read back; empty if all is well.

        As long as there are some, ``step`` raises. ``load_state_dict`` gives them a state;
        ``optimizer.state.pop(parameter)`` gives one up, so that the next step begins it anew.
        """
        self.synchronize()
        return self._lost.params(self._states)

    @property
    def offload_stats(self) -> OptimizerStats:
        """What was done so far, and where the state is now."""
        self.synchronize()
        sizes = [state.nbytes() for state in self._parameter_states()]
        disk = self._disk
        return OptimizerStats(
            on_disk_bytes=sum(on_disk for _, on_disk in sizes),
            resident_bytes=sum(resident for resident, _ in sizes),
            written_bytes=disk.written_bytes,
            read_bytes=disk.read_bytes,
            step_count=self._step_count_done,
            step_s=self._step_s,
            stall_s=disk.stall_s,
            waited_s=self._waited_s,
            write_failed_count=disk.failed_count,
        )

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run the optimizer's own step, part by part, and return what the closure returned."""
        began_s = perf_counter()
        self.synchronize()
        if self._undo is not None and self._undo.is_kept:
            restore(self._undo, self._states, self.param_groups)
            raise StorageError(UNDONE_LATE)
        self._lost.refuse(self._states, self.param_groups)
        self._opt_called = True  # for schedulers, which ask whether a step came before theirs
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                settle_param(param)
        if self._order is None:
            self._step_now(options)
        else:
            self._step_beside(self._order, options)
        self._step_count_done += 1
        self._step_s += perf_counter() - began_s
        if self._updates is None:
            self._lost.refuse(self._states, self.param_groups)
        return loss

    # A scheduler puts nothing around a step that has this mark.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def _step_now(self, options: dict[str, Any]) -> None:
        chunks = chunks_of(self.param_groups, self._bytes_of, self._part_bytes)
        parts = [Part([chunk]) for chunk in chunks]
        settings = Settings()
        with undone_if_it_fails(self._undo, self._states, self.param_groups):
            for _ in self._updated(parts, self, settings, options):
                pass
        settings.apply()

    def _step_beside(self, order: ForwardOrder, options: dict[str, Any]) -> None:
        """Update what others may look at past us, and begin the updates of all else."""
        order.begin_round()
        # Schedulers and scalers set something else as soon as this step has returned.
        groups = self.param_groups
        if not self._changes_groups:
            groups = [{name: kept(value) for name, value in group.items()} for group in groups]
        stand_in = self._stand_in()
        pairs = [(group, param) for group in groups for param in group["params"]]
        reason = why_none_later(options)
        reasons = [reason or one for one in why_not_later([param for _, param in pairs])]
        say_why_now(reasons, self._disk.notices)
        now = [pair for pair, reason in zip(pairs, reasons, strict=True) if reason]
        later = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
        settings, known = Settings(), set(self._states)
        used = {id(group) for group, _ in pairs}
        empty = [Part([Chunk(group, [])]) for group in groups if id(group) not in used]
        parts = [*parts_in_order(now, self._bytes_of, self._part_bytes), *empty]
        for _ in self._updated(parts, stand_in, settings, options):
            pass
        if not later:
            settings.apply()
            return

        def run(parts: list[Part]) -> Iterator[Part]:
            yield from self._updated(parts, stand_in, settings, {})
            settings.apply()
            self._states.put_last([param for _, param in pairs if param not in known])
            self._lost.refuse(self._states, groups)

        later = order.sort(later, lambda pair: pair[1])
        total = sum(self._bytes_of(param) for _, param in later)
        bytes_max = min(self._part_bytes, max(PART_BYTES_MIN, total // PARTS_MIN))
        self._updates = Deferred(
            list(parts_in_order(later, self._bytes_of, bytes_max)),
            run,
            order,
            self._disk.notices,
        )
        self._updates.start()

    def _stand_in(self) -> Optimizer:
        """Return an optimizer of the own class for the updates, as this one is now."""
        stand_in: Optimizer = object.__new__(self._own_kind)
        vars(stand_in).update({name: kept(value) for name, value in vars(self).items()})
        return stand_in

    def _updated(
        self, parts: list[Part], on: Optimizer, settings: Settings, options: dict[str, Any]
    ) -> Iterator[Part]:
        """Update one part after the other; give each as soon as its parameters are updated."""
        own = own_step(self._own_kind)
        for first in parts[:1]:
            self._prefetch(first)
        for part, following in zip_longest(parts, parts[1:]):
            if following is not None:
                self._prefetch(following)
            found = self._bring(part)
            staying = {id(param) for param in part.params if is_sparse(param.grad)}
            for chunk in found.chunks:
                update(on, own, chunk, settings, options)
            yield part
            # From here on others may change gradients, which this thread must not look at.
            self._send(part, staying)

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
        self.synchronize()
        super().load_state_dict(state_dict)
        self._note_loaded()
        self._take_over_state()

    def _note_loaded(self) -> None:
        """Go on with a state that was replaced in whole."""
        self._lost.forget()
        if self._undo is not None:
            self._undo.forget()

    def _give_state(self, param: Tensor, values: Iterable[tuple[Any, Any]]) -> None:
        """Give one parameter another state, which goes to the disk."""
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
        states.adopt(self._states)
        self.state = states
        for state in self._parameter_states():
            state.send(self._disk)
            self._disk.make_room()

    def _parameter_states(self) -> list[ParameterState]:
        return [state for state in self._states.values() if isinstance(state, ParameterState)]

    def _states_of(self, part: Part) -> list[ParameterState]:
        """Return the states that an update of this part will ask for."""
        found = (self._states.get(param) for param in part.params if param.grad is not None)
        return [state for state in found if isinstance(state, ParameterState)]

    def _bytes_of(self, param: Tensor) -> int:
        state = self._states.get(param)
        if isinstance(state, ParameterState) and len(state):
            return sum(state.nbytes())
        return STATE_PER_PARAM * param.nbytes

    def _prefetch(self, part: Part) -> None:
        for state in self._states_of(part):
            # What cannot be read is asked for again when it is brought, and told then.
            with suppress(SsdtrainError):
                state.prefetch()
        if self._undo is not None:
            self._undo.expect(part)

    def _bring(self, part: Part) -> Part:
        """Have the state of a part in memory; return what of the part can be updated."""
        if self._undo is not None:
            self._undo.remember(part, self._states)
        chunks = []
        for chunk in part.chunks:
            readable = [param for param in chunk.params if self._is_brought(param)]
            # A group without parameters is stepped as ever; one of which all is lost is not.
            if readable or not chunk.params:
                chunks.append(Chunk(chunk.group, readable))
        if self._undo is not None:
            self._undo.note_begun(part)
        return Part(chunks)

    def _is_brought(self, param: Tensor) -> bool:
        state = self._states.get(param)
        if param.grad is None or not isinstance(state, ParameterState):
            return True
        try:
            state.bring()
        except SsdtrainError as error:
            if self._undo is not None and self._undo.is_kept:
                raise
            self._lost.note(param, error)
            return False
        return True

    def _refuse_half_done(self) -> None:
        """Raise ``StorageError`` if the last step failed and left something that is not whole."""
        self.synchronize()
        if self._undo is not None and self._undo.is_kept:
            raise StorageError(f"{NOT_UNDONE} all that the step has updated")
        self._lost.refuse(self._states, self.param_groups)

    def _send(self, part: Part, staying: set[int]) -> None:
        for param in part.params:
            state = self._states.get(param)
            if not isinstance(state, ParameterState):
                continue
            if id(param) in staying:
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
    "an optimizer whose state is on the disk cannot be copied or pickled; save it with "
    "ssdtrain.save(path, model, optimizer), or save optimizer.state_dict()"
)


@cache
def _offloaded(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of the offloaded optimizers of this kind."""
    return type(f"Offloaded{kind.__name__}", (Offloaded, kind), {"__doc__": kind.__doc__})


def _copied(state: Any) -> Any:
    return state.copied() if isinstance(state, ParameterState) else state
