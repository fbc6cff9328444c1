"""Reads and writes traces: the tensors of a training step, and the kernels that use them.

`docs/internals/planning.md` describes the format. A running session records traces, `ssdtrain plan`
derives them from shapes, and the planner reads them. This module does not import torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from ssdtrain.errors import ConfigError
from ssdtrain.sizes import SIZE_MAX

__all__ = ["CLASSES", "Kernel", "Phase", "TensorClass", "Trace", "TracedTensor", "load", "save"]

FORMAT: Final = "ssdtrain-trace-1"

TensorClass = Literal["activation", "weight", "gradient", "optimizer_state", "workspace"]
"""Forward makes an ``activation`` for backward; a ``workspace`` is scratch memory of kernels."""

CLASSES: Final[tuple[TensorClass, ...]] = get_args(TensorClass)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A stretch of computing in which no tensor comes or goes."""

    seconds: float
    """Its time if all tensors that it uses are in memory; 0 or more."""
    uses: tuple[int, ...]
    """The indices of the tensors that have to be in memory while it runs, each once."""
    name: str = ""
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor of a step.

    It lives from the begin of the first kernel that uses it to the end of the last kernel that uses
    it, or, if it lives across steps, always.
    """

    nbytes: int
    kind: TensorClass = "activation"
    name: str = ""
    part: str = ""
    """The part of the model that it belongs to, such as ``layers.3.mlp``."""
    storage: int | None = None
    """Tensors with the same number share a storage: they count once, and move together."""
    lives_across_steps: bool = False
    is_fixed: bool = False
    """True if it must stay in memory, because it is small or others hold it."""
    recompute_seconds: float | None = None
    """The time to compute it again from tensors that are kept; ``None`` if that cannot be done."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of the step, such as ``forward``, up to the next phase."""

    name: str
    first_kernel: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A step that repeats: its first kernel follows its last kernel."""

    name: str
    kernels: tuple[Kernel, ...]
    tensors: tuple[TracedTensor, ...]
    phases: tuple[Phase, ...] = ()
    origin: str = ""
    """The source of the trace, for people."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if this is no step."""
        if not self.kernels:
            raise ConfigError(f"the trace {self.name!r} has no kernel; a step has at least one")
        for index, kernel in enumerate(self.kernels):
            self._check_kernel(index, kernel)
        for index, tensor in enumerate(self.tensors):
            self._check_tensor(index, tensor)
        seconds = sum(kernel.seconds for kernel in self.kernels)
        if not math.isfinite(
            seconds + sum(tensor.recompute_seconds or 0.0 for tensor in self.tensors)
        ):
            self._refuse("the times of its kernels and of recomputing have no finite sum")
        total = sum(tensor.nbytes for tensor in self.tensors)
        if total > SIZE_MAX:
            self._refuse(f"its tensors have {total:,} bytes, and at most {SIZE_MAX:,} are counted")
        firsts = [phase.first_kernel for phase in self.phases]
        if firsts != sorted(set(firsts)) or not all(
            0 <= first < len(self.kernels) for first in firsts
        ):
            self._refuse(f"its phases begin at the kernels {firsts}, which are not in order")

    def _check_kernel(self, index: int, kernel: Kernel) -> None:
        if not (math.isfinite(kernel.seconds) and kernel.seconds >= 0):
            self._refuse(f"kernel {index} takes {kernel.seconds!r} s")
        if len(set(kernel.uses)) < len(kernel.uses):
            self._refuse(f"kernel {index} names a tensor twice; name each use once")
        for tensor in kernel.uses:
            if not 0 <= tensor < len(self.tensors):
                self._refuse(
                    f"kernel {index} uses tensor {tensor}, but there are {len(self.tensors)}"
                )

    def _check_tensor(self, index: int, tensor: TracedTensor) -> None:
        if tensor.nbytes < 0:
            self._refuse(f"tensor {index} has {tensor.nbytes} bytes")
        if tensor.kind not in CLASSES:
            self._refuse(f"tensor {index} is of class {tensor.kind!r}, not {', '.join(CLASSES)}")
        again = tensor.recompute_seconds
        if again is not None and not (math.isfinite(again) and again >= 0):
            self._refuse(f"tensor {index} takes {again!r} s to compute again")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"the trace {self.name!r} makes no sense: {why}; record it again")

    def on_storages(self) -> tuple[Trace, tuple[int, ...]]:
        """Return the trace with a tensor for each storage, and the new index of every tensor.

        A storage has the bytes of its largest tensor, and the uses of all its tensors. It is fixed
        if a tensor on it is, and can be computed again if all tensors on it can.
        """
        first_of: dict[int, int] = {}
        places: list[int] = []
        merged: list[list[TracedTensor]] = []
        for tensor in self.tensors:
            known = None if tensor.storage is None else first_of.get(tensor.storage)
            if known is None:
                known = len(merged)
                merged.append([])
                if tensor.storage is not None:
                    first_of[tensor.storage] = known
            merged[known].append(tensor)
            places.append(known)
        if len(merged) == len(self.tensors):
            return self, tuple(places)
        kernels = tuple(
            Kernel(
                kernel.seconds,
                tuple(dict.fromkeys(places[tensor] for tensor in kernel.uses)),
                kernel.name,
                kernel.flops,
            )
            for kernel in self.kernels
        )
        tensors = tuple(_joined(parts) for parts in merged)
        return Trace(self.name, kernels, tensors, self.phases, self.origin), tuple(places)

    def as_document(self) -> dict[str, Any]:
        """Return the content of its JSON file, without values that are the default."""
        return {
            "format": FORMAT,
            "name": self.name,
            "origin": self.origin,
            "phases": [
                {"name": phase.name, "first_kernel": phase.first_kernel} for phase in self.phases
            ],
            "tensors": [_tensor_row(tensor) for tensor in self.tensors],
            "kernels": [_kernel_row(kernel) for kernel in self.kernels],
        }

    @classmethod
    def of_document(cls, document: object, source: str) -> Trace:
        """Make a trace of a parsed file, which errors call ``source``. Raises ``ConfigError``."""
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(
                f"{source} is not a trace of the format {FORMAT}; record it again with this version"
            )
        try:
            return cls(
                name=_text(document, "name"),
                kernels=tuple(_kernel(row) for row in document["kernels"]),
                tensors=tuple(_tensor(row) for row in document["tensors"]),
                phases=tuple(
                    Phase(_text(row, "name"), _whole(row["first_kernel"]))
                    for row in document.get("phases", ())
                ),
                origin=_text(document, "origin"),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{source} is not a valid trace: {error!r}; record it again"
            ) from error


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises ``ConfigError`` if the file is no trace, ``OSError`` without a file."""
    if not Path(path).exists():
        why = "there is no trace; session.save_trace(FILE) writes one"
        raise FileNotFoundError(errno.ENOENT, why, os.fspath(path))
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is not JSON: {error}") from error
    return Trace.of_document(document, os.fspath(path))


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; readers see the old file or the new file, never a part. Raises ``OSError``."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", str(target))
    if not target.parent.is_dir():
        why = "a trace goes into a folder that exists; make it first"
        raise FileNotFoundError(errno.ENOENT, why, str(target.parent))
    # Not by `tempfile`, because only the user could read its files.
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    file = temporary.open("x", encoding="utf-8")
    try:
        with file:
            json.dump(trace.as_document(), file, separators=(",", ":"))
            file.write("\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _joined(parts: list[TracedTensor]) -> TracedTensor:
    """Join the tensors on a storage."""
    first = parts[0]
    if len(parts) == 1:
        return first
    again = [part.recompute_seconds for part in parts]
    known = [seconds for seconds in again if seconds is not None]
    return TracedTensor(
        nbytes=max(part.nbytes for part in parts),
        kind=first.kind,
        name=first.name,
        part=first.part,
        storage=first.storage,
        lives_across_steps=any(part.lives_across_steps for part in parts),
        is_fixed=any(part.is_fixed for part in parts),
        recompute_seconds=sum(known) if len(known) == len(again) else None,
    )


def _kernel_row(kernel: Kernel) -> dict[str, Any]:
    row: dict[str, Any] = {"seconds": kernel.seconds, "uses": list(kernel.uses)}
    if kernel.name:
        row["name"] = kernel.name
    if kernel.flops:
        row["flops"] = kernel.flops
    return row


def _kernel(row: dict[str, Any]) -> Kernel:
    return Kernel(
        seconds=float(row["seconds"]),
        uses=tuple(_whole(tensor) for tensor in row["uses"]),
        name=_text(row, "name"),
        flops=float(row.get("flops", 0.0)),
    )


def _tensor_row(tensor: TracedTensor) -> dict[str, Any]:
    told = {
        "name": tensor.name,
        "part": tensor.part,
        "across_steps": tensor.lives_across_steps,
        "fixed": tensor.is_fixed,
    }
    numbers = {"storage": tensor.storage, "recompute_seconds": tensor.recompute_seconds}
    return {
        "bytes": tensor.nbytes,
        "class": tensor.kind,
        **{name: value for name, value in told.items() if value},
        **{name: number for name, number in numbers.items() if number is not None},
    }


def _text(row: dict[str, Any], name: str) -> str:
    """Return a text that can be written again: JSON may have half a surrogate pair."""
    return str(row.get(name, "")).encode(errors="backslashreplace").decode()


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _flag(row: dict[str, Any], name: str) -> bool:
    value = row.get(name, False)
    if not isinstance(value, bool):
        raise TypeError(f"{name} of a tensor is {value!r}, not true or false")
    return value


def _tensor(row: dict[str, Any]) -> TracedTensor:
    storage, again = row.get("storage"), row.get("recompute_seconds")
    return TracedTensor(
        nbytes=_whole(row["bytes"]),
        kind=cast("TensorClass", row.get("class", "activation")),
        name=_text(row, "name"),
        part=_text(row, "part"),
        storage=None if storage is None else _whole(storage),
        lives_across_steps=_flag(row, "across_steps"),
        is_fixed=_flag(row, "fixed"),
        recompute_seconds=None if again is None else float(again),
    )
