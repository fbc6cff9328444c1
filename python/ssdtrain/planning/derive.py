"""Derives the trace of a step from a model without memory: runs it on `meta` tensors.

Each operation of forward and backward is recorded with its shapes. The storages that it reads and
writes give the life of each tensor, `torch.utils.flop_counter` gives the floating point operations,
and a roofline gives the time. No architecture is known here. If layers repeat, five are run and the
middle layer is repeated, if its neighbours did exactly the same. A model that does not run its
layers in their order, each once and with nothing in between, is run in whole.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ssdtrain.errors import ConfigError
from ssdtrain.planning.attention import FusedAttention
from ssdtrain.planning.layers import Cut, NotShortenedError, cut_layers
from ssdtrain.planning.models import LIBRARIES, line_of_user, raised
from ssdtrain.planning.repeat import BACKWARD, FORWARD, NONE, Operation, Storage, repeated
from ssdtrain.planning.trace import Kernel, Phase, Trace, TracedTensor

__all__ = ["Optimizer", "Roofline", "derive"]

VALUE = "_local_scalar_dense"
"""The operation behind ``Tensor.item()``."""
ASKED_MAX = 10_000
"""Times that a line may ask for the value of a bool tensor; a loop that waits for it never ends."""
LAYERS_RUN = 5
"""Repeated layers that are run: the second to the fourth have such layers on both sides."""
KERNELS_MAX = 1_000_000
"""Kernels of a step with all of its micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The time of an operation: that of its computing, its memory traffic or its launch."""

    tensor_flops: float
    """Floating point operations per second in 16 bits."""
    single_flops: float
    """Floating point operations per second in float32."""
    memory_bytes_per_s: float
    launch_s: float = 3e-6

    def seconds(self, flops: float, nbytes: float, *, is_half: bool) -> float:
        """Return how long an operation takes."""
        rate = self.tensor_flops if is_half else self.single_flops
        return max(flops / rate, nbytes / self.memory_bytes_per_s, self.launch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The state that an optimizer keeps for each parameter."""

    states: int
    """Tensors of the parameter's shape."""
    state_bytes: int | None
    """Bytes of each of their values; ``None`` stands for those of the parameter."""
    has_master: bool = False
    """True if it keeps a float32 copy of parameters of 16 bits."""

    def bytes_of(self, param: torch.Tensor) -> int:
        """Return the bytes of the state of a parameter."""
        own = param.element_size()
        each = self.states * (self.state_bytes or own)
        return param.numel() * (each + (4 if self.has_master and own < 4 else 0))


