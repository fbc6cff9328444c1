"""Encodes plain values as JSON that gives them back exactly, or raises a clear error. Pure.

JSON has no tuples, no infinities, no keys but text. Such values become an object with a single key
that begins with `$`; so does a dict of the user that has such a key.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssdtrain.errors import CorruptError, UnsupportedError

__all__ = ["decode", "encode"]

TENSOR_BYTES_MAX = 1 << 20
"""Larger tensors and arrays belong into the model or the optimizer."""
ARRAY_KINDS = "biufcmM"
"""Dtypes of numpy that their text describes in full: numbers, bools, dates and durations."""
MAPS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def encode(value: Any, where: str) -> Any:
    """Return a value that `json.dumps` takes; `where` names the value in errors.

    Raises:
        UnsupportedError: The value is no plain data, or contains such a value.

    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple, set) or kind in MAPS:
        return _encode_several(value, where)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in ARRAY_KINDS:
        return _encode_array(value, where)
    remedy = "; give its state_dict()" if hasattr(value, "state_dict") else ""
    dtype = f" of dtype {value.dtype}" if kind is np.ndarray else ""
    raise UnsupportedError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}{dtype}, which a checkpoint cannot "
        "keep: it keeps None, bool, int, float, str, numbers of numpy, small tensors and arrays of "
        f"numbers; lists, tuples, sets and dicts of them{remedy}"
    )


def _encode_several(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in MAPS:
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {MAPS[kind]: pairs}
    listed = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return listed if kind is list else {f"${kind.__name__}": listed}


def _encode_tensor(value: Tensor, where: str) -> Any:
    is_dense = value.layout is torch.strided and not (value.is_quantized or value.is_meta)
    if type(value) is not Tensor or not is_dense:
        raise UnsupportedError(f"{where} is no plain dense tensor, which a checkpoint cannot keep")
    if value.nbytes > TENSOR_BYTES_MAX:
        raise UnsupportedError(
            f"{where} is a tensor of {value.nbytes} bytes: the manifest keeps small ones, of at "
            f"most {TENSOR_BYTES_MAX}; make it a buffer of the model"
        )
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": data.hex()}}


def _encode_array(value: Any, where: str) -> Any:
    """Encode an array or a number of numpy; the text of its dtype has the order of bytes."""
    if value.nbytes > TENSOR_BYTES_MAX:
        raise UnsupportedError(
            f"{where} is an array of {value.nbytes} bytes: the manifest keeps small ones, of at "
            f"most {TENSOR_BYTES_MAX}; make it a buffer of the model (torch.from_numpy)"
        )
    form = {"dtype": value.dtype.str, "data": value.tobytes().hex()}
    if isinstance(value, np.generic):
        return {"$number": form}
    return {"$array": {**form, "shape": list(value.shape)}}


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(item) for key, item in value.items()}
    if len(value) != 1 or tags[0] not in DECODERS:
        raise CorruptError(f"the manifest has a value of an unknown kind: {tags[0]}")
    return DECODERS[tags[0]](value[tags[0]])


def _decode_tensor(form: Any) -> Tensor:
    dtype = _decode_dtype(form["dtype"])
    data = bytearray.fromhex(form["data"])
    if not data:
        return torch.empty(form["shape"], dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(form["shape"]).clone()


def _decode_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptError(f"this version of torch has no dtype {name!r}")
    return found


def _decode_number(form: Any) -> Any:
    return np.frombuffer(bytes.fromhex(form["data"]), dtype=form["dtype"])[0]


def _decode_array(form: Any) -> Any:
    # A copy, because an array on bytes is read-only.
    flat = np.frombuffer(bytes.fromhex(form["data"]), dtype=form["dtype"])
    return flat.reshape(form["shape"]).copy()


def _decode_counter(pairs: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, item in pairs:
        counter[decode(key)] = decode(item)
    return counter


DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda listed: tuple(map(decode, listed)),
    "$set": lambda listed: set(map(decode, listed)),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "$ordered": lambda pairs: OrderedDict((decode(key), decode(item)) for key, item in pairs),
    "$counter": _decode_counter,
    "$dtype": _decode_dtype,
    "$tensor": _decode_tensor,
    "$number": _decode_number,
    "$array": _decode_array,
}
