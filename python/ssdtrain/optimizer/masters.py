"""Float32 masters of parameters of 16 bits: the step over them, and what of them is stored.

A master lies in the state of its parameter, under ``MASTER``. The optimizer's own step never finds
it there: it runs over leaves on the memory of the masters, in the place of the parameters. Where it
leaves memory, only that goes to the disk which the bfloat16 weight does not say already. The idea
is that of mixed precision with masters (arXiv 1710.03740), kept as in ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain._core import MasterCode
from ssdtrain.away.classes import is_away
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import copy_each, plainly
from ssdtrain.optimizer.chunks import Chunk, name_of, update
from ssdtrain.optimizer.contract import Rebound
from ssdtrain.optimizer.disk import Away, Disk
from ssdtrain.optimizer.shared_memory import sharing_memory
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
    "refuse_shared_memory",
    "say_if_there_are_none",
    "wants_master",
    "without_master",
]

MASTER = "master_weight"
"""The key of a master in the state of its parameter."""
KINDS = (torch.bfloat16, torch.float16)
LOAD_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""What torch calls these."""
WORKING_BYTES = 6
"""Of each number that is updated, beside its state as it is stored: the whole master takes two more
than what is stored of it, and the gradient in float32 four."""


def wants_master(param: Tensor) -> bool:
    """Whether a parameter has a float32 master: those of 16 bits."""
    return param.dtype in KINDS


class MasterAway(Away):
    """Stands in a state for a master: what the weight does not say, in memory or on the disk."""

    __slots__ = ("_code", "_weight")

    def __init__(
        self, disk: Disk, code: MasterCode, payload: Tensor, weight: Tensor, master: Tensor
    ) -> None:
        super().__init__(disk, None, payload)
        self._form = _form_of(master)
        self._code = code
        self._weight = weight

    def unsent(self) -> Tensor | None:
        """Return what is to be written, if it is in memory only."""
        return self.source if self.stored is None else None

    def settled(self) -> Away:
        """Wait for the write. Nobody changes what is in memory, so this may be put back."""
        self.end_write()
        return self

    def tensor(self) -> Tensor:
        """Wait for the master and return it; that of a weight that was changed is the weight."""
        return self._unpacked(super().tensor())

    def begin_look(self) -> Callable[[], Tensor]:
        """Begin to bring the bytes into memory, and return what waits for them."""
        payload = super().begin_look()
        return lambda: self._unpacked(payload())

    def copy(self) -> Tensor:
        """Return the master as a tensor of its own; what is stored stays where it is."""
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
        _say_changed(self._disk)
        return _begun_anew(weight)


@dataclass(eq=False)
class Leaf:
    """What the optimizer's own step gets in the place of a parameter."""

    param: Tensor
    tensor: Tensor
    """A leaf: on the memory of the master, or a copy of a parameter that has none."""
    master: Tensor | None
    """Also what somebody holds who has looked at it, and sees it change."""
    inner: Any = None
    """What the optimizer's own step is given as the state."""
    is_put: bool = False
    """Whether master and state are those of the parameter already."""

    def rounded(self) -> Tensor:
        """Return the parameter as it is after the update."""
        return self.tensor.detach().to(self.param.dtype)

    def updated_master(self) -> Tensor:
        """Return the master as the update has left it."""
        assert self.master is not None, "it is a copy"
        # An optimizer may give its parameter other memory (`p.data = ...`).
        is_same = self.tensor.data_ptr() == self.master.data_ptr()
        return self.master if is_same else self.tensor.detach()

    def let_go(self) -> None:
        """Hold the master no more."""
        for name in ("tensor", "master", "inner"):
            vars(self).pop(name, None)


