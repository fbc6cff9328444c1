"""Tells whether a block that is computed again saves what its forward saved, bit for bit.

The graph of a call that is computed again is that of its forward: only the tensors that it saved
come anew. If each of them is what it was, so is every gradient, whatever the block reads besides
its arguments. So the forward notes of each saved tensor the form and a checksum, or which argument
it is, and backward compares. Weights, and tensors whose bytes cannot be told, stay in the graph.
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
"""What autograd says, and we, of a saved tensor that was changed."""

Form = tuple[object, ...]


class _Argument(NamedTuple):
    """The bytes of an argument, which torch's checkpoint keeps, and brings back as they were."""

    form: Form
    places: frozenset[int]
    """Of the arguments that lie there: several may share their memory."""


class _Bytes(NamedTuple):
    """What the block computed, or has from elsewhere."""

    form: Form
    checksum: int


Told = _Argument | _Bytes | None
"""``None`` is of a tensor that stays in the graph, as in a plain one."""


class _Saved(NamedTuple):
    """What the graph of the forward has in the place of a tensor."""

    place: int
    below: object
    """What torch's checkpoint packed."""


class Comparison:
    """What a block saves when it is computed again, beside what its forward saved."""

    def __init__(
        self, name: str, told: Sequence[Told], versions: dict[int, int], leaves: Sequence[Any]
    ) -> None:
        self._name = name
        self._told = told
        self._versions = versions
        """Those of the tensors when they were saved, by their places; the same in each run."""
        self._leaves = [*leaves]
        self._count = 0
        self._failure: str | None = None
        """Why it is of no use; an error would keep its frames."""

    def hooks(self) -> saved_tensors_hooks:
        """Return what compares all that is saved meanwhile, as a context.

        Raises ``UnsupportedError`` where something else is saved.
        """
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            self._compare(tensor)
            return pack_below(tensor)

        return _Above(hooks, pack, unpack_below, self._leaves.clear)

    def _compare(self, tensor: Tensor) -> None:
        place, count = self._count, len(self._told)
        self._count += 1
        self._versions[place] = version_of(tensor)
        is_known = place < count  # of one too many torch tells
        # defence: what is computed again is compared
        if is_known and not _is_as(self._told[place], tensor, self._leaves):
            self._fail(f"tensor {place + 1} of {count} that it saves is another")
        self.refuse_other()

    def _fail(self, what: str) -> None:
        self._failure = OTHER_VALUES.format(self._name, what)

    def refuse_other(self) -> None:
        """Raise what was found; the block may have caught it."""
        if self._failure is not None:
            raise UnsupportedError(self._failure)

    def check_count(self) -> None:
        """Raise if fewer tensors than in the forward were saved when the block came to its end."""
        if self._count < len(self._told):
            self._fail(f"it saved {self._count} tensors instead of {len(self._told)}")
        self.refuse_other()


class Fingerprints:
    """What one call of the block ``name`` saved.

    Args:
        name: How messages name the block.

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: list[Told] = []
        self._versions: dict[int, int] = {}
        """Of what was computed again. Several backwards may run at once, or one in another."""
        self._runs_count = 0

    def noting(self, leaves: Sequence[Any]) -> saved_tensors_hooks:
        """Return what notes all that is saved in a forward with these arguments, as a context."""
        arguments = _by_address(leaves)
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            told = _tell(tensor, arguments)
            place = len(self._told)
            self._told.append(told)
            # Those of torch count what stays in the graph, too, and forget it.
            below = pack_below(tensor)
            return exclude(tensor) if told is None else _Saved(place, below)

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
            # Nothing was computed again yet: so it was the arguments.
            if self._runs_count == runs_count and IN_PLACE in str(error):
                raise UnsupportedError(ARGUMENT_CHANGED.format(self._name)) from error
            raise
        if isinstance(self._told[packed.place], _Bytes):
            version = self._versions[packed.place]
            check_version(tensor, version, lambda: describe(tensor.dtype, tensor.shape))
        return tensor

    def compare(self, leaves: Sequence[Any]) -> Comparison:
        """Return what compares it with what is saved now, from these arguments."""
        self._runs_count += 1
        return Comparison(self._name, self._told, self._versions, leaves)


class _Above(saved_tensors_hooks):
    """Hooks above those of torch's checkpoint."""

    def __init__(
        self,
        below: Hooks,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        let_go: Callable[[], object],
    ) -> None:
        self._below = below
        self._let_go = let_go
        """Called at the end: a graph has ``pack``, and shall not hold the arguments by it."""
        super().__init__(pack, unpack)

    def __enter__(self) -> None:
        hide_hooks(self.pack_hook, self._below)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        hide_hooks(self.pack_hook, None)
        self._let_go()


def _by_address(leaves: Sequence[Any]) -> dict[int, list[tuple[int, Tensor]]]:
    """Return the arguments whose bytes can be told, by their addresses."""
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for place, one in enumerate(leaves):
        if isinstance(one, Tensor) and _has_bytes(one):
            found.setdefault(one.data_ptr(), []).append((place, one))
    return found


def _tell(tensor: Tensor, arguments: dict[int, list[tuple[int, Tensor]]]) -> Told:
    if not _has_bytes(tensor) or _is_weight(tensor):
        return None
    there = arguments.get(tensor.data_ptr(), ())
    places = frozenset(place for place, one in there if _covers(one, tensor))
    form = _form_of(tensor)
    return _Argument(form, places) if places else _Bytes(form, checksum_of(tensor))


def _is_as(told: Told, tensor: Tensor, leaves: Sequence[Any]) -> bool:
    if told is None:
        return True
    if not _has_bytes(tensor) or told.form != _form_of(tensor):
        return False
    if isinstance(told, _Bytes):
        return told.checksum == checksum_of(tensor)
    given = [leaves[place] for place in told.places]
    return any(one.data_ptr() == tensor.data_ptr() for one in given) or any(
        checksum_of(one) == checksum_of(tensor) for one in given
    )


def _has_bytes(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, Parameter) and dispatch_keys(tensor) == PLAIN_KEYS
    return is_plain and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _form_of(tensor: Tensor) -> Form:
    return tensor.dtype, tensor.shape, tensor.stride()


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one, which has its memory in any case."""
    base = tensor._base if tensor._is_view() else tensor  # noqa: SLF001
    return type(base) is not Tensor and isinstance(base, Parameter)


def _covers(argument: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor at the address of an argument has its elements, each in its place."""
    if tensor.dtype != argument.dtype or tensor.numel() != argument.numel():
        return False
    both = tensor.is_contiguous() and argument.is_contiguous()
    return both or (tensor.shape == argument.shape and tensor.stride() == argument.stride())
