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
from ssdtrain.activations.saved_tensor import check_version, exclude
from ssdtrain.errors import UnsupportedError
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.torch_internals import Hooks, dispatch_keys, hide_hooks, top_hooks

__all__ = ["Fingerprints"]

OTHER_VALUES = (
    "the block {}, which is computed again in backward (ssdtrain.checkpoint), did not compute what "
    "its forward did ({}): something that it reads has changed since then, such as a weight, an "
    "attribute or a global name, or it draws random numbers of its own. No gradient was computed "
    "from it. Change it after backward, or take the mark off with ssdtrain.remove_checkpoint"
)

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


class _Saved:
    """What the graph of the forward has in the place of a tensor."""

    __slots__ = ("below", "kept", "place")

    def __init__(self, place: int, below: object, kept: Kept) -> None:
        self.place = place
        self.below = below
        """What torch's checkpoint packed."""
        self.kept: Kept | None = kept
        """The tensor itself, until it is known whether it is computed again."""


class Fingerprints:
    """What one call of the block ``name`` saved.

    Args:
        name: How messages name the block.

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: list[Told] = []
        self._undecided: list[_Saved] = []
        """All of a forward that has not been decided about."""
        self._versions: list[int] = []
        """Those of what was computed again, when it was saved."""
        self._failure: str | None = None
        """Why what is computed again now is of no use; an error would keep its frames."""

    def noting(self, leaves: Sequence[Any]) -> saved_tensors_hooks:
        """Return what notes all that is saved in a forward with these arguments, as a context.

        It stays in memory until ``decide`` is called.
        """
        arguments = _by_address(leaves)
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            told = _tell(tensor, arguments)
            place = len(self._told)
            self._told.append(told)
            # Those of torch count what stays in the graph, too, and forget it.
            packed, kept = pack_below(tensor), exclude(tensor)
            if told is None:
                return kept
            saved = _Saved(place, packed, kept)
            self._undecided.append(saved)
            return saved

        def unpack(packed: _Saved | Kept) -> Tensor:
            kept = packed if isinstance(packed, Kept) else packed.kept
            if kept is not None:
                own = kept.tensor
                check_version(own, kept.version, lambda: describe(own.dtype, own.shape))
                return own.detach()
            assert isinstance(packed, _Saved)
            tensor: Tensor = unpack_below(packed.below)
            if isinstance(self._told[packed.place], _Bytes):
                version = self._versions[packed.place]
                check_version(tensor, version, lambda: describe(tensor.dtype, tensor.shape))
            return tensor

        return _Above(hooks, pack, unpack)

    def decide(self, *, is_repeatable: bool) -> None:
        """Say after the forward whether what it saved is computed again, or stays in memory."""
        if is_repeatable:
            for saved in self._undecided:
                saved.kept = None
        self._undecided.clear()

    def comparing(self, leaves: Sequence[Any]) -> saved_tensors_hooks:
        """Return what compares all that is saved meanwhile with what was noted, as a context.

        Raises ``UnsupportedError`` where something else is saved.
        """
        self._failure = None
        self._versions = []
        hooks = top_hooks(False)
        assert hooks is not None, "torch's checkpoint has put its own on"
        pack_below, unpack_below = hooks

        def pack(tensor: Tensor) -> object:
            self._compare(tensor, leaves)
            return pack_below(tensor)

        return _Above(hooks, pack, unpack_below)

    def _compare(self, tensor: Tensor, leaves: Sequence[Any]) -> None:
        place, count = len(self._versions), len(self._told)
        self._versions.append(-1 if tensor.is_inference() else tensor._version)  # noqa: SLF001
        is_known = place < count  # of one too many torch tells
        # defence: what is computed again is compared
        if is_known and not _is_as(self._told[place], tensor, leaves):
            what = f"tensor {place + 1} of {count} that it saves is another"
            self._failure = OTHER_VALUES.format(self._name, what)
        self.refuse_other()

    def refuse_other(self) -> None:
        """Raise what was found; the block may have caught it."""
        if self._failure is not None:
            raise UnsupportedError(self._failure)

    def check_count(self) -> None:
        """Raise if fewer tensors than in the forward were saved when the block came to its end."""
        if len(self._versions) < len(self._told):
            what = f"it saved {len(self._versions)} tensors instead of {len(self._told)}"
            raise UnsupportedError(OTHER_VALUES.format(self._name, what))


class _Above(saved_tensors_hooks):
    """Hooks above those of torch's checkpoint."""

    def __init__(
        self, below: Hooks, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._below = below
        super().__init__(pack, unpack)

    def __enter__(self) -> None:
        hide_hooks(self.pack_hook, self._below)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        hide_hooks(self.pack_hook, None)


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
