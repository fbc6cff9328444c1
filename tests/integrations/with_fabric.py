"""Offloaded optimizers behind the objects that Fabric and Lightning put in front of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import ssdtrain
from support import assert_equal_bits

pytest_plugins = ["trainers"]
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # Fabric loads with `torch.load`, of which it tells that it is not `weights_only`.
    pytest.mark.filterwarnings("ignore:.*weights_only:FutureWarning"),
]
OVERLAPS = pytest.mark.parametrize("overlap", ["step", "backward"])
WIDTH = 160
BATCHES = 4


def rows(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def offload(optimizer: torch.optim.Optimizer, place: Path | None, overlap: str) -> None:
    if place is not None:
        options: dict[str, Any] = {"overlap": overlap, "buffer_bytes": "256KiB"}
        ssdtrain.offload_optimizer(optimizer, place / "spill", **options)


def everything(module: nn.Module, *optimizers: Any) -> dict[str, Tensor]:
    found = {name: one.detach().clone() for name, one in module.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for key, state in sorted(optimizer.state_dict()["state"].items()):
            found |= {f"{number} {key} {name}": one.clone() for name, one in state.items()}
    return found


def train_with_fabric(place: Path, overlap: str, *, offloaded: bool) -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    torch.manual_seed(0)
    plain_module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 1))
    plain_optimizer = torch.optim.AdamW(plain_module.parameters())
    offload(plain_optimizer, place if offloaded else None, overlap)
    module, optimizer = fabric.setup(plain_module, plain_optimizer)
    scheduler = ExponentialLR(optimizer, 0.9)

    def step(seed: int) -> None:
        fabric.backward(module(rows(seed)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    for seed in range(BATCHES):
        step(seed)
    fabric.save(place / "checkpoint", {"module": module, "optimizer": optimizer})
    step(BATCHES)
    # Back to the checkpoint, and on from there.
    fabric.load(place / "checkpoint", {"module": module, "optimizer": optimizer})
    step(BATCHES + 1)
    return everything(plain_module, optimizer)


@OVERLAPS
def test_fabric_trains_saves_and_loads_with_the_same_bits(overlap: str, place: Path) -> None:
    found = [train_with_fabric(place, overlap, offloaded=one) for one in (False, True)]
    assert_equal_bits(found[1], found[0])


def test_ssdtrain_saves_what_fabric_has_set_up(place: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain_module = nn.Linear(WIDTH, WIDTH)
    plain_optimizer = torch.optim.AdamW(plain_module.parameters())
    offload(plain_optimizer, place, "step")
    module, optimizer = fabric.setup(plain_module, plain_optimizer)
    fabric.backward(module(rows(1)).square().mean())
    optimizer.step()
    saved = everything(plain_module, optimizer)
    ssdtrain.save(place / "checkpoint", plain_module, optimizer)
    optimizer.step()
    ssdtrain.load(place / "checkpoint", plain_module, optimizer)
    assert_equal_bits(everything(plain_module, optimizer), saved)


class Rivals(lightning.pytorch.LightningModule):
    """A generator and a discriminator, each with an optimizer that is stepped by hand."""

    def __init__(self, place: Path | None, overlap: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.place, self.overlap = place, overlap
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.AdamW(self.generator.parameters()),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]
        for optimizer in optimizers:
            offload(optimizer, self.place, self.overlap)
        return optimizers

    def training_step(self, batch: list[Tensor], _: int) -> None:
        first, second = self.optimizers()
        assert isinstance(first, LightningOptimizer)
        with first.toggle_model():
            first.zero_grad()
            self.manual_backward(self.discriminator(self.generator(batch[0])).mean())
            first.step()
        made = self.generator(batch[0]).detach()
        with second.toggle_model():
            second.zero_grad()
            loss = self.discriminator(batch[0]).mean() - self.discriminator(made).mean()
            self.manual_backward(loss)
            second.step()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.cat([rows(one) for one in range(BATCHES)])), 8)


@OVERLAPS
def test_two_optimizers_that_lightning_leaves_to_the_user(overlap: str, place: Path) -> None:
    found = []
    for folder in (None, place):
        model = Rivals(folder, overlap)
        trainer = lightning.pytorch.Trainer(
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model)
        trainer.save_checkpoint(place / "checkpoint")
        again = Rivals(folder, overlap)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(again, ckpt_path=place / "checkpoint", weights_only=False)
        found.append(everything(again, *(one.optimizer for one in again.optimizers())))
    assert_equal_bits(found[1], found[0])
