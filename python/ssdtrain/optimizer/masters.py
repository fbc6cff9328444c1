"""Float32 masters of 16-bit parameters (arXiv 1710.03740): the step over them, and their storage.

A master is the entry ``MASTER`` of its parameter's state. The optimizer's own step runs over leaves
on the memory of masters, in the place of parameters. On the disk lie only the bits of a master that
the bfloat16 weight does not have.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain._core import MasterCode
from ssdtrain.errors import ConfigError
from ssdtrain.machine.torch_internals import copy_each, plainly
from ssdtrain.optimizer.chunks import Chunk, is_sparse, name_of, update
from ssdtrain.optimizer.contract import Rebound
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.state import ParameterState
from ssdtrain.store import is_dense
from ssdtrain.watched import HOLDER

__all__ = [
    "MASTER",
    "WORKING_BYTES",
    "Leaf",
    "Masters",
    "drop_stale",
    "load_as_masters",
    "refuse_cast_masters",
    "wants_master",
    "warn_without_masters",
    "without_master",
]

MASTER = "master_weight"
"""The key of a master in the state of its parameter."""
KINDS = (torch.bfloat16, torch.float16)
WORKING_BYTES = 6
"""Memory of each number beside its stored state: two bytes more for the whole master, and four for
the gradient in float32."""


def wants_master(param: Tensor) -> bool:
    """Return whether a parameter is bfloat16 or float16, so that it has a float32 master."""
    return param.dtype in KINDS


class MasterAway(Away):
    """Stands in a state for a master: the bits that the weight does not have."""

    __slots__ = ("_code", "_weight")

    def __init__(
        self, disk: Disk, code: MasterCode, payload: Tensor, weight: Tensor, master: Tensor
    ) -> None:
        super().__init__(disk, None, payload)
        self._form = _form_of(master)
        self._code = code
        self._weight = weight

    def unsent(self) -> Tensor | None:
        """Return the bits, if they were never written."""
        return self.source if self.stored is None else None

    def settled(self) -> Away:
        """Wait for the write. Nobody changes the bits in memory, so this entry is kept."""
        self.end_write()
        return self

    def tensor(self) -> Tensor:
        """Return the master; if other code has changed the weight, the master is the weight."""
        return self._unpacked(super().tensor())

    def begin_look(self) -> Callable[[], Tensor]:
        """Begin to read, and return a function that waits for the master."""
        payload = super().begin_look()
        return lambda: self._unpacked(payload())

    def copy(self) -> Tensor:
        """Return a copy of the master; the bits on the disk stay there."""
        source = self.source
        return self._unpacked(super().copy() if source is None else source)

    def _unpacked(self, payload: Tensor) -> Tensor:
        weight = self._weight.detach()
        with plainly():
            master = torch.empty_strided(
                self._form.shape, self._form.stride(), dtype=torch.float32, device="cpu"
            )
        if _lie_alike(master, weight) and self._code.unpack(
            weight.data_ptr(), payload.data_ptr(), master.data_ptr()
        ):
            return master
        _warn_of_change(self._disk)
        return _widened(weight)


@dataclass(eq=False)
class Leaf:
    """The tensor that the optimizer's own step updates in the place of a parameter."""

    param: Tensor
    tensor: Tensor
    """On the memory of the master, or a copy of a parameter that has none."""
    master: Tensor | None
    """Code that has looked at the master holds this tensor, and sees the update."""
    inner: Any = None
    """The state that the optimizer's own step gets."""
    is_put: bool = False
    """True once master and state are in the state of the parameter."""

    def rounded(self) -> Tensor:
        """Return the updated parameter, in its own dtype."""
        return self.tensor.detach().to(self.param.dtype)

    def updated_master(self) -> Tensor:
        """Return the updated master."""
        assert self.master is not None, "it is a copy"
        # An optimizer may give its parameter other memory (`p.data = ...`).
        is_same = self.tensor.data_ptr() == self.master.data_ptr()
        return self.master if is_same else self.tensor.detach()

    def let_go(self) -> None:
        """Drop the references to the master."""
        for name in ("tensor", "master", "inner"):
            vars(self).pop(name, None)