@dataclass
class _Recorder(TorchDispatchMode):
    """Records each operation with the storages that it uses."""

    roofline: Roofline
    storages: list[Storage] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    part: str = ""
    segment: tuple[str, int] = NONE
    phase: str = FORWARD
    layers_run: list[int] = field(default_factory=list)
    """The repeated layers in the order in which forward ran them."""
    operations_after: int = 0
    """The count of operations when the last of these layers ended."""
    assumed: dict[str, int] = field(default_factory=dict)
    """How often each line of the user asked for the value of a bool tensor."""
    is_cast: bool = False
    """True if the model uses autocast, which does nothing to tensors on `meta`."""
    _numbers: dict[int, int] = field(default_factory=dict)
    _held: list[torch.UntypedStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, which is held to keep its address its own."""
        storage = tensor.untyped_storage()
        address = _address(storage)
        found = self._numbers.get(address)
        if found is None:
            found = self._numbers[address] = len(self.storages)
            self._held.append(storage)
            self.storages.append(Storage(nbytes=storage.nbytes(), part=self.part))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is getattr(torch.ops.aten, VALUE).default:
            if args[0].dtype is torch.bool:
                return self._assumed()
            raise ConfigError(
                f"the model computes with the value of a {args[0].dtype} tensor in Python, and "
                "there are only shapes here; give a recorded trace instead (--trace FILE)"
            )
        out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        before = {_address(tensor.untyped_storage()) for tensor in read}
        is_view = all(_address(tensor.untyped_storage()) in before for tensor in made)
        changes = func._schema.is_mutable  # noqa: SLF001 - nothing public tells
        if made and (changes or not is_view):
            packet = func._overloadpacket  # noqa: SLF001 - as torch's flop counter does
            count = flop_registry.get(packet)
            flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
            self._record(packet.__name__, flops, read, made)
        return out

    def _assumed(self) -> bool:
        """Answer ``True`` for a bool tensor: the masks of plain batches are set.

        The value is not known here, so the line of the user that asks is noted.
        """
        stack = traceback.extract_stack()
        # Frames before this module are those of the command, not of the model.
        first = next(number for number, frame in enumerate(stack) if frame.filename == __file__)
        line = line_of_user(stack[first:], LIBRARIES)
        if line is None:
            return True
        self.assumed[line] = self.assumed.get(line, 0) + 1
        if self.assumed[line] > ASKED_MAX:
            raise ConfigError(
                f"{line} asks again and again for the value of a bool tensor, which has no value "
                "here and is taken as true; give a recorded trace instead (--trace FILE)"
            )
        return True

    def _record(
        self, name: str, flops: float, read: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        numbers = dict.fromkeys(self.number(tensor) for tensor in (*read, *made))
        moved = sum(
            min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            for tensor in (*read, *made)
        )
        is_half = made[0].element_size() <= 2
        self.operations.append(
            Operation(
                seconds=self.roofline.seconds(flops, moved, is_half=is_half),
                uses=tuple(numbers),
                name=name,
                flops=flops,
                phase=self.phase,
                segment=self.segment,
            )
        )


@contextmanager
def _casts(recorder: _Recorder) -> Iterator[None]:
    """Note each use of autocast, also if torch disables it because there is no GPU."""
    make = torch.autocast.__init__

    @functools.wraps(make)
    def noted(*args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(make).bind(*args, **kwargs).arguments
        recorder.is_cast = recorder.is_cast or bool(asked.get("enabled", True))
        make(*args, **kwargs)

    torch.autocast.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = make  # type: ignore[method-assign]


def _address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage in C++: on `meta` its data has no address."""
    return int(storage._cdata)  # noqa: SLF001 - nothing public tells


def derive(
    name: str,
    build: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]],
    roofline: Roofline,
    optimizer: Optimizer,
    accumulate: int = 1,
) -> Trace:
    """Return the trace of a step of a model, which ``build`` makes together with its loss.

    It is called in a context that makes tensors on `meta`. The loss is computed and differentiated
    once for each of the ``accumulate`` micro-batches. The origin of the trace names the lines that
    asked for the value of a bool tensor, which is taken as true. Raises ``ConfigError``.
    """
    try:
        return _derived(name, build, roofline, optimizer, accumulate, is_shortened=True)
    except NotShortenedError:
        return _derived(name, build, roofline, optimizer, accumulate, is_shortened=False)


def _derived(
    name: str,
    build: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]],
    roofline: Roofline,
    optimizer: Optimizer,
    accumulate: int,
    *,
    is_shortened: bool,
) -> Trace:
    with torch.device("meta"):
        model, loss_of = build()
    _refuse_lazy(model)
    cut = cut_layers(model, LAYERS_RUN) if is_shortened else None
    recorder = _Recorder(roofline)
    parameters = dict(model.named_parameters())
    for where, param in parameters.items():
        number = recorder.number(param)
        recorder.storages[number].kind = "weight"
        recorder.storages[number].part = where
    for where, buffer in model.named_buffers():
        number = recorder.number(buffer)
        recorder.storages[number].kind = "weight"
        recorder.storages[number].part = where
    try:
        parts = _parts(model, cut, recorder)
        with torch.device("meta"), FusedAttention(), _casts(recorder), recorder, parts:
            loss = loss_of()
            _check_loss(loss, list(parameters.values()))
            if cut is not None:
                cut.check(recorder.layers_run)
            recorder.phase = BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
    # A function of the user may call sys.exit, which must not end the command.
    except (Exception, SystemExit) as error:
        if cut is None:
            _refuse(error, recorder)
        # A model may take its layers by their numbers, or join all that they return.
        cut.undo(model)
        raise NotShortenedError from error
    updates = []
    for where, param in parameters.items():
        if param.grad is None:
            continue
        gradient = recorder.number(param.grad)
        recorder.storages[gradient].kind = "gradient"
        recorder.storages[gradient].part = where
        updates.append((recorder.number(param), gradient, optimizer.bytes_of(param)))
    operations, storages = recorder.operations, recorder.storages
    if cut is not None and cut.left_out:
        try:
            operations, updates = repeated(operations, storages, updates, LAYERS_RUN, cut.left_out)
        except ConfigError as error:
            cut.undo(model)
            raise NotShortenedError from error
    return _trace(
        name,
        roofline=roofline,
        operations=operations,
        storages=storages,
        updates=updates,
        accumulate=accumulate,
        origin=f"derived from shapes{_weights_in(parameters)}{_taken(recorder)}",
    )


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise ConfigError(
            f"{', '.join(lazy[:3])} of the model get their shapes from the first batch; give the "
            "layers shapes, or run the model once on device 'meta' before it is returned"
        )


