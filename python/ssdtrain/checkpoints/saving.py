"""``ssdtrain.save``: writes a checkpoint as a stream, in whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ssdtrain.checkpoints.folder import NewFiles, folder_of, kernel_errors
from ssdtrain.checkpoints.manifest import (
    optimizers_of,
    optimizers_part,
    packed,
    weight_items,
    weights_of,
)
from ssdtrain.checkpoints.shards import Item, shards_of, write_shard
from ssdtrain.checkpoints.values import encode
from ssdtrain.config import Size
from ssdtrain.errors import NoSpaceError
from ssdtrain.optimizer.offloaded import refuse_half_done
from ssdtrain.sizes import in_bytes, shown_bytes

__all__ = ["save"]

SHARD_BYTES_DEFAULT = 4 << 30


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Any = None,
    shard_bytes: Size = SHARD_BYTES_DEFAULT,
) -> None:
    """Save a model, and its optimizer or optimizers, into a folder, as a stream.

    Tensors are written one after the other; the state of an offloaded optimizer is read from its
    disk. At most two tensors more than before are in memory. The new checkpoint replaces an older
    one at once when it is whole and on the disk; until then the older one stays in any case. So the
    disk needs room for both.

    Args:
        path: The folder of the checkpoint, which is made; its parent must exist.
        model: Its parameters and buffers are saved as `state_dict` names them, tied ones once.
        optimizer: Any optimizer whose state is tensors and plain values, offloaded or not; or a
            list of several, such as one for the embeddings and one for the rest.
        extra: Plain data of yours, such as a count of steps, ``scheduler.state_dict()`` or
            ``torch.get_rng_state()``: the types of JSON, tuples, sets, other keys, small tensors,
            numbers and small arrays of numpy.
        shard_bytes: About the largest size of a file; a larger tensor has a file of its own.

    Raises:
        ConfigError: A path that is no folder, or has other files; no model, no optimizer.
        UnsupportedError: A value that cannot be saved as a stream, by name.
        NoSpaceError: The disk has no room for the new checkpoint beside the old one.
        StorageError: A read or a write failed; the older checkpoint is there as before.
        BusyError: Another process saves into this folder now.

    """
    folder = folder_of(path, "save")
    limit = in_bytes("shard_bytes", shard_bytes)
    found = weights_of(model)
    weights, model_part = weight_items(found)
    optimizers = optimizers_of(optimizer)
    for given in optimizers:
        refuse_half_done(given)
    state, optimizer_part = optimizers_part(optimizers, found)
    content = {
        "torch": str(torch.__version__),
        "model": model_part,
        "optimizer": optimizer_part,
        "extra": encode(extra, "extra"),
    }
    with NewFiles(folder) as new, kernel_errors("saving into", folder):
        _refuse_full(folder, [*weights, *state])
        files = {}
        for kind, items in (("weights", weights), ("state", state)):
            for number, shard in enumerate(shards_of(items, limit), 1):
                file, name = new.create(kind, number)
                files[name] = write_shard(file, name, shard)
        new.commit(packed({"files": files, **content}))


def _refuse_full(folder: Path, items: list[Item]) -> None:
    """Raise before the first write if there is not enough room."""
    facts = os.statvfs(folder if folder.exists() else folder.parent)
    needed, free = sum(item.nbytes for item in items), facts.f_bavail * facts.f_frsize
    if needed > free:
        raise NoSpaceError(
            f"this checkpoint takes {shown_bytes(needed)}, and {folder} has room for "
            f"{shown_bytes(free)}: an older one stays until the new one is whole. Make room there, "
            "or save elsewhere"
        )
