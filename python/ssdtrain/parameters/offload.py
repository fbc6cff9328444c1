"""The public ``offload_parameters``, and the functions that look at its work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ssdtrain.away.tensor import MIN_BYTES, why_staying
from ssdtrain.config import Size, optional_bytes
from ssdtrain.errors import ConfigError, NoSpaceError, UnsupportedError
from ssdtrain.machine.torch_internals import is_in_shards
from ssdtrain.notices import PROCESS
from ssdtrain.parameters.compiled import bring_before_compiled, is_compiled
from ssdtrain.parameters.hooks import uses_inner_weights, watch_modules
from ssdtrain.parameters.materialize import InitFn, check_first_values, is_on_meta, materialize
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.parameters.weights import NAME, Weights, weight_of
from ssdtrain.place import Place, opened
from ssdtrain.sharing import Budget
from ssdtrain.sizes import shown_bytes
from ssdtrain.watched import User

__all__ = ["offload_parameters", "parameter_stats", "parameters_in_memory"]

LARGEST_TIMES = 3
"""A module is in use, the next module is read, and the last module is written."""
BOUND_PARTS = 2
"""Weights without a bound of their own get one part in so many of a session's bound."""
WANTED = "offload_parameters, whose weights share this bound,"
ADVICE = "give offload_parameters a smaller max_resident_bytes"

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def offload_parameters(
    model: AnyModule,
    dir: Place,  # noqa: A002 - as in ssdtrain.offload
    *,
    max_resident_bytes: Size | None = None,
    max_disk_bytes: Size | None = None,
    verify: bool = False,
    init_fn: InitFn | None = None,
) -> AnyModule:
    """Keep the weights of a model on SSDs, and return the same model.

    The parameters stay the same objects. A module's own weights are brought before its forward, and
    may leave after it. Backward brings the weights that it needs, and so does each function of
    torch that gets a weight. A checksum tells whether a weight was changed when it leaves; only
    then is it written. The idea is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou
    (arXiv 2403.06504).

    Args:
        model: Its plain parameters of 64 KiB and more on the CPU may leave; all others stay. If it
            was built on ``torch.device("meta")``, each module gets its weights by its own
            ``reset_parameters``, and they leave before those of the next module are made; a model
            of Transformers initializes its weights as in its constructor. The parameters are new
            objects then, so make the optimizer afterwards.
        dir: A local directory, a list of them, a ``TensorStore``, to be kept open meanwhile, or the
            session of a ``with ssdtrain.offload(...)`` block. Then the weights use the files, the
            quota and the report of the session, and their bound is reserved in its
            ``max_resident_bytes``. The model may be used after the block.
        max_resident_bytes: Bound on these weights in memory, in bytes or text such as ``"8GiB"``.
            Weights that fit are kept. The default is three times the weights of the largest module;
            in a session with a bound, half of the bound that other models leave, and the weights of
            the largest module at least. Gradients, activations and the optimizer's state do not
            count.
        max_disk_bytes: Bound on the bytes that this call reserves on disk, in a file of its own. It
            has to hold all weights and the weights of the largest module once more, because the
            older bytes of a weight stay until the new bytes are whole. Without it, all calls that
            name the same directories share a file.
        verify: Checksum each weight before its write and after its read.
        init_fn: For a model on the meta device: ``model.apply(init_fn)`` is called when all modules
            have memory, as many constructors end with ``self.apply(self._init_weights)``. It has to
            give values to tensors that ``reset_parameters`` leaves without.

    Returns:
        The same model. ``parameter_stats`` returns its figures; ``parameters_in_memory`` keeps its
        weights in memory during a block.

    Raises:
        ConfigError: No module, no weight that could leave, a weight that is offloaded already, a
            bound that is smaller than the weights of a module or larger than a session has left, a
            tensor on the meta device without its first values, a session that has ended, or options
            that cannot be used.
        UnsupportedError: All weights are in shards (DTensor), as FSDP2 makes them.
        BudgetError: Other tensors in memory leave too little of the session's bound now; the model
            is as it was.
        NoSpaceError: The disk has no room; the model is as it was.
        StorageError: Later, in a forward, a backward, or a function that uses a weight: a read has
            failed. The weight is still on the disk, and the next use reads it again.

    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"offload_parameters takes a torch.nn.Module first, not {type(model)!r}: "
            "offload_parameters(model, dir)"
        )
    given = optional_bytes("max_resident_bytes", max_resident_bytes)
    check_first_values(model, init_fn)
    leaving, staying_bytes = _divide(model)
    store, share = opened(dir, max_disk_bytes, verify, caller="offload_parameters", name=NAME)
    budget = None if share is None else share.budget
    bound = _bound_of(model, leaving, given, budget)
    room = None if budget is None else budget.set_aside(bound, lambda: WANTED, ADVICE)
    watch_modules()
    weights = Weights(store, bound, room)
    weights.staying_bytes = staying_bytes
    try:
        bring_before_compiled(model)
        for name, param in leaving.items():
            if not param.is_meta:
                weights.add(param, name)
        weights.begin()
        if is_on_meta(model):
            materialize(model, init_fn, partial(_take_module, weights))
        # From here on a failed write is logged, because no caller gets the error.
        weights.is_failure_raised = False
    except BaseException as error:
        weights.give_back()
        if isinstance(error, NoSpaceError):
            error.args = (f"{error}; {_disk_need(model, leaving)}",)
        raise
    if share is not None:
        share.register(weights)
    return model


def parameter_stats(model: nn.Module) -> ParameterStats:
    """Return the figures of a model whose weights are offloaded.

    Raises:
        ConfigError: The weights are not offloaded.

    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"parameter_stats takes a torch.nn.Module, not {type(model)!r}")
    owners = _owners(model)
    if not owners:
        raise ConfigError(
            f"ssdtrain.offload_parameters has taken no weight of this {type(model).__name__}; call "
            "it, and call it again after a replacement of parameters such as "
            "load_state_dict(assign=True)"
        )
    if len(owners) > 1:
        raise ConfigError(
            f"this {type(model).__name__} was not given to ssdtrain.offload_parameters as a whole; "
            "call parameter_stats with the modules that were"
        )
    return owners[0].stats()


