"""Training on the fake device: the same bits each time, no race, nothing that the fake lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fake_device import FakeDevice
from on_fake import on_fake_device

LAG_US = 100
STEPS = 2


class Block(nn.Module):
    """A transformer block with dropout; its feed-forward part may run on a stream of its own."""

    def __init__(self, width: int = 32, heads: int = 4, side: torch.cuda.Stream | None = None):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.side = side

    def attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(count, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(count, length, width)))

    def feed(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            x = x + self.attend(x)
            return x + self.feed(x)
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            fed = self.feed(x)
        attended = self.attend(x)
        main.wait_stream(self.side)
        fed.record_stream(main)
        return x + attended + fed


class Language(nn.Module):
    def __init__(
        self, *, recompute: bool | None = None, side: torch.cuda.Stream | None = None
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(Block(side=side) for _ in range(2))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens[:, :-1])
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        logits = x @ self.words.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 5),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures).square().mean()


class Halves(nn.Module):
    """One half on each of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = Block().to("cuda:0"), Block().to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        x = self.far(self.near(x).to("cuda:1"))
        return x.to("cuda:0").square().mean()


class Views(nn.Module):
    """What autograd saves lies in parts, turned or stretched, on storages that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        mixed = torch.sigmoid(gate) * value
        turned = mixed.transpose(1, 2) * mixed[:, :1].transpose(1, 2).expand(-1, -1, 8)
        rows = torch.cat([turned[..., ::2], turned[..., 1::2].flip(-1)], dim=-1)
        return self.out(rows.transpose(1, 2)).square().mean()


def mlp() -> nn.Module:
    layers = [nn.Linear(24, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.Tanh()]

    class Squared(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    return Squared(*layers)


def tokens() -> Tensor:
    return torch.randint(0, 40, (3, 17))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(8, 24)),
    "convolution": (Pictures, lambda: torch.randn(4, 3, 12, 12)),
    "transformer": (Language, tokens),
    "autocast": (Language, tokens),
    "bfloat16": (lambda: mlp().bfloat16(), lambda: torch.randn(32, 24).bfloat16()),
    "views": (Views, lambda: torch.randn(4, 8, 32)),
    "checkpoint": (lambda: Language(recompute=False), tokens),
    "reentrant checkpoint": (lambda: Language(recompute=True), tokens),
    "two streams": (lambda: Language(side=torch.cuda.Stream()), tokens),
    "two devices": (Halves, lambda: torch.randn(2, 8, 32)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "mlp": torch.optim.SGD,
    "convolution": lambda weights, lr: torch.optim.AdamW(weights, lr, foreach=True),
    "transformer": lambda weights, lr: torch.optim.Adam(weights, lr, fused=True),
}


def train(case: str) -> list[Tensor]:
    """Losses, gradients and weights of a few steps, from the same seeds each time."""
    make, batch = CASES[case]
    torch.manual_seed(1)
    model = make()
    if case != "two devices":
        model.to("cuda")
    optimizer = OPTIMIZERS.get(case, torch.optim.AdamW)(model.parameters(), lr=0.01)
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    seen = []
    for _ in range(STEPS):
        inputs = batch().to("cuda", non_blocking=True)
        if case == "autocast":
            precision = torch.autocast("cuda", dtype=torch.bfloat16)
        with precision:
            loss = model(inputs)
        loss.backward()
        seen += [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.cpu() for tensor in [*seen, *model.parameters()]]


@on_fake_device()
def test_same_bits_as_the_cpu(fake: FakeDevice) -> None:
    def weights(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 8))
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 24).to(device)).tanh().square().mean().backward()
            optimizer.step()
        return [weight.detach().cpu() for weight in model.parameters()]

    assert all(map(torch.equal, weights("cpu"), weights("cuda")))


@on_fake_device()
def test_random_numbers_follow_the_generator(fake: FakeDevice) -> None:
    def draw() -> Tensor:
        return torch.rand(8, device="cuda").cpu()

    torch.manual_seed(1)
    first, second = draw(), draw()
    state = torch.cuda.get_rng_state()
    third = draw()
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), third)
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