def _check_loss(loss: object, parameters: list[nn.Parameter]) -> None:
    if not any(param.requires_grad for param in parameters):
        raise ConfigError(
            "no weight of the model asks for a gradient (requires_grad), so there is no step"
        )
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ConfigError(
            f"the loss is a {type(loss).__name__}{shape}, not one number that depends on the "
            "weights; return it from the function that computes the loss"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on the weights: something detaches it, or computes it "
            "without gradients"
        )
    if any(param.grad is not None for param in parameters):
        raise ConfigError(
            "the weights have gradients before backward was called; let the function that computes "
            "the loss return it, without a call of backward()"
        )


def _weights_in(parameters: Mapping[str, torch.Tensor]) -> str:
    names = dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in parameters.values())
    return f", weights in {' and '.join(names)}"


def _taken(recorder: _Recorder) -> str:
    """Return the assumptions of the trace that may be wrong, for its origin."""
    taken = ""
    if recorder.is_cast:
        taken = (
            "; torch.autocast does nothing to shapes, so nothing was cast (for a plan in 16 bits "
            "make the model in the dtype that FUNCTION is given, or give a recorded trace)"
        )
    if recorder.assumed:
        taken += f"; bool tensors were taken as true at {', '.join(recorder.assumed)}"
    return taken


def _refuse(error: BaseException, recorder: _Recorder) -> NoReturn:
    """Raise ``ConfigError`` for a model that does not run on tensors without values."""
    if isinstance(error, ConfigError):
        raise error
    is_elsewhere = "device" in str(error)
    hint = ". Tensors made without a device are on 'meta', too" if is_elsewhere else ""
    raise ConfigError(
        f"the model, or the function of its loss, raised {raised(error)}{_taken(recorder)}. For a "
        "plan it runs on tensors that have shapes but no values (device 'meta'); if it needs "
        f"values, give a step that ssdtrain recorded instead (--trace FILE){hint}"
    ) from error


