"""Gives a model that was built on ``torch.device("meta")`` its first values, module by module.

Inner modules come before the module around them, as in a constructor, so that the order of random
numbers is that of the plain construction:

1. Each module gets memory for its own tensors and calls its own ``reset_parameters()``.
2. A model of Transformers calls ``initialize_weights()`` once all modules in it have memory.
3. ``init_fn``, if the user gives it, is applied to all modules at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ssdtrain.errors import ConfigError

__all__ = ["InitFn", "check_first_values", "is_on_meta", "materialize"]

InitFn = Callable[[nn.Module], Any]

RESETS = ("reset_parameters", "_reset_parameters")
INITIALIZED = "_is_hf_initialized"
"""Transformers leaves a module or a tensor with this attribute as it is."""
DEFAULT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAN_BYTE = 0xFF
"""A number of these bytes is NaN in every floating dtype."""
PART_COUNT = 1 << 20
"""Numbers that are compared with NaN at once: a comparison of all takes a quarter of the weight."""
REMEDY = "give offload_parameters an init_fn(module) that does it"


class Entry(NamedTuple):
    """A key in the parameters or the buffers of a module, with the full name of the tensor."""

    name: str
    values: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module has now."""
        found: Tensor = self.values[self.key]
        return found


class ReplacedParameter(Parameter):
    """A parameter on the meta device in whose place the model has another parameter."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Raise, because only an optimizer that was made too early asks for it."""
        raise ConfigError(
            "this parameter was on the meta device, and ssdtrain.offload_parameters has replaced "
            "it: an optimizer that has it trains nothing; make the optimizer after that call"
        )


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a module, or a module in it, has a tensor on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def check_first_values(model: nn.Module, init_fn: InitFn | None) -> None:
    """Refuse a model on the meta device of which some tensor would have no first value.

    Raises:
        ConfigError: Tensors without a value, a weight that two modules share, or an ``init_fn`` for
            a model that has its values already.

    """
    if init_fn is not None:
        if not is_on_meta(model):
            raise ConfigError(
                "init_fn gives first values to a model that was built on the meta device; this "
                f"{type(model).__name__} has its values: call model.apply(init_fn) instead"
            )
        return
    models = [module for module in model.modules() if _is_pretrained(module)]
    initialized = {id(inner) for module in models for inner in module.modules()}
    _refuse_missing(
        entry.name
        for name, module in model.named_modules()
        if _reset_of(module) is None and id(module) not in initialized
        for entry in _entries(name, module)
    )
    _refuse_missing(_lone_tensors(model))
    by_transformers = _tied_by_transformers(model)
    for name, source in _ties(model).items():
        if name not in by_transformers:
            raise ConfigError(
                f"{name} is also {source}, and a model that was built on the meta device does not "
                "tell which of the two modules gives the weight its first values; share it after "
                f"offload_parameters, or {REMEDY}"
            )


def materialize(
    model: nn.Module, init_fn: InitFn | None, take: Callable[[str, nn.Module], None]
) -> None:
    """Replace all tensors of a model that are on the meta device by tensors with first values.

    After each module ``take`` may release the memory of its weights. Parameters are new objects. If
    anything raises, the model has its tensors on the meta device again.
    """
    replaced: list[tuple[Entry, Tensor]] = []
    try:
        with _marked(model):
            _give_values(model, init_fn, take, replaced)
    except BaseException:
        for entry, old in replaced:
            entry.values[entry.key] = old
        raise
    for _, old in replaced:
        if type(old) is Parameter:
            old.__class__ = ReplacedParameter


def _give_values(
    model: nn.Module,
    init_fn: InitFn | None,
    take: Callable[[str, nn.Module], None],
    replaced: list[tuple[Entry, Tensor]],
) -> None:
    """Materialize the modules in turn; note in ``replaced`` what each entry had before."""
    names = {id(module): name for name, module in model.named_modules()}
    entries, ties = _entries_by_name(model), _ties(model)
    waiting = {id(module) for module in model.modules() if is_on_meta(module)}
    # The reset of a module with a loaded value could overwrite it.
    loaded = {
        id(module)
        for module in model.modules()
        if not all(param.is_meta for param in module.parameters())
    }
    unset: list[Entry] = []
    # Writes of a constructor to these need not be done again.
    uncounted = set(ties if init_fn is None else entries)

    def give(module: nn.Module) -> None:
        if id(module) not in waiting:
            return
        waiting.remove(id(module))
        name = names[id(module)]
        own = _entries(name, module)
        # Accelerate's init_empty_weights() initializes on the meta device, which has no effect.
        if vars(module).pop(INITIALIZED, False):
            uncounted.update(entry.name for entry in own)
        for entry in own:
            replaced.append((entry, entry.tensor))
            entry.values[entry.key] = _without_values(entry.tensor)
        reset = None if id(module) in loaded else _reset_of(module)
        with torch.device("cpu"):
            if _is_pretrained(module):
                # Before it writes them once more.
                _refuse_forgotten(replaced, uncounted, f"{name}." if name else "")
                with _default_dtype_of(module):
                    module.initialize_weights()  # type: ignore[operator]
            elif reset is not None:
                reset()
        # Now, while they are in memory.
        unset.extend(entry for entry in own if _is_unset(entry.tensor))
        take(name, module)

    model.apply(give)
    _refuse_forgotten(replaced, uncounted)
    _refuse_copies(model, replaced, uncounted)
    for name, source in ties.items():
        # Each module has drawn the weight that they share, as in a constructor.
        entries[name].values[entries[name].key] = entries[source].tensor
    if init_fn is not None:
        with torch.device("cpu"):
            model.apply(init_fn)
        take("", model)
    _refuse_missing(entry.name for entry in unset if _is_unset(entry.tensor))
    _refuse_missing(_lone_tensors(model))


