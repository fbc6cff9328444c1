"""Whether an optimizer can be offloaded: looked up, and tried on small tensors, not assumed.

Some couple their parameters: by one norm over all of them, by a line search, by a step size that is
learned. Run over one part of the parameters after the other they would compute something else, and
no name of a class tells. So a copy of the optimizer is tried on a few small parameters, together
and one after the other, and the results must have the same bits.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.away.classes import AwayParameter
from ssdtrain.errors import ConfigError, UnsupportedError
from ssdtrain.machine.torch_internals import communications, own_shard
from ssdtrain.optimizer.chunks import CLOSURE, Chunk, own_step, run, update
from ssdtrain.optimizer.masters import MASTER
from ssdtrain.optimizer.options import kept, of_classes, owners_of_data
from ssdtrain.optimizer.same import is_same, slots_of
from ssdtrain.optimizer.settings import Settings, followed
from ssdtrain.optimizer.sharded import has_shards
from ssdtrain.optimizer.small_copy import (
    Trial,
    attributes_of,
    begun,
    gradient,
    numbers_drawn,
    params_of,
    set_numbers,
)

__all__ = [
    "Habits",
    "refuse_habits",
    "refuse_lists_of_parameters",
    "refuse_unfit",
    "take_over_step",
    "tried",
]

STEPS = 3
SCALES = {torch.float16: (1.0, 0.125, 8.0)}
"""Of the gradients of each step: what a bound on a norm does is seen above it, or below."""
ANY_SCALES = (1.0, 1e-3, 1e3)
LISTS_DEPTH = 3
LOSSES = (1.0, float("nan"), 2.0)
"""What closures return in a trial."""
ALONE = threading.RLock()
"""A second trial waits: each could take a change of the other's for one of its own."""
UNLESS = (
    "Another thread that draws random numbers during the call can cause this error: call "
    "offload_optimizer before such threads begin"
)


@dataclass
class Habits:
    """What a step does besides updating parameters and their state."""

    draws_random_numbers: bool = False
    changed_attributes: set[str] = field(default_factory=set)
    changed_in_place: set[str] = field(default_factory=set)
    """Options and attributes, in words."""
    needs_state: bool = False
    """Whether its step looks for state that its constructor makes."""
    takes_closure: bool = True
    """Whether it calls a closure once, before all else."""
    state_share: float = 0.0
    """Bytes of state for each byte of a parameter, or of its master, but for what is factored."""


def tried(optimizer: Optimizer, *, has_masters: bool) -> Habits:
    """Try steps; raise ``UnsupportedError`` for an optimizer whose update is not per parameter.

    With ``has_masters`` they are made over float32 parameters in the place of those of 16 bits. The
    optimizer itself, its class and its parameters stay as they are. The trial of a class that is
    not torch's own puts the shared generators back; call it before threads that draw random numbers
    begin.
    """
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get(CLOSURE)
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: its step needs a closure, which computes the "
            "loss of all parameters together; use an optimizer that updates each by itself, such "
            "as AdamW"
        )
    with ALONE, torch.device("cpu"):
        return _tried_alone(optimizer, has_masters=has_masters)


def _tried_alone(optimizer: Optimizer, *, has_masters: bool) -> Habits:
    kind = type(optimizer)
    data, numbers = of_classes(kind), numbers_drawn()
    inside = followed([(f"attribute {name!r}", value) for name, value in data.items()])
    habits, failed = Habits(), None
    try:
        habits = _tried(optimizer, has_masters=has_masters)
    except UnsupportedError as error:
        failed = error
    finally:
        if not _draws_nothing(kind) and not is_same(numbers, numbers_drawn()):
            set_numbers(numbers)
        changed = [one.name for one in inside if one.note()]
        for one in inside:
            one.restore()
        changed += [f"attribute {name!r}" for name in _restore_class(kind, data)]
    if changed:
        raise UnsupportedError(
            f"{kind.__name__} cannot be offloaded: its step changes the {changed[0]} of its class, "
            "which all optimizers of that class share, also the copies on which its step is tried "
            "first; give each optimizer an attribute of its own, in __init__"
        ) from failed
    if failed is not None:
        raise failed
    return habits


def _draws_nothing(kind: type[Optimizer]) -> bool:
    """Whether a step is known to draw no random numbers, whatever other threads draw meanwhile."""
    return all(one.__module__.startswith("torch.optim.") for one in (kind, own_step(kind)))


