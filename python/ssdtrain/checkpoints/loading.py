"""``ssdtrain.load``: reads a checkpoint as a stream, and compares it before it changes anything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ssdtrain.checkpoints.folder import (
    MANIFEST,
    folder_of,
    kernel_errors,
    opened,
    refuse_strange,
    remove_strays,
)
from ssdtrain.checkpoints.manifest import (
    EXTRA_STATE,
    Weights,
    form_in,
    kind_name,
    optimizers_in,
    optimizers_of,
    param_labels,
    unpacked,
    weights_of,
)
from ssdtrain.checkpoints.shards import fill, form_of, refuse_changed
from ssdtrain.checkpoints.values import decode
from ssdtrain.errors import ConfigError, CorruptError, UnsupportedError
from ssdtrain.optimizer.masters import MASTER
from ssdtrain.optimizer.offloaded import give_state, has_masters, note_loaded
from ssdtrain.sizes import shown_count

__all__ = ["load"]

NAMES_MAX = 5
TRIES = 5
"""A save may remove the files of the older checkpoint between two looks."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    check_first: bool = True,
) -> Any:
    """Load a checkpoint of ``ssdtrain.save`` into a model, and its optimizers, as a stream.

    Weights are read into the memory of the model's own tensors. The state of an offloaded optimizer
    goes to its disk, one parameter after the other. Before anything is changed, names, shapes,
    dtypes, ties, groups and the optimizer's class are compared.

    Args:
        path: The folder that was given to ``save``.
        model: A model like the saved one.
        optimizer: An optimizer of the same class over the same parameters in the same groups; it
            gets their options too, such as rates. If several were saved, a list of as many in the
            same order. ``None`` loads the weights alone.
        check_first: Read the whole checkpoint once, to find damage before anything is changed.
            Without, damage is found while loading, and tensors that were loaded before it stay.

    Returns:
        The ``extra`` that was given to ``save``.

    Raises:
        ConfigError: No checkpoint there, or another model or optimizer; names the difference.
        CorruptError: A file is missing, cut off, or has other bytes than were written.
        StorageError: A read failed.

    """
    folder = folder_of(path, "load")
    with kernel_errors("loading from", folder), _opened(folder) as (content, files):
        found = weights_of(model)
        _compare_model(content["model"], found)
        values = {name: decode(value) for name, value in content["model"]["values"].items()}
        optimizers = optimizers_of(optimizer)
        parts = optimizers_in(content["optimizer"]) if optimizers else []
        _compare_optimizers(parts, optimizers, found)
        options = [[decode(group["options"]) for group in part["groups"]] for part in parts]
        extra = decode(content["extra"])
        if check_first:
            _check(content, files, parts)
        for name, tensor in found.tensors.items():
            record = content["model"]["tensors"][name]
            fill(files[record["file"]], record, tensor.detach(), name)
        _set_values(model, values)
        for part, given, target in zip(parts, options, optimizers, strict=True):
            _load_optimizer(part, given, target, files)
        remove_strays(folder, set(content["files"]))
    return extra


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Open all files of a checkpoint, so that it stays readable while others save there."""
    manifest = folder / MANIFEST
    for last in (False,) * (TRIES - 1) + (True,):
        with ExitStack() as stack:
            try:
                with os.fdopen(opened(manifest), "rb") as file_of_manifest:
                    text = file_of_manifest.read()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise ConfigError(
                    f"there is no whole checkpoint in {folder}: it has no {MANIFEST}. Give the "
                    "folder that was given to ssdtrain.save"
                ) from error
            content = unpacked(text, str(manifest))
            refuse_strange(content["files"], manifest)
            files: dict[str, int] = {}
            try:
                for name in content["files"]:
                    files[name] = opened(folder / name)
                    stack.callback(os.close, files[name])
            except FileNotFoundError as error:
                if not last:
                    continue
                raise CorruptError(
                    f"{folder} lacks {name}, which its manifest names: bring the file back, or "
                    "load another checkpoint"
                ) from error
            for name, file in files.items():
                nbytes, expected = os.fstat(file).st_size, content["files"][name]["bytes"]
                if nbytes != expected:
                    raise CorruptError(
                        f"{folder / name} has {nbytes} bytes instead of {expected}: it was cut off "
                        "or changed. This checkpoint cannot be used; load an older one, or begin "
                        "anew"
                    )
            yield content, files
            return


def _compare_model(saved: dict[str, Any], found: Weights) -> None:
    _refuse_other_names(
        "the model", {*saved["tensors"], *saved["tied"]}, {*found.tensors, *found.tied}
    )
    _refuse_other_names("the model's extra state", {*saved["values"]}, {*found.values})
    for name, first in (saved["tied"] | found.tied).items():
        if saved["tied"].get(name) != found.tied.get(name):
            there, here = (
                "is the same tensor as" if name in tied else "is another tensor than"
                for tied in (saved["tied"], found.tied)
            )
            raise ConfigError(
                f"{name} {there} {first} in the checkpoint, and {here} it in this model; tie the "
                "weights as they were when it was saved, then load"
            )
    for name, tensor in found.tensors.items():
        _refuse_other_form(name, saved["tensors"][name], tensor)
        _refuse_unwritable(name, tensor)


def _refuse_unwritable(name: str, tensor: Tensor) -> None:
    if tensor.is_inference():
        raise UnsupportedError(
            f"nothing can be loaded into {name}: it was made under torch.inference_mode(), and "
            "torch forbids changes to it; make the model outside of inference mode"
        )


def _refuse_other_form(name: str, record: dict[str, Any], tensor: Tensor) -> None:
    there, here = form_in(record), form_of(tensor)
    if (there.dtype, there.shape) != (here.dtype, here.shape):
        raise ConfigError(
            f"{name} is {there.shown()} in the checkpoint, and {here.shown()} here; make the model "
            "as it was when it was saved"
        )


def _refuse_other_names(owner: str, there: set[str], here: set[str]) -> None:
    if there != here:
        raise ConfigError(
            f"{owner} differs from the checkpoint's: "
            f"only the checkpoint has {_shown(there - here)}, only this model has "
            f"{_shown(here - there)}; make the model as it was when it was saved"
        )


def _shown(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMES_MAX} more" if len(listed) > NAMES_MAX else ""
    return (", ".join(listed[:NAMES_MAX]) or "nothing") + more


def _compare_optimizers(
    parts: list[dict[str, Any]], optimizers: list[Optimizer], found: Weights
) -> None:
    if optimizers and not parts:
        raise ConfigError(
            "this checkpoint was saved without an optimizer; load it without one, or load a "
            "checkpoint that was saved with one: ssdtrain.save(path, model, optimizer)"
        )
    if len(parts) != len(optimizers):
        there = shown_count(len(parts), "optimizer")
        raise ConfigError(
            f"this checkpoint has the state of {there}, and {len(optimizers)} were given here; "
            "give as many, in the order in which they were saved: "
            "ssdtrain.load(path, model, [first, second])"
        )
    for number, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
        try:
            _compare_optimizer(part, optimizer, found)
        except ConfigError as error:
            if len(parts) == 1:
                raise
            raise ConfigError(f"optimizer {number} of the list: {error}") from error


def _compare_optimizer(saved: dict[str, Any], optimizer: Optimizer, found: Weights) -> None:
    if saved["class"] != kind_name(optimizer):
        raise ConfigError(
            f"this checkpoint has the state of a {saved['class']}, and the optimizer here is a "
            f"{kind_name(optimizer)}; make one of the same class"
        )
    groups = optimizer.param_groups
    there = [len(group["params"]) for group in saved["groups"]]
    here = [len(group["params"]) for group in groups]
    if there != here:
        raise ConfigError(
            f"the optimizer's groups have {there} parameters in the checkpoint, and {here} here; "
            "make the same groups (add_param_group) before loading"
        )
    params = (record for group in saved["groups"] for record in group["params"])
    if not has_masters(optimizer) and any(MASTER in (param["state"] or {}) for param in params):
        raise ConfigError(
            "this checkpoint has float32 masters of parameters, and the optimizer here keeps none; "
            "call ssdtrain.offload_optimizer(..., master_dtype=torch.float32) before loading"
        )
    labels = param_labels(optimizer, found)
    for number, (group, there_group) in enumerate(zip(groups, saved["groups"], strict=True)):
        pairs = zip(group["params"], there_group["params"], strict=True)
        for index, (param, record) in enumerate(pairs):
            if record["name"] != labels[param]:
                raise ConfigError(
                    f"parameter {index} of group {number} is {record['name']} in the checkpoint, "
                    f"and {labels[param]} here; give the optimizer its parameters in the same order"
                )
            _refuse_other_form(labels[param], record, param)


def _check(
    content: dict[str, Any], files: dict[str, int], optimizers: list[dict[str, Any]]
) -> None:
    """Read all bytes that will be loaded; raise if one differs from the written byte."""
    records = list(content["model"]["tensors"].items())
    for group in (group for optimizer in optimizers for group in optimizer["groups"]):
        for param in group["params"]:
            state = param["state"] or {}
            records += [
                (f"{param['name']}/{key}", record)
                for key, record in state.items()
                if "value" not in record
            ]
    for name, file in files.items():
        own = [(label, record) for label, record in records if record["file"] == name]
        if own:
            refuse_changed(file, name, content["files"][name], own)


def _set_values(model: nn.Module, values: dict[str, Any]) -> None:
    """Give modules their extra state, as `load_state_dict` does."""
    for name, value in values.items():
        owner = name.removesuffix(EXTRA_STATE).removesuffix(".")
        model.get_submodule(owner).set_extra_state(value)


def _load_optimizer(
    saved: dict[str, Any], options: list[Any], optimizer: Optimizer, files: dict[str, int]
) -> None:
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for param, record in zip(group["params"], saved_group["params"], strict=True):
            # Nothing here holds the tensors, so that they can leave memory at once.
            give_state(optimizer, param, _read_states(record, param, files))
    for group, given in zip(optimizer.param_groups, options, strict=True):
        params = group["params"]
        group.clear()
        group.update(given, params=params)
    # As at the end of `load_state_dict`: options newer than the checkpoint get defaults.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    note_loaded(optimizer)


def _read_states(
    record: dict[str, Any], param: Tensor, files: dict[str, int]
) -> Iterator[tuple[str, Any]] | None:
    if record["state"] is None:
        return None
    return (
        (
            key,
            decode(entry["value"])
            if "value" in entry
            else _read(entry, param, files, f"{record['name']}/{key}"),
        )
        for key, entry in record["state"].items()
    )


def _read(record: dict[str, Any], param: Tensor, files: dict[str, int], label: str) -> Tensor:
    form = form_in(record)
    dtype = getattr(torch, form.dtype)
    device = param.device if record.get("on_device_of_parameter") else torch.device("cpu")
    made = (
        torch.empty(form.shape, dtype=dtype, device=device)
        if form.stride is None
        else torch.empty_strided(form.shape, form.stride, dtype=dtype, device=device)
    )
    fill(files[record["file"]], record, made, label)
    return made
