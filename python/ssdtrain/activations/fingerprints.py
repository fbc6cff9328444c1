"""Compares, bit for bit, the tensors that a block saves in its two runs.

The second run keeps the graph of the forward and replaces only the saved tensors. If each of them
is equal, so is every gradient, whatever the block reads besides its arguments. So the forward notes
the form and a checksum of each saved tensor, or the argument that it is, and backward compares.
Weights, and tensors whose bytes cannot be read, stay in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ssdtrain._core import Kept
from ssdtrain.activations.eligibility import PLAIN_KEYS
from ssdtrain.activations.names import describe
from ssdtrain.activations.saved_tensor import check_version, exclude, give_back, version_of
from ssdtrain.errors import UnsupportedError
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import (
    Hooks,
    dispatch_keys,
    hide_hooks,
    top_hooks,
)

__all__ = ["Comparison", "Fingerprints"]

OTHER_VALUES = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), did not compute what "
    "its forward did ({}): something that it reads has changed since then. The block may have "
    "changed it (running statistics, a cache of keys and values, random numbers of its own), or "
    "the program (a weight, an attribute, a global name, train() or eval(), autocast, the number "
    "of threads). No gradient was computed from it. Take the mark off with "
    "ssdtrain.remove_checkpoint, or change it after backward"
)
ARGUMENT_CHANGED = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), needs its arguments "
    "there, and one of them was changed in place, by the block or after the call, as "
    "`x += block(x)` does. Write `x = x + block(x)`, or take the mark off with "
    "ssdtrain.remove_checkpoint"
)
IN_PLACE = "modified by an inplace operation"
"""Autograd and ``check_version`` say this of a saved tensor that was changed."""

Form = tuple[object, ...]


class _Argument(NamedTuple):
    """The fingerprint of an argument, which torch's checkpoint saves and brings back."""

    form: Form
    indices: frozenset[int]
    """Indices of the arguments at this address: several may share their memory."""


class _Bytes(NamedTuple):
    """The fingerprint of a tensor that the block computed, or has from elsewhere."""

    form: Form
    checksum: int


Fingerprint = _Argument | _Bytes | None
"""``None`` stands for a tensor that stays in the graph."""


class _Saved(NamedTuple):
    """The packed object in the graph of the forward."""

    number: int
    below: object
    """The packed object of torch's checkpoint."""


class Comparison:
    """Compares the tensors of a second run with the fingerprints of the forward."""

    def __init__(
        self,
        name: str,
        fingerprints: Sequence[Fingerprint],
        versions: dict[int, int],
        leaves: Sequence[Any],
    ) -> None:
        self._name = name
        self._fingerprints = fingerprints
        self._versions = versions
        """Versions of the tensors when they were saved, by index; the same in each run."""
        self._leaves = [*leaves]
        self._count = 0
        self._failure: str | None = None
        """Why the second run failed; an error would keep its frames."""

    def hooks(self) -> saved_tensors_hooks:
        """Return a context whose hooks compare each tensor that is saved in it.

        A hook raises ``UnsupportedError`` if a tensor differs.
        """
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            self._compare(tensor)
            return pack_below(tensor)

        return _Above(hooks, pack, unpack_below, self._leaves.clear)

    def _compare(self, tensor: Tensor) -> None:
        index, count = self._count, len(self._fingerprints)
        self._count += 1
        self._versions[index] = version_of(tensor)
        is_known = index < count  # torch raises if there are more
        # defence: what is computed again is compared
        if is_known and not _has_fingerprint(self._fingerprints[index], tensor, self._leaves):
            self._fail(f"tensor {index + 1} of {count} that it saves is another")
        self.refuse_other()

    def _fail(self, difference: str) -> None:
        self._failure = OTHER_VALUES.format(self._name, difference)

    def refuse_other(self) -> None:
        """Raise if a tensor differed; the block may have caught the first error."""
        if self._failure is not None:
            raise UnsupportedError(self._failure)

    def check_count(self) -> None:
        """Raise if the block has saved fewer tensors than in the forward."""
        if self._count < len(self._fingerprints):
            self._fail(f"it saved {self._count} tensors instead of {len(self._fingerprints)}")
        self.refuse_other()


