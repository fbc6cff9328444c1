"""The callbacks in processes that launchers start: each offloads, and trains as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import debug_launcher
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ssdtrain
from ssdtrain.integrations.lightning import OffloadCallback as ForLightning
from ssdtrain.integrations.transformers import OffloadCallback as ForTransformers
from support import assert_equal_bits, write_after_forward

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
MODEL = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0
)
DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
]


class Model(pl.LightningModule):
    """Small layers, and a file for what each process did."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        write_after_forward(self.layers)
        self.notes = notes

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        session = ssdtrain.active()
        written = 0 if session is None else session.stats.bytes_written
        (self.notes / f"rank{self.global_rank}").write_text(str(written))

    def on_fit_end(self) -> None:
        assert ssdtrain.active() is None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(ROWS), batch_size=4)


def written(notes: Path) -> list[int]:
    return [int(one.read_text()) for one in sorted(notes.glob("rank*"))]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_processes_of_lightning_offload(strategy: str, tmp_path: Path) -> None:
    found, bytes_written = [], []
    for callbacks in ([], [ForLightning(tmp_path, min_bytes=1)]):
        model = Model(tmp_path)
        pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        ).fit(model)
        assert ssdtrain.active() is None
        found.append(dict(model.state_dict()))
        bytes_written.append(written(tmp_path))
    assert_equal_bits(found[1], found[0])
    assert bytes_written[0] == [0, 0]
    assert min(bytes_written[1]) > 0


class Notes(TrainerCallback):
    """Notes what a process did."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        session = ssdtrain.active()
        written = 0 if session is None else session.stats.bytes_written
        (self.place / f"rank{args.process_index}").write_text(str(written))


def train_in_process(place: Path, callbacks: list[TrainerCallback]) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(MODEL)
    write_after_forward(model)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(place / "out"),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_steps=4,
            per_device_train_batch_size=4,
            save_strategy="no",
        ),
        train_dataset=DATA,
        callbacks=[*callbacks, Notes(place)],
    )
    trainer.train()
    assert ssdtrain.active() is None
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), place / "weights")


def test_processes_of_accelerate_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else accelerate chooses the number of threads, and warns of it.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, bytes_written = [], []
    for callbacks in ([], [ForTransformers(tmp_path, min_bytes=1)]):
        debug_launcher(train_in_process, (tmp_path, callbacks), num_processes=2)
        found.append(torch.load(tmp_path / "weights"))
        bytes_written.append(written(tmp_path))
    assert_equal_bits(found[1], found[0])
    assert bytes_written[0] == [0, 0]
    assert min(bytes_written[1]) > 0
