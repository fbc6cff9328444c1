"""Keeps the weights of a model under a bound."""

from __future__ import annotations

from types import FrameType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from ssdtrain.activations.installed import is_ours
from ssdtrain.away.known import known_of
from ssdtrain.away.tensor import OffloadedTensor, storage_key
from ssdtrain.away.tensors import OffloadedTensors
from ssdtrain.geometry import checksum_of
from ssdtrain.machine.process_memory import release_free_memory
from ssdtrain.machine.torch_internals import (
    in_transform,
    is_foreign,
    is_shared,
    plainly,
    top_hooks,
)
from ssdtrain.parameters.parked_update import ParkedUpdate
from ssdtrain.parameters.saved_weight import ON_STORAGE, WeightPair, note_pair, take_out_abandoned
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.parameters.weight import Weight
from ssdtrain.sharing import Room
from ssdtrain.store import TensorStore

__all__ = ["NAME", "Weights", "weight_of"]

NAME = "weights"
"""The name of their row in the report of a session."""


def weight_of(param: Tensor) -> Weight | None:
    """Return the entry of a parameter that may be away, or ``None``."""
    found = known_of(param)
    return found if isinstance(found, Weight) else None


class Weights(OffloadedTensors):
    """Keeps the weights of a model under a bound."""

    name = NAME
    too_many = "more than max_resident_bytes=%s of a model's weights are in memory"

    def __init__(
        self, store: TensorStore, max_resident_bytes: int, room: Room | None = None
    ) -> None:
        super().__init__(store, max_resident_bytes, room)
        self.is_failure_raised = True
        self.staying_bytes = 0
        """Bytes of the model's weights that never leave."""

    def add(self, param: Tensor, name: str) -> None:
        """Take a parameter over: its bytes may leave from now on."""
        # A weight that shares its memory with another tensor keeps that memory.
        if is_foreign(param) and not is_shared(param):
            with torch.no_grad():
                param.data = param.detach().clone()
        self.take(Weight(self, param, name))

    def begin(self) -> None:
        """Let weights leave until the bound holds; raise the error of a failed write."""
        with self._lock:
            self._make_room(0)
            self._writes.end_all()
            self._peak_bytes = self._resident_bytes
        error, self._error = self._error, None
        if error is not None:
            raise error
        release_free_memory()

    def park_update(self, updated: Tensor) -> ParkedUpdate:
        """Begin to write the updated bytes of a weight beside its old bytes."""
        self._writes.written_bytes += updated.nbytes
        return ParkedUpdate(updated, self._store)

    def commit_update(self, weight: Weight, parked: ParkedUpdate) -> None:
        """Put updated bytes in the place of the old bytes, as an update in place does."""
        with self._lock:
            param = weight.tensor
            assert param is not None, "its optimizer has it"
            weight.note_memory()
            fits = not weight.has_foreign_memory
            if fits and not weight.is_attached():
                # The write under way has old bytes.
                self._writes.forget(weight)
            if fits and parked.stored is not None and self._is_free(weight):
                weight.source, weight.pending = parked.source, None
                weight.stored, weight.sum = parked.stored, parked.sum
                if weight.source is not None:
                    weight.sum = None
                    self._writes.add(weight, parked.sum)
                self._reads.pop(id(weight), None)
                increment_version(param)
            else:
                memory = parked.tensor(self._store)
                self._bring(weight)
                with torch.no_grad():
                    param.copy_(memory)
            self._note(weight)

    def _is_free(self, weight: Weight) -> bool:
        """Take the bytes out of a weight; return whether no others use or have them."""
        return self._empty(weight) if weight.is_attached() else not weight.is_shared()

    def sum_of(self, weight: Weight) -> int | None:
        """Return the checksum of the bytes of a weight, wherever they are, if it is known."""
        with self._lock:
            param = weight.tensor
            if param is not None and weight.is_attached():
                return checksum_of(param)
            return weight.sum if weight.source is None else weight.checksum()

    def pair(self) -> WeightPair:
        """Return hooks on saved tensors that pack weights by name, above the hooks that are on."""
        return WeightPair(top_hooks(True))

    def look_pair(self, frame: FrameType) -> WeightPair | None:
        """Return such hooks for a function of torch that ``frame`` calls, or ``None``.

        No hooks stand above hooks of others: torch's checkpoint counts saved tensors, and would
        count a weight in memory, but not a weight that is away.
        """
        if not torch.is_grad_enabled() or in_transform() is not None or is_dynamo_compiling():
            return None
        take_out_abandoned(frame)
        below = top_hooks(True)
        if below is not None and not is_ours(below[0]):
            return None
        pair = WeightPair(below)
        note_pair(pair, frame)
        return pair

    def stats(self) -> ParameterStats:
        """Return the figures of this moment."""
        with self._lock:
            self._forget_gone()
            with plainly():
                for entry in self._alive():
                    # The program may have given a weight another dtype (`model.bfloat16()`).
                    if entry.is_attached() and not entry.users:
                        entry.may_leave()
                        self._note(entry)
            return ParameterStats(
                total_bytes=sum(entry.nbytes for entry in self._alive()),
                resident_bytes=self._resident_bytes,
                peak_resident_bytes=self._peak_bytes,
                on_disk_bytes=sum(
                    entry.nbytes for entry in self._alive() if not entry.is_in_memory()
                ),
                staying_bytes=self.staying_bytes,
                read_bytes=self._read_bytes,
                written_bytes=self._writes.written_bytes,
                stall_s=self._stall_s,
                write_failed_count=self._failed_count,
            )

    # From here on the lock is held.

    def _forget(self, entry: OffloadedTensor) -> None:
        super()._forget(entry)
        self._order.forget(entry.use_key)

    def _note(self, entry: OffloadedTensor) -> None:
        param = entry.tensor
        if param is not None and isinstance(entry, Weight):
            ON_STORAGE[storage_key(entry.husk)] = entry
            if entry.is_attached():
                ON_STORAGE[storage_key(param)] = entry
        super()._note(entry)

    def _empty(self, entry: OffloadedTensor, *, shared: bool = False) -> bool:
        param = entry.tensor
        assert param is not None, "its caller has it"
        ON_STORAGE.pop(storage_key(param), None)
        return super()._empty(entry, shared=shared)