class Fingerprints:
    """The fingerprints of the tensors that one call of a block saved.

    Args:
        name: Names the block in messages.

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._fingerprints: list[Fingerprint] = []
        self._versions: dict[int, int] = {}
        """Versions of recomputed tensors. Several backwards may run at once, or nested."""
        self._runs_count = 0

    def noting(self, leaves: Sequence[Any]) -> saved_tensors_hooks:
        """Return a context whose hooks note each tensor that a forward saves."""
        arguments = _by_address(leaves)
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            fingerprint = _fingerprint_of(tensor, arguments)
            index = len(self._fingerprints)
            self._fingerprints.append(fingerprint)
            # Torch's own hooks have to count also the tensors that stay in the graph.
            below = pack_below(tensor)
            return exclude(tensor) if fingerprint is None else _Saved(index, below)

        def unpack(packed: _Saved | Kept) -> Tensor:
            if isinstance(packed, _Saved):
                return self._unpack(packed, unpack_below)
            return give_back(packed.tensor, packed.version)

        return _Above(hooks, pack, unpack, arguments.clear)

    def _unpack(self, packed: _Saved, unpack_below: Callable[[Any], Tensor]) -> Tensor:
        runs_count = self._runs_count
        try:
            tensor = unpack_below(packed.below)
        except RuntimeError as error:
            # The second run has not begun, so an argument was changed.
            if self._runs_count == runs_count and IN_PLACE in str(error):
                raise UnsupportedError(ARGUMENT_CHANGED.format(self._name)) from error
            raise
        if isinstance(self._fingerprints[packed.number], _Bytes):
            version = self._versions[packed.number]
            check_version(tensor, version, lambda: describe(tensor.dtype, tensor.shape))
        return tensor

    def compare(self, leaves: Sequence[Any]) -> Comparison:
        """Return the comparison of a second run with these arguments."""
        self._runs_count += 1
        return Comparison(self._name, self._fingerprints, self._versions, leaves)


class _Above(saved_tensors_hooks):
    """Hooks on top of those of torch's checkpoint."""

    def __init__(
        self,
        below: Hooks,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        let_go: Callable[[], object],
    ) -> None:
        self._below = below
        self._let_go = let_go
        """Called at the end: the graph holds ``pack``, and must not hold the arguments by it."""
        super().__init__(pack, unpack)

    def __enter__(self) -> None:
        hide_hooks(self.pack_hook, self._below)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        hide_hooks(self.pack_hook, None)
        self._let_go()


def _by_address(leaves: Sequence[Any]) -> dict[int, list[tuple[int, Tensor]]]:
    """Return the arguments whose bytes can be read, by their addresses."""
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and _has_bytes(leaf):
            found.setdefault(leaf.data_ptr(), []).append((index, leaf))
    return found


def _fingerprint_of(tensor: Tensor, arguments: dict[int, list[tuple[int, Tensor]]]) -> Fingerprint:
    if not _has_bytes(tensor) or _is_weight(tensor):
        return None
    there = arguments.get(tensor.data_ptr(), ())
    indices = frozenset(index for index, argument in there if _covers(argument, tensor))
    form = _form_of(tensor)
    return _Argument(form, indices) if indices else _Bytes(form, checksum_of(tensor))


def _has_fingerprint(expected: Fingerprint, tensor: Tensor, leaves: Sequence[Any]) -> bool:
    if expected is None:
        return True
    if not _has_bytes(tensor) or expected.form != _form_of(tensor):
        return False
    if isinstance(expected, _Bytes):
        return expected.checksum == checksum_of(tensor)
    given = [leaves[index] for index in expected.indices]
    return any(argument.data_ptr() == tensor.data_ptr() for argument in given) or any(
        checksum_of(argument) == checksum_of(tensor) for argument in given
    )


def _has_bytes(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, Parameter) and dispatch_keys(tensor) == PLAIN_KEYS
    return is_plain and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _form_of(tensor: Tensor) -> Form:
    return tensor.dtype, tensor.shape, tensor.stride()


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    base = tensor._base if tensor._is_view() else tensor  # noqa: SLF001
    return type(base) is not Tensor and isinstance(base, Parameter)


def _covers(argument: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor at the address of an argument has the same elements and order."""
    if tensor.dtype != argument.dtype or tensor.numel() != argument.numel():
        return False
    both = tensor.is_contiguous() and argument.is_contiguous()
    return both or (tensor.shape == argument.shape and tensor.stride() == argument.stride())
