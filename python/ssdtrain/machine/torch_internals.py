"""Functions of torch without a public name that ssdtrain needs.

They are looked up by name: a torch that lacks a function is refused at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.compiler import is_dynamo_compiling

from ssdtrain.errors import UnsupportedError

__all__ = [
    "STORAGE_USERS_ALONE",
    "Hooks",
    "address_of",
    "are_same_type",
    "as_plain_tensors",
    "clone_of",
    "copy_each",
    "count_users",
    "current_backward",
    "current_node",
    "current_stream",
    "dispatch_keys",
    "hide_hooks",
    "holders_of",
    "hooks_allowed",
    "in_shards",
    "in_transform",
    "is_below_autograd",
    "is_foreign",
    "is_given",
    "is_in_shards",
    "is_shared",
    "is_traced",
    "is_wrapped",
    "memory_bytes",
    "mode_count",
    "outside_compiler",
    "own_shard",
    "plainly",
    "pop_hooks",
    "push_hooks",
    "queue_callback",
    "refuse_access",
    "sequence_number",
    "share_counters",
    "storage_users",
    "top_hooks",
    "tracer",
    "trains_with_others",
    "untraced",
    "users_of",
    "without_functions_of_user",
]

R = TypeVar("R")


def _find(path: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = attrgetter(path)(torch)
    except AttributeError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.{path}; ssdtrain needs torch 2.11 or newer"
        ) from error
    return found


sequence_number: Callable[[], int] = _find("_C._autograd._get_sequence_nr")
"""The number that the next node made in this thread will get."""


current_backward: Callable[[], int] = _find("_C._current_graph_task_id")
"""The number of the backward that runs in this thread, or -1."""

current_node: Callable[[], Any] = _find("_C._current_autograd_node")
"""The node that a backward runs in this thread, or None."""

push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _find(
    "_C._autograd._push_saved_tensors_default_hooks"
)
"""Puts a pair of hooks on top of those of this thread."""

pop_hooks: Callable[[], None] = _find("_C._autograd._pop_saved_tensors_default_hooks")

top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = _find(
    "_C._autograd._top_saved_tensors_default_hooks"
)
"""The pair of hooks that is used in this thread; with ``True`` also while the compiler has switched
it off."""

Hooks = tuple[Callable[[Tensor], object], Callable[[Any], Tensor]]
"""Pack and unpack."""


def hide_hooks(pack: Callable[[Tensor], object], below: Hooks | None) -> None:
    """Have torch's checkpoint find the user's hooks below those of ``pack``, as below its own.

    A checkpoint that begins looks for them, also a selective one. Call this without ``below``
    afterwards: a graph holds ``pack``, and the user's hooks may lead to the graph.
    """
    if below is not None and getattr(below[0], "_checkpoint_internal", False):
        below = getattr(below[0], "_user_hooks", None)
    marks = vars(pack)
    marks["_checkpoint_internal"] = True
    marks["_user_hooks"] = below


_why_disallowed: Callable[[], str | None] = _find(
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message"
)
_disallow: Callable[[str, bool], None] = _find("_C._autograd._saved_tensors_hooks_disable")
_allow: Callable[[], None] = _find("_C._autograd._saved_tensors_hooks_enable")


@contextmanager
def hooks_allowed() -> Iterator[None]:
    """Allow hooks to be pushed while this thread forbids that.

    torch forbids it while it compiles, but allows hooks to be popped.
    """
    message = _why_disallowed()
    if message is None:
        yield
        return
    _allow()
    try:
        yield
    finally:
        _disallow(message, False)


_transforms: Callable[[], object] = _find("_C._functorch.peek_interpreter_stack")
_is_tracing: Callable[[], bool] = _find("_C._is_tracing")


def in_transform() -> str | None:
    """Return the name of the transform that this thread is in, such as ``torch.func``."""
    if _transforms() is not None:
        return "torch.func"
    return "torch.jit.trace" if _is_tracing() else None


dispatch_keys: Callable[[Tensor], object] = _find("_C._dispatch_keys")
"""The parts of torch that handle the operations of a tensor: a set that compares by value."""

is_wrapped: Callable[[Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor")
"""True if a function transform stands between this tensor and its bytes."""

as_plain_tensors: Callable[..., Any] = _find("_C._disabled_torch_function_impl")
"""Calls a function of torch past ``__torch_function__`` of its arguments."""

are_same_type: Callable[[Tensor, Tensor], bool] = _find("_has_compatible_shallow_copy_type")
"""True if ``a.data = b`` is possible; ``Module.cpu()`` asks that of weights and gradients."""

copy_each: Callable[[list[Tensor], list[Tensor]], None] = _find("_foreach_copy_")
"""Copies a list of tensors into another list by a single call, which no signal interrupts."""

_function_mode_count: Callable[[], int] = _find("_C._len_torch_function_stack")
_dispatch_mode_count: Callable[[], int] = _find("_C._len_torch_dispatch_stack")


_function_modes: Callable[[], list[object]] = _find("overrides._get_current_function_mode_stack")


def mode_count() -> int:
    """Return how many modes of the user see the operations of this thread.

    A default device does not count.
    """
    count = _function_mode_count()
    if count:
        of_device = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", ())
        count -= sum(isinstance(mode, of_device) for mode in _function_modes())
    return count + _dispatch_mode_count()


refuse_access: Callable[[int, str], None] = _find("_C._set_storage_data_ptr_access_error_msg")
"""Makes accesses to the bytes of the storage at an address of C++ raise, in C++ too."""


queue_callback: Callable[[Callable[[], None]], None] = _find(
    "autograd.Variable._execution_engine.queue_callback"
)
"""Calls a function at the end of the backward that runs in this thread."""


def trains_with_others() -> bool:
    """Return whether this process exchanges gradients with others.

    DDP does so past Python, even if there is only one process.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_in_shards(value: object) -> bool:
    """Return whether a value is a ``DTensor``: each process has a shard of it."""
    # The import takes a second; a program that has such a tensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return type(value) is getattr(module, "DTensor", None)