def _restore_class(kind: type, before: dict[str, Any]) -> list[str]:
    """Give classes the data that they had; return the names of what differs."""
    now, owners = of_classes(kind), owners_of_data(kind)
    changed = [one for one in now if one not in before or now[one] is not before[one]]
    for name in changed:
        if name in before:
            setattr(owners[name], name, before[name])
        else:
            delattr(owners[name], name)
    return changed


def _tried(optimizer: Optimizer, *, has_masters: bool) -> Habits:
    name, habits = type(optimizer).__name__, Habits()
    trial = Trial(optimizer, has_masters, has_state=False)
    try:
        habits.needs_state = _needs_state(trial)
        trial = replace(trial, has_state=habits.needs_state)
        sparse = _wants_sparse(trial)
        for is_seeded in (False, True):
            # Optimizers that round at random are compared where they draw the same numbers twice.
            trial = replace(trial, is_seeded=is_seeded)
            together = _trained(trial, at_once=True, sparse=sparse, habits=habits)
            apart = _trained(trial, at_once=False, sparse=sparse, habits=habits)
            if is_same(together[:3], apart[:3]) or _draws_nothing(type(optimizer)):
                break
        habits.takes_closure = _takes_closure(trial, sparse=sparse)
        if has_shards(optimizer):
            _refuse_communication(trial)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name} cannot be offloaded: {error}") from error
    except Exception as error:
        missing = [
            f" (its attribute {one!r} could not be copied for that: {why})"
            for one, why in trial.left_out.items()
            if one in str(error)
        ]
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step was tried on small tensors first, without a "
            f"closure and attributes that cannot be copied, and raised {type(error).__name__}: "
            f"{error}{''.join(missing)}. Mend that, such as a mode to switch on first, or use an "
            "optimizer whose step updates each parameter by itself, whatever its size, such as "
            "AdamW"
        ) from error
    if not is_same(together[:3], apart[:3]):
        raise UnsupportedError(
            f"{name} cannot be offloaded: it couples its parameters (updated one after the other "
            "they get other values than updated together), so all of its state is needed at once. "
            "Compute what it needs of all together before step(), as clip_grad_norm_ does, or use "
            f"an optimizer that updates each parameter by itself, such as AdamW. {UNLESS}"
        )
    _refuse_counts(name, together[3], apart[3])
    if has_masters and any(MASTER in state for state in together[1]):
        raise UnsupportedError(
            f"{name} cannot be offloaded with master_dtype: its state has a {MASTER!r} of its own, "
            "the name under which the masters are kept; use master_dtype=None"
        )
    habits.draws_random_numbers &= not _draws_nothing(type(optimizer))
    habits.state_share = max(map(_state_share, together[0], together[1]), default=0.0)
    return habits


def _takes_closure(trial: Trial, *, sparse: bool) -> bool:
    """Return whether a step with a closure is that closure and then a step without one.

    It is not where a step calls the closure twice, or goes by the loss.
    """
    if CLOSURE not in inspect.signature(own_step(type(trial.optimizer))).parameters:
        return True
    calls: list[int] = []
    try:
        given, before = (_left_with_closures(trial, calls, is_given, sparse) for is_given in (1, 0))
    except Exception:  # noqa: BLE001 - whatever it is: without a closure none was raised
        return False
    return len(calls) == 2 * len(LOSSES) and is_same(given, before)


def _left_with_closures(trial: Trial, calls: list[int], is_given: int, sparse: bool) -> list[Any]:
    """Return what steps leave that are given a closure each, or before which it is called."""
    copied = begun(trial)
    step = own_step(type(copied))
    for loss in LOSSES:
        _give_gradients(trial, copied, 0, sparse=sparse)

        def closure(loss: float = loss) -> Tensor:
            calls.append(is_given)
            _give_gradients(trial, copied, 1, sparse=sparse)
            return torch.tensor(loss)

        if not is_given:
            closure()
        run(copied, step, {CLOSURE: closure} if is_given else {})
    return _left(copied)


def _refuse_counts(name: str, together: dict[str, Any], apart: dict[str, Any]) -> None:
    """Refuse a step that leaves other attributes if it is run over a part after the other."""
    others = [
        one
        for one in together.keys() | apart.keys()
        if not (one in together and one in apart and is_same(together[one], apart[one]))
    ]
    if others:
        raise UnsupportedError(
            f"{name} cannot be offloaded: its step leaves other attributes "
            f"({', '.join(sorted(others))}) if it is run over one part of the parameters after the "
            "other; count what it does in the state of each parameter, as AdamW does"
        )


