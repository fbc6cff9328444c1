"""Generated programs of everything that people do with a model give the bits of the plain one."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from checkout import SCRATCH
from weights_away import WIDTH, adamw, numbered

ONE_BYTES = WIDTH * WIDTH * 4
LAYERS = 5
Op = tuple[str, int]
NAMES = (
    *("forward", "forward", "backward", "backward", "step", "step", "zero", "clip"),
    *("evaluate", "infer", "look", "state", "save", "load", "copy", "hold", "drop"),
    *("freeze", "thaw", "scale", "data", "index", "numpy", "part", "grad", "swap"),
)
programs = some.lists(some.tuples(some.sampled_from(NAMES), some.integers(0, 30)), max_size=30)


class Model(nn.Module):
    """Layers, two of which share a weight, one that is run again, and one seen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.last = nn.Conv1d(1, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            run = number == 2 and self.training
            x = checkpoint(layer, x, use_reentrant=False) if run else layer(x)  # type: ignore[assignment]
            x = torch.nn.functional.dropout(torch.tanh(x), 0.1, self.training)
        x = self.tied(x)
        return self.last(x[:, None]).flatten(1)  # type: ignore[no-any-return]


class Player:
    """A model in training, and what a program does to it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = adamw(model.parameters())
        self.losses: list[Tensor] = []
        self.held: list[Tensor] = []
        self.saved: dict[str, Tensor] | None = None
        self.seen: list[Tensor] = []

    def weight(self, number: int) -> Any:
        params = [layer.weight for layer in self.model.layers] + [self.model.last.weight]
        return params[number % len(params)]

    def play(self, name: str, number: int) -> None:
        torch.manual_seed(number)
        getattr(self, f"do_{name}")(number)

    def do_forward(self, number: int) -> None:
        self.losses.append(self.model(numbered(number, 3, WIDTH)).square().mean())
        self.seen.append(self.losses[-1].detach())

    def do_backward(self, number: int) -> None:
        if self.losses:
            loss = self.losses.pop(number % len(self.losses))
            if loss.requires_grad:
                loss.backward()

    def do_step(self, number: int) -> None:
        self.losses.clear()  # what was changed in place is refused, which other tests compare
        self.optimizer.step()

    def do_zero(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(number % 2))

    def do_clip(self, number: int) -> None:
        self.seen.append(clip_grad_norm_(self.model.parameters(), 0.01))

    def do_evaluate(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(numbered(number, 2, WIDTH)))
        self.model.train()

    def do_infer(self, number: int) -> None:
        with torch.inference_mode():
            self.seen.append(self.model(numbered(number, 2, WIDTH)).clone())

    def do_look(self, number: int) -> None:
        self.seen.append(self.weight(number).detach().clone())

    def do_state(self, number: int) -> None:
        self.seen += [one.clone() for one in self.model.state_dict().values()]

    def do_save(self, number: int) -> None:
        self.saved = copy.deepcopy(self.model.state_dict())

    def do_load(self, number: int) -> None:
        self.losses.clear()
        if self.saved is not None:
            self.model.load_state_dict(self.saved)

    def do_copy(self, number: int) -> None:
        twin = copy.deepcopy(self.model).eval()
        self.seen.append(twin(numbered(number, 2, WIDTH)).detach())

    def do_hold(self, number: int) -> None:
        self.held.append(self.weight(number).detach()[number % 7 :])

    def do_drop(self, number: int) -> None:
        self.seen += [one.clone() for one in self.held]
        self.held.clear()

    def do_freeze(self, number: int) -> None:
        self.weight(number).requires_grad_(False)

    def do_thaw(self, number: int) -> None:
        self.model.requires_grad_(True)

    def do_scale(self, number: int) -> None:
        self.losses.clear()
        with torch.no_grad():
            self.weight(number).mul_(0.9)

    def do_data(self, number: int) -> None:
        self.losses.clear()
        weight = self.weight(number)
        weight.data = weight.data * 0.9

    def do_index(self, number: int) -> None:
        self.losses.clear()
        self.weight(number).data[number % 5] = 0.01

    def do_numpy(self, number: int) -> None:
        self.losses.clear()
        self.weight(number).detach().numpy()[number % 5] *= 0.5

    def do_part(self, number: int) -> None:
        layer = self.model.layers[number % LAYERS]
        layer(numbered(number, 2, WIDTH)).sum().backward()

    def do_grad(self, number: int) -> None:
        gradient = self.weight(number).grad
        self.seen.append(torch.zeros(1) if gradient is None else gradient.clone())

    def do_swap(self, number: int) -> None:
        self.losses.clear()
        first, second = self.weight(number), self.weight(number + 1)
        if first.shape == second.shape:
            first.data, second.data = second.data, first.data

    def end(self) -> list[Tensor]:
        self.seen += [one.detach().clone() for one in self.model.parameters()]
        return self.seen


def played(program: list[Op], directory: Path | None, bound: int, offloads: bool) -> list[Tensor]:
    model = Model()
    if directory is not None:
        ssdtrain.offload_parameters(model, directory, max_resident_bytes=bound * ONE_BYTES)
    player = Player(model)
    if directory is not None and offloads:
        ssdtrain.offload_optimizer(player.optimizer, directory, buffer_bytes="512KiB")
    for name, number in program:
        player.play(name, number)
    return player.end()


def prove(program: list[Op], bound: int, offloads: bool) -> None:
    expected = played(program, None, bound, offloads)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        actual = played(program, Path(directory), bound, offloads)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        support.assert_equal_bits({str(number): one}, {str(number): other})


@settings(max_examples=40)
@given(programs, some.integers(1, 4), some.booleans())
def test_programs(program: list[Op], bound: int, offloads: bool) -> None:
    prove(program, bound, offloads)


@pytest.mark.long
@settings(max_examples=500)
@given(programs, some.integers(1, 4), some.booleans())
def test_many_programs(program: list[Op], bound: int, offloads: bool) -> None:
    prove(program, bound, offloads)
