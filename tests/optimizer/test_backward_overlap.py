"""With ``overlap="backward"`` updates are made in backward, and put in place by ``step()``.

A clip, a second backward or a change that comes too late raises, and leaves weights and state of
the last step whole.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from ssdtrain import ConfigError, StorageError, UnsupportedError, offload_optimizer
from ssdtrain.optimizer import in_backward
from ssdtrain.optimizer.in_backward import InBackward
from ssdtrain.optimizer.taken import TakenGradient
from stores import SlowStore
from test_undo import ChosenStore
from trained import WIDTH, everything, model, plain_step, prove


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), weight_decay=0.1)


def batch(seed: int = 3) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(module: nn.Module, seed: int = 3, **options: Any) -> None:
    module(batch(seed)).square().mean().backward(**options)


def begun(directory: Any, make: Callable[[nn.Module], Optimizer] = adamw) -> tuple[Any, Any]:
    """Return a model and its optimizer after one step and another backward, or plainly."""
    module = model()
    optimizer: Any = make(module)
    if directory is not None:
        offload_optimizer(
            optimizer, directory, overlap="backward", buffer_bytes="1MiB", per_parameter=True
        )
    plain_step(module, optimizer, batch(0))
    backward(module)
    assert directory is None or taken_count(module) > 0
    return module, optimizer


def taken_count(module: nn.Module) -> int:
    return sum(type(param.grad) is TakenGradient for param in module.parameters())


def after_a_step() -> tuple[Any, Any]:
    module = model()
    optimizer = adamw(module)
    plain_step(module, optimizer, batch(0))
    return module, optimizer


def assert_as_after_the_last_step(module: Any, optimizer: Any) -> None:
    support.assert_equal_bits(everything(module, optimizer), everything(*after_a_step()))


def assert_goes_on(module: Any, optimizer: Any) -> None:
    """Zero, train on, and compare with a plain run that never began what was discarded."""
    plain, plain_optimizer = after_a_step()
    optimizer.zero_grad()
    for seed in (5, 6):
        plain_step(module, optimizer, batch(seed))
        plain_step(plain, plain_optimizer, batch(seed))
    support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


TOO_LATE: dict[str, Callable[[Any, Any], Any]] = {
    "clip": lambda m, _: clip_grad_norm_(m.parameters(), 1.0),
    "clip by value": lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "look": lambda m, _: m[4].weight.grad.sum(),
    "print": lambda m, _: repr(m[4].weight.grad),
    "numpy": lambda m, _: m[4].weight.grad.numpy(),
    "copy": lambda m, _: copy.deepcopy(m[4].weight.grad),
    "pickle": lambda m, _: pickle.dumps(m[4].weight.grad),
    "change": lambda m, _: m[4].weight.grad.mul_(2),
    "zero in place": lambda m, _: m.zero_grad(set_to_none=False),
    "second backward": lambda m, _: backward(m),
    "rate": lambda _, o: (o.param_groups[0].update(lr=0.5), o.step()),
    "weight": lambda m, o: (nn.init.zeros_(m[4].weight), o.step()),
    "autocast": lambda _, o: torch.autocast("cpu")(o.step)(),
}


@pytest.mark.parametrize("what", TOO_LATE)
def test_what_comes_too_late_raises_and_says_what_to_use(what: str, tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    with pytest.raises(UnsupportedError, match=r'overlap="step"'):
        TOO_LATE[what](module, optimizer)
    if what in ("rate", "weight"):
        return
    assert_as_after_the_last_step(module, optimizer)
    assert_goes_on(module, optimizer)


def test_an_unscale_raises(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(batch()).square().mean()).backward()
    for late in (scaler.unscale_, scaler.step):
        with pytest.raises(UnsupportedError, match=r'overlap="step"'):
            late(optimizer)
    assert_as_after_the_last_step(module, optimizer)


def test_a_second_backward_is_never_counted_in_part(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    with pytest.raises(UnsupportedError, match="set_is_last_backward"):
        backward(module)
    with pytest.raises(UnsupportedError, match="zero_grad"):
        optimizer.step()
    assert_goes_on(module, optimizer)


def test_a_look_at_the_state_shows_that_of_the_last_step(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    assert_as_after_the_last_step(module, optimizer)
    with pytest.raises(UnsupportedError, match="gone"):
        optimizer.step()
    assert_goes_on(module, optimizer)


@pytest.mark.parametrize("makes_step", [False, True])
def test_a_state_dict_is_that_of_its_moment(makes_step: bool, tmp_path: Path) -> None:
    module = model()
    optimizer = adamw(module)
    offload_optimizer(optimizer, tmp_path, overlap="backward", buffer_bytes="64KiB")
    plain_step(module, optimizer, batch(0))
    saved: Any = optimizer.state_dict()
    before = copy.deepcopy(saved)
    backward(module)
    assert taken_count(module) > 3
    for number, state in before["state"].items():
        support.assert_equal_bits(saved["state"][number], state)
    if makes_step:
        # That of a plain optimizer would be the state after this step.
        optimizer.step()
        for number, state in before["state"].items():
            support.assert_equal_bits(saved["state"][number], state)
        return
    optimizer.load_state_dict(saved)
    assert_as_after_the_last_step(module, optimizer)
    assert_goes_on(module, optimizer)


def test_gradients_are_gone_after_the_step(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    optimizer.step()
    with pytest.raises(UnsupportedError, match="zero_grad"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match="zero_grad"):
        backward(module)


ZEROES: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda _, o: o.zero_grad(),
    "in place": lambda _, o: o.zero_grad(set_to_none=False),
    "module": lambda m, _: m.zero_grad(),
    "by hand": lambda m, _: [setattr(p, "grad", None) for p in m.parameters()],
    "one": lambda m, _: setattr(m[4].weight, "grad", None),
    "another": lambda m, _: setattr(m[4].weight, "grad", torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("how", ZEROES)
def test_gradients_that_are_replaced_count_as_plainly(
    how: str, with_backward: bool, tmp_path: Path
) -> None:
    results = []
    for directory in (None, tmp_path):
        module, optimizer = begun(directory)
        ZEROES[how](module, optimizer)
        if with_backward and how not in ("one", "another"):
            backward(module, 9)
        optimizer.step()
        results.append(everything(module, optimizer))
    support.assert_equal_bits(results[1], results[0])


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("steps_then", [False, True])
def test_an_interrupt_in_backward(steps_then: bool, tmp_path: Path) -> None:
    """It leaves weights and state whole; a step then uses the gradients that are there, as ever."""
    results = []
    for directory in (None, tmp_path):
        module = model()
        optimizer: Any = adamw(module)
        if directory is not None:
            offload_optimizer(optimizer, directory, overlap="backward", buffer_bytes="1MiB")
        plain_step(module, optimizer, batch(0))
        with pytest.raises(KeyboardInterrupt):
            module[1:](Failing.apply(module[0](batch()))).square().mean().backward()
        if directory is not None:
            assert taken_count(module) > 0
        if steps_then:
            optimizer.step()
        results.append(everything(module, optimizer))
    support.assert_equal_bits(results[1], results[0])
    if not steps_then:
        assert_goes_on(module, optimizer)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_failed_read_leaves_all_of_the_last_step(count: int, tmp_path: Path) -> None:
    with ChosenStore(tmp_path) as store:
        module, optimizer = begun(store)
        # What is read for an update that is then left out is not read again.
        optimizer.zero_grad()
        optimizer._disk.flush()
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        store.fail_after(count, 1000)
        backward(module)
        with pytest.raises(StorageError, match="from before this step"):
            optimizer.step()
        support.assert_equal_bits(dict(module.named_parameters()), before)
        store.failing = range(0)
        optimizer.step()  # the same gradients
        plain, plain_optimizer = begun(None)
        plain_optimizer.step()
        support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


@pytest.mark.parametrize("space_error_rate", [0.3, 1.0])
def test_a_failed_write_loses_nothing(space_error_rate: float, tmp_path: Path) -> None:
    plain, plain_optimizer = begun(None)
    with SlowStore(tmp_path, space_error_rate=space_error_rate) as store:
        module = model()
        optimizer: Any = adamw(module)
        offload_optimizer(optimizer, store, overlap="backward", buffer_bytes="1MiB")
        plain_step(module, optimizer, batch(0))
        backward(module)
        for seed in range(6):
            for one, its in ((plain, plain_optimizer), (module, optimizer)):
                its.step()
                its.zero_grad()
                backward(one, seed)
        optimizer.step()
        plain_optimizer.step()
        support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))
        assert optimizer.offload_stats.write_failed_count > 0


def test_an_interrupt_while_updates_are_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = begun(tmp_path)
    own = in_backward.put_in_place
    calls = itertools.count()

    def interrupted(host: Any, record: Any) -> None:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        own(host, record)

    monkeypatch.setattr(in_backward, "put_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    plain, plain_optimizer = begun(None)
    plain_optimizer.step()
    support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


def test_a_look_that_is_interrupted_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = begun(tmp_path)
    own = in_backward.roll_back
    calls = itertools.count()

    def interrupted(host: Any, record: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        own(host, record)

    monkeypatch.setattr(in_backward, "roll_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.state_dict()
    plain, plain_optimizer = begun(None)
    support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


def test_a_step_that_is_put_in_place_is_not_undone_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = InBackward._publish

    def interrupted(self: InBackward, host: Any, now: Any) -> None:
        own(self, host, now)
        raise KeyboardInterrupt

    module, optimizer = begun(tmp_path)
    # Somebody holds it, so this one is updated in step().
    held = module[0].bias.grad, module[0].weight.grad
    monkeypatch.setattr(InBackward, "_publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del held
    plain, plain_optimizer = begun(None)
    plain_optimizer.step()
    support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


def tied() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    module[3].weight = module[0].weight
    module[2].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "recomputed", support.shared_out(["not", "blocks", "session"], quick=["session"])
)
def test_tied_frozen_and_recomputed_weights(recomputed: str, tmp_path: Path) -> None:
    def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
        def forward(x: Tensor) -> Tensor:
            for layer in module:
                inner = layer
                x = inner(x) if recomputed == "not" else checkpoint(inner, x, use_reentrant=False)
                x = torch.tanh(x)
            return x

        if recomputed == "session":
            with ssdtrain.offload(tmp_path, min_bytes=1):
                forward(x).square().mean().backward()
        else:
            forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    prove(adamw, tmp_path, lambda *_: step, build=tied)


def test_blocks_that_enter_backward_again(tmp_path: Path) -> None:
    def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
        x = x.requires_grad_()
        for layer in module:
            x = checkpoint(layer, x, use_reentrant=True)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    prove(adamw, tmp_path, lambda *_: step)


def test_losses_of_different_parameters_and_grad(tmp_path: Path) -> None:
    """Each parameter counts for itself; `torch.autograd.grad` accumulates nothing."""

    def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
        hidden = module[0](x)
        hidden.sum().backward(retain_graph=True)
        loss = module[1:](hidden.detach()).square().mean()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(module[1:].parameters()))
        torch.autograd.grad(hidden.sum(), [module[0].weight])
        optimizer.step()
        optimizer.zero_grad()

    prove(adamw, tmp_path, lambda *_: step)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_and_gradients_that_somebody_holds(tmp_path: Path) -> None:
    def step(module: Any, optimizer: Optimizer, x: Tensor) -> None:
        flat = torch.zeros(WIDTH * WIDTH)
        module[4].weight.grad = flat.view(WIDTH, WIDTH)
        module[3].weight.grad = held = torch.zeros(WIDTH, 2 * WIDTH)
        module(x).square().mean().backward(create_graph=module[0].bias.sum().item() > 0)
        with torch.no_grad():
            flat.mul_(0.5)
            held.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    prove(adamw, tmp_path, lambda *_: step)


@pytest.mark.parametrize("options", [{"overlap": "backward"}, {"undo": True}])
def test_weights_that_share_memory_are_refused(options: Any, tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    module[1].weight = nn.Parameter(module[0].weight.detach())
    with pytest.raises(UnsupportedError, match="lie in the same memory"):
        offload_optimizer(adamw(module), tmp_path, **options)


def test_a_weight_that_is_thawed_and_a_view_that_sees_the_step(tmp_path: Path) -> None:
    results = []
    for directory in (None, tmp_path):
        module, optimizer = begun(directory)
        view = module[4].weight.detach()[1]
        optimizer.step()
        optimizer.zero_grad()
        module[3].weight.requires_grad_(False)
        plain_step(module, optimizer, batch(4))
        module[3].weight.requires_grad_(True)
        plain_step(module, optimizer, batch(5))
        results.append({"view": view.clone(), **everything(module, optimizer)})
    support.assert_equal_bits(results[1], results[0])


def test_copies_and_pickles_of_a_model(tmp_path: Path) -> None:
    module, _ = begun(tmp_path)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        support.assert_equal_bits(dict(other.named_parameters()), dict(module.named_parameters()))
        backward(other)


def test_an_optimizer_that_is_dropped_leaves_no_hook(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    backward(module)
    assert taken_count(module) == 0
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


def test_gradients_that_another_optimizer_took_are_told(tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path)
    optimizer.step()
    optimizer.zero_grad()
    before = [param.detach().clone() for param in module.parameters()]
    again: Any = adamw(module)
    offload_optimizer(again, tmp_path, overlap="backward", buffer_bytes="1MiB")
    backward(module)
    with pytest.raises(UnsupportedError, match=r"another optimizer .* has taken the gradient"):
        again.step()
    assert all(map(torch.equal, before, module.parameters()))
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    again.zero_grad()
    backward(module)
    again.step()
    assert not any(map(torch.equal, before, module.parameters()))


class Scaled(torch.optim.SGD):
    """Has an option in a container, and an attribute."""

    scale = 1.0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["cfg"] = {"scale": 1.0}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["cfg"]["scale"] * self.scale)
        return None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in an option": lambda o: o.param_groups[0]["cfg"].update(scale=2.0),
    "an attribute": lambda o: setattr(o, "scale", 2.0),
    "a new attribute": lambda o: setattr(o, "grad_scale", torch.tensor(4.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_updates_have_not_seen_is_told(change: str, tmp_path: Path) -> None:
    module, optimizer = begun(tmp_path, lambda module: Scaled(module.parameters()))
    before = [param.detach().clone() for param in module.parameters()]
    CHANGES[change](optimizer)
    with pytest.raises(UnsupportedError, match="was changed after updates of this step had begun"):
        optimizer.step()
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_state_that_is_set_anew_is_begun_anew(overlap: Any, tmp_path: Path) -> None:
    plain, module = model(), model()
    plain_optimizer, optimizer = adamw(plain), adamw(module)
    offload_optimizer(optimizer, tmp_path, overlap=overlap)
    for seed in range(4):
        for one, its in ((plain, plain_optimizer), (module, optimizer)):
            if seed == 2:
                its.state = defaultdict(dict)
            plain_step(one, its, batch(seed))
    for one, its in ((plain, plain_optimizer), (module, optimizer)):
        its.zero_grad()
        backward(one)
        its.state = defaultdict(dict)
        its.step()
    support.assert_equal_bits(everything(module, optimizer), everything(plain, plain_optimizer))


def test_a_weight_that_a_hook_freezes_is_updated_in_step(tmp_path: Path) -> None:
    pairs = []
    for directory in (None, tmp_path):
        module = model()
        optimizer: Any = adamw(module)
        if directory is not None:
            offload_optimizer(optimizer, directory, overlap="backward", buffer_bytes="1MiB")
        module[4].weight.register_post_accumulate_grad_hook(lambda one: one.requires_grad_(False))
        backward(module)
        optimizer.step()
        pairs.append(everything(module, optimizer))
    support.assert_equal_bits(*pairs)


@pytest.mark.parametrize("zeroing", ["module", "by hand"])
def test_a_step_that_is_left_out_may_be_followed_by_another_rate(
    zeroing: str, tmp_path: Path
) -> None:
    pairs = []
    for directory in (None, tmp_path):
        module, optimizer = begun(directory)
        if zeroing == "module":
            module.zero_grad()
        else:
            for param in module.parameters():
                param.grad = None
        optimizer.param_groups[0]["lr"] = 0.5
        backward(module, seed=7)
        assert directory is None or taken_count(module) > 0
        optimizer.step()
        pairs.append(everything(module, optimizer))
    support.assert_equal_bits(*pairs)


class Listing(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.scales = {id(param): 0.5 for group in self.param_groups for param in group["params"]}


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="scales"):
        offload_optimizer(Listing(model().parameters()), tmp_path, overlap="backward")
    with pytest.raises(ConfigError, match=r'"backward"'):
        offload_optimizer(adamw(model()), tmp_path, overlap="sideward")  # type: ignore[arg-type]
    _, optimizer = begun(tmp_path)
    with pytest.raises(ConfigError, match="True or False"):
        optimizer.set_is_last_backward("no")
