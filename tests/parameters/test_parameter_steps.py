"""Whatever a training step does, weights on the disk give the bits of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ssdtrain
import support
from ssdtrain import TensorStore
from weights_away import (
    WAYS,
    WIDTH,
    Case,
    Lion,
    Training,
    Way,
    adamw,
    away,
    each_way,
    layers,
    numbered,
    offloaded,
    plain_step,
    prove,
    quarter,
    squared,
    started,
    unique,
)


def smooth() -> nn.Module:
    """A model that can be differentiated twice."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus()) for _ in range(8)))


def accumulated_and_clipped(training: Training, number: int) -> None:
    for part in range(2):
        training.backward(training.loss(10 * number + part) / 2)
    training.note("norm", clip_grad_norm_(training.model.parameters(), 0.01))
    clip_grad_value_(training.model.parameters(), 0.001)
    training.note_gradients()
    training.update()


def several_forwards(training: Training, number: int) -> None:
    """Go forward more than once before the first way back, and back in another order."""
    losses = [training.loss(10 * number + part) for part in range(3)]
    for place in (1, 0, 2):
        training.backward(losses[place])
    training.update()


def retained(training: Training, number: int) -> None:
    loss = training.loss(number)
    training.flush()
    for _ in range(2):
        loss.backward(retain_graph=True)
        training.note_gradients()
    training.backward(loss)
    training.update()


def in_parts(training: Training, number: int) -> None:
    """Go back to some weights, then to others, then to all."""
    loss = training.loss(number)
    training.flush()
    params = list(training.model.parameters())
    for some in (params[:3], params[5:7], params):
        for one in torch.autograd.grad(loss, some, retain_graph=True):
            training.note("part", one)
    loss.backward(inputs=params[4:], retain_graph=True)
    training.note_gradients()
    loss.backward(inputs=params[:4])
    training.note_gradients()
    training.update()


def penalised(training: Training, number: int) -> None:
    """Penalise the gradient at the input."""
    x = numbered(number, 4, WIDTH).requires_grad_()
    out = training.model(x).sum()
    training.flush()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    training.note("gradient", gradient)
    training.backward(out + (gradient.norm(dim=1) - 1).square().mean())
    training.update()


def twice(training: Training, number: int) -> None:
    """Differentiate the gradients of all weights once more."""
    params = list(training.model.parameters())
    loss = training.loss(number)
    training.flush()
    first = torch.autograd.grad(loss, params, create_graph=True)
    training.flush()
    training.backward(torch.stack([one.square().sum() for one in first]).sum() + loss)
    training.update()


def graph_of_backward(training: Training, number: int) -> None:
    loss = training.loss(number)
    training.flush()
    loss.backward(create_graph=True)
    params = list(training.model.parameters())
    norm = torch.stack([one.grad.norm() for one in params if one.grad is not None]).norm()
    for param in params:
        param.grad = None
    training.backward(norm + training.loss(number + 1))
    training.update()


