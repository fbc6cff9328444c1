"""What a step changes besides parameters and state, and what it is given: each once a step."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import support
from ssdtrain import UnsupportedError, offload_optimizer
from ssdtrain.optimizer.offloaded import Offloaded
from ssdtrain.optimizer.same import is_same
from ssdtrain.optimizer.settings import Settings
from stepped import OVERLAPS, backward, trained
from trained import everything, model

STEPS = 6
LATE = 4
"""A step that no trial comes to."""
Change = Callable[["Changing"], None]


class Changing(Optimizer):
    """Momentum that changes something of its own in a step, and goes by it."""

    def __init__(
        self,
        params: Any,
        change: Change,
        rate: Callable[[Changing], float] = lambda _: 1.0,
        *,
        begins: int = 0,
        **own: Any,
    ) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.change, self.rate, self.begins = change, rate, begins
        vars(self).update(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] += 1
        if self.param_groups and self.param_groups[0]["count"] > self.begins:
            self.change(self)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.add_(momentum, alpha=-group["lr"] * self.rate(self))
        return loss


@dataclass
class Way:
    """How something changes in a step: what it is at first, the change, and what is read of it."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]
    read: Callable[[Any], float]


def count_up(value: dict[str, float]) -> None:
    value["calls"] = value.get("calls", 0) + 1


def note_in(value: list[float]) -> None:
    value.append(len(value))


def move_first(value: OrderedDict[str, int]) -> None:
    value.move_to_end(next(iter(value)))
    value[next(iter(value))] += 1


def first_of(value: OrderedDict[str, int]) -> float:
    return 1 / (1 + len(next(iter(value))) + next(iter(value.values())))


WAYS = {
    "list": Way(lambda: [0.0], note_in, lambda one: 1 / len(one)),
    "deque": Way(lambda: deque([0.0], maxlen=3), note_in, lambda one: 1 / (1 + sum(one))),
    "dict": Way(dict, count_up, lambda one: 1 / (1 + one.get("calls", 0))),
    "order": Way(lambda: OrderedDict(a=1, bcd=2), move_first, first_of),
    "default": Way(lambda: defaultdict(float), count_up, lambda one: 1 / (1 + one["calls"])),
    "set": Way(lambda: {0}, lambda one: one.add(len(one)), lambda one: 1 / len(one)),
    "nested": Way(
        lambda: {"a": ([0.0],)}, lambda one: note_in(one["a"][0]), lambda one: 1 / len(one["a"][0])
    ),
    "tensor": Way(lambda: torch.tensor(1.0), lambda one: one.mul_(0.5), float),
    "array": Way(lambda: np.ones(1), lambda one: one.__imul__(0.5), lambda one: float(one[0])),
}


def changing(params: Any, way: Way, *, is_option: bool, begins: int = 0) -> Changing:
    """Make an optimizer that changes an option or an attribute in place, once in a step."""

    def change(optimizer: Changing) -> None:
        if not is_option:
            way.change(optimizer.own)  # type: ignore[attr-defined]
        for group in optimizer.param_groups if is_option else ():
            way.change(group["own"])

    def rate(optimizer: Changing) -> float:
        return way.read(optimizer.param_groups[0]["own"] if is_option else optimizer.own)  # type: ignore[attr-defined]

    made = Changing(params, change, rate, begins=begins)
    if is_option:
        made.param_groups[0]["own"] = way.make()
    else:
        made.own = way.make()  # type: ignore[attr-defined]
    return made


def own_of(optimizer: Any) -> Any:
    return vars(optimizer).get("own", optimizer.param_groups[0].get("own"))


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("begins", [0, LATE])
@pytest.mark.parametrize("is_option", [False, True], ids=["attribute", "option"])
@pytest.mark.parametrize("name", support.shared_out(WAYS, quick=("list", "tensor")))
def test_what_a_step_changes_in_place_is_changed_once(
    name: str, is_option: bool, begins: int, undo: bool, tmp_path: Path
) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = changing(module.parameters(), WAYS[name], is_option=is_option, begins=begins)
        own = own_of(optimizer)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=undo)
        weights = trained(module, optimizer, steps=STEPS)
        assert own_of(optimizer) is own
        found.append((weights, own))
    support.assert_equal_bits(found[1][0], found[0][0])
    assert is_same(found[1][1], found[0][1])


