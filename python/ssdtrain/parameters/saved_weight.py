"""Hooks on saved tensors that pack a weight by its name, so that no graph holds its bytes."""

from __future__ import annotations

import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ssdtrain.activations.installed import uninstall
from ssdtrain.activations.names import describe
from ssdtrain.activations.saved_tensor import check_version, give_back, version_of
from ssdtrain.away.classes import AwayParameter, is_away
from ssdtrain.away.tensor import storage_key
from ssdtrain.machine.torch_internals import Hooks, hide_hooks, outside_compiler
from ssdtrain.parameters.weight import Weight
from ssdtrain.watched import User

__all__ = ["ON_STORAGE", "WeightPair", "note_pair", "running_frames", "take_out_abandoned"]

ON_STORAGE: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
"""The weights of all models, by the address of their storage."""


def _on_storage_of(tensor: Tensor) -> Weight | None:
    """Return the weight that has the storage of a tensor, also if it is away."""
    key = storage_key(tensor)
    weight = ON_STORAGE.get(key)
    if weight is None:
        return None
    param = weight.tensor
    # The program may have given the parameter other memory, and another storage this address.
    return weight if param is not None and storage_key(param) == key else None


REPLACED = (
    "the weight {} was given other memory (weight.data = ...) after a forward had used it, and the "
    "backward of that forward needs the older bytes, which are gone (ssdtrain.offload_parameters). "
    "Change it in place, or give it other memory between backward and the next forward"
)


class SavedWeight:
    """An object that a graph holds in the place of a weight, or of a view of it."""

    __slots__ = (
        "_is_itself",
        "_offset",
        "_size",
        "_stride",
        "_times_replaced",
        "_version",
        "_weight",
    )

    def __init__(self, weight: Weight, param: Tensor, tensor: Tensor) -> None:
        weight.note_memory()
        self._weight = weight
        self._is_itself = tensor is param
        self._times_replaced = weight.times_replaced
        self._version = param._version  # noqa: SLF001 - it has no public name
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> Tensor:
        """Bring the weight back, and return the view that was saved."""
        param = self._weight.tensor
        assert param is not None, "the graph has the parameter"
        check_version(  # defence: version of a saved weight
            param,
            self._version,
            lambda: f"the weight {self._weight.name} {describe(param.dtype, self._size)}",
        )
        weight, user = self._weight, User()
        # A use: a forward in a signal handler must not let it leave between these lines.
        weight.note_user(user)
        try:
            weight.look(param)
            weight.note_memory()
            return self._view(param)
        finally:
            weight.end_use(user)

    def _view(self, param: Tensor) -> Tensor:
        with torch.no_grad():
            saved = param.detach()
            if self._is_itself:
                # Autograd, too, uses the parameter as it is now.
                return saved
            # defence: other memory of a saved weight
            if self._weight.times_replaced != self._times_replaced:
                raise RuntimeError(REPLACED.format(self._weight.name))
            return saved.as_strided(self._size, self._stride, self._offset)


class _HeldTensor(NamedTuple):
    """An object that a graph holds in the place of another tensor, if no hooks lie below."""

    tensor: Tensor
    """A leaf itself, as autograd holds it: ``weight.data = ...`` changes the bytes it gets."""
    version: int
    unswappable: weakref.ref[Tensor]
    """``torch.utils.swap_tensors`` refuses a tensor that has a weak reference."""


def _keep(tensor: Tensor) -> _HeldTensor:
    # The result of a node would hold the node, which holds this object: a cycle.
    held = tensor if tensor.is_leaf else tensor.detach()
    return _HeldTensor(held, version_of(tensor), weakref.ref(held))


def _give_back(kept: Any) -> Tensor:
    was_away = is_away(kept.tensor)
    # Traced, a version counter would be a constant.
    brought = outside_compiler(lambda: give_back(kept.tensor, kept.version))
    return brought if was_away else kept.tensor


class WeightPair(saved_tensors_hooks):
    """Hooks on saved tensors, above the hooks that are on."""

    def __init__(self, below: Hooks | None) -> None:
        pack_below, unpack_below = (_keep, _give_back) if below is None else below
        # Not through `self`, which has the hooks: without such a cycle a graph is freed with its
        # last user, also the part to which the hooks of a checkpoint lead.
        packs_below: list[Any] = [pack_below]
        self._below = packs_below

        def pack(tensor: Tensor) -> object:
            if type(tensor) in (Tensor, Parameter, AwayParameter) and not tensor.is_sparse:
                weight = _on_storage_of(tensor)
                param = None if weight is None else weight.tensor
                if weight is not None and param is not None and _is_view(tensor, param):
                    return SavedWeight(weight, param, tensor)
            return packs_below[0](tensor)

        def unpack(packed: object) -> Tensor:
            if type(packed) is SavedWeight:
                return packed.tensor()
            unpacked: Tensor = unpack_below(packed)
            return unpacked

        hide_hooks(pack, below)
        super().__init__(pack, unpack)

    def let_go(self) -> None:
        """Let go of the hooks below, which may hold the graph."""
        if _pairs.on:
            _pairs.on = [(pair, frame) for pair, frame in _pairs.on if pair is not self]
        self._below.clear()
        hide_hooks(self.pack_hook, None)


class _Pairs(threading.local):
    def __init__(self) -> None:
        self.on: list[tuple[WeightPair, FrameType]] = []


_pairs = _Pairs()
"""The installed pairs of looks of each thread, with the frame that looks."""


def note_pair(pair: WeightPair, frame: FrameType) -> None:
    """Note the pair of a look before it is installed."""
    _pairs.on.append((pair, frame))


def take_out_abandoned(frame: FrameType) -> None:
    """Remove pairs of looks whose frame an interrupt has ended; ``frame`` is running."""
    if not _pairs.on:
        return
    running = running_frames(frame)
    for pair, its_frame in list(_pairs.on):
        if id(its_frame) not in running:
            uninstall(pair)
            pair.let_go()


def running_frames(frame: FrameType | None) -> set[int]:
    """Return the ids of a frame and of all its callers."""
    running = set[int]()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    return running


def _is_view(tensor: Tensor, param: Tensor) -> bool:
    return tensor.dtype == param.dtype and not (tensor.is_conj() or tensor.is_neg())
