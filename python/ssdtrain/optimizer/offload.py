"""``ssdtrain.offload_optimizer``: keep the state of an optimizer on SSDs."""

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
    is_of_torch,
    params_of,
    refuse_lists_of_parameters,
    refuse_shards,
    refuse_shared_memory,
    refuse_unfit,
    take_over_step,
)
from ssdtrain.optimizer.disk import Disk
from ssdtrain.optimizer.gradients import gradients_of
from ssdtrain.optimizer.masters import refuse_cast_masters, warn_without_masters
from ssdtrain.optimizer.offloaded import Offloaded, Overlap
from ssdtrain.optimizer.trial import state_share_of
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

    ``step`` runs the optimizer's own code over one part of the parameters after the other, while
    the state of the next part is read and that of the last part is written. The update has the bits
    of the plain one. ``state[param]``, ``state_dict()`` and ``load_state_dict()`` work as ever. The
    idea is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou (arXiv 2403.06504).

    Args:
        optimizer: An optimizer that keeps the contract: ``step()`` writes parameters and
            ``state[param]``, and may rebind numbers on its groups or on itself, to the same value
            for each part of the parameters; it calls a closure once, before all else, and changes
            nothing else in place. torch's own classes do, except LBFGS. Other classes are tried on
            small tensors.
        dir: A local directory, a list of directories, a ``TensorStore`` that stays open, or the
            session of a ``with ssdtrain.offload(...)`` block: its files, quota, report and
            ``max_resident_bytes``. The optimizer may be used after the block.
        overlap: ``"step"``: ``step()`` makes the updates. ``"backward"``: backward computes each
            update as soon as the gradient is complete, and frees the gradient; ``step()`` puts the
            updates in place. Code that then clips, unscales or looks at gradients gets an
            ``UnsupportedError``. With several micro-batches in a step, call
            ``optimizer.set_is_last_backward(False)``, and ``(True)`` before the last.
        buffer_bytes: Memory for state that is read, updated and written at the same time, in bytes
            or text such as ``"256MiB"``; at most a quarter of a session's ``max_resident_bytes``.
            A single large parameter may take more.
        max_disk_bytes: Bound on the bytes that this call reserves on disk, in a file of its own;
            state beyond it stays in memory. Without it, all calls that name the same directories
            share a file.
        verify: Checksum each tensor before its write and after its read.
        undo: Undo a step that fails or is interrupted. Each step then writes the weights, and the
            disk needs space for the state twice and the weights once. ``overlap="backward"`` undoes
            such a step in any case, without that write.
        master_dtype: ``torch.float32`` keeps a float32 master of each bfloat16 and float16
            parameter: the step runs over the masters, with gradients and state in float32, and the
            parameter is the master, rounded. The master of a bfloat16 parameter takes two bytes on
            disk for each number. A parameter that other code changes is its own master from then
            on. Parameters of other dtypes have none.
        max_gradient_bytes: Bound on the gradients in memory, in bytes or text such as ``"8GiB"``.
            Gradients beyond it leave memory between the micro-batches of a step. With
            ``"backward"`` the last micro-batch updates and frees them, so none leaves.
        per_parameter: ``True`` says that the optimizer keeps the contract, so it is not tried;
            with ``"backward"`` also that its step draws no random numbers, and keeps no view of a
            weight in its state. Without it, ``step()`` makes the updates of a class that is not
            torch's.

    Returns:
        The same optimizer, now also with ``offload_stats`` and ``lost_parameters``.

    Raises:
        ConfigError: No optimizer of torch, an offloaded one, or one whose ``step`` was replaced; a
            directory or options that cannot be used; a session that has ended, or whose
            ``max_resident_bytes`` is too small for a single parameter.
        UnsupportedError: The optimizer breaks the contract, or its parameters are not on the CPU;
            with ``"backward"``, masters or ``undo``, two parameters lie on the same memory; with
            ``"backward"`` or masters, the optimizer keeps lists of its parameters; for parameters
            in shards (DTensor), all options but ``undo``, and updates that may communicate. With
            ``"backward"``, uses of a gradient that come too late raise it.
        BudgetError: In ``step``, before any change: other users of the session's
            ``max_resident_bytes`` leave too little of it.
        StorageError: In ``step``: state could not be read. With ``undo`` or
            ``overlap="backward"`` nothing has changed, and ``step`` may be called again. Without,
            all other parameters were updated, and the optimizer refuses further steps until a state
            is loaded, or the state of each of its ``lost_parameters`` is given up with
            ``optimizer.state.pop(parameter)``.

    """
    refuse_unfit(optimizer)
    if isinstance(optimizer, Offloaded):
        name = type(optimizer).__name__
        raise ConfigError(f"this {name} is offloaded already; use it as it is")
    gradient_bytes = optional_bytes("max_gradient_bytes", max_gradient_bytes)
    _refuse_other_values(overlap, undo=undo, per_parameter=per_parameter)
    has_masters = _has_masters(optimizer, master_dtype)
    is_trusted = per_parameter or is_of_torch(type(optimizer))
    refuse_shards(
        optimizer,
        type(optimizer),
        is_trusted=is_trusted,
        overlap=overlap != "step",
        master_dtype=has_masters,
        max_gradient_bytes=gradient_bytes is not None,
    )
    state_share = state_share_of(optimizer, has_masters=has_masters, per_parameter=per_parameter)
    if overlap == "backward":
        refuse_lists_of_parameters(optimizer, 'overlap="backward"', 'overlap="step"')
    if has_masters:
        refuse_lists_of_parameters(optimizer, "master_dtype", "master_dtype=None")
    if overlap == "backward" or has_masters or undo:
        refuse_shared_memory(params_of(optimizer), 'overlap="backward", master_dtype or undo')
    buffer = in_bytes("buffer_bytes", buffer_bytes)
    store, share = opened(dir, max_disk_bytes, verify, caller="offload_optimizer", name=NAME)
    budget = None if share is None else share.budget
    refuse_small_bound(optimizer, budget, state_share, has_masters=has_masters)
    buffer = within(buffer, budget)
    disk = Disk(store, in_flight_bytes_max=part_of(buffer), min_bytes=STATE_MIN_BYTES)
    buffers = Buffers(optimizer, disk, budget, buffer)
    gradients = None
    if gradient_bytes is not None:
        gradients = gradients_of(
            optimizer, store, budget, gradient_bytes, in_backward=overlap == "backward"
        )
    begin = partial(
        Offloaded._begin,  # noqa: SLF001 - the constructor of the new class
        disk=disk,
        buffers=buffers,
        overlap=overlap,
        is_trusted=is_trusted,
        state_share=state_share,
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
    warn_without_masters(disk, optimizer.param_groups, wanted=has_masters)
    # An error or an interrupt from here on leaves an offloaded optimizer: each step repeats the
    # last two calls.
    if share is not None:
        share.register(buffers)
        if gradients is not None:
            share.register(gradients)
    offloaded._watch()  # noqa: SLF001 - a part of the constructor
    offloaded._send_all()  # noqa: SLF001 - likewise
    return optimizer


def _refuse_other_values(overlap: object, **flags: object) -> None:
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
    return True


def become_offloaded(optimizer: Optimizer, begin: Callable[..., object]) -> Offloaded:
    """Give an optimizer the class of offloaded optimizers; a failure leaves it as it was."""
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
    """Return the class of offloaded optimizers of this kind."""

    def step(self: Any, *given: Any, **named: Any) -> Any:
        # torch's wrapper around this function runs the hooks on steps; the compiler may enter it.
        return outside_compiler(partial(Offloaded.step, self._itself(), *given, **named))

    step.__doc__ = kind.step.__doc__
    # `GradScaler` asks which arguments a step takes.
    vars(step)["__signature__"] = inspect.signature(own_step(kind))
    vars(step).update(vars(Offloaded.step))
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "step": step}

    class OffloadedFirst(type(kind)):  # type: ignore[misc]
        """Looks methods up in our class first, though the optimizer's own is the first base.

        Python lets an object change its class only if the first bases have the same memory layout,
        which fails for ours if the first base of ``kind`` is ``ABC`` or ``Generic``.
        """

        def mro(cls) -> list[type]:
            if Offloaded not in cls.__bases__:
                return cast("list[type]", super().mro())
            return [cls, Offloaded, WholeState, *kind.__mro__]

    made: type[Optimizer] = OffloadedFirst(f"Offloaded{kind.__name__}", (kind, Offloaded), names)
    return made