def _refuse_communication(trial: Trial) -> None:
    """Refuse a step that communicates for parameters in shards.

    Where state cannot be read, an update is left out or undone in one process alone, and what the
    others wait for would be another parameter's.
    """
    of_shards = replace(trial, in_shards=True)
    count = communications(lambda: _trained(of_shards, at_once=True, sparse=False))
    if count:
        raise UnsupportedError(
            "its parameters are in shards (DTensor), and its update communicates between "
            f"processes ({count} times in {STEPS} small steps): a process that could not read its "
            "state would put the others out of step; use an optimizer that updates each shard by "
            "itself, such as AdamW"
        )


def _state_share(param: Tensor, state: dict[Any, Any]) -> float:
    alike = [one for one in state.values() if isinstance(one, Tensor) and one.shape == param.shape]
    return sum(one.nbytes for one in alike) / max(1, param.nbytes)


def refuse_habits(name: str, habits: Habits) -> None:
    """Refuse an optimizer whose updates would have other bits in a backward."""
    if habits.draws_random_numbers:
        raise UnsupportedError(
            f'{name} cannot be offloaded with overlap="backward": its step draws random numbers, '
            f'which would come in another order in a backward; use overlap="step". {UNLESS}'
        )
    if habits.changed_in_place:
        raise UnsupportedError(
            f'{name} cannot be offloaded with overlap="backward": its step changes its '
            f"{', '.join(sorted(habits.changed_in_place))} in place, which would be seen too late; "
            'use overlap="step"'
        )
    if habits.changed_attributes:
        raise UnsupportedError(
            f'{name} cannot be offloaded with overlap="backward": its step changes its attributes '
            f"({', '.join(sorted(habits.changed_attributes))}), which would be seen too late; use "
            'overlap="step"'
        )


def refuse_lists_of_parameters(optimizer: Optimizer, option: str, instead: str) -> None:
    """Refuse an optimizer that knows its parameters by identity: updates are made on others."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, value in attributes_of(optimizer).items():
        if _has_one_of(params, value, LISTS_DEPTH):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot be offloaded with {option}: its attribute "
                f"{name!r} has parameters or their ids, and updates are then made on copies of "
                f"them; use {instead}"
            )


def _has_one_of(params: set[int], value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in params
    if type(value) is int:
        return value in params
    if depth and isinstance(value, dict):
        return any(_has_one_of(params, one, depth - 1) for pair in value.items() for one in pair)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return any(_has_one_of(params, one, depth - 1) for one in value)
    return False


def _needs_state(trial: Trial) -> bool:
    """Return whether its step looks for state that its constructor makes, as Adagrad's may."""
    if not trial.optimizer.state:
        return False
    try:
        _trained(trial, at_once=True, sparse=False)
    except LookupError:
        return True
    except Exception:  # noqa: BLE001 - the next try meets it again, and tells
        return False
    return False


def _wants_sparse(trial: Trial) -> bool:
    """Return whether its step takes sparse gradients only."""
    try:
        _trained(trial, at_once=True, sparse=False)
    except RuntimeError as error:
        if "sparse" in str(error).lower():
            return True
        raise
    return False


def _trained(
    trial: Trial,
    *,
    at_once: bool,
    sparse: bool,
    habits: Habits | None = None,
) -> list[Any]:
    """Return all that a copy of the optimizer ends with after some steps on small parameters."""
    copied = begun(trial)
    for number in range(STEPS):
        _give_gradients(trial, copied, number, sparse=sparse)
        # In the first step much is made that stays as it is then.
        noting = habits if at_once and number else None
        before = None if noting is None else _surroundings(copied)
        in_place = _make_step(copied, at_once=at_once)
        if habits is not None:
            habits.changed_in_place |= in_place
        if noting is not None and before is not None:
            _note(noting, before, _surroundings(copied))
    return _left(copied)


def _left(copied: Optimizer) -> list[Any]:
    """Return parameters, their state, options, and attributes."""
    params = params_of(copied)
    places = {id(param): place for place, param in enumerate(params)}
    left = {name: _by_place(value, places) for name, value in attributes_of(copied).items()}
    for key, value in copied.state.items():
        if not isinstance(key, Tensor):
            left[f"state[{key!r}]"] = _by_place(value, places)
    return [params, [dict(copied.state[param]) for param in params], _options_of(copied), left]