class Masters:
    """The masters of an optimizer's parameters. Used by the thread that updates."""

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
        staying: set[int],
    ) -> None:
        """Run the optimizer's own step over a chunk, over masters where there are some."""
        leaf: Leaf | None
        leaves: list[Leaf] = []
        params: list[Tensor] = []
        unknown = [param for param in chunk.params if param not in states]
        try:
            self._begin_all(chunk, states, leaves, params)
            update(on, step, Chunk(chunk.group, params, chunk.params), rebound, options)
            params.clear()
            for leaf in leaves:
                # From here on only what the step has left counts.
                leaf.inner = None
            leaf = None
            self._end_all(leaves, states, staying)
        except BaseException:
            # Also of an interrupt, which may have come anywhere above.
            params.clear()
            self._end_in_any_case(leaves, states, staying)
            raise
        finally:
            # Those without masters have a state already: all come in their order.
            states.put_last(unknown)

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

        A master stands as long as its rounding is the parameter. Whoever has changed the parameter
        since has given it another master: itself.
        """
        master = None
        if isinstance(state, dict):
            # An interrupt may have come before `adopt`.
            _widen(state)
            master = state.get(MASTER)
        if not _is_rounded_to(master, param.detach()):
            if master is not None:
                _say_changed(self._disk)
            master = _begun_anew(param.detach())
        assert isinstance(master, Tensor)
        if isinstance(param, Parameter):
            leaf: Tensor = Parameter(master, requires_grad=param.requires_grad)
        else:
            leaf = master.detach().requires_grad_(param.requires_grad)
        vars(leaf).update({name: value for name, value in vars(param).items() if name != HOLDER})
        leaf.grad = gradient.detach().float()
        inner = without_master(state) if isinstance(state, dict) else None
        # A state that has a master only is one that the optimizer itself has not made yet.
        return Leaf(param, leaf, master, inner if inner or MASTER not in (state or {}) else None)

    def end(self, leaf: Leaf, states: Any, inner: Any, weight: Tensor, *, stays: bool) -> None:
        """Put a master, and what the optimizer keeps besides, into the state of the parameter.

        ``weight`` has the bits of the parameter after the update.
        """
        self._put(leaf, states, inner or {})
        del inner
        leaf.let_go()
        if not stays:
            self.fold(states[leaf.param], leaf.param, weight)

    def _put(self, leaf: Leaf, states: Any, inner: Any) -> None:
        """Put it into the state. After an interrupt it may be called again."""
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
        """Keep of a master only what its weight does not say, if it may leave memory."""
        if type(state) is not ParameterState or not state.may_leave(MASTER, self._disk):
            return
        packed = _packed(dict.__getitem__(state, MASTER), weight.detach())
        if packed is not None:
            code, payload = packed
            master = dict.__getitem__(state, MASTER)
            state[MASTER] = MasterAway(self._disk, code, payload, param, master)

    def adopt(self, state: Any, param: object) -> None:
        """Take over a state from before, or one that was loaded: all of it is float32 from now on.

        That is what torch makes of it where it is loaded for float32 parameters.
        """
        if isinstance(param, Tensor) and isinstance(state, dict) and wants_master(param):
            _widen(state)
            self.fold(state, param, param)

    def _end_all(self, leaves: list[Leaf], states: Any, staying: set[int]) -> None:
        """End what is left of some leaves. After an interrupt it may be called again."""
        # First, and at once: an interrupt leaves no weight behind its master.
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
                # Without an entry the step was not begun, or has left none.
                self._put(leaf, states, states.get(leaf.tensor, leaf.inner) or {})
            states.pop(vars(leaf).get("tensor"), None)
            leaf.let_go()
            if id(leaf.param) not in staying:
                self.fold(states[leaf.param], leaf.param, leaf.param)
            leaves.pop()

    def _end_in_any_case(self, leaves: list[Leaf], states: Any, staying: set[int]) -> None:
        while leaves:
            try:
                self._end_all(leaves, states, staying)
            except KeyboardInterrupt:
                # One is raised already when all is whole; whoever is impatient sends more.
                continue
            except BaseException:
                for leaf in leaves:
                    # One that was put into the state of its parameter is in no dict any more.
                    states.pop(vars(leaf).get("tensor"), None)
                raise


def _widen(state: dict[Any, Any]) -> None:
    for key, value in list(dict.items(state)):
        is_number = type(value) is Tensor and value.is_floating_point()
        if is_number and key != "step" and value.dtype is not torch.float32:
            state[key] = value.float()


def drop_stale(state: Any, param: Tensor) -> None:
    """Drop the master of a parameter that was made float32 itself."""
    if isinstance(state, dict) and not wants_master(param):
        dict.pop(state, MASTER, None)


def without_master(state: Any) -> ParameterState:
    """Return the state of a parameter as its optimizer knows it, with the same tensors."""
    return ParameterState((key, value) for key, value in state.items() if key != MASTER)


def load_as_masters(
    optimizer: Optimizer, load: Callable[[dict[str, Any]], object], state_dict: dict[str, Any]
) -> None:
    """Let torch load a state as that of float32 parameters: it casts it to the dtype of these.

    Whatever goes wrong, an interrupt too, leaves the state and the groups of before. Hooks see the
    optimizer with its own parameters, before and after.
    """
    attributes, back = vars(optimizer), dict[Tensor, Tensor]()
    before_load, after_load = (attributes[name] for name in LOAD_HOOKS)
    state_dict = state_dict.copy()
    for hook in before_load.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    groups, states = attributes["param_groups"], attributes["state"]
    stand_ins = [[_stand_in(param, back) for param in group["params"]] for group in groups]
    no_hooks = {name: OrderedDict[int, Any]() for name in LOAD_HOOKS}
    as_before = dict(zip(LOAD_HOOKS, (before_load, after_load), strict=True))
    as_before |= {"param_groups": groups, "state": states}
    try:
        attributes.update(no_hooks, param_groups=_with_params(groups, stand_ins))
        load(state_dict)
        originals = [group["params"] for group in groups]
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        for key, state in attributes["state"].items():
            loaded[back.get(key, key) if isinstance(key, Tensor) else key] = state
        loaded_groups = _with_params(attributes["param_groups"], originals)
        as_before |= {"param_groups": loaded_groups, "state": loaded}
    finally:
        # One call, so that an interrupt comes before all of it or after.
        attributes.update(as_before)
    for hook in after_load.values():
        hook(optimizer)


def _with_params(groups: list[dict[str, Any]], params: list[list[Tensor]]) -> list[dict[str, Any]]:
    return [{**group, "params": own} for group, own in zip(groups, params, strict=True)]


def _stand_in(param: Tensor, back: dict[Tensor, Tensor]) -> Tensor:
    if not wants_master(param):
        return param
    # The shape of the parameter, and the memory of one number.
    made = torch.empty((), dtype=torch.float32, device=param.device).expand(param.shape)
    back[made] = param
    return made


def refuse_cast_masters(optimizer: Optimizer) -> None:
    """Refuse a state whose masters torch has rounded: it was loaded before there could be some."""
    for param, state in optimizer.state.items():
        master = state.get(MASTER) if isinstance(state, dict) else None
        if isinstance(master, Tensor) and master.dtype is not torch.float32:
            raise ConfigError(
                f"the state of {name_of(optimizer.param_groups, param)} has a master that was "
                f"rounded to {master.dtype}, as torch does where a state is loaded for such a "
                "parameter; call offload_optimizer(..., master_dtype=torch.float32) first, then "
                "optimizer.load_state_dict"
            )


def refuse_shared_memory(groups: list[dict[str, Any]]) -> None:
    """Refuse parameters that lie upon each other: each would have a master of its own."""
    params = [
        param
        for group in groups
        for param in group["params"]
        # Of one with holes, another may lie in these. One that is away lies alone.
        if wants_master(param) and is_dense(param) and not is_away(param)
    ]
    if sharing_memory(params, own_elements=True):
        raise UnsupportedError(
            "two parameters of this optimizer lie in the same memory, and with master_dtype "
            "each would have a master of its own, of which only the last one counted; use the "
            "same Parameter in both places"
        )


def _form_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _begun_anew(weight: Tensor) -> Tensor:
    with plainly():
        return weight.to(torch.float32, copy=True)


def _lie_alike(master: Tensor, weight: Tensor) -> bool:
    """Whether the elements lie in the same order, one after the other, so that it can be packed."""
    return (
        weight.dtype is torch.bfloat16
        and weight.is_cpu
        and weight.numel() > 0
        and (weight.shape, weight.stride()) == (master.shape, master.stride())
        and is_dense(weight)
    )


def _is_rounded_to(master: object, weight: Tensor) -> bool:
    """Whether a weight is its master, rounded; any NaN is the rounding of any other."""
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
    """Return what a weight does not say of its master, or ``None`` if that is all of it."""
    if master.dtype is not torch.float32 or not _lie_alike(master, weight):
        return None
    # A default device, as users may set, is not where the bytes are.
    payload = torch.empty(
        MasterCode.payload_len_max(master.numel()), dtype=torch.int16, device="cpu"
    )
    code = MasterCode.pack(weight.data_ptr(), master.data_ptr(), payload.data_ptr(), master.numel())
    return None if code is None else (code, payload[: code.payload_len])


def say_if_there_are_none(disk: Disk, groups: list[dict[str, Any]], *, wanted: bool) -> None:
    """Tell whoever wanted masters if no parameter has one."""
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if wanted and dtypes.isdisjoint(KINDS):
        disk.notices.say(
            "no masters",
            "master_dtype=torch.float32 changes nothing: no parameter of the optimizer is "
            "bfloat16 or float16, so none has a float32 master. Cast the model before its "
            "optimizer is made (model.bfloat16()), or leave the option out",
        )


def _say_changed(disk: Disk) -> None:
    disk.notices.say(
        "changed weight",
        "a weight was changed by other code than its optimizer since the last step "
        "(load_state_dict of the model, a copy into it, a clamp): its float32 master begins anew "
        "from the weight. That is meant for loading; code that changes weights in every step takes "
        "the bits below bfloat16 from all numbers of the parameter each time",
        level=logging.WARNING,
    )
