"""Whoever looks at a state gets its bytes, wherever they are, and what is changed stays changed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import support
from ssdtrain import ConfigError, TensorStore, UnsupportedError, offload_optimizer
from ssdtrain.optimizer.state import ParameterState
from trained import WIDTH, away, everything, model, plain_step, train


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters())


def trained(directory: Path | None) -> tuple[dict[Any, Any], Optimizer]:
    """Return the state of the first weight after three steps."""
    _, optimizer = train(adamw, directory, steps=3)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    if directory is not None:
        assert away(optimizer) == 6, "two tensors for each of three weights"
    return state, optimizer


def by_pickle(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


def by_save(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def updated(state: Any) -> Any:
    into: dict[Any, Any] = {}
    into.update(state)
    return into


WAYS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "stars": lambda state: {**state},
    "update": updated,
    "or": lambda state: state | {},
    "copy": copy.copy,
    "its copy": lambda state: state.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "save": by_save,
    "items": lambda state: dict(list(state.items())),
    "values": lambda state: dict(zip(state.keys(), state.values(), strict=True)),
    "get": lambda state: {key: state.get(key) for key in state},
    "setdefault": lambda state: {key: state.setdefault(key, None) for key in state},
    "pop": lambda state: {key: state.pop(key) for key in list(state)},
    "popitem": lambda state: dict(reversed([state.popitem() for _ in range(len(state))])),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_value(way: str, tmp_path: Path) -> None:
    expected, _ = trained(None)
    state, _ = trained(tmp_path)
    assert len(state) == len(expected)
    assert "exp_avg" in state
    seen = WAYS[way](state)
    assert isinstance(seen, dict)
    assert not isinstance(seen, ParameterState)
    support.assert_equal_bits(seen, expected)


def test_equality_and_print(tmp_path: Path) -> None:
    expected, _ = trained(None)
    state, optimizer = trained(tmp_path)
    assert repr(state) == repr(expected)
    optimizer.zero_grad()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


def test_what_is_changed_stays_changed(tmp_path: Path) -> None:
    def train_on(optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))
        plain_step(module, optimizer, x)
        optimizer.state[module[0].weight]["exp_avg"].mul_(0.5)  # type: ignore[index]
        optimizer.state[module[3].weight]["exp_avg"] = torch.ones(WIDTH, 2 * WIDTH)  # type: ignore[index]
        plain_step(module, optimizer, x)
        plain_step(module, optimizer, x)
        return everything(module, optimizer)

    plain = model()
    expected = train_on(adamw(plain), plain)
    module = model()
    actual = train_on(offload_optimizer(adamw(module), tmp_path), module)
    support.assert_equal_bits(actual, expected)


def test_what_somebody_holds_stays_in_memory_and_is_live(tmp_path: Path) -> None:
    module = model()
    optimizer = offload_optimizer(adamw(module), tmp_path)
    x = torch.randn(8, WIDTH)
    plain_step(module, optimizer, x)
    held = optimizer.state[module[0].weight]["exp_avg"]
    part = optimizer.state[module[3].weight]["exp_avg"][3:5]
    before, part_before = held.clone(), part.clone()
    plain_step(module, optimizer, x)
    assert away(optimizer) == 4
    assert not torch.equal(held, before), "it is the state itself, as in a plain optimizer"
    assert not torch.equal(part, part_before)
    del held, part
    gc.collect()
    plain_step(module, optimizer, x)
    assert away(optimizer) == 6


def test_a_state_that_is_the_parameter_stays_one_with_it(tmp_path: Path) -> None:
    class WithAlias(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["alias"] = param.detach()
            return super().step(closure)

    module = model()
    optimizer = offload_optimizer(WithAlias(module.parameters(), momentum=0.9), tmp_path)
    plain_step(module, optimizer, torch.randn(8, WIDTH))
    for param in module.parameters():
        assert optimizer.state[param]["alias"].data_ptr() == param.data_ptr()


def test_a_checkpoint_goes_on_in_either_optimizer(tmp_path: Path) -> None:
    def half(directory: Path | None, saved: Any = None) -> tuple[Any, dict[str, Tensor]]:
        module = model()
        optimizer = adamw(module)
        if directory is not None:
            offload_optimizer(optimizer, directory, buffer_bytes="1MiB")
        if saved is not None:
            module.load_state_dict(saved[0])
            # torch's optimizers go on in the tensors that they are given.
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        generator = torch.Generator().manual_seed(7)
        for _ in range(4):
            plain_step(module, optimizer, torch.randn(8, WIDTH, generator=generator))
        saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        return saved, everything(module, optimizer)

    saved, _ = half(None)
    offloaded, _ = half(tmp_path)
    assert offloaded[1].keys() == saved[1].keys()
    _, expected = half(None, saved)
    for directory, start in ((tmp_path, saved), (None, offloaded), (tmp_path, offloaded)):
        support.assert_equal_bits(half(directory, start)[1], expected)


def test_a_state_that_is_loaded_goes_to_the_disk(tmp_path: Path) -> None:
    module = model()
    optimizer = offload_optimizer(adamw(module), tmp_path)
    plain_step(module, optimizer, torch.randn(8, WIDTH))
    saved = optimizer.state_dict()
    assert away(optimizer) == 6, "what is saved stays on the disk as well"
    optimizer.load_state_dict(saved)
    del saved
    plain_step(module, optimizer, torch.randn(8, WIDTH))
    assert away(optimizer) == 6


def test_a_store_that_is_open_is_shared(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        module = model()
        optimizer = offload_optimizer(adamw(module), store)
        other = model()
        offload_optimizer(adamw(other), store)
        plain_step(module, optimizer, torch.randn(8, WIDTH))
        assert away(optimizer) == 6
        assert store.stats()["disk_used_bytes"] >= 6 * 4 * WIDTH * WIDTH


def test_nothing_is_left_of_a_dropped_optimizer(tmp_path: Path) -> None:
    with support.nothing_leaks():
        train(adamw, tmp_path, steps=2)
    assert not list(tmp_path.iterdir())


def test_the_state_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    optimizer = offload_optimizer(adamw(module), tmp_path, buffer_bytes="2MiB")
    seen = []

    def look(*_: object) -> None:
        seen.append(optimizer.offload_stats.resident_bytes)  # type: ignore[attr-defined]

    own = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = own(self, closure)
            look()
            return result

    optimizer._own_kind = Watched  # type: ignore[attr-defined]
    for _ in range(3):
        plain_step(module, optimizer, torch.randn(8, 256))
    assert len(seen) == 3 * 16, "one part for each weight, of 512 KiB"
    state_bytes = 16 * 2 * 256 * 256 * 4
    # The part that is updated, those on their way to the disk, and the counts of steps.
    assert max(seen) <= 2 << 20 < state_bytes


class Coupled(torch.optim.SGD):
    """Scales all updates by one norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        nn.utils.clip_grad_norm_(
            [param for group in self.param_groups for param in group["params"]], 1e-3
        )
        assert grads
        return super().step(closure)


