"""Describes the content of a checkpoint in its manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import is_away
from ssdtrain.checkpoints.shards import Form, Item, form_of
from ssdtrain.checkpoints.values import encode
from ssdtrain.errors import ConfigError, CorruptError, UnsupportedError
from ssdtrain.machine.torch_internals import is_in_shards
from ssdtrain.optimizer.chunks import name_of
from ssdtrain.optimizer.disk import Away
from ssdtrain.optimizer.offloaded import own_kind

__all__ = [
    "EXTRA_STATE",
    "Weights",
    "form_in",
    "kind_name",
    "optimizers_in",
    "optimizers_of",
    "optimizers_part",
    "packed",
    "param_labels",
    "unpacked",
    "weight_items",
    "weights_of",
]

VERSION = 1
EXTRA_STATE = "_extra_state"
"""Torch's name for the result of a module's `get_extra_state`."""


@dataclass
class Weights:
    """The content of a model's `state_dict`: its own tensors, each once, and plain values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Further names of tensors, and the first name of each."""
    values: dict[str, Any] = field(default_factory=dict)


def weights_of(model: nn.Module) -> Weights:
    """Return the tensors of a model that a checkpoint has: the tensors themselves, no copies.

    Raises:
        ConfigError: ``model`` is no module.
        UnsupportedError: A tensor that cannot be saved in place, by name.

    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a checkpoint takes a torch.nn.Module, not {type(model)!r}")
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = Weights()
    first_names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        is_extra = name.rpartition(".")[2] == EXTRA_STATE
        if not (is_extra or isinstance(value, Tensor)):
            raise UnsupportedError(
                f"{name} in the state_dict() of this model is a {type(value).__qualname__} that a "
                "hook has put there, and load could not give it back; use get_extra_state()"
            )
        if is_extra:
            found.values[name] = encode(value, f"state_dict()[{name!r}]")
            continue
        refuse_odd(name, value)
        _refuse_expanded(name, value)
        if id(value) not in live:
            raise UnsupportedError(
                f"{name} in the state_dict() of this model is not the model's own tensor but made "
                "by a hook, so nothing can be loaded into it in place; save model.state_dict() "
                "with torch.save"
            )
        first = first_names.setdefault(id(value), name)
        if first == name:
            found.tensors[name] = value
        else:
            found.tied[name] = first
    return found


def refuse_odd(name: str, tensor: Tensor) -> None:
    """Raise `UnsupportedError` for a tensor that is more or less than plain bytes."""
    why = ""
    if type(tensor) not in (Tensor, Parameter) and not is_away(tensor):
        why = (
            f"it is a {type(tensor).__module__}.{type(tensor).__name__}; save state_dict() with "
            "torch.save"
        )
        if is_in_shards(tensor):
            why = (
                f"it is a {type(tensor).__module__}.{type(tensor).__name__}, of which each process "
                "has a shard; save and load it with torch.distributed.checkpoint"
            )
    elif tensor.is_meta:
        why = (
            "it is on the meta device and has no bytes; ssdtrain.offload_parameters(model, dir) "
            "gives the model its weights, on the disk (make the optimizer afterwards), or "
            "model.to_empty(device='cpu') gives it memory for all of them"
        )
    elif tensor.layout is not torch.strided:
        why = f"its layout is {tensor.layout}; .to_dense() makes it dense"
    elif tensor.is_quantized or tensor.is_nested:
        why = "it is quantized or nested"
    if why:
        raise UnsupportedError(f"{name} cannot be saved or loaded as a stream: {why}")


def _refuse_expanded(name: str, tensor: Tensor) -> None:
    """Raise `UnsupportedError` for a tensor into which nothing can be loaded in place."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if any(step == 0 and size > 1 for step, size in steps):
        raise UnsupportedError(
            f"{name} cannot be saved or loaded: several of its elements are the same memory "
            "(expand); make it .contiguous()"
        )


def weight_items(found: Weights) -> tuple[list[Item], dict[str, Any]]:
    """Return the tensors to be written and the manifest's part about the model."""
    items = [_item(name, tensor) for name, tensor in found.tensors.items()]
    tensors = {item.label: item.record for item in items}
    return items, {"tensors": tensors, "tied": found.tied, "values": found.values}


def param_labels(optimizer: Optimizer, found: Weights) -> dict[Tensor, str]:
    """Return the model's name of each parameter of an optimizer.

    Raises `ConfigError` for a parameter that the model does not save: its values would be lost.
    """
    names = {id(tensor): name for name, tensor in found.tensors.items()}
    labels: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"{name_of(optimizer.param_groups, param)} of the optimizer is not in the "
                    "state_dict() of the model, so a checkpoint would lack it; give a "
                    "torch.nn.ModuleList of all modules that the optimizer updates"
                )
            labels[param] = names[id(param)]
    return labels


