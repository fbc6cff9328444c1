"""``ssdtrain.offload_optimizer``: keep the state of an optimizer on SSDs.

The optimizer gets the class of offloaded ones, which is derived from its own class, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from ssdtrain.config import Size, optional_bytes
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import outside_compiler
from ssdtrain.optimizer.buffers import NAME, Buffers, part_of, refuse_small_bound, within
from ssdtrain.optimizer.chunks import own_step
from ssdtrain.optimizer.contract import (
    refuse_lists_of_parameters,
    refuse_options_of_shards,
    refuse_unfit,
    take_over_step,
)
from ssdtrain.optimizer.disk import Disk
from ssdtrain.optimizer.gradients import gradients_of
from ssdtrain.optimizer.masters import (
    refuse_cast_masters,
    refuse_shared_memory,
    say_if_there_are_none,
)
from ssdtrain.optimizer.offloaded import Offloaded, Overlap
from ssdtrain.optimizer.trial import behaviour_of
from ssdtrain.optimizer.whole_state import WholeState
from ssdtrain.place import Place, opened
from ssdtrain.sizes import in_bytes

__all__ = ["offload_optimizer"]

BUFFER_BYTES_DEFAULT = 256 << 20
STATE_MIN_BYTES = 64 << 10
"""Smaller tensors of a state (biases, counts of steps) stay in memory."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def offload_optimizer(
    optimizer: AnyOptimizer,
    dir: Place,  # noqa: A002 - as in ssdtrain.offload
    *,
    overlap: Overlap = "step",
    buffer_bytes: Size = BUFFER_BYTES_DEFAULT,
    max_disk_bytes: Size | None = None,
    verify: bool = False,
    undo: bool = False,
    master_dtype: torch.dtype | None = None,
    max_gradient_bytes: Size | None = None,
    per_parameter: bool = False,
) -> AnyOptimizer:
    """Keep the state of an optimizer on SSDs, and return the same optimizer.

    Its ``step`` runs the optimizer's own code over one part of the parameters after the other,
    while the state of the next part is read and that of the last one is written: the update has the
    same bits as the plain one. ``state[param]``, ``state_dict()`` and ``load_state_dict()`` work as
    ever. The idea is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou (arXiv 2403.06504).

    Args:
        optimizer: One that keeps the contract: ``step()`` writes parameters and ``state[param]``,
            and may rebind numbers on its groups or on itself, to the same value for each part of
            the parameters; it changes nothing else in place. torch's own classes do, but LBFGS.
            Others are tried on small tensors.
        dir: A local directory, a list of them, a ``TensorStore``, to be kept open meanwhile, or
            the session of a ``with ssdtrain.offload(...)`` block: its files, quota and report, and
            its ``max_resident_bytes``, which then holds for activations and updates together. The
            optimizer may be used after the block.
        overlap: When updates are made. ``"step"``: in ``step()``. ``"backward"``: they are made in
            backward, as soon as gradients are complete, which are freed, and ``step()`` puts them
            in place. Whoever clips, unscales or looks at gradients then gets an
            ``UnsupportedError``. With several micro-batches in a step, say which is the last:
            ``optimizer.set_is_last_backward(False)``, and ``(True)``.
        buffer_bytes: Memory for the state that is read, updated and written at the same time, in
            bytes or text such as ``"256MiB"``. A single parameter takes what it needs. Of the
            ``max_resident_bytes`` of a session a quarter is taken at most.
        max_disk_bytes: Bound on the bytes that this call reserves on disk, in a file of its own;
            what does not fit stays in memory. Without it, all that name the same directories share
            a file.
        verify: Checksum each tensor before its write and after its read.
        undo: A step that fails or is interrupted is undone, so that model and optimizer are those
            of the last whole step. Costs a write of the weights in each step, and space on the
            disk for the state twice and the weights once. ``overlap="backward"`` does it in any
            case, without that write.
        master_dtype: ``torch.float32`` keeps a float32 master of each bfloat16 and float16
            parameter: the step runs over the masters, with gradients and state in float32, and the
            parameter is the master, rounded. Of a bfloat16 one's master two bytes are stored for
            each number. Parameters of other dtypes have none. A parameter that other code changes
            is its own master from then on.
        max_gradient_bytes: Bound on the gradients in memory, in bytes or text such as ``"8GiB"``.
            Where they alone exceed it, they leave memory between the micro-batches of a step, and
            come back when autograd adds to them and for their update. With ``"backward"`` the last
            micro-batch has them updated and freed, and no more leaves. ``None``: they stay in
            memory.
        per_parameter: The optimizer keeps the contract: it is trusted, and not tried. With
            ``"backward"`` it draws no random numbers either. Of a class that is not torch's, and
            not trusted, updates are made in ``step()``.

    Returns:
        The same optimizer, now also with ``offload_stats`` and ``lost_parameters``.

    Raises:
        ConfigError: No optimizer of torch, one that is offloaded already, or whose ``step`` was
            replaced; a directory or options that cannot be used; a session that has ended, or
            whose ``max_resident_bytes`` is too small for a single parameter.
        UnsupportedError: The optimizer breaks the contract (LBFGS), or its parameters are not on
            the CPU; ``"backward"`` or masters of one that keeps lists of its parameters; those in
            shards (DTensor) with more than ``"step"`` and ``undo``, or with an update that
            communicates, which is tried: call this in all processes. In backward, in ``step`` and
            for what uses a gradient: too late for ``overlap="backward"``.
        BudgetError: In ``step``, before anything is changed: other users of the session's
            ``max_resident_bytes`` leave too little of it.
        StorageError: In ``step``: state could not be read back. With ``undo`` (and with
            ``overlap="backward"``) nothing has changed, and the step can be made again. Without,
            every other parameter was updated; the optimizer refuses further steps until a state is
            loaded, or that of each of its ``lost_parameters`` is given up with
            ``optimizer.state.pop(parameter)``.

    """
    refuse_unfit(optimizer)
    if isinstance(optimizer, Offloaded):
        name = type(optimizer).__name__
        raise ConfigError(f"this {name} is offloaded already; use it as it is")
    gradient_bytes = optional_bytes("max_gradient_bytes", max_gradient_bytes)
    _refuse_other_values(overlap, undo=undo, per_parameter=per_parameter)
    has_masters = _has_masters(optimizer, master_dtype)
    refuse_options_of_shards(
        optimizer,
        overlap=overlap,
        has_masters=has_masters,
        has_gradient_bound=gradient_bytes is not None,
    )
    behaviour = behaviour_of(optimizer, has_masters=has_masters, per_parameter=per_parameter)
    if overlap == "backward":
        refuse_lists_of_parameters(optimizer, 'overlap="backward"', 'overlap="step"')
    if has_masters:
        refuse_lists_of_parameters(optimizer, "master_dtype", "master_dtype=None")
    buffer = in_bytes("buffer_bytes", buffer_bytes)
    store, share = opened(dir, max_disk_bytes, verify, caller="offload_optimizer", name=NAME)
    budget = None if share is None else share.budget
    refuse_small_bound(optimizer, budget, behaviour.state_share, has_masters=has_masters)
    buffer = within(buffer, budget)
    disk = Disk(store, in_flight_bytes_max=part_of(buffer), min_bytes=STATE_MIN_BYTES)
    buffers = Buffers(optimizer, disk, budget, buffer)
    gradients = None
    if gradient_bytes is not None:
        gradients = gradients_of(
            optimizer, store, budget, gradient_bytes, in_backward=overlap == "backward"
        )
    begin = partial(
        Offloaded._begin,  # noqa: SLF001 - the constructor of what the optimizer becomes
        disk=disk,
        buffers=buffers,
        overlap=overlap,
        behaviour=behaviour,
        undo=undo,
        has_masters=has_masters,
        gradients=gradients,
    )
    try:
        offloaded = become_offloaded(optimizer, begin)
    except BaseException:
        if gradients is not None:
            gradients.give_back()
        raise
    say_if_there_are_none(disk, optimizer.param_groups, wanted=has_masters)
    # What fails or interrupts from here on leaves an optimizer that is offloaded: it is in the
    # report first, and each step makes up for the other two.
    if share is not None:
        share.register(buffers)
        if gradients is not None:
            share.register(gradients)
    offloaded._watch()  # noqa: SLF001 - a part of the constructor
    offloaded._send_all()  # noqa: SLF001 - likewise
    return optimizer