def own_shard(tensor: Any) -> Any:
    """Return this process's shard of a ``DTensor``; return any other tensor itself."""
    # Not `to_local`, which is for autograd and returns a view.
    return tensor._local_tensor if is_in_shards(tensor) else tensor  # noqa: SLF001


def in_shards(shard: Tensor, spec: Any) -> Tensor:
    """Return a ``DTensor`` of which this process has that shard, with the spec of a similar one.

    Public functions put a view between the tensor and its shard, which would hold its memory.
    """
    made: Tensor = sys.modules["torch.distributed.tensor"].DTensor(shard, spec, requires_grad=False)
    return made


def clone_of(tensor: Tensor) -> Tensor:
    """Return a copy, also of a class without ``clone`` that is made of other tensors (torchao)."""
    if is_in_shards(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    parts = {name: clone_of(getattr(tensor, name)) for name in names}
    unflatten: Any = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    made: Tensor = unflatten(parts, context, tensor.size(), tensor.stride())
    return made


def memory_bytes(tensor: Tensor) -> int:
    """Return how many bytes of this process a tensor's elements take.

    ``nbytes`` does not tell that of a sparse tensor or a ``DTensor``.
    """
    tensor = own_shard(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes  # noqa: SLF001 - not coalesced
    return tensor.nbytes


# Four questions about a tensor: do other tensors lie on its storage, does Python code hold the
# storage, does C++ hold the tensor, and does its memory belong to others.

count_users: Callable[[int], int] = _find("_C._storage_Use_Count")
"""Counts the tensors on the storage at an address of C++; see ``users_of``."""

holders_of: Callable[[Tensor], int] = _find("Tensor._use_count")
"""Counts the references of C++ to a tensor: one for its object in Python, for each graph that has
saved it, each library that it was given to (DLPack) and each parameter whose gradient it is."""

_alone = torch.zeros(1, device="cpu")
_HOLDERS_ALONE = holders_of(_alone)
_STORAGE_REFERENCES_ALONE = max(sys.getrefcount(_alone.untyped_storage()) for _ in range(2))
STORAGE_USERS_ALONE = 2
"""The result of `storage_users` for a tensor that shares its storage with no other."""


def address_of(storage: UntypedStorage) -> int:
    """Return the address of a storage in C++; no other living storage has it."""
    return int(storage._cdata)  # noqa: SLF001 - it has no public name


def users_of(storage: UntypedStorage) -> int:
    """Return how many tensors lie on this storage; its Python object counts as one of them."""
    return count_users(address_of(storage))


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors lie on the storage of this one; see ``users_of``."""
    return users_of(tensor.untyped_storage())


def is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor has the memory of this, or Python code holds its storage."""
    return (
        storage_users(tensor) != STORAGE_USERS_ALONE
        or sys.getrefcount(tensor.untyped_storage()) > _STORAGE_REFERENCES_ALONE
    )


def is_given(tensor: Tensor, expected_count: int = 0) -> bool:
    """Return whether a graph or another library (DLPack) has a tensor in C++.

    ``expected_count`` holders of torch itself do not count, such as the node that accumulates the
    gradient of a parameter.
    """
    return holders_of(tensor) > _HOLDERS_ALONE + expected_count


def is_foreign(tensor: Tensor) -> bool:
    """Return whether a file, numpy, another library or another process has a tensor's memory.

    Torch does not know the users of such memory.
    """
    storage = tensor.untyped_storage()
    return not storage.resizable() or storage.is_shared()


current_stream: Callable[[int], int] = getattr(
    torch._C,  # noqa: SLF001 - the public function makes an object, which costs thirty times as much
    "_cuda_getCurrentRawStream",
    lambda _gpu: 0,
)
"""The handle of the stream that is current in this thread on the GPU with this number; a torch that
was built without CUDA has none."""

_is_excluded: Callable[[object], bool] = _find("_C._dispatch_tls_is_dispatch_key_excluded")
_exclude: Callable[[object, bool], AbstractContextManager[None]] = _find(
    "_C._SetExcludeDispatchKeyGuard"
)
_KEEPS_COUNTERS: object = _find("_C.DispatchKey.ADInplaceOrView")


is_below_autograd: Callable[[], bool] = partial(_is_excluded, _KEEPS_COUNTERS)
"""True inside of an operation, where `detach` gives a tensor a version counter of its own."""


def share_counters() -> AbstractContextManager[None]:
    """Return a context in which a detached tensor shares its version counter, also there."""
    return _exclude(_KEEPS_COUNTERS, False)


_no_modes: Callable[[], AbstractContextManager[object]] = _find(
    "utils._python_dispatch._disable_current_modes"
)


@contextmanager
def plainly() -> Iterator[None]:
    """Let torch make an ordinary tensor under all modes of the user.

    Others are compared with this tensor, so it must not be fake or of inference mode.
    """
    with _no_modes(), torch.inference_mode(mode=False):
        yield


without_functions_of_user: Callable[[], AbstractContextManager[None]] = _find(
    "_C.DisableTorchFunction"
)
"""Returns a context in which neither modes nor classes of the user see calls of functions."""

tracer: Callable[[], object] = _find("_C._dynamo.eval_frame.get_eval_frame_callback")
"""The compiler's function that sees each call of this thread before it runs; ``None`` or ``False``
if there is none."""


def is_traced() -> bool:
    """Return whether the compiler traces this call, or would trace the calls that it makes."""
    return is_dynamo_compiling() or bool(tracer())


untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = _find("_disable_dynamo")
"""Makes a function that the compiler calls without tracing it; unlike the public
``torch.compiler.disable`` it does not import the compiler."""


def outside_compiler(function: Callable[[], R]) -> R:
    """Call a function that the compiler does not trace."""
    if is_traced():
        result: R = _untraced(function)
        return result
    return function()


@untraced
def _untraced(function: Callable[[], object]) -> object:
    return function()