class Masters:
    """The masters of an optimizer's parameters."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def update(
        self,
        on: Optimizer,
        step: Callable[..., Any],
        chunk: Chunk,
        rebound: Rebound,
        options: dict[str, Any],
        *,
        states: Any,
    ) -> None:
        """Run the optimizer's own step over the masters and other parameters of a chunk."""
        leaf: Leaf | None
        leaves: list[Leaf] = []
        params: list[Tensor] = []
        try:
            self._begin_all(chunk, states, leaves, params)
            update(on, step, Chunk(chunk.group, params, chunk.params), rebound, options)
            params.clear()
            for leaf in leaves:
                # From here on the entries that the step has left count.
                leaf.inner = None
            leaf = None
            self._end_all(leaves, states)
        except BaseException:
            # An interrupt may come anywhere above.
            params.clear()
            self._end_in_any_case(leaves, states)
            raise

    def _begin_all(
        self, chunk: Chunk, states: Any, leaves: list[Leaf], params: list[Tensor]
    ) -> None:
        for param in chunk.params:
            state = states.get(param)
            if param.grad is None or not wants_master(param):
                drop_stale(state, param)
                params.append(param)
                continue
            leaf = self.begin(param, state, param.grad)
            leaves.append(leaf)
            params.append(leaf.tensor)
            if leaf.inner is not None:
                states[leaf.tensor] = leaf.inner

    def begin(self, param: Tensor, state: Any, gradient: Tensor) -> Leaf:
        """Return a leaf with the master of a parameter, and with its gradient in float32.

        If the master, rounded, is not the parameter, other code has changed the parameter, which
        then is its own master.
        """
        master = None
        if isinstance(state, dict):
            # An interrupt may have come before `adopt`.
            _widen(state)
            master = state.get(MASTER)
        if not _is_rounded_to(master, param.detach()):
            if master is not None:
                _warn_of_change(self._disk)
            master = _widened(param.detach())
        assert isinstance(master, Tensor)
        if isinstance(param, Parameter):
            leaf: Tensor = Parameter(master, requires_grad=param.requires_grad)
        else:
            leaf = master.detach().requires_grad_(param.requires_grad)
        vars(leaf).update({name: value for name, value in vars(param).items() if name != HOLDER})
        leaf.grad = gradient.detach().float()
        inner = without_master(state) if isinstance(state, dict) else None
        # The optimizer has not made its state yet if a master is all there is.
        return Leaf(param, leaf, master, inner if inner or MASTER not in (state or {}) else None)

    def end(self, leaf: Leaf, states: Any, inner: Any, weight: Tensor) -> None:
        """Put a master, and the entries that the step has left, into the state of the parameter.

        ``weight`` has the bits of the parameter after the update.
        """
        self._put(leaf, states, inner or {})
        del inner
        leaf.let_go()
        self.fold(states[leaf.param], leaf.param, weight)

    def _put(self, leaf: Leaf, states: Any, inner: Any) -> None:
        """Put a master and ``inner`` into the state. An interrupted call may be repeated."""
        state = states.get(leaf.param)
        if not isinstance(state, ParameterState):
            state = ParameterState(state or {})
        for key, value in inner.items():
            state[key] = value
        for key in [key for key in dict.keys(state) if key not in inner and key != MASTER]:
            dict.pop(state, key)
        state[MASTER] = leaf.updated_master()
        states[leaf.param] = state
        leaf.is_put = True

    def fold(self, state: Any, param: Tensor, weight: Tensor) -> None:
        """Keep only the bits of a master that its weight does not have, if it may leave memory."""
        if type(state) is not ParameterState or not state.may_leave(MASTER, self._disk):
            return
        packed = _packed(dict.__getitem__(state, MASTER), weight.detach())
        if packed is not None:
            code, payload = packed
            master = dict.__getitem__(state, MASTER)
            state[MASTER] = MasterAway(self._disk, code, payload, param, master)

    def adopt(self, state: Any, param: object) -> None:
        """Make an older or loaded state float32, as torch does for float32 parameters."""
        if isinstance(param, Tensor) and isinstance(state, dict) and wants_master(param):
            _widen(state)
            self.fold(state, param, param)

    def _end_all(self, leaves: list[Leaf], states: Any) -> None:
        """Put all leaves into weights and states. An interrupted call may be repeated."""
        # By one call, and first: an interrupt leaves no weight behind its master.
        left = [leaf for leaf in leaves if not leaf.is_put]
        if left:
            # Detached and not in no_grad(), which an interrupt at its end would leave on.
            copy_each(
                [leaf.param.detach() for leaf in left], [leaf.tensor.detach() for leaf in left]
            )
        del left
        while leaves:
            leaf = leaves[-1]
            if not leaf.is_put:
                # No entry: the step has not begun, or has left none.
                self._put(leaf, states, states.get(leaf.tensor, leaf.inner) or {})
            states.pop(vars(leaf).get("tensor"), None)
            leaf.let_go()
            if not is_sparse(leaf.param.grad):
                self.fold(states[leaf.param], leaf.param, leaf.param)
            leaves.pop()

    def _end_in_any_case(self, leaves: list[Leaf], states: Any) -> None:
        while leaves:
            try:
                self._end_all(leaves, states)
            except KeyboardInterrupt:
                # The caller raises the first interrupt once all is whole.
                continue
            except BaseException:
                for leaf in leaves:
                    # A leaf in the state of its parameter has no "tensor" any more.
                    states.pop(vars(leaf).get("tensor"), None)
                raise


def _widen(state: dict[Any, Any]) -> None:
    for key, value in list(dict.items(state)):
        is_number = type(value) is Tensor and value.is_floating_point()
        if is_number and key != "step" and value.dtype is not torch.float32:
            state[key] = value.float()


