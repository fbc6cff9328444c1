"""Whatever changes a weight, at whatever moment, is kept when it leaves and comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import ssdtrain
import support
from weights_away import (
    WIDTH,
    Training,
    adamw,
    is_away,
    layers,
    leave,
    numbered,
    offloaded,
    squared,
)

PLACE = 2


def convolutions() -> nn.Module:
    """Layers whose graphs save the weight itself, where linear ones save a view of it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv1d(80, 80, 3, padding=1) for _ in range(8)))


def of_signals(model: nn.Module, number: int) -> Tensor:
    kind = next(model.parameters()).dtype
    loss: Tensor = model(numbered(number, 2, 80, 7).to(kind)).float().square().mean()
    return loss


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "linear": (layers, squared),
    "convolution": (convolutions, of_signals),
}


# Changes of one weight


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[1::3] *= 0.5


def by_new_memory(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


def by_a_part_of_other_memory(weight: Tensor) -> None:
    weight.data = torch.full((2, *weight.shape), 0.01)[1]


@torch.no_grad()
def in_place(weight: Tensor) -> None:
    weight.mul_(0.5)


@torch.inference_mode()
def in_inference(weight: Tensor) -> None:
    weight.mul_(0.5)


def by_a_held_view(weight: Tensor) -> None:
    held = weight.detach()[2:5]
    held.zero_()


CHANGES: dict[str, Callable[[Any], None]] = {
    "mul_ of data": lambda weight: weight.data.mul_(0.5),
    "new data": by_new_memory,
    "a part of other data": by_a_part_of_other_memory,
    "in place": in_place,
    "in inference mode": in_inference,
    "numpy": by_numpy,
    "held view": by_a_held_view,
}


GIVES_MEMORY = ("new data", "a part of other data")

# Moments of a step at which a weight is changed. Each is tried with a weight that is away where it
# can be, and with one that is in memory.


def step_with(
    training: Training, number: int, moment: str, change: Callable[[], None]
) -> dict[str, Tensor]:
    """Make a step, with a change at a moment; return what is seen of it."""
    seen: dict[str, Tensor] = {}
    layer = training.model.get_submodule("5")

    def now(passed: str) -> None:
        if passed == moment:
            change()

    handles = [layer.register_forward_hook(lambda *_: now("in forward"))]
    if moment == "in backward":
        handles.append(layer.register_full_backward_hook(lambda *_: change()))
    now("before")
    loss = training.loss(number)
    seen["loss"] = loss.detach().clone()
    now("between forward and backward")
    try:
        loss.backward()
    except RuntimeError as error:
        # What autograd refuses of a plain weight it refuses of one on the disk.
        seen[support.IN_PLACE if support.IN_PLACE in str(error) else str(error)] = torch.zeros(1)
    for handle in handles:
        handle.remove()
    for name, param in training.model.named_parameters():
        if param.grad is not None:
            seen[f"gradient of {name}"] = param.grad.clone()
    now("between backward and step")
    training.update()
    now("after")
    for name, param in training.model.named_parameters():
        seen[name] = param.detach().clone()
    return seen


MOMENTS = (
    "before",
    "in forward",
    "between forward and backward",
    "in backward",
    "between backward and step",
    "after",
)
WHILE_A_GRAPH_NEEDS_IT = MOMENTS[1:4]


def changed(
    kind: str, moment: str, change: Callable[[Any], None], directory: Path | None, *, at_home: bool
) -> list[dict[str, Tensor]]:
    build, loss = KINDS[kind]
    model = build()
    optimizer = adamw(model.parameters())
    if directory is not None:
        offloaded(model, directory)
    name = f"{PLACE}.weight"

    def change_it() -> None:
        weight = model.get_parameter(name)
        if at_home:
            weight.detach().sum()
        change(weight)

    training = Training(model, optimizer, loss)
    seen = []
    for number in range(3):
        act = change_it if number == 1 else support.nothing
        seen.append(step_with(training, number, moment, act))
    return seen


@pytest.mark.parametrize(
    ("kind", "moment", "at_home"),
    support.shared_out(
        [
            *(("linear", moment, False) for moment in MOMENTS),
            *(("convolution", moment, False) for moment in WHILE_A_GRAPH_NEEDS_IT),
            ("linear", "in forward", True),
        ],
        quick=[
            ("linear", "in forward", False),
            ("linear", "between backward and step", False),
            ("convolution", "in backward", False),
        ],
    ),
)
def test_changes_at_every_moment(kind: str, moment: str, at_home: bool, tmp_path: Path) -> None:
    different, refused = {}, set()
    for name, change in CHANGES.items():
        expected = changed(kind, moment, change, None, at_home=at_home)
        actual = changed(kind, moment, change, tmp_path, at_home=at_home)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            try:
                support.assert_equal_bits(one, other)
            except AssertionError:
                names = [key for key in one if key not in other] or list(one)
                if any("was given other memory" in key for key in names):
                    refused.add(name)
                else:
                    different[name] = f"in step {number}: {names[0]}"
                break
    assert not different
    # The graph has a view of the weight, whose memory is gone; a plain run has it still.
    needs_older = kind == "linear" and moment in WHILE_A_GRAPH_NEEDS_IT
    assert refused == (set(GIVES_MEMORY) if needs_older else set())


# Changes of a whole model


@pytest.mark.parametrize("width", [WIDTH, 256], ids=["small in bfloat16", "large in bfloat16"])
def test_figures_follow_another_dtype(width: int, tmp_path: Path) -> None:
    model = layers(width=width)
    offloaded(model, tmp_path)
    before = ssdtrain.parameter_stats(model)
    assert before.resident_bytes > 0 < before.on_disk_bytes
    model.bfloat16()
    stats = ssdtrain.parameter_stats(model)
    weights_bytes = sum(param.nbytes for param in model.parameters() if param.dim() == 2)
    assert stats.total_bytes == weights_bytes == before.total_bytes // 2
    assert stats.resident_bytes + stats.on_disk_bytes == weights_bytes


def other_state(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(9)
    return {name: torch.randn(one.shape).to(one) for name, one in model.state_dict().items()}


def wrong_state(model: nn.Module) -> None:
    state = {**other_state(model), "2.weight": torch.ones(3, 3), "none": torch.ones(1)}
    del state["5.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*\n.*Unexpected key.*\n.*size mismatch"):
        model.load_state_dict(state)


def in_half_and_back(model: nn.Module) -> None:
    model.half()
    for param in model.parameters():
        param.detach().sum()
    model.float()


def from_a_vector(model: nn.Module) -> None:
    count = sum(param.numel() for param in model.parameters())
    vector_to_parameters(torch.linspace(-0.1, 0.1, count), model.parameters())


def swapped(model: Any) -> None:
    torch.manual_seed(2)
    model[PLACE].weight = Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)


def tied_later(model: Any) -> None:
    model[PLACE].weight = model[5].weight


def layer_replaced(model: Any) -> None:
    torch.manual_seed(2)
    model[PLACE] = nn.Linear(WIDTH, WIDTH)


def weighted(model: Any) -> None:
    parametrizations.weight_norm(model[PLACE])


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model[PLACE], "weight", Symmetric())
    with parametrize.cached():
        model(numbered(1, 2, WIDTH))