def _refuse_other_values(overlap: object, **flags: object) -> None:
    if overlap == "forward":
        raise ConfigError(
            'overlap="forward" is not there: use "backward", which updates each parameter while '
            "backward computes"
        )
    if overlap not in ("step", "backward"):
        raise ConfigError(f'overlap is "step" or "backward", not {overlap!r}')
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False, not {flag!r}")


def _has_masters(optimizer: Optimizer, master_dtype: object) -> bool:
    if master_dtype is None:
        return False
    if master_dtype is not torch.float32:
        raise ConfigError(f"master_dtype is None or torch.float32, not {master_dtype!r}")
    refuse_cast_masters(optimizer)
    refuse_shared_memory(optimizer.param_groups)
    return True


def become_offloaded(optimizer: Optimizer, begin: Callable[..., object]) -> Offloaded:
    """Give an optimizer the class of offloaded ones; a failure leaves it as it was."""
    kind: type[Optimizer] = type(optimizer)
    attributes = dict(vars(optimizer))
    _refuse_names(kind, set(attributes))
    try:
        take_over_step(optimizer)
        optimizer.__class__ = _offloaded_class(kind)  # type: ignore[arg-type]
        begin(optimizer, kind)
    except BaseException:
        optimizer.__class__ = kind
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        raise
    return cast("Offloaded", optimizer)