@contextmanager
def parameters_in_memory(model: nn.Module) -> Iterator[None]:
    """Keep all weights of a model in memory, beyond any bound, while a block runs.

    Code that gets weights past Python's functions of torch needs it: ``torch.func``,
    ``torch.jit.trace``, ``torch.export``, extensions in C++.

    Raises:
        StorageError: A weight could not be read.

    """
    user = User()
    found = [weight for param in model.parameters() if (weight := weight_of(param)) is not None]
    try:
        for weight in found:
            weight.owner.begin_use([weight], user)
        yield
    finally:
        for weight in found:
            weight.end_use(user)


def _take_module(weights: Weights, name: str, module: nn.Module) -> None:
    """Take the own weights of a module over, and let others leave for them."""
    for key, param in module.named_parameters(prefix=name, recurse=False):
        if weight_of(param) is None and why_staying(param, Parameter) is None:
            weights.add(param, key)
    weights.begin()


def _bound_of(
    model: nn.Module, leaving: dict[str, Tensor], given: int | None, budget: Budget | None
) -> int:
    """Return the bound, which has to hold the weights of each module."""
    name, largest_bytes = _largest_module(model, leaving)
    if given is not None and given < largest_bytes:
        raise ConfigError(
            f"max_resident_bytes={shown_bytes(given)} is less than the "
            f"{shown_bytes(largest_bytes)} of weights that {name} uses at once; give more, twice "
            "that if the next module's weights are to be read meanwhile"
        )
    if budget is None or budget.limit_bytes is None:
        return LARGEST_TIMES * largest_bytes if given is None else given
    if budget.left_bytes != budget.limit_bytes:
        # A dropped model may be in a cycle, and wait for Python's collector.
        gc.collect()
    left_bytes = budget.left_bytes
    assert left_bytes is not None
    wanted_bytes = max(largest_bytes, left_bytes // BOUND_PARTS) if given is None else given
    # A reservation for more than all weights would be lost to others.
    bound = min(wanted_bytes, sum(param.nbytes for param in leaving.values()))
    if bound > left_bytes:
        raise ConfigError(_too_large(budget, bound, f"{name} alone uses", largest_bytes))
    return bound


def _too_large(budget: Budget, bound: int, least: str, least_bytes: int) -> str:
    limit_bytes, left_bytes = budget.limit_bytes, budget.left_bytes
    assert limit_bytes is not None
    assert left_bytes is not None
    others = ""
    if left_bytes < limit_bytes:
        others = f", of which {shown_bytes(limit_bytes - left_bytes)} are for other weights,"
    return (
        f"max_resident_bytes={shown_bytes(limit_bytes)} of this session{others} does not hold "
        f"{shown_bytes(bound)} of weights; {least} {shown_bytes(least_bytes)} of them at once. "
        "Raise the session's max_resident_bytes, which also holds activations and updates; give "
        "the weights less of it (offload_parameters(max_resident_bytes=...)); or give "
        "offload_parameters a directory in the place of the session, so that they do not count "
        "there"
    )


def _disk_need(model: nn.Module, leaving: dict[str, Tensor]) -> str:
    all_bytes = sum(param.nbytes for param in leaving.values())
    name, largest_bytes = _largest_module(model, leaving)
    return (
        f"offload_parameters needs {shown_bytes(all_bytes + largest_bytes)} on the disk: all "
        f"weights, and the {shown_bytes(largest_bytes)} of {name} once more"
    )


def _owners(model: nn.Module) -> list[Weights]:
    found = [weight for param in model.parameters() if (weight := weight_of(param)) is not None]
    return list({id(weight.owner): weight.owner for weight in found}.values())


def _divide(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return the parameters that may leave, by name, and the bytes of those that stay."""
    scripted = {
        id(param)
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for param in module.parameters()
    }
    leaving: dict[str, Tensor] = {}
    staying_bytes = 0
    for name, param in model.named_parameters():
        if weight_of(param) is not None:
            raise ConfigError(
                f"the weight {name!r} of this model is offloaded already: call offload_parameters "
                "once; for other options build the model anew"
            )
        is_small = param.nbytes < MIN_BYTES
        why = (
            "scripted"
            if id(param) in scripted
            else None
            if param.is_meta
            else why_staying(param, Parameter)
        )
        if is_small or why is not None:
            staying_bytes += param.nbytes
        else:
            leaving[name] = param
    if scripted:
        PROCESS.say(
            "scripted weights",
            "the weights of scripted modules stay in memory: their code uses them past Python",
        )
    if not leaving:
        if any(map(is_in_shards, model.parameters())):
            raise UnsupportedError(
                f"the weights of this {type(model).__name__} are in shards (DTensor), which stay "
                "where they are: fully_shard brings and releases them itself. Their optimizer's "
                "state (ssdtrain.offload_optimizer) and the activations (ssdtrain.offload) can go "
                "to the disk"
            )
        raise ConfigError(
            f"no weight of this {type(model).__name__} can leave memory: only plain dense "
            "parameters of 64 KiB and more on the CPU can that share their memory with nothing"
        )
    return leaving, staying_bytes


def _largest_module(model: nn.Module, leaving: dict[str, Tensor]) -> tuple[str, int]:
    """Return the name of the module with the most weights at once, and their bytes."""
    wanted = {id(param) for param in leaving.values()}

    def nbytes(module: nn.Module) -> int:
        inner = uses_inner_weights(module) or is_compiled(module)
        params = {id(param): param for param in module.parameters(recurse=inner)}
        return sum(param.nbytes for number, param in params.items() if number in wanted)

    name, module = max(model.named_modules(), key=lambda pair: nbytes(pair[1]))
    shown = f"{name} ({type(module).__name__})" if name else f"the {type(module).__name__} itself"
    if is_compiled(module) or uses_inner_weights(module):
        shown += " with all modules in it"
    return shown, nbytes(module)