def _refuse_forgotten(
    replaced: list[tuple[Entry, Tensor]], uncounted: set[str], prefix: str = ""
) -> None:
    """Refuse a tensor that a constructor wrote more often, on the meta device, than we have."""
    for entry, old in replaced:
        is_counted = entry.name.startswith(prefix) and entry.name not in uncounted
        if is_counted and _written_count(old) > _written_count(entry.tensor):
            raise ConfigError(
                f"{entry.name} was changed by a constructor beside reset_parameters() of its "
                "module, which had no effect on the meta device; add adapters after "
                f"offload_parameters, and for other changes {REMEDY}"
            )


def _refuse_copies(
    model: nn.Module, replaced: list[tuple[Entry, Tensor]], uncounted: set[str]
) -> None:
    """Refuse a parameter that no constructor wrote on the meta device, though we have.

    Transformers writes none before ``initialize_weights()``.
    """
    by_transformers = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if _is_pretrained(module)
    )
    for entry, old in replaced:
        is_counted = entry.name not in uncounted and not entry.name.startswith(by_transformers)
        is_written = _written_count(entry.tensor) > 0 == _written_count(old)
        if isinstance(old, Parameter) and is_counted and is_written:
            raise ConfigError(
                f"{entry.name} is a copy of another tensor (copy.deepcopy, as in "
                "nn.TransformerEncoder), or no constructor gave it a value; on the meta device "
                f"nothing tells which values it would have: {REMEDY}"
            )


def _refuse_missing(names: Iterator[str]) -> None:
    found = list(names)
    if found:
        more = f" and {len(found) - 5} more tensors" if len(found) > 5 else ""
        raise ConfigError(
            f"no first values for {', '.join(found[:5])}{more}: the model was built on the meta "
            "device, and neither reset_parameters() of the module nor a model of Transformers "
            "around it gives them; write reset_parameters(), build the module with "
            f'torch.device("cpu"), or {REMEDY}'
        )


def _entries(name: str, module: nn.Module) -> list[Entry]:
    """Return the own parameters and buffers of a module that are on the meta device."""
    both = (module._parameters, module._buffers)  # noqa: SLF001 - they are replaced there
    return [
        Entry(f"{name}.{key}" if name else key, values, key)
        for values in both
        for key, tensor in values.items()
        if tensor is not None and tensor.is_meta
    ]


def _entries_by_name(model: nn.Module) -> dict[str, Entry]:
    return {entry.name: entry for pair in model.named_modules() for entry in _entries(*pair)}


def _lone_tensors(model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors on the meta device that are neither parameters nor buffers."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and value.numel() > 0:
                yield f"{name}.{key}" if name else key


def _ties(model: nn.Module) -> dict[str, str]:
    """Return the names that share a tensor with another name, which keeps its own values."""
    tied = _tied_by_transformers(model)
    entries = sorted(_entries_by_name(model).items(), key=lambda pair: pair[0] in tied)
    first: dict[int, str] = {}
    sources = {name: first.setdefault(id(entry.tensor), name) for name, entry in entries}
    return {name: source for name, source in sources.items() if name != source}


def _tied_by_transformers(model: nn.Module) -> set[str]:
    """Return the names to which models of Transformers tie a weight of another name."""
    return {
        f"{name}.{target}" if name else target
        for name, module in model.named_modules()
        if _is_pretrained(module)
        for target in vars(module)["all_tied_weights_keys"]
    }


def _is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a ``PreTrainedModel`` of Transformers 5 or newer."""
    # The class is asked: wrappers pass on the attributes of the model in them.
    has_method = callable(getattr(type(module), "initialize_weights", None))
    return has_method and isinstance(vars(module).get("all_tied_weights_keys"), dict)


def _reset_of(module: Any) -> Callable[[], object] | None:
    """Return the method that gives the own weights of a module first values."""
    for name in RESETS:
        reset: Any = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        # GPT-2's layer draws its weight in its constructor, and has no method for it.
        return lambda: (nn.init.normal_(module.weight, std=0.02), nn.init.zeros_(module.bias))
    return None


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU like one on the meta device, of NaN if it is of floats."""
    new = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, Parameter):
        new = Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update(vars(tensor))
    vars(new).pop(INITIALIZED, None)
    if new.is_floating_point() or new.is_complex():
        # A fill of the storage is no write that torch counts.
        storage: Any = new.untyped_storage()
        storage.fill_(NAN_BYTE)
    return new


def _written_count(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - torch has no public name for it


def _is_unset(tensor: Tensor) -> bool:
    """Return whether a tensor has a number without a value."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.numel() > 0 and _written_count(tensor) == 0
    parts = torch.split(tensor.detach().reshape(-1), PART_COUNT)
    return any(bool(part.isnan().any()) for part in parts)


@contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """Let Transformers initialize the tensors on the meta device, and no others."""
    tensors = (*model.parameters(), *model.buffers())
    marked = [tensor for tensor in tensors if not (tensor.is_meta or hasattr(tensor, INITIALIZED))]
    for tensor in marked:
        setattr(tensor, INITIALIZED, True)
    try:
        yield
    finally:
        for tensor in marked:
            vars(tensor).pop(INITIALIZED, None)


@contextmanager
def _default_dtype_of(model: Any) -> Iterator[None]:
    """Set the default dtype to that of a model, as Transformers does around its constructor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype if model.dtype in DEFAULT_DTYPES else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
