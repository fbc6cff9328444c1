"""The callback of Lightning with both of its packages: equal bits, and nothing stays on."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ssdtrain
from ssdtrain.integrations.lightning import OffloadCallback
from support import assert_equal_bits, assert_nothing_is_on, write_after_forward

pytest_plugins = ["trainers"]
pytestmark = [
    # Lightning 2.6 asks torch 2.15 in a way that will be given up.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"),
    # It tells how to train faster, which a test of 4 batches need not.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
BOTH = pytest.mark.parametrize(
    "package", [lightning.pytorch, pytorch_lightning], ids=lambda one: one.__name__
)
ONE = pytest.mark.parametrize("package", [lightning.pytorch])
BATCHES = 4
ROWS = torch.randn(BATCHES * 8, 64, generator=torch.Generator().manual_seed(1))
EVENTS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


class Stop(Exception):
    """What a test raises in the middle of training."""


def model_of(package: Any) -> Any:
    class Model(package.LightningModule):  # type: ignore[misc, name-defined]
        """Small layers, and each loss that they had."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)
            )
            write_after_forward(self.layers)
            self.losses: list[Tensor] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.layers(batch[0])

        def predict_step(self, batch: list[Tensor], _: int) -> Any:
            return self.layers(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS), batch_size=8)

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS[:8]), batch_size=8)

        predict_dataloader = val_dataloader

    return Model()


def trainer_of(package: Any, *callbacks: Any, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        **options,
    }
    return package.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **arguments,
    )


def offloads(place: Path) -> OffloadCallback:
    return OffloadCallback(place / "spill", min_bytes=1)


def outcome(model: Any) -> dict[str, Tensor]:
    """Return each loss and each weight."""
    return {"losses": torch.stack(model.losses), **model.state_dict()}


def offloaded(callback: OffloadCallback) -> ssdtrain.Stats:
    assert callback.session is not None
    stats = callback.session.stats
    assert stats.tensors_offloaded + stats.tensors_forwarded + stats.tensors_kept > 0
    return stats


def at(package: Any, event: str, act: Callable[[Any], None]) -> Any:
    """Return a callback that does something when an event comes."""
    callback = package.Callback()

    def acts(trainer: Any, *_: Any, **__: Any) -> None:
        act(trainer)

    setattr(callback, event, acts)
    return callback


def logger_of(package: Any) -> Any:
    class Logger(package.loggers.logger.Logger):  # type: ignore[misc, name-defined]
        """Keeps what it is given."""

        name, version = "kept", 0

        def __init__(self) -> None:
            super().__init__()
            self.logs: list[dict[str, float]] = []

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.logs.append({**metrics, "step": step})

    return Logger()


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "val_check_interval": 2}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated and validated", "bfloat16"],
)
def test_not_one_bit_differs(package: Any, options: dict[str, Any], place: Path) -> None:
    callback, found = offloads(place), []
    for callbacks in ([], [callback]):
        model = model_of(package)
        trainer_of(package, *callbacks, **options).fit(model)
        found.append(outcome(model))
        assert_nothing_is_on()
    assert_equal_bits(found[1], found[0])
    assert offloaded(callback).bytes_read > 0


@BOTH
def test_no_end_leaves_anything_on(package: Any, place: Path) -> None:
    def raises_again(_: object) -> None:
        raise Stop

    ends = zip(EVENTS, itertools.cycle((KeyboardInterrupt, Stop)), strict=False)
    for (event, error), is_first in itertools.product(ends, (True, False)):

        def raises(_: object, error: type[BaseException] = error) -> None:
            raise error

        callback, other = offloads(place), at(package, event, raises)
        # The worst of neighbours: it also keeps those behind it from being told of the error.
        other.on_exception = at(package, "on_exception", raises_again).on_exception
        trainer = trainer_of(package, *((other, callback) if is_first else (callback, other)))
        with pytest.raises((Stop, SystemExit)):
            trainer.fit(model_of(package))
        assert_nothing_is_on()
        # A second try with the same trainer, as in a notebook.
        trainer.callbacks.remove(other)
        trainer.fit(model_of(package))
        assert "run" not in vars(trainer.fit_loop)