class Nested(torch.autograd.Function):
    """Goes forward and back in its own backward, through a part that is given to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = part(x)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            ctx.part(again).backward(grads[0])
        return again.grad, None


def nested(training: Training, number: int) -> None:
    x = numbered(number, 4, WIDTH).requires_grad_()
    for part in training.model.children():
        x = Nested.apply(x, part)  # type: ignore[no-untyped-call]
    training.backward(x.square().mean())
    training.update()


def with_closure(training: Training, number: int) -> None:
    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(number)
        training.backward(loss)
        return loss

    training.optimizer.step(closure)


def unused_layers(training: Training, number: int) -> None:
    """Train some of the layers only, others each time, and drop forwards."""
    parts = list(training.model.children())[number % 3 :: 2]
    x = numbered(number, 4, WIDTH)
    for part in parts:
        x = part(x)
    training.loss(number)
    dropped = training.loss(number)
    training.backward(x.square().mean())
    del dropped
    training.update()


def frozen_and_not(training: Training, number: int) -> None:
    """Freeze other layers in each step, also between forward and backward."""
    params = list(training.model.parameters())
    for place, param in enumerate(params):
        param.requires_grad_(place % 4 != number % 4)
    loss = training.loss(number)
    for param in params[:4]:
        param.requires_grad = True
    training.backward(loss)
    training.update()


def hooked(training: Training, number: int) -> None:
    """Look at gradients by hooks, on weights that may be away."""
    handles = []
    for param in training.model.parameters():
        handles.append(param.register_hook(lambda grad: grad * 0.5))
        handles.append(
            param.register_post_accumulate_grad_hook(
                lambda one: training.note("hook", one.grad.clone() + one.detach())  # type: ignore[union-attr]
            )
        )
    training.backward(training.loss(number))
    for handle in handles:
        handle.remove()
    training.update()


def by_hand(training: Training, number: int) -> None:
    """Update without an optimizer, in the ways that tutorials show."""
    training.backward(training.loss(number))
    with torch.no_grad():
        for place, param in enumerate(training.model.parameters()):
            assert param.grad is not None
            if place % 3 == 0:
                param -= 0.1 * param.grad  # noqa: PLW2901 - in place
            elif place % 3 == 1:
                param.data = param.data - 0.1 * param.grad
            else:
                param.copy_(param - 0.1 * param.grad)
            param.grad = None


def in_hooks(training: Training, number: int) -> None:
    """Update each weight as soon as its gradient is there, as tutorials on memory show."""

    def update(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]
        param.grad = None

    handles = [
        param.register_post_accumulate_grad_hook(update) for param in training.model.parameters()
    ]
    training.backward(training.loss(number))
    for handle in handles:
        handle.remove()


STEPS: dict[str, Case] = {
    "clipped": Case(layers, step=accumulated_and_clipped),
    "several forwards": Case(layers, step=several_forwards),
    "retained": Case(layers, step=retained),
    # One function gets a list of all weights.
    "in parts": Case(layers, step=in_parts, keeps_bound=False),
    # A graph that backward makes holds the weights it saves: autograd does not ask hooks there.
    "penalised": Case(smooth, step=penalised, keeps_bound=False),
    "twice": Case(smooth, step=twice, keeps_bound=False),
    "nested": Case(smooth, step=nested),
    "closure": Case(layers, step=with_closure),
    "unused layers": Case(layers, step=unused_layers),
    "frozen and not": Case(layers, step=frozen_and_not),
    "hooked": Case(layers, step=hooked),
    "by hand": Case(layers, step=by_hand),
    "in hooks": Case(smooth, step=in_hooks),
}


@pytest.mark.parametrize(
    ("name", "way"),
    each_way(
        STEPS,
        alone=["clipped", "retained", "closure", "in hooks"],
    ),
)
def test_steps(name: str, way: str, tmp_path: Path) -> None:
    prove(STEPS[name], tmp_path, WAYS[way])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", support.shared_out(WAYS, quick=["everything"]))
def test_a_graph_of_the_backward(way: str, tmp_path: Path) -> None:
    prove(Case(smooth, step=graph_of_backward, keeps_bound=False), tmp_path, WAYS[way])


def scaled(training: Training, number: int) -> None:
    """Scale the loss; some steps overflow and are left out."""
    vars(training).setdefault(
        "scaler", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    )
    scaler: torch.amp.GradScaler = vars(training)["scaler"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = training.loss(number)
    training.backward(scaler.scale(loss * (1e38 if number in (1, 3) else 1.0)))
    scaler.unscale_(training.optimizer)
    clip_grad_norm_(training.model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(training.optimizer)
    scaler.update()
    assert (scaler.get_scale() < before) == (number in (1, 3)), "left out, or not"
    training.optimizer.zero_grad()


@pytest.mark.parametrize(("fused", "way"), each_way([False, True], alone=[True], rare=[True]))
def test_a_scaler_that_leaves_steps_out(way: str, fused: bool, tmp_path: Path) -> None:
    make = partial(torch.optim.AdamW, lr=1e-2, fused=fused)
    # A fused update takes all weights at once.
    keeps_bound = not fused or WAYS[way].optimizer is not None
    prove(Case(smooth, step=scaled, make=make, keeps_bound=keeps_bound), tmp_path, WAYS[way])


MAKES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "momentum": (partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False), True),
    "foreach": (partial(torch.optim.AdamW, foreach=True), False),
    "fused": (partial(torch.optim.AdamW, fused=True), False),
    "adafactor": (torch.optim.Adafactor, True),
    "lion": (Lion, True),
}


@pytest.mark.parametrize(("name", "way"), each_way(MAKES, alone=["momentum", "fused", "lion"]))
def test_optimizers(name: str, way: str, tmp_path: Path) -> None:
    make, one_at_a_time = MAKES[name]
    keeps_bound = one_at_a_time or WAYS[way].optimizer is not None
    prove(Case(smooth, make=make, keeps_bound=keeps_bound), tmp_path, WAYS[way])


def lbfgs_step(training: Training, number: int) -> None:
    training.optimizer.step(lambda: backward_of(training, number))
    training.optimizer.zero_grad()


def backward_of(training: Training, number: int) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss(number)
    training.backward(loss)
    return loss


def test_an_optimizer_that_couples_all_weights(tmp_path: Path) -> None:
    make = partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=2)
    prove(Case(smooth, step=lbfgs_step, make=make, keeps_bound=False), tmp_path, Way())


# What the feature itself may be asked for, and in which order


@pytest.mark.parametrize("bound", [None, "300KiB", 5 << 20, "largest"])
def test_any_bound(bound: Any, tmp_path: Path) -> None:
    """Also none, which holds three layers, and one that holds all."""
    model, expected = layers(), layers()
    largest = WIDTH * WIDTH * 4
    given = largest if bound == "largest" else bound
    assert (
        ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes=given, verify=True) is model
    )
    seen = Training(model, adamw(model.parameters()), squared).run(plain_step)
    plainly = Training(expected, adamw(expected.parameters()), squared).run(plain_step)
    for one, other in zip(seen, plainly, strict=True):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), name
    stats = ssdtrain.parameter_stats(model)
    limits = {None: 3 * largest, "300KiB": 300 << 10, "largest": largest}
    assert stats.peak_resident_bytes <= limits.get(bound, stats.total_bytes)
    assert stats.total_bytes == 8 * largest
    assert stats.staying_bytes == 8 * WIDTH * 4, "of the biases"
    assert (stats.read_bytes > 0) == (bound != 5 << 20)


def test_one_store_for_everything(tmp_path: Path) -> None:
    expected = Training(smooth(), None, squared)
    expected.optimizer = adamw(expected.model.parameters())
    with TensorStore(tmp_path) as store:
        model = offloaded(smooth(), store)
        optimizer = ssdtrain.offload_optimizer(adamw(model.parameters()), store)
        other = offloaded(smooth(), store)
        training = Training(model, optimizer, squared)
        for one, plainly in zip(training.run(plain_step), expected.run(plain_step), strict=True):
            for name, tensor in plainly.items():
                assert torch.equal(one[name], tensor), name
        assert all(map(torch.equal, other.parameters(), smooth().parameters()))
        assert store.stats()["disk_used_bytes"] > 0


def test_two_models_and_one_optimizer(tmp_path: Path) -> None:
    """A generator and a critic, each on the disk, in turns."""

    def run(directory: Path | None) -> list[Tensor]:
        models = [smooth(), layers()]
        if directory is not None:
            for model in models:
                offloaded(model, directory)
        optimizers = [adamw(model.parameters()) for model in models]
        for number in range(5):
            for turn, optimizer in enumerate(optimizers):
                made = models[0](numbered(number, 4, WIDTH))
                models[1](made if turn == 0 else made.detach()).square().mean().backward()
                optimizer.step()
                for one in optimizers:
                    one.zero_grad()
        return [param.detach().clone() for model in models for param in model.parameters()]

    assert all(map(torch.equal, run(tmp_path), run(None)))


def test_offloaded_in_the_middle_of_training(tmp_path: Path) -> None:
    def run(directory: Path | None) -> list[dict[str, Tensor]]:
        model = smooth()

        def step(training: Training, number: int) -> None:
            if number == 2 and directory is not None:
                offloaded(model, directory)
            plain_step(training, number)

        return Training(model, adamw(model.parameters()), squared).run(step)

    for one, other in zip(run(tmp_path), run(None), strict=True):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), name


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Only the first half is offloaded; the other stays, and so do its figures."""
    case = Case(smooth)
    model = case.build()
    half = model[:4]  # type: ignore[index]
    offloaded(half, tmp_path)
    seen = Training(model, adamw(model.parameters()), squared).run(plain_step)
    expected = case.build()
    plainly = Training(expected, adamw(expected.parameters()), squared).run(plain_step)
    for one, other in zip(seen, plainly, strict=True):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), name
    stats = ssdtrain.parameter_stats(half)
    assert stats.total_bytes == 4 * WIDTH * WIDTH * 4
    assert stats.read_bytes > 0