@pytest.mark.parametrize("is_option", [False, True], ids=["attribute", "option"])
@pytest.mark.parametrize("name", support.shared_out(WAYS, quick=("list", "tensor")))
def test_what_a_step_changes_in_place_is_refused_in_backward(
    name: str, is_option: bool, tmp_path: Path
) -> None:
    optimizer = changing(model().parameters(), WAYS[name], is_option=is_option)
    with pytest.raises(
        UnsupportedError, match=r"its (option 'own'|attributes \(own\)|.*attribute 'own')"
    ):
        offload_optimizer(optimizer, tmp_path, overlap="backward")
    assert is_same(own_of(optimizer), WAYS[name].make())


class Late(torch.optim.SGD):
    """Halves its rate in place, in a step that no trial comes to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.own = torch.tensor(1.0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] > LATE:
                self.own.mul_(0.5)
            group["lr"] = float(self.own)
        return super().step(closure)


@pytest.mark.defends("what changes in place beside a backward is an error")
def test_what_a_later_step_changes_in_place_is_told(tmp_path: Path) -> None:
    module = model()
    optimizer = Late(module.parameters())
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    with pytest.raises(UnsupportedError, match="has changed its attribute 'own' in place"):
        trained(module, optimizer, steps=STEPS)


class OwnState(Optimizer):
    """Keeps its state in an attribute, and views of one flat tensor that is an attribute, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        found = [param for group in self.param_groups for param in group["params"]]
        self.flat = torch.zeros(sum(param.numel() for param in found))
        self.norms: dict[Tensor, Tensor] = {}
        first = 0
        for param in found:
            view = self.flat[first : first + param.numel()].view_as(param)
            self.state[param]["momentum"] = view
            first += param.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param]["momentum"].mul_(0.9).add_(param.grad)
                self.norms[param] = momentum.norm()
                param.sub_(momentum * group["lr"] / (1 + self.norms[param]))


def test_state_that_lies_in_attributes_is_no_setting(tmp_path: Path) -> None:
    """Small enough to be given back to each part, which would lose what the others have done."""
    found = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(size, 3)) for size in (3, 4, 5)]
        optimizer = OwnState(params)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, buffer_bytes=1)
        for number in range(STEPS):
            for param in params:
                param.grad = param.detach() * number
            optimizer.step()
        found.append((params, optimizer.flat, optimizer.norms))
    assert is_same(found[1], found[0])


class Holder:
    """An object that counts calls."""

    def __init__(self) -> None:
        self.calls = 0


def test_an_object_that_each_part_changes_is_told(tmp_path: Path) -> None:
    def change(optimizer: Changing) -> None:
        optimizer.own.calls += 1  # type: ignore[attr-defined]

    module = model()
    optimizer = Changing(module.parameters(), change, begins=LATE, own=Holder())
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=True)
    trained(module, optimizer, steps=LATE)
    before = everything(module, optimizer)
    backward(module, LATE)
    with pytest.raises(UnsupportedError, match=r"'own' \(a Holder\).* \(the step was undone"):
        optimizer.step()
    support.assert_equal_bits(everything(module, optimizer), before)


