"""The callback of ``transformers.Trainer``, and what is around it: equal bits, nothing stays on."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ssdtrain
from ssdtrain.integrations.transformers import OffloadCallback
from support import assert_equal_bits, assert_nothing_is_on, wait_until, write_after_forward

pytest_plugins = ["trainers"]
MODEL = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0
)
DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
]
STEPS = 4
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"  # before transformers 5.20


EVENTS = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log")


class Stop(Exception):
    """What a test raises in the middle of training."""


ERRORS = (KeyboardInterrupt, Stop)


class At(TrainerCallback):
    """Does something the second time that an event comes."""

    def __init__(self, event: str, act: Callable[[Any], None]) -> None:
        self.left = 1 if event in ("on_train_begin", "on_epoch_begin") else 2

        def acts(args: Any, state: Any, control: Any, **_: Any) -> None:
            self.left -= 1
            if self.left == 0:
                act(control)

        setattr(self, event, acts)


def offloads(place: Path) -> OffloadCallback:
    return OffloadCallback(place / "spill", min_bytes=1)


def model_of() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(MODEL)
    write_after_forward(model)
    return model


def trainer_of(
    place: Path,
    *callbacks: TrainerCallback,
    kind: type[Trainer] = Trainer,
    model: GPT2LMHeadModel | None = None,
    **options: Any,
) -> Trainer:
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        **options,
    }
    return kind(
        model_of() if model is None else model,
        TrainingArguments(
            output_dir=str(place / "out"),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=list(callbacks),
    )


def test_weights_and_optimizer_on_the_disk(place: Path) -> None:
    """The trainer's own model and optimizer, with the options of its arguments."""
    config = GPT2Config(**(MODEL.to_dict() | {"n_embd": 128}))
    outcomes = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        write_after_forward(model)
        callbacks = [offloads(place)] if is_offloaded else []
        options = {"learning_rate": 1e-3, "weight_decay": 0.1}
        trainer = trainer_of(place, *callbacks, model=model, **options)
        if is_offloaded:
            ssdtrain.offload_parameters(model, place / "spill", max_resident_bytes="1MiB")
            optimizer: Any = trainer.create_optimizer()
            ssdtrain.offload_optimizer(optimizer, place / "spill", buffer_bytes="256KiB")
        trainer.train()
        if is_offloaded:
            assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
            assert optimizer.offload_stats.on_disk_bytes > 0
            assert ssdtrain.parameter_stats(model).on_disk_bytes > 0
        outcomes.append({name: one.clone() for name, one in outcome(trainer).items()})
    assert_equal_bits(*outcomes)


def outcome(trainer: Trainer) -> dict[str, Tensor]:
    """Return each loss and each weight."""
    history = trainer.state.log_history
    losses = [one[name] for one in history for name in ("loss", "eval_loss") if name in one]
    assert losses
    return {"losses": torch.tensor(losses, dtype=torch.float64), **trainer.model.state_dict()}


def offloaded(callback: OffloadCallback) -> ssdtrain.Stats:
    assert callback.session is not None
    stats = callback.session.stats
    assert stats.tensors_offloaded + stats.tensors_forwarded + stats.tensors_kept > 0
    return stats


def logs_of(trainer: Trainer) -> list[dict[str, float]]:
    return [one for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {CHECKPOINTING: True},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"bf16": True},
    ],
    ids=["plain", "checkpointed", "accumulated and evaluated", "bfloat16"],
)
def test_not_one_bit_differs(place: Path, options: dict[str, Any]) -> None:
    plain = trainer_of(place, **options)
    plain.train()
    callback = offloads(place)
    with_callback = trainer_of(place, callback, **options)
    with_callback.train()
    assert_nothing_is_on()
    assert_equal_bits(outcome(with_callback), outcome(plain))
    assert offloaded(callback).bytes_read > 0


def test_no_end_leaves_anything_on(place: Path) -> None:
    for error, event, is_first in itertools.product(ERRORS, EVENTS, (True, False)):

        def raises(_: object, error: type[BaseException] = error) -> None:
            assert ssdtrain.active() is not None
            raise error

        callback, other = offloads(place), At(event, raises)
        trainer = trainer_of(place, *((other, callback) if is_first else (callback, other)))
        with pytest.raises(error):
            trainer.train()
        assert_nothing_is_on()
    # A second try with the same trainer, as in a notebook.
    trainer.train()
    assert len(logs_of(trainer)) == STEPS
    offloaded(callback)


def test_training_that_is_stopped_early_leaves_nothing_on(place: Path) -> None:
    def stop(control: Any) -> None:
        control.should_training_stop = True

    trainer = trainer_of(place, offloads(place), At("on_step_end", stop))
    trainer.train()
    assert len(logs_of(trainer)) == 2


