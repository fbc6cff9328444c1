"""Counting what saved tensors hold in memory, for the modes that have no session to ask.

The definition is the one that `ssdtrain.offload` reports about itself: the bytes of the distinct
storages that saved tensors hold, parameters excluded.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.autograd.graph import Node, saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE_INTERVAL_S = 0.004

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
    """Counts the storages that autograd saves while `measure` is open.

    A storage counts from the moment a saved tensor first refers to it until it dies. One Python
    object stands for a storage as long as it lives, so a weak reference to that object tells both
    who it is and when it is gone; an address would be reused for the next tensor.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Held, so that no other storage can come to stand under a parameter's id.
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
            with saved_tensors_hooks(self._pack, _unchanged):
                yield
        finally:
            self._open = False

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Make the contexts of one checkpointed region: a `context_fn` of `checkpoint`.

        The recomputation saves its tensors through hooks of checkpoint's own, which hide the ones
        around the step. So while `measure` is open its context goes on top of them, counts, and
        hands every tensor on.
        """
        return nullcontext(), _Recomputation(self)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a saved tensor, unless it is known or a parameter's."""
        if tensor.layout != torch.strided or is_weight(tensor):
            return
        storage = tensor.untyped_storage()
        key, size_bytes = id(storage), storage.nbytes()
        if key in self._parameters:
            return

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            with self._lock:
                del self._storages[key]
                self.resident_bytes -= size_bytes

        with self._lock:
            if key in self._storages:
                return
            self._storages[key] = weakref.ref(storage, forget)
            self.resident_bytes += size_bytes
            self.resident_bytes_peak = max(self.resident_bytes_peak, self.resident_bytes)

    @property
    def is_open(self) -> bool:
        """Whether `measure` is open."""
        return self._open

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count(tensor)
            # Never the tensor itself: where it is the output of its node, node and tensor would
            # hold each other, and a graph without backward would never die.
            return tensor.detach()


class _Recomputation:
    """Counts inside a recomputation, on top of the hooks that checkpoint has set for it."""

    def __init__(self, counter: SavedStorageCounter) -> None:
        self._counter = counter
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not self._counter.is_open:
            return self
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        assert hooks is not None, "checkpoint recomputes under hooks of its own"
        pack, unpack = hooks

        def count_and_pack(tensor: torch.Tensor) -> Any:
            with torch.no_grad():
                self._counter.count(tensor)
            # May raise what ends the recomputation early: it passes through to checkpoint.
            return pack(tensor)

        self._stack.enter_context(saved_tensors_hooks(count_and_pack, unpack))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter, a view of one, or the copy autocast made of one."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Node | None = tensor.grad_fn
    while node is not None and node.name() in WEIGHT_PRESERVING_NODES:
        (node, _), *_ = node.next_functions
    variable = getattr(node, "variable", None)  # Only AccumulateGrad, the end of a graph, has one.
    return isinstance(variable, nn.Parameter)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


class Sampler:
    """Samples a number of bytes in a thread of its own while its `with` block runs."""

    def __init__(
        self, read_bytes: Callable[[], int], interval_s: float = SAMPLE_INTERVAL_S
    ) -> None:
        self.samples: list[tuple[float, int]] = []
        """(seconds since the block was entered, bytes)."""
        self._read_bytes = read_bytes
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssdtrain-demo-sampler")

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        sample = time.perf_counter() - self._start, self._read_bytes()
        # Of a level stretch only the ends are worth keeping: they draw the same line.
        if [size for _, size in self.samples[-2:]] == [sample[1], sample[1]]:
            self.samples[-1] = sample
        else:
            self.samples.append(sample)
