"""Models whose weights are on the disk train with the bits of the plain ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import ssdtrain
import support
from weights_away import (
    STEPS,
    WAYS,
    WIDTH,
    Case,
    Training,
    Way,
    adamw,
    each_way,
    layers,
    numbered,
    offloaded,
    plain,
    plain_step,
    prove,
    squared,
    unique,
)

HEADS = 4
TOKENS = 300


def mlp() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.LayerNorm(WIDTH))


def convolution() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
        for _ in range(6)
    ]
    return nn.Sequential(*blocks, nn.ConvTranspose2d(48, 48, 3))


def of_images(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(numbered(number, 2, 48, 5, 5)).square().mean()
    return loss


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
    )


def of_sequences(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(numbered(number, 2, 5, WIDTH)).square().mean()
    return loss


class Attention(nn.Module):
    """Queries, keys and values of different tensors, and weights of the attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            mixed, weights = part(x, x * 2, x * 3)
            x = x + mixed * weights.sum()
        return x


class Language(nn.Module):
    """Its table is its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.blocks(self.table(tokens))))  # type: ignore[no-any-return]


def of_tokens(model: nn.Module, number: int) -> Tensor:
    tokens = numbered(number, 3, 6).mul(100).long().abs() % TOKENS
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class Recurrent(nn.Module):
    """Some cells of each kind, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            [
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                nn.GRU(WIDTH, WIDTH, batch_first=True),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                nn.RNN(WIDTH, WIDTH, batch_first=True),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
            ]
        )
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)[0]
        state = None
        for one in x.unbind(1):
            state = self.cell(one, state)
        assert state is not None
        return x + state[0][:, None]


def shared() -> nn.Module:
    """Modules that are used more than once, and one weight that two modules have."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    parts[7].weight = parts[2].weight
    order = (0, 1, 0, 2, 3, 1, 4, 5, 6, 0, 7, 5)
    return nn.Sequential(*(parts[number] for number in order), nn.Tanh())


class Adapted(nn.Module):
    """A frozen base beside small parts that are trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = layers()
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in self.base)
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in self.base)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x)) + up(down(x))
        return x


class Checkpointed(nn.Module):
    """Runs its layers again in backward, two at a time."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(4)
        )
        self.pairs = nn.ModuleList(pairs)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0 if x.requires_grad else x.requires_grad_()
        for pair in self.pairs:
            x = F.dropout(self.run(pair, x), 0.1, self.training)
        return x


SELECTIVE = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(
        checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    ),
)
RUNS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    # Of this torch says in a FutureWarning that it goes past other hooks, if there are any.
    "selective": SELECTIVE,
}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    RUNS["selective through hooks"] = partial(SELECTIVE, respect_saved_tensors_hooks=True)


class Borrowed(nn.Module):
    """A parent that uses the weights of its children, which it never calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.children_ = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children_:
            x = F.linear(x, child.weight, child.bias)  # type: ignore[arg-type]
            x = torch.tanh(x @ self.own) + x
        return x


class ByAutograd(nn.Module):
    """A model whose forward takes gradients: an energy, and the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = layers()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = torch.tanh(self.energy(place)).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=self.training)
        return force + energy


class Thirds(nn.Module):
    """A weight of which each use sees a part, a transposed one, or a sum over it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weight.chunk(3)
        x = torch.tanh(x @ first.t()) @ second + F.linear(x, third) * self.weight.mean()
        return x + x @ self.weight[5 : 5 + WIDTH].detach()


def thirds() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Thirds() for _ in range(6)))


def wide() -> nn.Module:
    return layers(width=2 * WIDTH).bfloat16()


