"""Writes and reads tensors in files of the safetensors format, piece by piece.

Such a file is the length of a header (8 bytes, little endian), the header (JSON: dtype, shape and
offsets of each tensor), and the bytes of the tensors, one after the other
(https://github.com/huggingface/safetensors). The package of that name writes tensors that are all
in memory; this file brings each into memory when it is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ssdtrain.errors import CorruptError
from ssdtrain.store import is_dense

__all__ = ["Form", "Item", "fill", "form_of", "refuse_changed", "shards_of", "write_shard"]

PIECE_BYTES = 8 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
"""The dtypes of the package safetensors. Other dtypes, such as complex128, are written as bytes."""


@dataclass(frozen=True)
class Form:
    """Dtype, shape and strides of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """`None` if its elements lie in the usual order; they are saved in that order in any case."""

    def shown(self) -> str:
        """Return the form as errors write it."""
        return f"{self.dtype} of shape {self.shape}"


def form_of(tensor: Tensor) -> Form:
    """Return the form of a dense tensor."""
    usual = tensor.is_contiguous()
    # Strides that leave holes, or lay elements upon each other, are not made again.
    return Form(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride() if is_dense(tensor) and not usual else None,
    )


@dataclass(frozen=True)
class Item:
    """A tensor to write."""

    label: str
    form: Form
    nbytes: int
    begin: Callable[[], Callable[[], Tensor]]
    """Begins to bring the tensor into memory, and returns a function that waits for it."""
    record: dict[str, Any]
    """Its entry in the manifest, completed when it has been written."""


def shards_of(items: list[Item], shard_bytes: int) -> Iterator[list[Item]]:
    """Cut items into files of about `shard_bytes`."""
    taken: list[Item] = []
    total = 0
    for item in items:
        if taken and total + item.nbytes > shard_bytes:
            yield taken
            taken, total = [], 0
        taken.append(item)
        total += item.nbytes
    if taken:
        yield taken


def write_shard(file: int, name: str, items: list[Item]) -> dict[str, Any]:
    """Write a file, complete the records of its items, and return the manifest's entry of it."""
    header = _header(items)
    _write(file, memoryview(header))
    offset = len(header)
    waiting = items[0].begin()
    for item, following in zip(items, [*items[1:], None], strict=True):
        tensor = waiting()
        if following is not None:
            # The disk reads the next tensor while this one is written.
            waiting = following.begin()
        content = _bytes_of(tensor)
        if len(content) != item.nbytes:
            raise CorruptError(f"{item.label} changed its size while it was saved")
        checksum = 0
        for piece in _pieces(content):
            checksum = crc32(piece, checksum)
            _write(file, piece)
        item.record.update(file=name, offset=offset, bytes=item.nbytes, crc32=checksum)
        offset += item.nbytes
        del tensor, content
    return {"bytes": offset, "header_bytes": len(header), "header_crc32": crc32(header)}


def fill(file: int, record: dict[str, Any], target: Tensor, label: str) -> None:
    """Read a tensor into the memory of ``target``; raise if its bytes were changed.

    Raises:
        CorruptError: Other bytes than were written, or too few.

    """
    # The memory of a lazily conjugated or negated tensor has other bytes than its elements.
    is_lazy = target.is_conj() or target.is_neg()
    is_direct = target.is_cpu and target.is_contiguous() and not is_lazy
    landing = target if is_direct else torch.empty(target.shape, dtype=target.dtype, device="cpu")
    content = _bytes_of(landing)
    checksum, offset = 0, record["offset"]
    for piece in _pieces(content):
        _read(file, piece, offset, label)
        checksum = crc32(piece, checksum)
        offset += len(piece)
    _refuse_other(checksum, record["crc32"], label, record["file"])
    with torch.no_grad():
        if is_direct:
            # Tells autograd that the bytes have changed.
            increment_version(target)
        else:
            target.copy_(landing)


def refuse_changed(
    file: int, name: str, facts: dict[str, Any], records: list[tuple[str, dict[str, Any]]]
) -> None:
    """Read a whole file, and raise if a byte differs from the written byte."""
    piece = memoryview(bytearray(PIECE_BYTES))
    parts = [("its header", 0, facts["header_bytes"], facts["header_crc32"])]
    parts += [
        (label, record["offset"], record["bytes"], record["crc32"]) for label, record in records
    ]
    for label, begin, nbytes, expected in parts:
        checksum = 0
        for offset in range(begin, begin + nbytes, PIECE_BYTES):
            taken = piece[: min(PIECE_BYTES, begin + nbytes - offset)]
            _read(file, taken, offset, label)
            checksum = crc32(taken, checksum)
        _refuse_other(checksum, expected, label, name)


def _refuse_other(found: int, expected: int, label: str, name: str) -> None:
    if found != expected:
        raise CorruptError(
            f"{label} in {name} was changed after it was written: its checksum is {found:08x} "
            f"instead of {expected:08x}. This checkpoint cannot be used; load an older one, or "
            "begin anew"
        )


def _header(items: list[Item]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for item in items:
        known = DTYPES.get(getattr(torch, item.form.dtype))
        entries[_unused(item.label, entries)] = {
            "dtype": known or "U8",
            "shape": list(item.form.shape) if known else [item.nbytes],
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _unused(label: str, entries: dict[str, Any]) -> str:
    """Return a name that no entry of a header has, and that the format does not reserve.

    Two optimizers may have the same parameter, and names of parameters may be anything.
    """
    name, number = label, 0
    while name in entries or name == "__metadata__":
        number += 1
        name = f"{label}@{number}"
    return name


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of the elements in their usual order; without a copy if possible."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    array: Any = plain.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _pieces(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), PIECE_BYTES):
        yield content[begin : begin + PIECE_BYTES]


def _write(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]


def _read(file: int, into: memoryview, offset: int, label: str) -> None:
    while into:
        count = os.preadv(file, [into], offset)
        if not count:
            raise CorruptError(f"the file ends within {label}: it was cut off")
        into, offset = into[count:], offset + count
