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
                "tell the first values of which module it has; share the weight after "
                f"offload_parameters, or {REMEDY}"
            )


def materialize(
    model: nn.Module, init_fn: InitFn | None, take: Callable[[str, nn.Module], None]
) -> None:
    """Replace all tensors of a model that are on the meta device by tensors with first values.

    After each module ``take`` may release the memory of its weights. Parameters are new objects. If
    anything raises, the model has its tensors on the meta device again.
    """
    work = _Materialization(model, init_fn)
    try:
        with _marked(model):
            work.run(take)
    except BaseException:
        work.undo()
        raise
    work.retire_old()


class _Materialization:
    def __init__(self, model: nn.Module, init_fn: InitFn | None) -> None:
        self._model = model
        self._init_fn = init_fn
        self._on_meta = {id(module) for module in model.modules() if is_on_meta(module)}
        self._with_values = {
            id(module)
            for module in model.modules()
            if not all(param.is_meta for param in module.parameters())
        }
        """Modules whose reset could overwrite a value that the program has loaded."""
        self._ties = _ties(model)
        self._replaced: list[tuple[Entry, Tensor]] = []
        self._uncompared: dict[str, tuple[Entry, Tensor]] = {}
        """Replaced tensors whose writes are not yet compared with those of the new tensors."""
        self._unset: list[Entry] = []

    def run(self, take: Callable[[str, nn.Module], None]) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        entries = _entries_by_name(self._model)
        # Each module draws a weight that it shares, as in a constructor; one of them stays.
        for name in self._ties:
            tensor = entries[name].tensor
            self._put(entries[name], _empty_like(tensor, tensor.device))
        for module in _inner_first(self._model, set()):
            if id(module) in self._on_meta:
                self._materialize(names[id(module)], module)
                take(names[id(module)], module)
        for name, source in self._ties.items():
            self._put(entries[name], entries[source].tensor)
        if self._init_fn is not None:
            with torch.device("cpu"):
                self._model.apply(self._init_fn)
            take("", self._model)
        self._refuse_forgotten("")
        _refuse_missing(entry.name for entry in self._unset if _is_unset(entry.tensor))
        _refuse_missing(_lone_tensors(self._model))

    def undo(self) -> None:
        """Give all modules the tensors that they had."""
        for entry, old in reversed(self._replaced):
            entry.values[entry.key] = old

    def retire_old(self) -> None:
        """Let the parameters that were replaced raise when an optimizer asks for a gradient."""
        for _, old in self._replaced:
            if type(old) is Parameter and old.is_meta:
                old.__class__ = ReplacedParameter

    def _materialize(self, name: str, module: nn.Module) -> None:
        """Give the own tensors of a module memory, and first values as its constructor does."""
        # Accelerate's init_empty_weights() initializes on the meta device, which has no effect.
        was_initialized = vars(module).pop(INITIALIZED, False)
        entries = _entries(name, module)
        for entry in entries:
            new = _empty_like(entry.tensor, torch.device("cpu"))
            if new.is_floating_point() or new.is_complex():
                # A fill of the storage is no write that torch counts.
                storage: Any = new.untyped_storage()
                storage.fill_(NAN_BYTE)
            if not was_initialized:
                self._uncompared[entry.name] = entry, entry.tensor
            self._put(entry, new)
        reset = None if id(module) in self._with_values else _reset_of(module)
        with torch.device("cpu"):
            if _is_pretrained(module):
                self._refuse_forgotten(f"{name}." if name else "")
                with _default_dtype_of(module):
                    module.initialize_weights()  # type: ignore[operator]
            elif reset is not None:
                reset()
        self._unset += [entry for entry in entries if _is_unset(entry.tensor)]

    def _put(self, entry: Entry, tensor: Tensor) -> None:
        self._replaced.append((entry, entry.tensor))
        entry.values[entry.key] = tensor

    def _refuse_forgotten(self, prefix: str) -> None:
        """Refuse weights under a prefix that a constructor wrote more often than we have.

        torch counts the writes to a tensor also on the meta device.
        """
        for name in [name for name in self._uncompared if name.startswith(prefix)]:
            entry, old = self._uncompared.pop(name)
            if self._init_fn is None and _written_count(old) > _written_count(entry.tensor):
                raise ConfigError(
                    f"{name} was changed by a constructor beside reset_parameters() of its module, "
                    "which had no effect on the meta device; add adapters after "
                    f"offload_parameters, and for other changes {REMEDY}"
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


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that gives the own weights of a module first values."""
    for name in RESETS:
        reset: Any = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return lambda: _reset_conv1d(module)
    return None


def _reset_conv1d(module: Any) -> None:
    """Draw the weight of GPT-2's ``Conv1D`` as its constructor does, which has no method for it."""
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _inner_first(child, seen)
        yield module


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(tensor, device=device)
    if isinstance(tensor, Parameter):
        new = Parameter(new, requires_grad=tensor.requires_grad)
    vars(new).update(vars(tensor))
    vars(new).pop(INITIALIZED, None)
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
    marked = [
        tensor for tensor in tensors if not tensor.is_meta and not hasattr(tensor, INITIALIZED)
    ]
    for tensor in marked:
        setattr(tensor, INITIALIZED, True)
    try:
        yield
    finally:
        for tensor in marked:
            vars(tensor).pop(INITIALIZED, None)


@contextmanager
def _default_dtype_of(model: nn.Module) -> Iterator[None]:
    """Set the default dtype to that of a model, as Transformers does around its constructor."""
    before = torch.get_default_dtype()
    kinds = [param.dtype for param in model.parameters() if param.dtype in DEFAULT_DTYPES]
    torch.set_default_dtype(kinds[0] if kinds else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