def of_wide_rows(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(numbered(number, 4, 2 * WIDTH).bfloat16()).float().square().mean()
    return loss


def autocast(loss: Callable[[nn.Module, int], Tensor], model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, number)


CASES: dict[str, Case] = {
    "mlp": Case(mlp),
    "convolution": Case(convolution, of_images),
    "transformer": Case(transformer, of_sequences),
    "attention": Case(Attention, of_sequences),
    "tied": Case(Language, of_tokens),
    "recurrent": Case(Recurrent, of_sequences),
    "shared": Case(shared),
    "adapters": Case(Adapted),
    **{f"checkpoint, {name}": Case(partial(Checkpointed, run)) for name, run in RUNS.items()},
    # What is used outside of its module's forward is saved as it is, and stays.
    "borrowed": Case(Borrowed, keeps_bound=False),
    "parts": Case(thirds),
    "gradient in forward": Case(ByAutograd, keeps_bound=False),
    "bfloat16": Case(wide, of_wide_rows),
    "autocast": Case(mlp, partial(autocast, squared)),
}


@pytest.mark.parametrize(
    ("name", "way"), each_way(CASES, alone=["mlp", "attention", "shared", "autocast"])
)
def test_models(name: str, way: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        if name == "checkpoint, selective" and WAYS[way].activations:
            warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        prove(CASES[name], tmp_path, WAYS[way])


def unseen_step(training: Training, number: int) -> None:
    """Train without a look at gradients, which updates in backward take."""
    loss = training.loss(number)
    training.note("loss", loss)
    loss.backward()
    training.update()


@pytest.mark.parametrize("name", ["mlp", "tied", "shared"])
def test_updates_in_backward(name: str, tmp_path: Path) -> None:
    case = Case(CASES[name].build, CASES[name].loss, unseen_step)
    prove(case, tmp_path, Way(optimizer="backward"))


@pytest.mark.parametrize("schedule", ["step", "backward"])
def test_masters(schedule: str, tmp_path: Path) -> None:
    case = Case(wide, of_wide_rows, unseen_step, masters=True)
    prove(case, tmp_path, Way(optimizer=schedule))


def test_masters_and_activations(tmp_path: Path) -> None:
    prove(Case(wide, of_wide_rows, masters=True), tmp_path, Way(True, "step"))


# Evaluation, in each of its modes, between steps of training


def evaluated(model: nn.Module, loss: Any, number: int) -> list[Tensor]:
    """Evaluate as people do; the fast paths of torch are among these."""
    found = []
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(loss(model, number))
    found.append(loss(model, number).detach())
    model.train()
    with torch.inference_mode():
        found.append(loss(model, number))
    return [one.clone() for one in found]


def evaluated_step(training: Training, number: int) -> None:
    for one in evaluated(training.model, training.loss_of, number):
        training.note("before", one)
    loss = training.loss(number)
    for one in evaluated(training.model, training.loss_of, number + 10):
        training.note("between forward and backward", one)
    training.backward(loss)
    for one in evaluated(training.model, training.loss_of, number + 20):
        training.note("between backward and step", one)
    training.update()


EVALUATED = ("transformer", "tied", "recurrent", "checkpoint, not reentrant")


@pytest.mark.parametrize(
    "name",
    support.shared_out(EVALUATED, quick=["tied", "checkpoint, not reentrant"]),
)
def test_evaluation_in_between(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with warnings.catch_warnings():
        # Of checkpoints in evaluation, plainly too.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        prove(
            Case(case.build, case.loss, evaluated_step, keeps_bound=case.keeps_bound),
            tmp_path,
            WAYS["everything"],
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_is_only_evaluated_writes_its_weights_once(mode: Any, tmp_path: Path) -> None:
    expected, model = transformer().eval(), offloaded(transformer().eval(), tmp_path)
    for number in range(STEPS):
        with mode():
            assert torch.equal(of_sequences(model, number), of_sequences(expected, number))
    stats = ssdtrain.parameter_stats(model)
    total_bytes = sum(param.nbytes for param in unique(model).values())
    assert stats.written_bytes <= total_bytes, "what does not change is not written again"
    assert stats.read_bytes > total_bytes, "each weight, again and again"


def test_a_frozen_base_is_written_once(tmp_path: Path) -> None:
    case = Case(Adapted)
    model = offloaded(case.build(), tmp_path)
    training = Training(model, adamw([p for p in model.parameters() if p.requires_grad]), squared)
    training.run(plain_step)
    total_bytes = sum(param.nbytes for param in unique(model).values())
    assert ssdtrain.parameter_stats(model).written_bytes <= total_bytes
    assert len(plain(case)) == STEPS