def _refuse_names(kind: type[Optimizer], attributes: set[str]) -> None:
    """Refuse an optimizer that has an attribute or a method with a name of ours."""
    ours = {
        name
        for base in (Offloaded, WholeState)
        for name in (*base.__annotations__, *vars(base))
        if not (name.startswith("__") or hasattr(Optimizer, name))
    } - {"param_groups", "state"}
    own = {name for base in kind.__mro__ if base is not Optimizer for name in vars(base)}
    taken = sorted(ours & (own | attributes))
    if taken:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: it has {taken[0]!r}, a name that an offloaded "
            "optimizer needs for itself; give it another name"
        )


@cache
def _offloaded_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of the offloaded optimizers of this kind."""

    def step(self: Any, *given: Any, **named: Any) -> Any:
        # Around it torch puts the hooks on steps, into which the compiler may look.
        return outside_compiler(partial(Offloaded.step, self._itself(), *given, **named))

    step.__doc__ = kind.step.__doc__
    # What asks which arguments a step takes (`GradScaler`) is told those of its own.
    vars(step)["__signature__"] = inspect.signature(own_step(kind))
    vars(step).update(vars(Offloaded.step))
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "step": step}

    class OffloadedFirst(type(kind)):  # type: ignore[misc]
        """Looks methods up in our class first, though the optimizer's own is the first base.

        Python lets an object change its class only where the first bases lead to the same memory
        layout. They would not if ours came first and `kind` had `ABC` or `Generic` as first base.
        """

        def mro(cls) -> list[type]:
            if Offloaded not in cls.__bases__:
                return cast("list[type]", super().mro())
            return [cls, Offloaded, WholeState, *kind.__mro__]

    made: type[Optimizer] = OffloadedFirst(f"Offloaded{kind.__name__}", (kind, Offloaded), names)
    return made