def test_what_cannot_be_offloaded_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    module = model()
    for optimizer, message in (
        (Coupled(module.parameters(), lr=0.1), "Coupled .* couples its parameters"),
        (torch.optim.LBFGS(module.parameters()), "LBFGS .* its step needs a closure"),
        (torch.optim.AdamW(module.parameters(), differentiable=True), "differentiable"),
        (torch.optim.AdamW(model().to("meta").parameters()), "after ssdtrain.offload_parameters"),
    ):
        kind = type(optimizer)
        generator = torch.random.get_rng_state()
        with pytest.raises(UnsupportedError, match=message):
            offload_optimizer(optimizer, tmp_path)
        assert type(optimizer) is kind
        assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(param.grad is None for param in module.parameters())


def test_bad_input(tmp_path: Path) -> None:
    module = model()
    with pytest.raises(ConfigError, match=r"takes a torch\.optim\.Optimizer"):
        offload_optimizer(module, tmp_path)  # type: ignore[type-var]
    optimizer = adamw(module)
    with pytest.raises(ConfigError, match="options of the store"), TensorStore(tmp_path) as store:
        offload_optimizer(optimizer, store, verify=True)
    with pytest.raises(ConfigError, match="buffer_bytes"):
        offload_optimizer(optimizer, tmp_path, buffer_bytes="many")
    optimizer.step = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="was replaced by other code"):
        offload_optimizer(optimizer, tmp_path)
    del optimizer.step
    offload_optimizer(optimizer, tmp_path)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_optimizer(optimizer, tmp_path)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save optimizer\.state_dict\(\)"):
            refused(optimizer)


def steps(module: nn.Module, optimizer: Optimizer, count: int) -> None:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        plain_step(module, optimizer, torch.randn(8, WIDTH, generator=generator))


SCHEDULES = pytest.mark.parametrize("overlap", ["step", "backward"])


@SCHEDULES
def test_a_state_dict_whose_hook_makes_a_step(overlap: str, tmp_path: Path) -> None:
    """What changes the optimizer meanwhile, here or in another thread, changes its own state."""

    def trained(place: Path | None) -> dict[str, Tensor]:
        module = model()
        optimizer = adamw(module)
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap)
        steps(module, optimizer, 2)

        def step(one: Optimizer) -> None:
            assert one is optimizer
            steps(module, optimizer, 1)

        handle = optimizer.register_state_dict_pre_hook(step)
        saved = optimizer.state_dict()
        handle.remove()
        assert {float(state["step"]) for state in saved["state"].values()} == {3}
        steps(module, optimizer, 1)
        return everything(module, optimizer)

    support.assert_equal_bits(trained(tmp_path), trained(None))


@SCHEDULES
def test_hooks_that_change_a_state(overlap: str, tmp_path: Path) -> None:
    def before(one: Optimizer) -> None:
        for state in one.state.values():
            state["exp_avg"].mul_(2)
            state["mean"] = torch.ones(3)

    def after(one: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "group count": len(one.param_groups)}

    def trained(place: Path | None) -> tuple[Any, dict[str, Tensor]]:
        module = model()
        optimizer = adamw(module)
        if place is not None:
            offload_optimizer(optimizer, place, overlap=overlap)
        steps(module, optimizer, 2)
        handles = [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_state_dict_post_hook(after),
        ]
        saved = optimizer.state_dict()
        for handle in handles:
            handle.remove()
        steps(module, optimizer, 1)
        return saved, everything(module, optimizer)

    (saved, found), (expected_saved, expected) = trained(tmp_path), trained(None)
    support.assert_equal_bits(found, expected)
    assert saved["group count"] == expected_saved["group count"]
    assert all("mean" in state for state in saved["state"].values())


@pytest.mark.parametrize(
    "options",
    [{"overlap": "step"}, {"overlap": "step", "undo": True}, {"overlap": "backward"}],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_after_a_look_the_state_goes_to_the_disk_again(
    is_loaded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    module = model()
    optimizer: Any = offload_optimizer(adamw(module), tmp_path, **options)
    steps(module, optimizer, 2)
    all_bytes = optimizer.offload_stats.on_disk_bytes + optimizer.offload_stats.resident_bytes
    if is_loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        for state in optimizer.state.values():
            state["exp_avg"].sum()
    steps(module, optimizer, 2)
    assert away(optimizer) == 6, "two tensors for each of three weights"
    assert optimizer.offload_stats.on_disk_bytes > 0.9 * all_bytes