def kind_name(optimizer: Optimizer) -> str:
    """Return the full name of an optimizer's class, which it had before it was offloaded.

    Raises `UnsupportedError` for a class that overrides how it is saved.
    """
    kind = own_kind(optimizer)
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    if (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
        or any(getattr(optimizer, name, None) for name in hooks)
    ):
        raise UnsupportedError(
            f"{kind.__name__} saves its state in a way of its own (state_dict, or hooks on it); if "
            "it stands before another optimizer, as what Accelerate's prepare() returns, give that "
            "one (mostly optimizer.optimizer); else save optimizer.state_dict() with torch.save"
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def optimizers_of(given: object) -> list[Optimizer]:
    """Return a list of the optimizers that a user gave: ``None``, an optimizer, or a list.

    Raises `ConfigError` for anything else.
    """
    if given is None:
        return []
    optimizers = []
    for item in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(item, Optimizer):
            raise ConfigError(
                f"a checkpoint takes a torch.optim.Optimizer, or a list of them, not {type(item)!r}"
            )
        optimizers.append(item)
    return optimizers


def optimizers_part(optimizers: list[Optimizer], found: Weights) -> tuple[list[Item], Any]:
    """Return the tensors of all states, and the manifest's part about optimizers."""
    items: list[Item] = []
    parts = []
    for optimizer in optimizers:
        own, part = _optimizer_items(optimizer, found)
        items += own
        parts.append(part)
    if len(parts) > 1:
        return items, parts
    return items, parts[0] if parts else None


def optimizers_in(part: Any) -> list[dict[str, Any]]:
    """Return the manifest's parts about each optimizer."""
    if part is None:
        return []
    return part if isinstance(part, list) else [part]


def _optimizer_items(optimizer: Optimizer, found: Weights) -> tuple[list[Item], dict[str, Any]]:
    labels = param_labels(optimizer, found)
    if any(key not in labels for key in optimizer.state):
        raise UnsupportedError(
            f"{kind_name(optimizer)} has state that belongs to no parameter of its groups; save "
            "optimizer.state_dict() with torch.save"
        )
    items: list[Item] = []
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        params = [
            {
                "name": labels[param],
                **_form_record(form_of(param)),
                "state": _state_record(optimizer, param, labels[param], items),
            }
            for param in group["params"]
        ]
        options = {
            name: encode(value, f"param_groups[{number}][{name!r}]")
            for name, value in group.items()
            if name != "params"
        }
        groups.append({"options": options, "params": params})
    return items, {"class": kind_name(optimizer), "groups": groups}


def _state_record(
    optimizer: Optimizer, param: Tensor, label: str, items: list[Item]
) -> dict[str, Any] | None:
    """Describe a parameter's state without bringing it into memory."""
    state = optimizer.state.get(param)
    if state is None:
        return None
    if not isinstance(state, dict):
        raise UnsupportedError(f"the state of {label} is no dict but a {type(state).__name__}")
    record: dict[str, Any] = {}
    for key, value in dict.items(state):
        if type(key) is not str:
            raise UnsupportedError(f"the state of {label} has a key that is no text: {key!r}")
        where = f"{label}/{key}"
        if isinstance(value, Away):
            item = _item(where, value.form, value.begin_look)
        elif isinstance(value, Tensor):
            refuse_odd(where, value)
            item = _item(where, value)
            if value.device == param.device and not value.is_cpu:
                item.record["on_device_of_parameter"] = True
        else:
            record[key] = {"value": encode(value, where)}
            continue
        items.append(item)
        record[key] = item.record
    return record


def _item(
    label: str, tensor: Tensor, begin: Callable[[], Callable[[], Tensor]] | None = None
) -> Item:
    form = form_of(tensor)
    return Item(
        label=label,
        form=form,
        nbytes=tensor.nbytes,
        begin=begin or (lambda: lambda: tensor),
        record=_form_record(form),
    )


def _form_record(form: Form) -> dict[str, Any]:
    record: dict[str, Any] = {"dtype": form.dtype, "shape": list(form.shape)}
    if form.stride is not None:
        record["stride"] = list(form.stride)
    return record


def form_in(record: dict[str, Any]) -> Form:
    """Return the form that is in a record."""
    stride = record.get("stride")
    return Form(record["dtype"], tuple(record["shape"]), None if stride is None else tuple(stride))


def packed(content: dict[str, Any]) -> bytes:
    """Return the manifest's file, with a checksum of itself."""
    body = {"format": "ssdtrain checkpoint", "version": VERSION, **content}
    return json.dumps(body | {"crc32": _checksum(body)}, indent=1).encode() + b"\n"


def unpacked(text: bytes, where: str) -> dict[str, Any]:
    """Return the content of a manifest's file.

    Raises:
        ConfigError: The file is no manifest, or has a later version.
        CorruptError: The file was changed since it was written.

    """
    remedy = "this checkpoint cannot be used; load an older one, or begin anew"
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CorruptError(f"{where} is damaged, {remedy}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != "ssdtrain checkpoint":
        raise ConfigError(f"{where} is not the manifest of a checkpoint of ssdtrain")
    if body.get("version") != VERSION:
        raise ConfigError(
            f"{where} has version {body.get('version')!r} of the format, and this ssdtrain reads "
            f"version {VERSION}; load it with the version of ssdtrain that saved it"
        )
    if body.pop("crc32", None) != _checksum(body):
        raise CorruptError(f"{where} is damaged (its checksum does not fit), {remedy}")
    return body


def _checksum(body: dict[str, Any]) -> int:
    return crc32(json.dumps(body, separators=(",", ":")).encode())
