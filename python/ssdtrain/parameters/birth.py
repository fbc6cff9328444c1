"""Modules that were built on ``torch.device("meta")`` get their weights, one module at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ssdtrain.errors import ConfigError
from ssdtrain.notices import PROCESS
from ssdtrain.parameters.first_values import (
    as_when_built,
    built_again,
    initializer_of,
    is_pretrained,
    is_unset,
    make_unset,
    reset_of,
    written_count,
)

__all__ = ["Birth", "birth_of"]

INITIALIZED = "_is_hf_initialized"
"""Marks modules and tensors that Transformers is to leave as they are."""

Values = dict[str, Any]
"""The parameters of a module, or its buffers."""
Place = tuple[int, str]
"""The number of such values, and a key in them."""


# An interrupt is lost in a generator that is given up halfway: what asks for the first of some has
# a list of them.


def birth_of(model: nn.Module) -> Birth | None:
    """Return what gives a model its weights, or ``None`` if all of it has bytes.

    Raises:
        ConfigError: A module without bytes that nothing can give first values, or an optimizer that
            was made for them.

    """
    if not [module for module in model.modules() if _without_bytes(module)]:
        return None
    _refuse_unborn(model)
    _refuse_optimizers(model)
    return Birth(model)


def _refuse_unborn(model: nn.Module) -> None:
    initialized = {
        id(inner)
        for module in model.modules()
        if is_pretrained(module) or initializer_of(module) is not None
        for inner in module.modules()
    }
    for name, module in model.named_modules():
        shown = f"the module {name or 'itself'} ({type(module).__name__})"
        own = [*module._parameters.items(), *module._buffers.items()]  # noqa: SLF001 - as below
        without = [key for key, tensor in own if tensor is not None and tensor.is_meta]
        if without and reset_of(module) is None and id(module) not in initialized:
            raise ConfigError(
                f"no bytes yet: {', '.join(without)} of {shown}, which was built on the meta "
                "device and has no method "
                "reset_parameters() that gives them first values; write one, or build this module "
                'with torch.device("cpu")'
            )
        lone = [key for key, one in vars(module).items() if _is_lone(one)]
        if lone:
            raise ConfigError(
                f"no bytes yet: {', '.join(lone)} of {shown}, which was built on the meta device; "
                "what is neither parameter nor buffer is given none; make it with "
                'device="cpu", or build this module with torch.device("cpu")'
            )


def _refuse_optimizers(model: nn.Module) -> None:
    """Refuse a model whose parameters an optimizer has: it would update the old ones for ever."""
    ours = {id(param) for param in model.parameters() if param.is_meta}
    if _optimizer_of(ours) is None:
        return
    # One that nobody has any more, but for itself.
    gc.collect()
    optimizer = _optimizer_of(ours)
    if optimizer is not None:
        raise ConfigError(
            f"an optimizer ({type(optimizer).__name__}) has parameters of this model, which was "
            "built on the meta device: they get bytes as new objects here, and the optimizer would "
            "go on with the old ones and train nothing; make it after this call"
        )


def _optimizer_of(params: set[int]) -> Optimizer | None:
    for one in gc.get_objects():
        # Not isinstance: proxies would be asked for their class.
        if issubclass(type(one), Optimizer) and "param_groups" in vars(one):
            groups = one.param_groups
            if not params.isdisjoint(id(param) for group in groups for param in group["params"]):
                found: Optimizer = one
                return found
    return None


def _is_lone(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.numel() > 0


class Birth:
    """Gives the modules of a model that have none their weights and buffers.

    Inner modules come before the one around them, as in a constructor, so that random numbers are
    drawn in the order of the plain construction wherever constructors do nothing but build and
    reset. A model of Transformers then initializes the modules in it, by its own method, where its
    constructor would have. Parameters are new objects, one in all places where an old one was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._unborn = {id(module) for module in model.modules() if _without_bytes(module)}
        self._holders = {
            id(module)
            for module in model.modules()
            if not self._unborn.isdisjoint([id(inner) for inner in module.modules()])
        }
        """The modules in which are some without bytes."""
        self._pretrained = {
            id(inner)
            for module in model.modules()
            if is_pretrained(module) and id(module) in self._holders
            for inner in module.modules()
        }
        """The modules that a model of Transformers is to initialize."""
        self._tied = _tied_places(model)
        """Where a model of Transformers puts the weight of another place, when it has drawn both:
        the number of that weight."""
        self._places = _places(model, self._tied)
        self._born: dict[int, Tensor] = {}
        """The parameters in the places of others, by the numbers of those."""
        self._old: dict[int, tuple[Values, Values]] = {}
        """What was where a new tensor is, by the number of the values."""
        self._unset: list[tuple[Values, str, str]] = []
        """What nothing had given values when its module was born, and its name."""
        self._compared: set[int] = set()
        """The modules of which is known whether their constructors did more."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module, and its name, when its own weights have values, maybe not the last."""
        with self._marks():
            for module in _inner_first(self._model, set()):
                name = self._names[id(module)]
                if self._bear(module):
                    yield name, module
                if id(module) in self._holders and self._initialize(module):
                    yield name, module
        self._refuse_lost(self._model)
        for values, key, name in self._unset:
            if is_unset(values[key]):
                raise ConfigError(
                    f"{name} has no bytes, as it was built on the meta device, and neither "
                    "reset_parameters() of its module nor _init_weights() of a model around it "
                    "gives all of it first values; let one of them do so, or build this module "
                    'with torch.device("cpu")'
                )

    def undo(self) -> None:
        """Put what was there back into all places."""
        for values, old in self._old.values():
            values.update(old)

    @contextmanager
    def _marks(self) -> Iterator[None]:
        """Mark for Transformers what has bytes, and has to keep them, and nothing else."""
        concerned = [one for one in self._model.modules() if id(one) in self._pretrained]
        with_bytes = (one for module in concerned for one in _own(module) if not one.is_meta)
        marked = [one for one in with_bytes if not hasattr(one, INITIALIZED)]
        for module in concerned:
            # Of a model that was built with bytes, and lost them on its way to the meta device.
            if vars(module).pop(INITIALIZED, False):
                # Or all was drawn there, in vain, by init_weights().
                self._compared.add(id(module))
        for one in marked:
            setattr(one, INITIALIZED, True)
        try:
            yield
        finally:
            for one in marked:
                vars(one).pop(INITIALIZED, None)

    def _bear(self, module: nn.Module) -> bool:
        """Give a module that has none its own weights and buffers; return whether it had none."""
        if id(module) not in self._unborn:
            return False
        params: Values = module._parameters  # noqa: SLF001 - its own ones
        buffers: Values = module._buffers  # noqa: SLF001 - as above
        reset = reset_of(module)
        new = {name: param for name, param in params.items() if param is not None}
        missing = {name: one for name, one in buffers.items() if one is not None and one.is_meta}
        # What another module has given values to is drawn for here in vain, as it is where weights
        # are tied after the construction.
        given = {name: param for name, param in new.items() if not param.is_meta}
        twin = self._twin(module) if reset is None else None
        for name, buffer in missing.items():
            self._put(buffers, name, _new(buffer) if twin is None else twin.get_buffer(name))
        for name, param in new.items():
            fresh = _new(param) if twin is None else twin.get_parameter(name).detach()
            self._put(params, name, Parameter(fresh, requires_grad=param.requires_grad))
        if reset is not None:
            with torch.device("cpu"):
                reset()
        born = {name: param for name, param in params.items() if name not in given}
        params.update(given)
        for name, param in new.items():
            if (id(params), name) in self._tied:
                continue
            self._born.setdefault(id(param), born.get(name, param))
            for other, key in self._places.pop(id(param), []):
                self._put(other, key, born[name])
        own = [(params, name) for name in born if born[name] is not None]
        prefix = self._names[id(module)]
        for values, name in [*own, *((buffers, name) for name in missing)]:
            if is_unset(values[name]):
                self._unset.append((values, name, f"{prefix}.{name}" if prefix else name))
        return True

    def _twin(self, module: nn.Module) -> nn.Module | None:
        """Return the module as its constructor made it, if that wrote to weights of its own."""
        if not [one for one in _without_bytes(module) if written_count(one)]:
            return None
        twin = built_again(module)
        if twin is None and id(module) in self._pretrained:
            self._compared.add(id(module))
            PROCESS.say(
                f"drawn by {type(module)}",
                "%s draws its weights in its constructor, which cannot be called again for a model "
                "that was built on the meta device: the model's first values are drawn as ever, "
                "but with other random numbers than by the plain construction",
                type(module).__name__,
            )
        return twin

    def _put(self, values: Values, key: str, tensor: Tensor) -> None:
        """Put a tensor into the place of another."""
        self._old.setdefault(id(values), (values, {}))[1].setdefault(key, values[key])
        values[key] = tensor

    def _initialize(self, model: Any) -> bool:
        """Do what the constructor of a model does when all in it is built; whether it does any."""
        if is_pretrained(model):
            # Not done on the meta device: what is missing now is something else.
            self._refuse_lost(model)
            self._compared.update(id(module) for module in model.modules())
            with as_when_built(model):
                model.initialize_weights()
            for values, key, _, _ in _tied_by(model):
                number = self._tied.pop((id(values), key), None)
                if number is not None:
                    values[key] = self._born[number]
            return True
        reset = None if id(model) in self._unborn else reset_of(model)
        initialize = initializer_of(model)
        lost = self._lost(model)
        if lost and reset is not None:
            # It has no weights of its own, and so gives some to the modules in it.
            with as_when_built(model):
                reset()
        if initialize is None:
            return bool(lost) and reset is not None
        if self._lost(model):
            with as_when_built(model):
                model.apply(initialize)
        if lost:
            return True
        PROCESS.say(
            f"not initialized by {type(model)}",
            "%s was built on the meta device, and nothing tells that its constructor applied "
            "_init_weights to its modules: their weights have the first values of "
            "reset_parameters() alone",
            type(model).__name__,
        )
        return False

    def _lost(self, within: nn.Module) -> list[str]:
        """Return the weights that were changed more often without bytes than since they have some.

        That is what constructors did besides building and resetting modules.
        """
        lost = []
        for module in within.modules():
            params: Values = module._parameters  # noqa: SLF001 - its own ones
            if id(module) in self._compared or id(params) not in self._old:
                continue
            for key, old in self._old[id(params)][1].items():
                is_tied = (id(params), key) in self._tied
                if not is_tied and written_count(old) > written_count(params[key]):
                    prefix = self._names[id(module)]
                    lost.append(f"{prefix}.{key}" if prefix else key)
        return lost

    def _refuse_lost(self, within: nn.Module) -> None:
        lost = self._lost(within)
        if lost:
            raise ConfigError(
                f"{lost[0]} was changed by a constructor after reset_parameters() of its module; "
                "that did nothing, as the model was built on the meta device, and cannot be "
                "repeated: training would begin with other first values; do this in "
                "reset_parameters() of the module or of one around it, or in "
                "_init_weights(module), which the model's constructor applies, or build the model "
                "with bytes"
            )


