"""The weights of a model, under their bound."""

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
from ssdtrain.machine.torch_internals import in_transform, is_shared, top_hooks
from ssdtrain.parameters.saved_weight import ON_STORAGE, WeightPair, note_pair, take_out_abandoned
from ssdtrain.parameters.stats import ParameterStats
from ssdtrain.parameters.successor import Successor
from ssdtrain.parameters.weight import Weight
from ssdtrain.sharing import Room
from ssdtrain.store import TensorStore

__all__ = ["NAME", "Weights", "weight_of"]

NAME = "weights"
"""What they are called in the report of a session."""


def weight_of(param: Tensor) -> Weight | None:
    """Return what is known of a parameter, if it may be away."""
    found = known_of(param)
    return found if isinstance(found, Weight) else None


class Weights(OffloadedTensors):
    """Keeps the weights of one model under a bound."""

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
        """Take a parameter over, whose bytes may leave from now on."""
        # A weight that is tied to another, or of which there is a view, stays what others see.
        if not param.untyped_storage().resizable() and not is_shared(param):
            # Memory of a file, of numpy or of another library: others may have it, unseen by torch.
            with torch.no_grad():
                param.data = param.detach().clone()
        self.take(Weight(self, param, name))

    def begin(self) -> None:
        """Let so many leave as the bound wants; raise what the disk refuses."""
        with self._lock:
            self._make_room(0)
            self._writes.end_all()
            self._peak_bytes = self._resident_bytes
        error, self._error = self._error, None
        if error is not None:
            raise error
        release_free_memory()

    def precede(self, updated: Tensor) -> Successor:
        """Begin to write the bytes that a weight is to have, beside those that it has."""
        self._writes.written_bytes += updated.nbytes
        return Successor(updated, self._store)

    def succeed(self, weight: Weight, successor: Successor) -> None:
        """Put such bytes in the place of those that a weight has, as an update in place does."""
        with self._lock:
            param = weight.tensor
            assert param is not None, "its optimizer has it"
            weight.note_memory()
            fits = not weight.has_foreign_memory
            if fits and not weight.is_attached():
                # What is being written is out of date.
                self._writes.forget(weight)
            if fits and successor.stored is not None and self._is_free(weight):
                weight.source, weight.pending = successor.source, None
                weight.stored, weight.sum = successor.stored, successor.sum
                if weight.source is not None:
                    weight.sum = None
                    self._writes.add(weight, successor.sum)
                self._reads.pop(id(weight), None)
                increment_version(param)
            else:
                memory = successor.tensor(self._store)
                self._bring(weight)
                with torch.no_grad():
                    param.copy_(memory)
            self._note(weight)

    def _is_free(self, weight: Weight) -> bool:
        """Have a weight without bytes in memory, unless others have them or may be using them."""
        return self._empty(weight) if weight.is_attached() else not weight.is_shared()

    def times_replaced(self, weight: Weight) -> int:
        """Return how often others gave a weight other memory so far (``weight.data = ...``)."""
        with self._lock:
            weight.note_memory()
            return weight.times_replaced

    def sum_of(self, weight: Weight) -> int | None:
        """Return the checksum of the bytes that a weight has, wherever they are, if it is known."""
        with self._lock:
            param = weight.tensor
            if param is not None and weight.is_attached():
                return checksum_of(param)
            return weight.sum if weight.source is None else weight.checksum()

    def pair(self) -> WeightPair:
        """Return hooks on saved tensors that pack weights by name, above those that are on."""
        return WeightPair(top_hooks(True))

    def look_pair(self, frame: FrameType) -> WeightPair | None:
        """Return the same for a function of torch, which ``frame`` calls; ``None``: it needs none.

        None stand above hooks of others: torch's checkpoint counts what is saved, and would count
        a weight in memory, and not one that is away.
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
            return ParameterStats(
                total_bytes=sum(one.nbytes for one in self._alive()),
                resident_bytes=self._resident_bytes,
                peak_resident_bytes=self._peak_bytes,
                on_disk_bytes=sum(one.nbytes for one in self._alive() if not one.is_in_memory()),
                staying_bytes=self.staying_bytes,
                read_bytes=self._read_bytes,
                written_bytes=self._writes.written_bytes,
                stall_s=self._stall_s,
                write_failed_count=self._failed_count,
            )

    # From here on the lock is held.

    def _forget(self, one: OffloadedTensor) -> None:
        super()._forget(one)
        self._order.forget(one.use_key)

    def _note(self, one: OffloadedTensor) -> None:
        param = one.tensor
        if param is not None and isinstance(one, Weight):
            ON_STORAGE[storage_key(one.husk)] = one
            if one.is_attached():
                ON_STORAGE[storage_key(param)] = one
        super()._note(one)

    def _empty(self, one: OffloadedTensor, *, shared: bool = False) -> bool:
        param = one.tensor
        assert param is not None, "its caller has it"
        ON_STORAGE.pop(storage_key(param), None)
        return super()._empty(one, shared=shared)