@contextmanager
def _parts(model: nn.Module, cut: Cut | None, recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder the module that runs, and the begin of each repeated layer."""
    with ExitStack() as stack:
        for where, module in model.named_modules():
            enter = functools.partial(_enter, recorder, where)
            leave = functools.partial(_leave, recorder, where.rpartition(".")[0])
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        for index, layer in enumerate(cut.layers if cut is not None else ()):
            begin = functools.partial(_begin, recorder, index)
            end = functools.partial(_end, recorder, index)
            stack.callback(layer.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(end).remove)
        yield


def _enter(recorder: _Recorder, where: str, *_: object) -> None:
    recorder.part = where


def _leave(recorder: _Recorder, outside: str, *_: object) -> None:
    recorder.part = outside


def _begin(recorder: _Recorder, index: int, _: object, args: Any, kwargs: Any) -> None:
    if recorder.phase == FORWARD:
        if recorder.layers_run and len(recorder.operations) != recorder.operations_after:
            raise NotShortenedError
        recorder.layers_run.append(index)
    recorder.segment = (FORWARD, index)
    if index == 0:
        _mark(recorder, NONE, (args, kwargs))


def _end(recorder: _Recorder, index: int, _module: object, _args: object, out: Any) -> None:
    recorder.segment = NONE
    recorder.operations_after = len(recorder.operations)
    _mark(recorder, (BACKWARD, index), out)


def _mark(recorder: _Recorder, segment: tuple[str, int], tensors: Any) -> None:
    """Let a segment begin when backward has the gradient of the first tensor that needs one."""

    def reached(_: torch.Tensor) -> None:
        recorder.segment = segment

    for leaf in tree_leaves(tensors):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(reached)  # type: ignore[no-untyped-call]
            return


def _trace(
    name: str,
    *,
    roofline: Roofline,
    operations: list[Operation],
    storages: list[Storage],
    updates: list[tuple[int, int, int]],
    accumulate: int,
    origin: str,
) -> Trace:
    if accumulate * len(operations) > KERNELS_MAX:
        raise ConfigError(
            f"{accumulate:,} micro-batches of {len(operations):,} kernels each are more than can "
            f"be planned ({KERNELS_MAX:,} kernels); all are alike, so plan a step of fewer"
        )
    again = _recompute_seconds(operations, storages)
    kinds = [storage.kind for storage in storages]
    saved = again.keys()
    tensors: list[TracedTensor] = []
    kernels: list[Kernel] = []
    phases: list[Phase] = []
    shared: dict[int, int] = {}

    def tensor(number: int, own: dict[int, int]) -> int:
        kept = shared if kinds[number] in {"weight", "gradient"} else own
        found = kept.get(number)
        if found is None:
            found = kept[number] = len(tensors)
            storage = storages[number]
            kind = kinds[number] or ("activation" if number in saved else "workspace")
            tensors.append(
                TracedTensor(
                    storage.nbytes,
                    kind=kind,
                    part=storage.part,
                    lives_across_steps=kind == "weight",
                    recompute_seconds=again.get(number),
                )
            )
        return found

    for _ in range(accumulate):
        own: dict[int, int] = {}
        phase = ""
        for operation in operations:
            if operation.phase != phase:
                phase = operation.phase
                phases.append(Phase(phase, len(kernels)))
            uses = tuple(tensor(number, own) for number in operation.uses)
            kernels.append(Kernel(operation.seconds, uses, operation.name, operation.flops))
    if updates:
        phases.append(Phase("update", len(kernels)))
    for weight, gradient, state_bytes in updates:
        needed = [tensor(weight, {}), tensor(gradient, {})]
        moved = 2 * storages[weight].nbytes + storages[gradient].nbytes + 2 * state_bytes
        if state_bytes:
            needed.append(len(tensors))
            part = storages[weight].part
            tensors.append(
                TracedTensor(
                    state_bytes, kind="optimizer_state", part=part, lives_across_steps=True
                )
            )
        seconds = roofline.seconds(0.0, moved, is_half=False)
        kernels.append(Kernel(seconds, tuple(needed), "update"))
    return Trace(name, tuple(kernels), tuple(tensors), tuple(phases), origin)


def _recompute_seconds(operations: list[Operation], storages: list[Storage]) -> dict[int, float]:
    """Return the storages of forward that backward needs, and the seconds to compute each again.

    They include the operations that made its inputs if these are not saved. An input of several
    operations counts once, for the first: all storages together take the time of the forward.
    """
    made: set[int] = set()
    needed: set[int] = set()
    for operation in operations:
        if operation.phase == FORWARD:
            made.update(operation.uses)
        else:
            needed.update(operation.uses)
    saved = {number for number in made & needed if not storages[number].kind}
    seconds: dict[int, float] = {}
    seen: set[int] = set()
    for operation in operations:
        if operation.phase != FORWARD:
            continue
        new = [number for number in operation.uses if number not in seen]
        seen.update(new)
        inputs = [number for number in operation.uses if number not in new]
        before = sum(seconds.get(number, 0.0) for number in inputs if number not in saved)
        # A storage that is changed in place is an input: its last use completes it.
        for number in inputs:
            if number not in saved:
                seconds[number] = 0.0
        made_now = new or inputs[:1]
        for number in made_now:
            again_s = (operation.seconds + before) / len(made_now)
            seconds[number] = seconds.get(number, 0.0) + again_s
    return {number: seconds.get(number, 0.0) for number in saved}