def _own(module: nn.Module) -> list[Tensor]:
    own = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001 - its own ones
    return [one for one in own if one is not None]


def _without_bytes(module: nn.Module) -> list[Tensor]:
    return [one for one in _own(module) if one.is_meta]


def _places(model: nn.Module, tied: dict[Place, int]) -> dict[int, list[tuple[Values, str]]]:
    """Return where each parameter without bytes stands, by its number, without tied places."""
    places: dict[int, list[tuple[Values, str]]] = {}
    for module in model.modules():
        params = module._parameters  # noqa: SLF001 - its own ones
        for name, param in params.items():
            if param is not None and param.is_meta and (id(params), name) not in tied:
                places.setdefault(id(param), []).append((params, name))
    return places


def _tied_places(model: nn.Module) -> dict[Place, int]:
    """Return where models of Transformers put weights of other places, and their numbers."""
    return {
        (id(values), key): id(values[key])
        for module in model.modules()
        if is_pretrained(module)
        for values, key, others, source in _tied_by(module)
        if values[key] is others[source] and values[key].is_meta
    }


def _tied_by(model: nn.Module) -> Iterator[tuple[Values, str, Values, str]]:
    """Yield the places that a model of Transformers ties, each with the one that it is tied to."""
    modules = dict(model.named_modules(remove_duplicate=False))
    ties: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
    for places in ties.items():
        found: list[Any] = []
        for place in places:
            prefix, _, key = place.rpartition(".")
            params = modules[prefix]._parameters if prefix in modules else {}  # noqa: SLF001 - theirs
            if params.get(key) is not None:
                found += [params, key]
        if len(found) == 4 and (found[0] is not found[2] or found[1] != found[3]):
            yield found[0], found[1], found[2], found[3]


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _new(tensor: Tensor) -> Tensor:
    new = torch.empty_like(tensor, device="cpu")
    make_unset(new)
    return new