def is_large(optimizer: Changing) -> bool:
    """Whether a step has parameters that no trial has."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return any(param.numel() > 1000 for param in params)


def count_inside(optimizer: Changing) -> None:
    if is_large(optimizer):
        optimizer.own.held["calls"] += 1  # type: ignore[attr-defined]


def count_in_class(optimizer: Changing) -> None:
    if is_large(optimizer):
        type(optimizer).calls += 1  # type: ignore[attr-defined]


class Counted(Changing):
    """Has a count in its class."""

    calls = 0


@pytest.mark.parametrize(
    ("change", "message"), [(count_inside, r"'own' \(a dict"), (count_in_class, "its class")]
)
def test_what_no_trial_sees_is_told_when_two_parts_change_it(
    change: Change, message: str, tmp_path: Path
) -> None:
    module, own = model(), Holder()
    vars(own)["held"] = {"calls": 0}
    optimizer = Counted(module.parameters(), change, own=own)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=True)
    backward(module, 0)
    with pytest.raises(UnsupportedError, match=message):
        optimizer.step()


def test_an_object_that_one_part_has_changed_is_undone(tmp_path: Path) -> None:
    def change(optimizer: Changing) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if optimizer.fails and any(param.shape == (160, 160) for param in params):  # type: ignore[attr-defined]
            optimizer.own.calls += 1  # type: ignore[attr-defined]
            raise ValueError("the last part")

    module, own = model(), Holder()
    optimizer: Any = Changing(module.parameters(), change, own=own, fails=False)
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=True)
    optimizer.fails = True
    backward(module, 0)
    with pytest.raises(ValueError, match="last part"):
        optimizer.step()
    assert own.calls == 0


class Shared(torch.optim.SGD):
    """Counts in a tensor that all groups have."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] = 0.1 / float(group["count"])
        return super().step(closure)


def test_a_tensor_that_groups_share_is_shared_in_the_trial(tmp_path: Path) -> None:
    groups = [{"params": [param]} for param in model().parameters()]
    optimizer = Shared(groups, lr=0.1)
    count = torch.tensor(0.0)
    for group in optimizer.param_groups:
        group["count"] = count
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        offload_optimizer(optimizer, tmp_path)
    assert count == 0


class Bounded(torch.optim.SGD):
    """Bounds the norm of all gradients together, which is mostly below the bound."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        nn.utils.clip_grad_norm_(params, 10.0)
        return super().step(closure)


class OfTheFirst(torch.optim.SGD):
    """Uses the rate of the first group for all."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        return super().step(closure)


def test_a_bound_on_a_norm_that_is_seldom_reached_is_seen(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        offload_optimizer(Bounded(model().parameters(), lr=0.1), tmp_path)


@pytest.mark.parametrize("rate", [0, 0.0, 0.1])
def test_options_of_another_group_are_seen_where_they_are_equal(
    rate: float, tmp_path: Path
) -> None:
    groups = [{"params": [param]} for param in model().parameters()]
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        offload_optimizer(OfTheFirst(groups, lr=rate), tmp_path)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_group_that_couples_is_not_added(overlap: Any, tmp_path: Path) -> None:
    module = model()
    weights, last = list(module.parameters())[:-1], list(module.parameters())[-1]
    optimizer = OfTheFirst(weights, lr=0.1, momentum=0.9)
    offload_optimizer(optimizer, tmp_path, overlap=overlap)
    backward(module, 0)
    optimizer.step()
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        optimizer.add_param_group({"params": [last]})
    assert len(optimizer.param_groups) == 1
    optimizer.zero_grad()
    trained(module, optimizer, steps=2)


class OfClass(torch.optim.SGD):
    """Counts its steps in its class."""

    calls = 0
    names: list[str] = []  # noqa: RUF012 - this is what is tried

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params, lr=0.1)
        self.name = name

    def step(self, closure: Any = None) -> Any:
        if self.name == "calls":
            type(self).calls += 1
        else:
            self.names.append(self.name)
        return super().step(closure)


@pytest.mark.parametrize("name", ["calls", "names"])
def test_what_a_step_changes_in_its_class_is_refused_and_unchanged(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"attribute '{name}' of its class"):
        offload_optimizer(OfClass(model().parameters(), name), tmp_path)
    assert OfClass.calls == 0
    assert OfClass.names == []


class Named(torch.optim.SGD):
    """Keeps something of all in the state."""

    def step(self, closure: Any = None) -> Any:
        count_up(self.state.setdefault("all", {}))  # type: ignore[arg-type, call-overload]
        return super().step(closure)