def drop_stale(state: Any, param: Tensor) -> None:
    """Drop the master of a parameter that is float32 now."""
    if isinstance(state, dict) and not wants_master(param):
        dict.pop(state, MASTER, None)


def without_master(state: Any) -> ParameterState:
    """Return a state without its master, with the same tensors."""
    return ParameterState((key, value) for key, value in state.items() if key != MASTER)


def load_as_masters(
    optimizer: Optimizer, load: Callable[[dict[str, Any]], object], state_dict: dict[str, Any]
) -> None:
    """Let torch load a state as that of float32 parameters: it casts it to the dtype of these.

    After an error or an interrupt the optimizer has the state and the groups of before.
    """
    attributes, back = vars(optimizer), dict[Tensor, Tensor]()
    groups = attributes["param_groups"]
    after = {"param_groups": groups, "state": attributes["state"]}
    try:
        attributes["param_groups"] = [
            {**group, "params": [_stand_in(param, back) for param in group["params"]]}
            for group in groups
        ]
        load(state_dict)
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        for key, state in attributes["state"].items():
            loaded[back.get(key, key) if isinstance(key, Tensor) else key] = state
        loaded_groups = [
            {**new, "params": old["params"]}
            for new, old in zip(attributes["param_groups"], groups, strict=True)
        ]
        after = {"param_groups": loaded_groups, "state": loaded}
    finally:
        # One call, so that an interrupt comes before all of it or after.
        attributes.update(after)


def _stand_in(param: Tensor, back: dict[Tensor, Tensor]) -> Tensor:
    if not wants_master(param):
        return param
    # All elements are one number in memory.
    made = torch.empty((), dtype=torch.float32, device=param.device).expand(param.shape)
    back[made] = param
    return made


def refuse_cast_masters(optimizer: Optimizer) -> None:
    """Refuse masters that torch has rounded, as it loads a state for 16-bit parameters."""
    for param, state in optimizer.state.items():
        master = state.get(MASTER) if isinstance(state, dict) else None
        if isinstance(master, Tensor) and master.dtype is not torch.float32:
            raise ConfigError(
                f"the state of {name_of(optimizer.param_groups, param)} has a master that was "
                f"rounded to {master.dtype}, as torch does where a state is loaded for such a "
                "parameter; call offload_optimizer(..., master_dtype=torch.float32) first, then "
                "optimizer.load_state_dict"
            )


def _form_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _widened(weight: Tensor) -> Tensor:
    with plainly():
        return weight.to(torch.float32, copy=True)


def _lie_alike(master: Tensor, weight: Tensor) -> bool:
    """Return whether both are dense and have the same strides, so that a master can be packed."""
    return (
        weight.dtype is torch.bfloat16
        and weight.is_cpu
        and weight.numel() > 0
        and (weight.shape, weight.stride()) == (master.shape, master.stride())
        and is_dense(weight)
    )


def _is_rounded_to(master: object, weight: Tensor) -> bool:
    """Return whether a weight is its master, rounded; all NaNs count as equal."""
    if not isinstance(master, Tensor) or master.dtype is not torch.float32:
        return False
    if not wants_master(weight) or master.shape != weight.shape:
        return False
    master = master.detach()
    if _lie_alike(master, weight):
        return MasterCode.is_rounded(weight.data_ptr(), master.data_ptr(), weight.numel())
    rounded = master.to(weight.dtype)
    is_same = rounded.view(torch.int16) == weight.view(torch.int16)
    return bool((is_same | (rounded.isnan() & weight.isnan())).all())


def _packed(master: Tensor, weight: Tensor) -> tuple[MasterCode, Tensor] | None:
    """Return the bits of a master that its weight does not have; ``None`` if they do not pack."""
    if master.dtype is not torch.float32 or not _lie_alike(master, weight):
        return None
    # Not on a default device of the user.
    payload = torch.empty(
        MasterCode.payload_len_max(master.numel()), dtype=torch.int16, device="cpu"
    )
    code = MasterCode.pack(weight.data_ptr(), master.data_ptr(), payload.data_ptr(), master.numel())
    return None if code is None else (code, payload[: code.payload_len])


def warn_without_masters(disk: Disk, groups: list[dict[str, Any]], *, wanted: bool) -> None:
    """Log a warning if masters are wanted, and no parameter has one."""
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if wanted and dtypes.isdisjoint(KINDS):
        disk.notices.say(
            "no masters",
            "master_dtype=torch.float32 changes nothing: no parameter of the optimizer is "
            "bfloat16 or float16, so none has a float32 master. Cast the model before its "
            "optimizer is made (model.bfloat16()), or leave the option out",
        )


def _warn_of_change(disk: Disk) -> None:
    disk.notices.say(
        "changed weight",
        "a weight was changed by other code than its optimizer since the last step "
        "(load_state_dict of the model, a copy into it, a clamp): its float32 master begins anew "
        "from the weight. That is meant for loading; code that changes weights in every step takes "
        "the bits below bfloat16 from all numbers of the parameter each time",
        level=logging.WARNING,
    )
