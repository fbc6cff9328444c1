"""Masters of bfloat16 parameters: all has the bits of the loop with masters in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import support
from mastered import (
    WAYS,
    MakeOf,
    Prepare,
    Step,
    build,
    inner_of,
    master_of,
    prove,
    started,
    train,
)
from ssdtrain import ConfigError, UnsupportedError, offload_optimizer
from ssdtrain.optimizer.disk import Away
from trained import WIDTH, everything, model, plain_step


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


MAKES: dict[str, MakeOf] = {
    "adamw": adamw,
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw-amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=2**-6),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}
QUICK = ("adamw-fused", "sgd-momentum", "adafactor")
"""The others are tried by the long tests."""


@pytest.mark.parametrize("name", support.shared_out(MAKES, quick=QUICK))
def test_optimizers_of_torch(name: str, tmp_path: Path) -> None:
    def prepare(_module: nn.Module, _optimizer: Any) -> Step:
        def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
            loss: Tensor = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    prove(MAKES[name], tmp_path, prepare)


def test_masters_are_not_what_the_weights_say(tmp_path: Path) -> None:
    """Else the proofs above would prove nothing."""
    module, optimizer = started(adamw, tmp_path)
    for _ in range(3):
        plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
    for param in module.parameters():
        master = master_of(optimizer, param)
        assert master.dtype is torch.float32
        assert torch.equal(master.bfloat16(), param)
        assert not torch.equal(master, param.float())
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


def two_groups(params: Any) -> Optimizer:
    listed = list(params)
    return torch.optim.AdamW(
        [{"params": listed[1::2], "weight_decay": 0.1}, {"params": listed[::2], "lr": 1e-2}]
    )


def in_order(module: nn.Module, optimizer: Any) -> None:
    """Two groups give the parameters other numbers than the module."""
    if hasattr(optimizer, "inner"):
        known = {id(master): param for _, param, master in optimizer.pairs}
        groups = optimizer.inner.param_groups
        optimizer.masters = [master for group in groups for master in group["params"]]
        optimizer.params = [known[id(master)] for master in optimizer.masters]


def clipped(module: nn.Module, optimizer: Any) -> Step:
    in_order(module, optimizer)
    scheduler = lr_scheduler.OneCycleLR(inner_of(optimizer), 1e-2, total_steps=30)

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        for part in x.chunk(4):
            (module(part).square().mean() / 4).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return norm

    return step


def test_clipping_accumulation_groups_and_a_scheduler(tmp_path: Path) -> None:
    prove(two_groups, tmp_path, clipped, in_backward=False)


def accumulated(module: nn.Module, optimizer: Any) -> Step:
    in_order(module, optimizer)
    scheduler = lr_scheduler.StepLR(inner_of(optimizer), 3, 0.5)

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> None:
        for number, part in enumerate(x.chunk(4)):
            getattr(optimizer, "set_is_last_backward", bool)(number == 3)
            (module(part).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()

    return step


def test_accumulation_with_a_last_backward(tmp_path: Path) -> None:
    prove(two_groups, tmp_path, accumulated)


def with_closure(_module: nn.Module, _optimizer: Any) -> Step:
    def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x).square().mean()
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return loss.detach()

    return step


def test_a_closure(tmp_path: Path) -> None:
    prove(adamw, tmp_path, with_closure, steps=10)


def scaled(_module: nn.Module, optimizer: Any) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    numbers = iter(range(100))

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = scaler.scale(module(x).float().square().mean())
        (loss * (torch.inf if next(numbers) in (2, 5) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.tensor(scaler.get_scale())

    return step


@pytest.mark.parametrize("fused", support.shared_out([False, True], quick=[False]))
def test_a_scaler_that_skips_steps(fused: bool, tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        return torch.optim.AdamW(params, fused=fused)

    prove(make, tmp_path, scaled, in_backward=False, steps=10)


def tied() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).bfloat16()
    module[2].weight = module[0].weight
    module[3].weight.requires_grad_(False)
    return module


def mixed() -> nn.Module:
    """The norms stay in float32, and have no masters."""
    module = build()
    module[1].float()  # type: ignore[index]
    return nn.Sequential(module[0], Cast(torch.float32), module[1], Cast(), *list(module)[2:])  # type: ignore[index, call-overload]


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def transposed() -> nn.Module:
    """Weights that lie in another order, and one with holes: nothing can be packed of that."""
    module: Any = build()
    with torch.no_grad():
        module[0].weight = nn.Parameter(module[0].weight.t().contiguous().t())
        wide = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        module[4].weight = nn.Parameter(wide[:, ::2])
    return module  # type: ignore[no-any-return]


def halved() -> nn.Module:
    return model().half()


@pytest.mark.parametrize(
    "make_model", support.shared_out([tied, mixed, transposed, halved], quick=[mixed, transposed])
)
def test_models(make_model: Callable[[], nn.Module], tmp_path: Path) -> None:
    prove(adamw, tmp_path, build=make_model, steps=8)


def test_a_gradient_that_comes_and_goes(tmp_path: Path) -> None:
    def prepare(_module: nn.Module, _optimizer: Any) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Any, x: Tensor) -> None:
            plain_step(module[:-1] if next(numbers) % 3 else module, optimizer, x)

        return step

    prove(adamw, tmp_path, prepare, steps=10)


def test_a_group_that_is_added(tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        return adamw(list(params)[:-2])

    def prepare(module: Any, optimizer: Any) -> Step:
        numbers = iter(range(100))
        last = list(module[-1].parameters())
        if hasattr(optimizer, "inner"):
            optimizer.params, optimizer.masters = optimizer.params[:-2], optimizer.masters[:-2]

        def step(module: Any, optimizer: Any, x: Tensor) -> None:
            if next(numbers) == 4:
                if hasattr(optimizer, "inner"):
                    optimizer.add(last, lr=0.1)
                else:
                    optimizer.add_param_group({"params": last, "lr": 0.1})
            plain_step(module, optimizer, x)
            module.zero_grad()

        return step

    prove(make, tmp_path, prepare, steps=10)


def test_sparse_gradients_keep_their_masters_in_memory(tmp_path: Path) -> None:
    def embedding() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(2000, WIDTH, sparse=True)).bfloat16()

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> None:
        places = (x[:, :4].float().abs() * 500).long().clamp(max=1999)
        module(places).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for way in ("step", "backward"):
        options: dict[str, Any] = {"build": embedding, "steps": 5}
        make: MakeOf = torch.optim.SparseAdam
        plain, _ = train(make, None, lambda *_: step, **options)
        actual, optimizer = train(make, tmp_path, lambda *_: step, overlap=way, **options)
        for one, other in zip(actual, plain, strict=True):
            support.assert_equal_bits(one, other)
        assert optimizer.offload_stats.on_disk_bytes == 0


def changing(how: Callable[[Tensor], Any]) -> Prepare:
    def prepare(_module: nn.Module, _optimizer: Any) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Any, x: Tensor) -> None:
            if next(numbers) % 3 == 2:
                how(module[3].weight)
                how(module[3].bias)
            plain_step(module, optimizer, x)

        return step

    return prepare


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "copy": lambda weight: weight.data.copy_(torch.full_like(weight, 0.01)),
    "two": lambda weight: weight.data.view(-1)[3:8:4].neg_(),
    "clamp": lambda weight: torch.no_grad()(weight.clamp_)(-0.05, 0.05),
    "swap": lambda weight: setattr(weight, "data", weight.data.flip(0).clone()),
}


@pytest.mark.parametrize("how", support.shared_out(CHANGES, quick=["two", "swap"]))
def test_a_weight_that_others_change_is_its_own_master(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prove(adamw, tmp_path, changing(CHANGES[how]), steps=5)
    said = [one for one in caplog.records if "master begins anew" in one.message]
    assert len(said) == len(WAYS), "once for each optimizer"


def test_nothing_is_said_where_nothing_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prove(adamw, tmp_path, steps=4)
    assert not [one for one in caplog.records if "master begins anew" in one.message]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_asks_for_masters_of_no_parameter_is_told(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adamw(nn.Linear(8, 8, dtype=dtype).parameters())
    with caplog.at_level(logging.WARNING):
        offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32)
    said = [one for one in caplog.records if "master_dtype=torch.float32 changes" in one.message]
    assert len(said) == (1 if dtype is torch.float32 else 0)


def test_a_look_sees_the_weight_that_others_have_changed(tmp_path: Path) -> None:
    module, optimizer = started(adamw, tmp_path)
    plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
    optimizer._disk.flush()
    weight: Any = module[0].weight  # type: ignore[index]
    weight.data.neg_()
    assert torch.equal(master_of(optimizer, weight), weight.float())


def test_a_weight_that_is_made_float32_needs_no_master(tmp_path: Path) -> None:
    module, optimizer = started(adamw, tmp_path)
    plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
    optimizer._disk.flush()
    module.float()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    plain_step(module, optimizer, torch.randn(8, WIDTH))
    for name, param in module.named_parameters():
        assert param.dtype is torch.float32
        assert not torch.equal(param, before[name])
        assert "master_weight" not in optimizer.state[param]


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    def prepare(_module: nn.Module, _optimizer: Any) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Any, x: Tensor) -> None:
            number = next(numbers)
            if number == 5:
                with torch.no_grad():
                    module[0].weight.fill_(0.25)
            module(x).square().mean().backward()
            if number in (2, 5):
                # What is infinite in a gradient makes the weight a NaN, here in two places.
                module[0].weight.grad.view(-1)[::25_000] = torch.inf
            optimizer.step()
            optimizer.zero_grad()

        return step

    prove(MAKES["sgd"], tmp_path, prepare, steps=8, in_backward=False)


def test_ties_cost_a_bit_for_each_weight(tmp_path: Path) -> None:
    """Half a unit is added to weights: as often as not that is rounded down."""

    def ones() -> nn.Module:
        return nn.ParameterList([torch.ones(300, 300, dtype=torch.bfloat16)])

    def step(module: Any, optimizer: Any, x: Tensor) -> None:
        module[0].grad = torch.full_like(module[0], -1.0)
        optimizer.step()

    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=2**-8)

    # After an odd number of steps; with two more the tie would go to the weight above it.
    options: dict[str, Any] = {"build": ones, "steps": 5}
    plain, _ = train(make, None, lambda *_: step, **options)
    for way in ("step", "backward"):
        actual, optimizer = train(make, tmp_path, lambda *_: step, overlap=way, **options)
        for one, other in zip(actual, plain, strict=True):
            support.assert_equal_bits(one, other)
        optimizer._disk.flush()
        assert optimizer.offload_stats.on_disk_bytes == 2 * 90_000 + 2 * 90_000 // 16
        step(ParameterOf(optimizer), optimizer, torch.empty(0))
        optimizer._disk.flush()
        assert optimizer.offload_stats.on_disk_bytes == 2 * 90_000


class ParameterOf:
    def __init__(self, optimizer: Any) -> None:
        self._params = optimizer.param_groups[0]["params"]

    def __getitem__(self, number: int) -> Tensor:
        found: Tensor = self._params[number]
        return found


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).bfloat16()


def test_ten_bytes_of_each_parameter_are_on_the_disk(tmp_path: Path) -> None:
    module = large()
    count = sum(param.numel() for param in module.parameters())
    optimizer: Any = offload_optimizer(
        adamw(module.parameters()), tmp_path, buffer_bytes="4MiB", master_dtype=torch.float32
    )
    for number in range(3):
        module(torch.randn(8, 512).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer._disk.flush()
        stats = optimizer.offload_stats
        assert stats.on_disk_bytes == 10 * count
        assert stats.written_bytes == (number + 1) * 10 * count
        assert stats.read_bytes == number * 10 * count
        # What is left are the counts of steps.
        assert stats.resident_bytes < 100


def test_the_first_step_does_not_hold_all_masters(tmp_path: Path) -> None:
    module = large()
    optimizer: Any = offload_optimizer(
        adamw(module.parameters()), tmp_path, buffer_bytes="64KiB", master_dtype=torch.float32
    )
    own, found = optimizer._own_kind, []

    class Counting(own):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            states = [dict.values(state) for state in self.state.values()]
            entries = [entry for state in states for entry in state]
            found.append(sum(one.nbytes for one in entries if isinstance(one, Tensor)))
            found.append(sum(one.nbytes for one in entries if type(one) is Away))
            return own.step.__wrapped__(self, closure)

    optimizer._own_kind = Counting
    module(torch.randn(8, 512).bfloat16()).square().mean().backward()
    optimizer.step()
    assert len(found) == 2 * 4, "each weight is a part"
    assert max(found[::2]) < 100
    assert found[-1] == 3 * 8 * 512 * 512


def test_an_optimizer_that_has_trained_in_bfloat16(tmp_path: Path) -> None:
    """Its state is made float32, as torch does that loads it into an optimizer of masters."""
    plain, module = build(), build()
    first, optimizer = adamw(plain.parameters()), adamw(module.parameters())
    xs = torch.randn(6, 8, WIDTH).bfloat16()
    for x in xs[:3]:
        plain_step(plain, first, x)
        plain_step(module, optimizer, x)
    _, reference = started(adamw, None, lambda: plain)
    reference.inner.load_state_dict(first.state_dict())
    offload_optimizer(optimizer, tmp_path, buffer_bytes="1MiB", master_dtype=torch.float32)
    for x in xs[3:]:
        plain_step(plain, reference, x)
        plain_step(module, optimizer, x)
    support.assert_equal_bits(everything(module, optimizer), everything(plain, reference))


def test_a_master_that_somebody_holds_is_live(tmp_path: Path) -> None:
    for overlap in ("step", "backward"):
        module, optimizer = started(adamw, tmp_path, overlap=overlap)
        plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
        for number in (0, 1):
            weight = module[number].weight  # type: ignore[index]
            held = master_of(optimizer, weight)
            old = held.clone()
            plain_step(module, optimizer, torch.randn(8, WIDTH).bfloat16())
            assert master_of(optimizer, weight) is held
            assert not torch.equal(held, old)
            assert torch.equal(held.bfloat16(), weight)


def test_autograd_is_told_of_the_change(tmp_path: Path) -> None:
    module, optimizer = started(adamw, tmp_path)
    x = torch.randn(8, WIDTH, requires_grad=True).bfloat16()
    loss = module(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float32", True])
def test_masters_are_float32(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"master_dtype is None or torch\.float32, not"):
        offload_optimizer(adamw(build().parameters()), tmp_path, master_dtype=dtype)


class Listing(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.listed = self.param_groups[0]["params"][:1]


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    params = list(build().parameters())
    why = "'listed' has parameters or their ids.*use master_dtype=None"
    with pytest.raises(UnsupportedError, match=why):
        offload_optimizer(Listing(params), tmp_path, master_dtype=torch.float32)
    for view in (params[0].data.t(), params[0].data[:8]):
        shared = [*params, nn.Parameter(view)]
        with pytest.raises(UnsupportedError, match="lie in the same memory"):
            offload_optimizer(adamw(shared), tmp_path, master_dtype=torch.float32)
    optimizer = adamw(params)
    offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="lie in the same memory"):
        optimizer.add_param_group({"params": shared[-1:]})


def test_a_state_with_a_master_of_its_own_is_refused(tmp_path: Path) -> None:
    class WithMaster(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param].setdefault("master_weight", param.detach().float())
            return super().step(closure)

    optimizer = WithMaster([nn.Parameter(torch.ones(200, 200, dtype=torch.bfloat16))], lr=0.1)
    with pytest.raises(UnsupportedError, match="'master_weight' of its own"):
        offload_optimizer(optimizer, tmp_path, master_dtype=torch.float32)


def test_a_default_device_is_not_where_masters_lie(tmp_path: Path) -> None:
    """On a machine with a GPU users make it the default device; here it is another one."""

    def prepare(_module: nn.Module, optimizer: Any) -> Step:
        numbers = iter(range(100))

        def step(module: nn.Module, optimizer: Any, x: Tensor) -> None:
            number = next(numbers)
            # The first step makes state, and AdamW counts its steps on the default device.
            with torch.device("meta" if number else "cpu"):
                plain_step(module, optimizer, x)
                if number == 2:
                    optimizer.load_state_dict(optimizer.state_dict())

        return step

    # It is a mode of torch, with which no update is made in backward.
    prove(adamw, tmp_path, prepare, steps=6, in_backward=False)


def test_steps_without_what_there_was_before(tmp_path: Path) -> None:
    """Whoever takes the state of a parameter away lets it begin anew."""

    def prepare(module: Any, optimizer: Any) -> Step:
        numbers = iter(range(100))

        def step(module: Any, optimizer: Any, x: Tensor) -> None:
            plain_step(module, optimizer, x)
            if next(numbers) == 3:
                weight = module[0].weight
                if hasattr(optimizer, "inner"):
                    master = optimizer.masters[0]
                    optimizer.inner.state.pop(master)
                    master.data.copy_(weight)
                else:
                    optimizer.state.pop(weight)

        return step

    plain, _ = train(adamw, None, prepare, steps=6)
    ours, _ = train(adamw, tmp_path, prepare, steps=6)
    for one, other in zip(ours[4:], plain[4:], strict=True):
        support.assert_equal_bits(dict(sorted(one.items())), dict(sorted(other.items())))
