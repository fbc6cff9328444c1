"""Counts saved tensors in memory, for the modes without a session, as a session counts them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node, saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHT_PRESERVING_NODES = frozenset(
    {
        "ToCopyBackward0",
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "AliasBackward0",
    }
)
"""Nodes whose output is still the weight: views of it, and the casts that autocast makes."""


class SavedStorageCounter:
    """Counts the storages that autograd saves while `measure` is open, without parameters.

    A storage counts from the moment a saved tensor first refers to it until it dies, which a weak
    reference to its Python object tells; an address would be used again for the next tensor.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Held, so that no other storage gets the id of a parameter's.
        storages = [parameter.untyped_storage() for parameter in parameters]
        self._parameters = {id(storage): storage for storage in storages}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Reentrant: a storage may die, and its callback run, inside `count` in the same thread.
        self._lock = threading.RLock()
        self._open = False
        self.resident_bytes = 0
        """Bytes of the counted storages that are alive."""
        self.resident_bytes_peak = 0
        """Largest value that `resident_bytes` has had."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count every tensor that is saved in the `with` block, also by a recomputation in it."""
        self._open = True
        try:
            with saved_tensors_hooks(self._pack, torch.Tensor.detach):
                yield
        finally:
            self._open = False

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Make the contexts of a checkpointed region: a `context_fn` of `checkpoint`."""
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Count inside a recomputation, on top of the hooks of checkpoint, which hide others."""
        if not self._open:
            yield
            return
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        assert hooks is not None, "checkpoint recomputes under hooks of its own"
        pack, unpack = hooks

        def count_and_pack(tensor: torch.Tensor) -> Any:
            with torch.no_grad():
                self.count(tensor)
            # `pack` may raise to end the recomputation early: that error goes to checkpoint.
            return pack(tensor)

        with saved_tensors_hooks(count_and_pack, unpack):
            yield

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a saved tensor, unless it is known or a parameter's."""
        if tensor.layout != torch.strided or is_weight(tensor):
            return
        storage = tensor.untyped_storage()
        key, size_bytes = id(storage), storage.nbytes()

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            with self._lock:
                del self._storages[key]
                self.resident_bytes -= size_bytes

        with self._lock:
            if key in self._parameters or key in self._storages:
                return
            self._storages[key] = weakref.ref(storage, forget)
            self.resident_bytes += size_bytes
            self.resident_bytes_peak = max(self.resident_bytes_peak, self.resident_bytes)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count(tensor)
            # The output of a node would hold its node, which holds it: they would never die.
            return tensor.detach()


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a saved tensor is a parameter, a view of it, or autocast's copy of it."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Node | None = tensor.grad_fn
    while node is not None and node.name() in WEIGHT_PRESERVING_NODES:
        (node, _), *_ = node.next_functions
    variable = getattr(node, "variable", None)  # Only AccumulateGrad, the end of a graph, has it.
    return isinstance(variable, nn.Parameter)