def _give_gradients(trial: Trial, copied: Optimizer, number: int, *, sparse: bool) -> None:
    for param in params_of(copied):
        grad = gradient(param, trial.generator) * SCALES.get(param.dtype, ANY_SCALES)[number]
        param.grad = grad.to_sparse() if sparse else grad


def _make_step(copied: Optimizer, *, at_once: bool) -> set[str]:
    """Run a step over all parameters, or over one after the other.

    Returns what the latter changes in place besides parameters and state.
    """
    step = own_step(type(copied))
    if at_once:
        run(copied, step, {})
        return set()
    settings = Settings()
    for group in copied.param_groups:
        for part in [[param] for param in group["params"]] or [[]]:
            update(copied, step, Chunk(group, part), settings, {})
    settings.apply(copied)
    return settings.in_place


def _by_place(value: Any, places: dict[int, int]) -> Any:
    """Return a value with the places of parameters instead of these, to be compared."""
    if isinstance(value, Tensor) and id(value) in places:
        return "parameter", places[id(value)]
    if isinstance(value, list | tuple):
        return [_by_place(one, places) for one in value]
    if isinstance(value, dict):
        return [[_by_place(one, places) for one in pair] for pair in value.items()]
    return value


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _surroundings(optimizer: Optimizer) -> tuple[Any, Any, dict[str, Any]]:
    """Return copies of what a step might change besides parameters and their state."""
    own = set(map(id, params_of(optimizer)))
    return (
        numbers_drawn(),
        kept(_options_of(optimizer), own),
        kept(attributes_of(optimizer), own),
    )


def _note(habits: Habits, before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> None:
    habits.draws_random_numbers |= not is_same(before[0], after[0])
    habits.changed_attributes |= {
        name
        for name in before[2].keys() | after[2].keys()
        if not (name in before[2] and name in after[2] and is_same(before[2][name], after[2][name]))
    }


def refuse_unfit(optimizer: object) -> None:
    """Refuse what is no optimizer, and parameters whose state cannot be offloaded."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"offload_optimizer takes a torch.optim.Optimizer, not {type(optimizer)!r}: "
            "offload_optimizer(torch.optim.AdamW(model.parameters()), dir)"
        )
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise ConfigError(
            f"this {name} has no state of its own: it stands before another optimizer, as what "
            "Accelerate's prepare() returns. Give that one to offload_optimizer (it is mostly its "
            "attribute `optimizer`), or call offload_optimizer before prepare()"
        )
    slots = slots_of(type(optimizer))
    if slots:
        raise UnsupportedError(
            f"{name} cannot be offloaded: it has attributes in __slots__ ({', '.join(slots)}), of "
            "which nobody could tell whether a step changes them; make them usual ones"
        )
    inner = [one for one, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise UnsupportedError(
            f"{name} cannot be offloaded: it stands before another optimizer (its attribute "
            f"{inner[0]!r}); give that one to offload_optimizer"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UnsupportedError(
                f"{name}(differentiable=True) cannot be offloaded: autograd would need each state"
            )
        for param in group["params"]:
            if param.is_meta:
                raise UnsupportedError(
                    f"{name} cannot be offloaded: it has a parameter without bytes, on the meta "
                    "device. Make the optimizer after ssdtrain.offload_parameters(model, dir) or "
                    "model.to_empty(device='cpu'), which give the model its parameters"
                )
            own = own_shard(param)
            if not own.is_cpu or type(own) not in (Tensor, Parameter, AwayParameter):
                raise UnsupportedError(
                    f"{name} cannot be offloaded: it has a parameter that is a "
                    f"{type(param).__name__} on {param.device}, and only the state of plain "
                    "tensors on the CPU, whole or in shards, can be offloaded so far; leave this "
                    "optimizer as it is"
                )


def take_over_step(optimizer: Optimizer) -> None:
    """Take away what a scheduler put on ``step``; refuse what others did."""
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return
    if not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"the step of this {type(optimizer).__name__} was replaced by other code, which would "
            "go past the state on the disk; call offload_optimizer before that"
        )
    # Ours tells the scheduler by itself that a step was made.
    del optimizer.step