def test_what_is_counted_in_the_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"state\['all'\]"):
        offload_optimizer(Named(model().parameters(), lr=0.1), tmp_path)


class WithOurs(torch.optim.SGD):
    """Has a method with a name of ours."""

    def set_is_last_backward(self) -> None:
        """Do something of its own."""


@pytest.mark.parametrize("name", ["_disk", "offload_stats", "set_is_last_backward"])
def test_a_name_of_ours_is_refused(name: str, tmp_path: Path) -> None:
    optimizer = (WithOurs if name == "set_is_last_backward" else torch.optim.SGD)(
        model().parameters(), lr=0.1
    )
    if name != "set_is_last_backward":
        vars(optimizer)[name] = 1
    with pytest.raises(UnsupportedError, match=f"'{name}', a name that"):
        offload_optimizer(optimizer, tmp_path)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_each_attribute_of_ours_has_a_name_that_is_refused(overlap: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    offload_optimizer(optimizer, tmp_path, overlap=overlap)
    named = {name for base in Offloaded.__mro__[:2] for name in base.__annotations__}
    assert vars(optimizer)["_ours"] <= named


class ByName(torch.optim.SGD):
    """Has a rate for each parameter by its name, or by its place."""

    def __init__(self, params: Any, rates: list[float] | None = None) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0]["rates"] = rates

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            names, rates = group["param_names"], group["rates"]
            for place, (name, param) in enumerate(zip(names, group["params"], strict=True)):
                rate = rates[place] if rates else 1 / (2 + len(name))
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                # Of bfloat16 with masters it is the master's.
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=rate)


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_part_has_the_names_of_its_parameters(
    overlap: Any, has_masters: bool, tmp_path: Path
) -> None:
    found = []
    for way in ("step", overlap):
        module = model()
        if has_masters:
            module = module.bfloat16()
        optimizer = ByName(
            (f"{'x' * n}.{name}", one) for n, (name, one) in enumerate(module.named_parameters())
        )
        if has_masters or way != "step" or found:
            # One part has all of them.
            size = "1MiB" if found else "64MiB"
            master_dtype = torch.float32 if has_masters else None
            offload_optimizer(
                optimizer, tmp_path, overlap=way, buffer_bytes=size, master_dtype=master_dtype
            )
        for seed in range(3):
            for number, param in enumerate(module.parameters()):
                param.grad = torch.full_like(param, (seed + 1) * (number + 1) / 64)
            optimizer.step()
        found.append(everything(module, optimizer))
        assert len(optimizer.param_groups[0]["param_names"]) == len(list(module.parameters()))
    support.assert_equal_bits(found[1], found[0])


def test_other_lists_beside_the_parameters_are_refused(tmp_path: Path) -> None:
    module = model()
    rates: list[float] = [1 for _ in module.parameters()]
    rates[-1] = 0.1
    with pytest.raises(UnsupportedError, match="couples its parameters"):
        offload_optimizer(ByName(module.named_parameters(), rates), tmp_path)


class Drawing(torch.optim.SGD):
    """Draws from the generators of Python and numpy in each step, once for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad += random.random() + float(np.random.random())  # noqa: NPY002
        return super().step(closure)


def test_the_trial_leaves_other_generators_where_they_are(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    offload_optimizer(Drawing(model().parameters(), lr=0.1), tmp_path)
    assert is_same((random.getstate(), np.random.get_state(legacy=False)), before)  # noqa: NPY002


class Hits(dict[str, int]):
    """A dict that has an attribute."""

    count = 0


def counted_hits() -> Hits:
    found = Hits()
    found.count = 1
    return found


class Caching(torch.optim.SGD):
    """Counts in an attribute of a dict, and goes by it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.hits = Hits()

    def step(self, closure: Any = None) -> Any:
        self.hits.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.hits.count
        return super().step(closure)


