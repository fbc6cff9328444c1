"""The file of a training step: tensors and kernels. Format: `docs/internals/planning.md`.

A recorder in a running session writes traces, `ssdtrain plan` derives them from shapes, and the
planner reads them. Nothing here knows torch.
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
"""``activation``: what forward makes for backward; ``workspace``: scratch memory of kernels."""

CLASSES: Final[tuple[TensorClass, ...]] = get_args(TensorClass)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A stretch of computing between whose begin and end no tensor comes or goes."""

    seconds: float
    """Its time when everything that it uses is there; 0 or more."""
    uses: tuple[int, ...]
    """The tensors that have to be in memory while it runs, each once, by their places."""
    name: str = ""
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One tensor, or several that share a storage.

    It lives from the begin of the first kernel that uses it to the end of the last one, or, if it
    lives across steps, always.
    """

    nbytes: int
    kind: TensorClass = "activation"
    name: str = ""
    part: str = ""
    """The part of the model that it belongs to, such as ``layers.3.mlp``."""
    storage: int | None = None
    """Tensors with the same number lie on one storage: they count once, and move together."""
    lives_across_steps: bool = False
    is_fixed: bool = False
    """Whether it must stay in memory, because it is small or somebody else holds it."""
    recompute_seconds: float | None = None
    """How long it takes to compute it again from what is kept; ``None`` if that cannot be done."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of the step, such as ``forward``, up to the next one."""

    name: str
    first_kernel: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One step that repeats: its first kernel follows its last one."""

    name: str
    kernels: tuple[Kernel, ...]
    tensors: tuple[TracedTensor, ...]
    phases: tuple[Phase, ...] = ()
    origin: str = ""
    """Who made it and from what, for people."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for what is no step."""
        if not self.kernels:
            raise ConfigError(f"the trace {self.name!r} has no kernel; a step has at least one")
        for place, kernel in enumerate(self.kernels):
            self._check_kernel(place, kernel)
        for place, one in enumerate(self.tensors):
            self._check_tensor(place, one)
        seconds = sum(one.seconds for one in self.kernels)
        if not math.isfinite(seconds + sum(one.recompute_seconds or 0.0 for one in self.tensors)):
            self._refuse("its kernels, and what can be computed again, take for ever together")
        total = sum(one.nbytes for one in self.tensors)
        if total > SIZE_MAX:
            self._refuse(f"its tensors have {total:,} bytes, and at most {SIZE_MAX:,} are counted")
        firsts = [phase.first_kernel for phase in self.phases]
        if firsts != sorted(set(firsts)) or not all(0 <= one < len(self.kernels) for one in firsts):
            self._refuse(f"its phases begin at the kernels {firsts}, which is no order of them")

    def _check_kernel(self, place: int, kernel: Kernel) -> None:
        if not (math.isfinite(kernel.seconds) and kernel.seconds >= 0):
            self._refuse(f"kernel {place} takes {kernel.seconds!r} s")
        if len(set(kernel.uses)) < len(kernel.uses):
            self._refuse(f"kernel {place} names a tensor twice; name each use once")
        for tensor in kernel.uses:
            if not 0 <= tensor < len(self.tensors):
                self._refuse(
                    f"kernel {place} uses tensor {tensor}, but there are {len(self.tensors)}"
                )

    def _check_tensor(self, place: int, one: TracedTensor) -> None:
        if one.nbytes < 0:
            self._refuse(f"tensor {place} has {one.nbytes} bytes")
        if one.kind not in CLASSES:
            self._refuse(f"tensor {place} is of class {one.kind!r}, not {', '.join(CLASSES)}")
        again = one.recompute_seconds
        if again is not None and not (math.isfinite(again) and again >= 0):
            self._refuse(f"tensor {place} takes {again!r} s to compute again")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"the trace {self.name!r} makes no sense: {why}; record it again")

    def on_storages(self) -> tuple[Trace, tuple[int, ...]]:
        """Return the trace with one tensor for each storage, and the new place of every tensor.

        A storage has the bytes of its largest tensor, is used where any of them is, is fixed if
        one of them is, and can be computed again only if all of them can.
        """
        first_of: dict[int, int] = {}
        places: list[int] = []
        merged: list[list[TracedTensor]] = []
        for one in self.tensors:
            known = None if one.storage is None else first_of.get(one.storage)
            if known is None:
                known = len(merged)
                merged.append([])
                if one.storage is not None:
                    first_of[one.storage] = known
            merged[known].append(one)
            places.append(known)
        if len(merged) == len(self.tensors):
            return self, tuple(places)
        kernels = tuple(
            Kernel(
                one.seconds,
                tuple(dict.fromkeys(places[tensor] for tensor in one.uses)),
                one.name,
                one.flops,
            )
            for one in self.kernels
        )
        tensors = tuple(_joined(parts) for parts in merged)
        return Trace(self.name, kernels, tensors, self.phases, self.origin), tuple(places)

    def as_document(self) -> dict[str, Any]:
        """Return it as its JSON file says it, without what has its usual value."""
        return {
            "format": FORMAT,
            "name": self.name,
            "origin": self.origin,
            "phases": [{"name": one.name, "first_kernel": one.first_kernel} for one in self.phases],
            "tensors": [_tensor_row(one) for one in self.tensors],
            "kernels": [_kernel_row(one) for one in self.kernels],
        }

    @classmethod
    def of_document(cls, document: object, source: str) -> Trace:
        """Make it of a parsed file; ``source`` names that in errors. Raises ``ConfigError``."""
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
                f"{source} has something that is no trace: {error!r}; record it again"
            ) from error


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises ``ConfigError`` for a file that is none, ``OSError`` without one."""
    if not Path(path).exists():
        why = "there is no trace; session.save_trace(FILE) writes one"
        raise FileNotFoundError(errno.ENOENT, why, os.fspath(path))
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is not JSON: {error}") from error
    return Trace.of_document(document, os.fspath(path))


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; readers see the old file or the new one, never a part. Raises ``OSError``."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", str(target))
    if not target.parent.is_dir():
        why = "a trace goes into a folder that exists; make it first"
        raise FileNotFoundError(errno.ENOENT, why, str(target.parent))
    # Not by `tempfile`, whose files nobody else may read.
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
    """Make one tensor of those on a storage."""
    first = parts[0]
    if len(parts) == 1:
        return first
    again = [one.recompute_seconds for one in parts]
    known = [one for one in again if one is not None]
    return TracedTensor(
        nbytes=max(one.nbytes for one in parts),
        kind=first.kind,
        name=first.name,
        part=first.part,
        storage=first.storage,
        lives_across_steps=any(one.lives_across_steps for one in parts),
        is_fixed=any(one.is_fixed for one in parts),
        recompute_seconds=sum(known) if len(known) == len(again) else None,
    )


def _kernel_row(one: Kernel) -> dict[str, Any]:
    row: dict[str, Any] = {"seconds": one.seconds, "uses": list(one.uses)}
    if one.name:
        row["name"] = one.name
    if one.flops:
        row["flops"] = one.flops
    return row


def _kernel(row: dict[str, Any]) -> Kernel:
    return Kernel(
        seconds=float(row["seconds"]),
        uses=tuple(_whole(tensor) for tensor in row["uses"]),
        name=_text(row, "name"),
        flops=float(row.get("flops", 0.0)),
    )


def _tensor_row(one: TracedTensor) -> dict[str, Any]:
    told = {
        "name": one.name,
        "part": one.part,
        "across_steps": one.lives_across_steps,
        "fixed": one.is_fixed,
    }
    numbers = {"storage": one.storage, "recompute_seconds": one.recompute_seconds}
    return {
        "bytes": one.nbytes,
        "class": one.kind,
        **{name: value for name, value in told.items() if value},
        **{name: number for name, number in numbers.items() if number is not None},
    }


def _text(row: dict[str, Any], name: str) -> str:
    """Return a text as it can be written again: JSON may have halves of characters."""
    return str(row.get(name, "")).encode(errors="backslashreplace").decode()


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _flag(row: dict[str, Any], name: str) -> bool:
    value = row.get(name, False)
    if not isinstance(value, bool):
        raise TypeError(f"a tensor has {name} {value!r}, which is true or false")
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
