"""``ssdtrain.offload_parameters``: keep the weights of a model on SSDs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ssdtrain.config import Directories, Size, optional_bytes
from ssdtrain.errors import ConfigError
from ssdtrain.notices import PROCESS
from ssdtrain.optimizer.forward_order import READS_INNER_WEIGHTS
from ssdtrain.parameters.birth import born, refuse_unborn
from ssdtrain.parameters.hooks import watch_modules
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.parameters.weight import MIN_BYTES, why_staying
from ssdtrain.parameters.weights import Weights, weight_of
from ssdtrain.sizes import shown_bytes
from ssdtrain.store import TensorStore

__all__ = ["offload_parameters", "parameter_stats", "parameters_in_memory"]

LARGEST_TIMES = 3
"""One module is in use, the next one is read, and the last one is written."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def offload_parameters(
    model: AnyModule,
    dir: Directories | TensorStore,  # noqa: A002 - as in ssdtrain.offload
    *,
    max_resident_bytes: Size | None = None,
    max_disk_bytes: Size | None = None,
    verify: bool = False,
) -> AnyModule:
    """Keep the weights of a model on SSDs, and return the same model.

    The parameters stay the same objects. A module's own weights are brought before its forward, and
    may leave after it; backward brings those that it needs, and whoever else uses one through torch
    has it brought. What was changed is found by a checksum when it leaves, and written; all else is
    only read. The idea is that of ZeRO-Infinity (arXiv 2104.07857) and Fuyou (arXiv 2403.06504).

    Args:
        model: Its plain parameters of 64 KiB and more on the CPU may leave; all others stay. Of one
            that was built on ``torch.device("meta")`` each module gets its weights by its own
            ``reset_parameters``, and they leave before those of the next one are made: then the
            parameters are new objects, so make the optimizer afterwards.
        dir: A local directory, a list of them, or a ``TensorStore``, to be kept open meanwhile.
        max_resident_bytes: Bound on these weights in memory, in bytes or text such as ``"8GiB"``.
            Weights that fit are kept. ``None``: three times those of the module with the most.
            Gradients, activations and the optimizer's state are not among them.
        max_disk_bytes: Bound on the bytes reserved on disk; what does not fit stays in memory.
        verify: Checksum each weight before its write and after its read.

    Returns:
        The same model. ``parameter_stats`` tells its figures; ``parameters_in_memory`` keeps its
        weights in memory for a while.

    Raises:
        ConfigError: No module, no weight that could leave, one that is offloaded already, a bound
            that is smaller than the weights of one module, a module without bytes and without
            ``reset_parameters``, or options that cannot be used.
        NoSpaceError: The disk has no room; the model is as it was.
        StorageError: In a forward, a backward, and whatever else uses a weight: it could not be
            read. It is on the disk still, and the next use reads it again.

    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload_parameters takes a torch.nn.Module, not {type(model)!r}")
    if isinstance(dir, TensorStore) and (max_disk_bytes is not None or verify):
        raise ConfigError(
            "max_disk_bytes and verify are options of the store: give them to TensorStore(...)"
        )
    refuse_unborn(model)
    leaving, staying_bytes = _divide(model)
    bound = _bound_of(model, leaving, optional_bytes("max_resident_bytes", max_resident_bytes))
    store = (
        dir
        if isinstance(dir, TensorStore)
        else TensorStore(dir, max_disk_bytes=max_disk_bytes, verify=verify)
    )
    weights = Weights(store, bound)
    weights.staying_bytes = staying_bytes
    try:
        for name, param in leaving.items():
            if not param.is_meta:
                weights.add(param, name)
        weights.begin()
        names = {id(module): name for name, module in model.named_modules()}
        for module in born(model):
            for name, param in module.named_parameters(prefix=names[id(module)], recurse=False):
                if weight_of(param) is None and why_staying(param) is None:
                    weights.add(param, name)
            weights.begin()
    except BaseException:
        weights.give_back()
        raise
    watch_modules()
    return model


def parameter_stats(model: nn.Module) -> ParameterStats:
    """Return the figures of a model whose weights are offloaded.

    Raises:
        ConfigError: They are not.

    """
    owners = _owners(model)
    if len(owners) != 1:
        raise ConfigError(
            f"this {type(model).__name__} was not given to ssdtrain.offload_parameters as a whole; "
            "ask for the module that was"
        )
    return owners[0].stats()


@contextmanager
def parameters_in_memory(model: nn.Module) -> Iterator[None]:
    """Keep all weights of a model in memory, beyond any bound, while a block runs.

    For what gets weights past Python's functions of torch: ``torch.func``, ``torch.jit.trace``,
    ``torch.export``, extensions in C++.

    Raises:
        StorageError: A weight could not be read.

    """
    user = object()
    found = [weight for param in model.parameters() if (weight := weight_of(param)) is not None]
    try:
        for weight in found:
            param = weight.param
            assert param is not None, "the model has it"
            weight.begin_use(param, user)
        yield
    finally:
        for weight in found:
            weight.end_use(user)


def _bound_of(model: nn.Module, leaving: dict[str, Tensor], given: int | None) -> int:
    """Return the bound, which has to hold the weights of each module."""
    name, largest_bytes = _largest_module(model, leaving)
    if given is None:
        return LARGEST_TIMES * largest_bytes
    if given < largest_bytes:
        raise ConfigError(
            f"max_resident_bytes={shown_bytes(given)} is less than the "
            f"{shown_bytes(largest_bytes)} of weights that {name} uses at once; give more, twice "
            "that if the next module's weights are to be read meanwhile"
        )
    return given


def _owners(model: nn.Module) -> list[Weights]:
    found = [weight for param in model.parameters() if (weight := weight_of(param)) is not None]
    owners = {id(weight.owner): weight.owner for weight in found}.values()
    return [owner for owner in owners if isinstance(owner, Weights)]


def _divide(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return the parameters that may leave, by name, and the bytes of those that stay."""
    compiled = {
        id(param)
        for module in model.modules()
        if _is_out_of_sight(module)
        for param in module.parameters()
    }
    leaving: dict[str, Tensor] = {}
    staying_bytes = 0
    for name, param in model.named_parameters():
        if weight_of(param) is not None:
            raise ConfigError(f"the weight {name!r} of this model is offloaded already")
        is_small = param.nbytes < MIN_BYTES
        why = "compiled" if id(param) in compiled else None if param.is_meta else why_staying(param)
        if is_small or why is not None:
            staying_bytes += param.nbytes
        else:
            leaving[name] = param
    if compiled:
        PROCESS.say(
            "compiled weights",
            "the weights of modules that are compiled or scripted stay in memory: their code uses "
            "them past Python",
        )
    if not leaving:
        raise ConfigError(
            f"no weight of this {type(model).__name__} can leave memory: only plain dense "
            "parameters of 64 KiB and more on the CPU can, whose memory is theirs alone"
        )
    return leaving, staying_bytes


def _is_out_of_sight(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def _largest_module(model: nn.Module, leaving: dict[str, Tensor]) -> tuple[str, int]:
    """Return the module that uses the most at once, and how many bytes these are."""
    wanted = {id(param) for param in leaving.values()}

    def nbytes(module: nn.Module) -> int:
        inner = isinstance(module, READS_INNER_WEIGHTS)
        params = {id(param): param for param in module.parameters(recurse=inner)}
        return sum(param.nbytes for number, param in params.items() if number in wanted)

    name, module = max(model.named_modules(), key=lambda pair: nbytes(pair[1]))
    shown = f"{name} ({type(module).__name__})" if name else f"the {type(module).__name__} itself"
    return shown, nbytes(module)