def test_attributes_of_containers_are_changed_once(tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = Caching(module.parameters())
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB")
        found.append((trained(module, optimizer, steps=STEPS), optimizer.hits.count))
    support.assert_equal_bits(found[1][0], found[0][0])
    assert found[1][1] == found[0][1] == STEPS


class Rounding(torch.optim.SGD):
    """Draws from a generator of its own, and fails once, in its second part."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.generator = torch.Generator().manual_seed(3)
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad += torch.rand(1, generator=self.generator)
        if self.fails and any(
            param.shape == (160, 160) for param in self.param_groups[0]["params"]
        ):
            raise ValueError("the second part")
        return super().step(closure)


def test_a_generator_of_its_own_is_undone(tmp_path: Path) -> None:
    module = model()
    optimizer = Rounding(module.parameters())
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", undo=True)
    trained(module, optimizer, steps=1)
    before = optimizer.generator.get_state()
    backward(module, 1)
    optimizer.fails = True
    with pytest.raises(ValueError, match="second part"):
        optimizer.step()
    assert torch.equal(optimizer.generator.get_state(), before)


class OfDefaults(torch.optim.SGD):
    """Goes by the options that it was made with."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]
        return super().step(closure)


def test_options_that_an_optimizer_was_made_with_are_kept(tmp_path: Path) -> None:
    found = []
    for is_offloaded in (False, True):
        module = model()
        optimizer = OfDefaults(module.parameters(), lr=0.1, momentum=0.9)
        if is_offloaded:
            offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
        for seed in range(STEPS):
            backward(module, seed)
            optimizer.step()
            optimizer.defaults["lr"] *= 0.5
            optimizer.zero_grad()
        found.append(everything(module, optimizer))
    support.assert_equal_bits(found[1], found[0])


@pytest.mark.parametrize("name", ["lr", "weight_decay", "maximize", "defaults"])
def test_each_option_that_is_changed_after_backward_is_seen(name: str, tmp_path: Path) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=np.float64(0.1))  # type: ignore[arg-type]
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="1MiB")
    backward(module, 0)
    options = optimizer.defaults if name == "defaults" else optimizer.param_groups[0]
    options["lr" if name == "defaults" else name] = np.float64(0.5)
    with pytest.raises(UnsupportedError, match=f"'{name}'\\]? was changed"):
        optimizer.step()


@dataclass(slots=True)
class Slotted:
    """Has no dict."""

    value: float


SAME: list[tuple[Any, Any]] = [
    *((np.float64(one), np.float64(one)) for one in (1.0, float("nan"))),
    (Slotted(1.0), Slotted(1.0)),
    (partial(int, 1), partial(int, 1)),
    (threading.Lock(), threading.Lock()),
    ({1: [Slotted(1.0)]}, {1: [Slotted(1.0)]}),
]
OTHER: list[tuple[Any, Any]] = [
    (np.float64(1.0), np.float64(2.0)),
    (np.float32(0.0), np.float32(-0.0)),
    (Slotted(1.0), Slotted(2.0)),
    (partial(int, 1), partial(int, 2)),
    (np.random.default_rng(0), np.random.default_rng(1)),
    (bytearray(b"a"), bytearray(b"b")),
    (Hits(), counted_hits()),
    *(({**dict.fromkeys(range(11))}, {**dict.fromkeys(range(11)), at: 0}) for at in range(11)),
]


@pytest.mark.parametrize("view", [slice(None), slice(None, None, -1), slice(2, 7, 2)])
def test_arrays_on_the_memory_of_state_are_no_settings(view: slice) -> None:
    param = Parameter(torch.zeros(9))
    optimizer = torch.optim.SGD([param], lr=0.1)
    others = np.zeros(9)
    optimizer.own = [param.detach().numpy()[view], others[view]]  # type: ignore[attr-defined]
    settings = Settings()
    settings.begin(optimizer)
    optimizer.own[0][...] = others[...] = 1  # type: ignore[attr-defined]
    settings.undo(optimizer)
    assert param.sum() == len(param[view] if view.step != -1 else param)
    assert not others[view].any()


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_is_the_same(one: Any, other: Any) -> None:
    assert is_same(one, other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_is_not_the_same(one: Any, other: Any) -> None:
    assert not is_same(one, other)