@ONE
def test_training_that_is_stopped_early_leaves_nothing_on(package: Any, place: Path) -> None:
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    model = model_of(package)
    trainer_of(package, offloads(place), at(package, "on_train_batch_end", stop)).fit(model)
    assert 0 < len(model.losses) < BATCHES


@ONE
def test_a_resumed_training_goes_on_bit_for_bit(package: Any, place: Path) -> None:
    found = []
    for callbacks in ([], [offloads(place)]):
        first = trainer_of(package, *callbacks)
        first.fit(model_of(package))
        first.save_checkpoint(place / "checkpoint")
        model = model_of(package)
        again = trainer_of(package, *callbacks, max_epochs=2)
        again.fit(model, ckpt_path=place / "checkpoint", weights_only=False)
        assert len(model.losses) == BATCHES
        found.append(outcome(model))
    assert_equal_bits(found[1], found[0])


@ONE
def test_validation_and_prediction_are_not_covered(package: Any, place: Path) -> None:
    callback, model = offloads(place), model_of(package)
    trainer = trainer_of(package, callback)
    trainer.validate(model)
    trainer.predict(model)
    assert callback.session is None
    trainer.fit(model)
    first = callback.session
    trainer.validate(model)
    assert callback.session is first
    # A second training, with another trainer and the same callback.
    trainer_of(package, callback).fit(model)
    assert callback.session is not first
    offloaded(callback)


@ONE
def test_the_figures_are_in_the_logs_of_the_training(package: Any, place: Path) -> None:
    logger, callback = logger_of(package), offloads(place)
    trainer = trainer_of(package, callback, logger=logger, log_every_n_steps=2)
    trainer.fit(model_of(package))
    logs = [one for one in logger.logs if "ssdtrain/bytes_written" in one]
    assert [one["step"] for one in logs] == [1, 3]
    stats = offloaded(callback)
    for name in ("bytes_offloaded", "bytes_kept", "bytes_written", "bytes_read", "stall_s"):
        values = [one[f"ssdtrain/{name}"] for one in logs]
        assert min(values) >= 0, name
        # What was on its way to the disk at the last log ends afterwards.
        assert 0.5 * getattr(stats, name) <= sum(values) <= 1.001 * getattr(stats, name), name
    assert logs[-1]["ssdtrain/resident_bytes_peak"] == stats.resident_bytes_peak > 0


@ONE
def test_a_trainer_without_logs_is_left_in_peace(package: Any, place: Path) -> None:
    logger = logger_of(package)
    for options in ({"log_every_n_steps": 0, "logger": logger}, {"fast_dev_run": True}):
        trainer_of(package, offloads(place), **options).fit(model_of(package))
    assert not logger.logs


def test_the_report_is_logged_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = offloads(place)
    with caplog.at_level(logging.INFO, logger="ssdtrain"):
        trainer_of(lightning.pytorch, callback).fit(model_of(lightning.pytorch))
    assert [one.message for one in caplog.records if "resident" in one.message] == [
        str(callback.session)
    ]


def test_a_callback_is_pickled_for_other_processes(place: Path) -> None:
    callback = offloads(place)
    trainer_of(lightning.pytorch, callback).fit(model_of(lightning.pytorch))
    copied = pickle.loads(pickle.dumps(callback))
    assert copied.session is None
    trainer_of(lightning.pytorch, copied).fit(model_of(lightning.pytorch))
    offloaded(copied)


def test_two_callbacks_are_refused(place: Path) -> None:
    trainer = trainer_of(lightning.pytorch, offloads(place), offloads(place))
    with pytest.raises(ssdtrain.ConfigError, match="2 callbacks of type OffloadCallback"):
        trainer.fit(model_of(lightning.pytorch))