class NoMemory(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("CPU out of memory. Tried to allocate")


class Greedy(Trainer):
    """Has no memory for the first batch size."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **names: Any) -> Any:
        loss = super().compute_loss(model, inputs, *rest, **names)
        if len(inputs["input_ids"]) > 3:
            # Backward begins with what was made last, and the rest stays behind.
            loss = loss + NoMemory.apply(next(model.parameters()).sum())  # type: ignore[no-untyped-call]
        return loss


def test_a_smaller_batch_is_tried_in_the_same_block(place: Path) -> None:
    sizes: list[int] = []
    found = []
    callback = offloads(place)
    tries = []

    class Looks(TrainerCallback):
        """Behind the callback, at the beginning of each try."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            session = ssdtrain.active()
            if session is not None:
                wait_until(lambda: session.stats.disk_used_bytes == 0, "the end of the last try")
                tries.append(session)

    for callbacks in ([], [callback]):
        trainer = trainer_of(place, *callbacks, Looks(), kind=Greedy, auto_find_batch_size=True)
        trainer.train()
        sizes.append(trainer._train_batch_size)
        found.append(outcome(trainer))
        assert_nothing_is_on()
    assert sizes == [3, 3]
    assert_equal_bits(found[1], found[0])
    assert tries == [callback.session] * 2
    offloaded(callback)


def test_a_resumed_training_goes_on_bit_for_bit(place: Path) -> None:
    found = []
    for callbacks in ([], [offloads(place)]):
        trainer = trainer_of(place, *callbacks, save_strategy="steps", save_steps=2)
        trainer.train()
        again = trainer_of(place, *callbacks, save_strategy="no")
        again.train(resume_from_checkpoint=str(place / "out" / "checkpoint-2"))
        assert_equal_bits(again.model.state_dict(), trainer.model.state_dict())
        found.append(outcome(again))
    assert_equal_bits(found[1], found[0])


def test_evaluation_and_prediction_are_not_covered(place: Path) -> None:
    callback = offloads(place)
    trainer = trainer_of(place, callback)
    trainer.evaluate()
    trainer.predict(DATA[:4])
    assert callback.session is None
    trainer.train()
    first = callback.session
    trainer.evaluate()
    assert callback.session is first
    # A second training, and a second trainer with the same callback.
    trainer.train()
    second = trainer_of(place, callback)
    second.train()
    assert callback.session is not first


def test_the_figures_are_in_the_logs_of_the_training(place: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Logger(TrainerCallback):
        """One of those that come before ours, as those do that the trainer itself makes."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    callback = offloads(place)
    trainer = trainer_of(place, Logger(), callback, eval_strategy="steps", eval_steps=1)
    trainer.train()
    logs = logs_of(trainer)
    assert len(logs) == STEPS
    stats = offloaded(callback)
    for name in ("bytes_offloaded", "bytes_kept", "bytes_written", "bytes_read", "stall_s"):
        values = [one[f"ssdtrain/{name}"] for one in logs]
        assert min(values) >= 0, name
        # What was on its way to the disk at the last log ends afterwards.
        assert 0.5 * getattr(stats, name) <= sum(values) <= 1.001 * getattr(stats, name), name
    assert logs[-1]["ssdtrain/resident_bytes_peak"] == stats.resident_bytes_peak > 0
    assert all("ssdtrain/resident_bytes" in one for one in logs)
    assert [one for one in seen if "ssdtrain/bytes_written" in one] == [
        {name: value for name, value in one.items() if name != "step"} for one in logs
    ]
    assert not any("ssdtrain/bytes_written" in one for one in seen if "eval_loss" in one)
    json.dumps(trainer.state.log_history)


def test_the_report_is_logged_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = offloads(place)
    with caplog.at_level(logging.INFO, logger="ssdtrain"):
        trainer_of(place, callback).train()
    assert [one.message for one in caplog.records if "resident" in one.message] == [
        str(callback.session)
    ]


def test_a_callback_is_pickled_for_other_processes(place: Path) -> None:
    callback = offloads(place)
    trainer = trainer_of(place, callback)
    trainer.train()
    copied = pickle.loads(pickle.dumps(callback))
    assert copied.session is None
    trainer_of(place, copied).train()
    offloaded(copied)


def test_two_callbacks_are_refused(place: Path) -> None:
    trainer = trainer_of(place, offloads(place), offloads(place))
    with pytest.raises(ssdtrain.ConfigError, match="2 callbacks of type OffloadCallback"):
        trainer.train()
    trainer.remove_callback(OffloadCallback)
    trainer.train()


def test_a_trainer_that_trains_otherwise_is_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(place, offloads(place))
    trainer._inner_training_loop(args=trainer.args)
    assert "ssdtrain offloads nothing" in caplog.text


def test_a_block_does_for_accelerate(place: Path) -> None:
    def train() -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(DATA, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with pytest.raises(
            ssdtrain.UnsupportedError, match=r"give that one \(mostly optimizer\.opt"
        ):
            ssdtrain.save(place / "saved", model, optimizer)
        for inputs in loader:
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    plain = train()
    with ssdtrain.offload(place / "spill", min_bytes=1) as session:
        found = train()
    assert_equal_bits(found, plain)
    assert session.stats.bytes_read > 0


# peft 0.21 asks for it by the name that transformers 5.20 gave up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft(place: Path) -> None:
    def train(*callbacks: TrainerCallback) -> dict[str, Tensor]:
        trainer = trainer_of(place, *callbacks)
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        torch.manual_seed(0)
        model = get_peft_model(trainer.model, config)
        trainer = Trainer(model, trainer.args, train_dataset=DATA, callbacks=list(callbacks))
        trainer.train()
        return outcome(trainer)

    callback = offloads(place)
    assert_equal_bits(train(callback), train())
    offloaded(callback)