def test_figures_from_the_first_moment(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    stats = ssdtrain.parameter_stats(model)
    total_bytes = sum(param.nbytes for param in unique(model).values())
    assert stats.total_bytes == total_bytes
    assert stats.resident_bytes <= stats.peak_resident_bytes
    assert stats.written_bytes >= total_bytes - quarter(model), "what left was written"
    assert stats.read_bytes == 0
    assert stats.on_disk_bytes >= total_bytes - stats.resident_bytes
    assert stats.stall_s >= 0
    with pytest.raises(AttributeError):
        stats.read_bytes = 5  # type: ignore[misc]
    with ssdtrain.parameters_in_memory(model):
        inside = ssdtrain.parameter_stats(model)
        assert inside.resident_bytes == total_bytes
    assert replace(stats) == stats


@pytest.mark.parametrize("schedule", [None, "step", "backward"])
def test_a_checkpoint_of_weights_that_are_away(schedule: str | None, tmp_path: Path) -> None:
    """Saved and loaded by streaming, under the bound, into a model whose weights are away, too."""
    case = Case(layers, step=unlooked_step)
    way = Way(optimizer=schedule)
    expected = started(case, None, Way())[0]
    expected.run(case.step, 4)
    saving, _ = started(case, tmp_path, way)
    saving.run(case.step, 2)
    assert away(saving.model)
    ssdtrain.save(tmp_path / "checkpoint", saving.model, saving.optimizer)
    loading, _ = started(case, tmp_path, way)
    with torch.no_grad():
        for param in loading.model.parameters():
            param.zero_()
    ssdtrain.load(tmp_path / "checkpoint", loading.model, loading.optimizer)
    bound = quarter(loading.model)
    assert ssdtrain.parameter_stats(loading.model).resident_bytes <= bound
    loading.seen = saving.seen
    for number in range(2, 4):
        loading.seen.append({})
        torch.manual_seed(number)
        case.step(loading, number)
        loading.note_weights()
        loading.note("random state", torch.get_rng_state())
    for one, other in zip(loading.seen, expected.seen, strict=True):
        support.assert_equal_bits(one, other)


def unlooked_step(training: Training, number: int) -> None:
    """Train without a look at gradients, which updates in backward take."""
    loss = training.loss(number)
    training.note("loss", loss)
    loss.backward()
    training.update()