def parametrized_and_back(model: Any) -> None:
    parametrized(model)
    parametrize.remove_parametrizations(model[PLACE], "weight", leave_parametrized=True)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model[PLACE], "weight", 0.3)


def pruned_in_all(model: Any) -> None:
    prune.global_unstructured(
        [(part, "weight") for part in model], pruning_method=prune.L1Unstructured, amount=0.2
    )


MODELS: dict[str, Callable[[Any], None]] = {
    "load": lambda model: model.load_state_dict(other_state(model)),
    "load by assignment": lambda model: model.load_state_dict(other_state(model), assign=True),
    "load what is wrong": wrong_state,
    "bfloat16": lambda model: model.bfloat16(),
    "half and back": in_half_and_back,
    "vector": from_a_vector,
    "swapped": swapped,
    "tied": tied_later,
    "layer replaced": layer_replaced,
    "weight norm": weighted,
    "parametrized and back": parametrized_and_back,
    "pruned": pruned,
    "pruned in all": pruned_in_all,
    "frozen": lambda model: model[PLACE].requires_grad_(False),
    "shared memory": lambda model: model.share_memory(),
}


def trained_with(change: Callable[[Any], None], directory: Path | None) -> list[dict[str, Tensor]]:
    """Train, change the model, make a new optimizer for it, as one has to, and train on."""
    model = layers()
    if directory is not None:
        offloaded(model, directory)
    seen = []
    for _ in range(2):
        training = Training(model, adamw(model.parameters()), squared)
        seen += [step_with(training, number, "", support.nothing) for number in range(3)]
        if len(seen) == 3:
            if directory is not None:
                leave(model, f"{PLACE}.weight")
            change(model)
    return seen


@pytest.mark.parametrize("change", MODELS)
def test_changes_of_models(change: str, tmp_path: Path) -> None:
    expected = trained_with(MODELS[change], None)
    for one, other in zip(trained_with(MODELS[change], tmp_path), expected, strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize("change", [weighted, pruned_in_all])
def test_models_that_were_changed_before(change: Callable[[Any], None], tmp_path: Path) -> None:
    def trained(directory: Path | None) -> list[dict[str, Tensor]]:
        model = layers()
        change(model)
        if directory is not None:
            offloaded(model, directory)
        training = Training(model, adamw(model.parameters()), squared)
        return [step_with(training, number, "", support.nothing) for number in range(5)]

    for one, other in zip(trained(tmp_path), trained(None), strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.defends("shared weights stay")
@pytest.mark.parametrize("keeps_copies", [False, True])
def test_shared_memory_stays_shared(keeps_copies: bool, tmp_path: Path) -> None:
    """Another process may have it from then on, so it cannot leave any more."""
    model = offloaded(layers(), tmp_path)
    weight: Any = model.get_parameter("2.weight")
    weight.share_memory_()
    held = weight.detach() if keeps_copies else None
    for number in range(3):
        squared(model, number)
    gc.collect()
    assert weight.is_shared()
    assert not is_away(weight)
    assert held is None or held.data_ptr() == weight.data_ptr()


# Averages


def averaged(kind: str, directory: Path | None) -> list[dict[str, Tensor]]:
    """Train with an average of the weights beside it; return both, and what they compute."""
    model = layers()
    if directory is not None:
        offloaded(model, directory)
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training = Training(model, adamw(model.parameters()), squared)
    seen = []
    for number in range(4):
        seen.append(step_with(training, number, "", support.nothing))
        if kind == "by hand":
            for one, now in zip(average.parameters(), model.parameters(), strict=True):
                one.data.lerp_(now.data, 0.1)
        else:
            average.update_parameters(model)
    update_bn([], average)
    seen.append({"loss": squared(average.module, 1)})
    seen.append({name: one.clone() for name, one in average.module.state_dict().items()})
    return [*seen, exchanged_for(model, average)]


def exchanged_for(model: nn.Module, average: nn.Module) -> dict[str, Tensor]:
    """Evaluate with the averages in the place of the weights, and then with these again."""
    kept = [param.detach().clone() for param in model.parameters()]
    losses = []
    for values in ([one.data for one in average.parameters()], kept):
        for param, one in zip(model.parameters(), values, strict=True):
            param.data.copy_(one)
        losses.append(squared(model, 2))
    return {"with": losses[0], "without": losses[1]}


@pytest.mark.parametrize("kind", ["by hand", "in foreach"])
def test_averages_of_weights(kind: str, tmp_path: Path) -> None:
    for one, other in zip(averaged(kind, tmp_path), averaged(kind, None), strict=True):
        support.assert_equal_bits(one, other)


def test_unchanged_weights_are_not_written_again(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    total_bytes = ssdtrain.parameter_stats(model).total_bytes
    for number in range(4):
        squared(model, number).backward()
        model.zero_grad()
    stats = ssdtrain.parameter_stats(model)
    assert stats.written_bytes <= total_bytes
    change = partial(CHANGES["mul_ of data"], model.get_parameter("3.weight"))
    change()
    for number in range(4):
        squared(model, number)
    after = ssdtrain.parameter_stats(model)
    assert after.written_bytes - stats.written_bytes <= WIDTH * WIDTH * 4 + (
        total_bytes - stats.written_bytes
    ), "only the one that was changed, and what had never left"


def test_a_model_whose_parameters_were_replaced_is_offloaded_again(tmp_path: Path) -> None:
    model, plain = offloaded(layers(), tmp_path), layers()
    values = {name: one + 1 for name, one in plain.state_dict().items()}
    for one in (model, plain):
        one.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    with pytest.raises(ssdtrain.ConfigError, match="after a replacement of parameters"):
        ssdtrain.parameter_stats(model)
    offloaded(model, tmp_path)
    for one in (model, plain):
        squared(one, 0).backward()
    assert ssdtrain.parameter_stats(model).on_disk_bytes > 0
    support.assert_equal_bits(support.gradients(model), support.gradients(plain))
