"""Models of Hugging Face, and adapters on them, with their weights on the disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import ssdtrain
import support
from weights_away import (
    WAYS,
    Case,
    Training,
    adamw,
    away,
    each_way,
    numbered,
    offloaded,
    plain_step,
    prove,
    quarter,
    unique,
)

# Names that PEFT uses and that Transformers had in older versions.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

TOKENS = 160
HIDDEN = 128


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=128,
        n_embd=HIDDEN,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-untyped-call, no-any-return]


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=HIDDEN,
        d_kv=32,
        d_ff=2 * HIDDEN,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def with_checkpoints(build: Any, reentrant: bool) -> nn.Module:
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.config.use_cache = False
    if reentrant:
        model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def tokens_of(number: int) -> Tensor:
    return numbered(number, 2, 12).mul(50).long().abs() % TOKENS


def of_tokens(model: nn.Module, number: int) -> Tensor:
    tokens = tokens_of(number)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def adapted(build: Any, **options: Any) -> nn.Module:
    """Wrap a model's linear layers in adapters."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False, **options
    )
    return peft.get_peft_model(build(), config)  # type: ignore[no-any-return]


CASES = {
    "llama, reentrant": Case(partial(with_checkpoints, llama, True), of_tokens),
    "llama, not reentrant": Case(partial(with_checkpoints, llama, False), of_tokens),
    "gpt2": Case(gpt2, of_tokens),
    "t5": Case(t5, of_tokens),
    "llama, adapted": Case(partial(adapted, llama), of_tokens),
    # DoRA makes a tensor of the base's weight and the adapter's in each forward.
    "llama, adapted by directions": Case(
        partial(adapted, llama, use_dora=True), of_tokens, keeps_bound=False
    ),
}


COMMON = ("llama, not reentrant", "gpt2", "llama, adapted")


@pytest.mark.parametrize(
    ("name", "way"), each_way(CASES, alone=["gpt2"], rare=CASES.keys() - set(COMMON))
)
def test_families(name: str, way: str, tmp_path: Path) -> None:
    prove(CASES[name], tmp_path, WAYS[way])


def generated(training: Training, number: int) -> None:
    """Generate between two steps, and between forward and backward."""
    model: Any = training.model
    options: dict[str, Any] = {"max_new_tokens": 6, "attention_mask": torch.ones(2, 12).long()}
    loss = training.loss(number)
    model.eval()
    for ways in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2, "do_sample": False}):
        training.note("made", model.generate(tokens_of(number), **options, **ways))
    model.train()
    training.backward(loss)
    training.update()


@pytest.mark.parametrize("name", support.shared_out(["gpt2", "llama, adapted"], quick=["gpt2"]))
def test_generation_in_between(name: str, tmp_path: Path) -> None:
    prove(Case(CASES[name].build, of_tokens, generated), tmp_path, WAYS["everything"])


# What people do with adapters on weights that are away


def test_adapters_on_a_base_that_is_away_already(tmp_path: Path) -> None:
    def run(directory: Path | None) -> list[dict[str, Tensor]]:
        base = llama()
        if directory is not None:
            offloaded(base, directory)
        model = adapted(lambda: base)
        training = Training(
            model, adamw([p for p in model.parameters() if p.requires_grad]), of_tokens
        )
        training.run(plain_step, 3)
        if directory is not None:
            # The results are looks, which take the memory of one weight more.
            looked_bytes = max(param.nbytes for param in base.parameters())
            peak_bytes = ssdtrain.parameter_stats(base).peak_resident_bytes
            assert peak_bytes <= quarter(base) + looked_bytes
        return training.seen

    for one, other in zip(run(tmp_path), run(None), strict=True):
        support.assert_equal_bits(one, other)


@pytest.mark.parametrize(
    "way",
    support.shared_out(["merge", "unload", "disable", "save", "two"], quick=["merge", "disable"]),
)
def test_adapters_on_an_offloaded_base(way: str, tmp_path: Path) -> None:
    def run(directory: Path | None) -> list[Tensor]:
        model: Any = adapted(llama)
        if directory is not None:
            offloaded(model, directory)
        training = Training(model, adamw(model.parameters()), of_tokens)
        training.run(plain_step, 2)
        seen = []
        if way == "merge":
            model.merge_adapter()
            seen.append(of_tokens(model.eval(), 3))
            model.unmerge_adapter()
            model.train()
        elif way == "unload":
            model = training.model = model.merge_and_unload()
        elif way == "disable":
            with model.disable_adapter():
                seen.append(of_tokens(model, 3))
        elif way == "save":
            target = tmp_path / f"saved-{directory is None}"
            model.save_pretrained(target)
            model.load_adapter(target, "again", is_trainable=True)
            model.set_adapter("again")
        else:
            model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
            model.set_adapter("second")
        torch.manual_seed(3)
        seen.append(of_tokens(model, 3))
        training.optimizer = adamw([p for p in model.parameters() if p.requires_grad] or [seen[0]])
        if way != "unload":
            training.run(plain_step, 4)
        seen += list(model.parameters())
        return [one.detach().clone() for one in seen]

    support.assert_equal_bits(
        dict(enumerate_names(run(tmp_path))), dict(enumerate_names(run(None)))
    )


def enumerate_names(values: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(number), value) for number, value in enumerate(values)]


# What Transformers does with a model


def test_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    def run(directory: Path | None) -> dict[str, Tensor]:
        model: Any = gpt2()
        if directory is not None:
            offloaded(model, directory)
        Training(model, adamw(model.parameters()), of_tokens).run(plain_step, 2)
        target = tmp_path / f"saved-{directory is None}"
        model.save_pretrained(target)
        return type(model).from_pretrained(target).state_dict()  # type: ignore[no-any-return]

    support.assert_equal_bits(run(tmp_path), run(None))


def test_a_vocabulary_that_grows(tmp_path: Path) -> None:
    def run(directory: Path | None) -> dict[str, Tensor]:
        model: Any = llama()
        if directory is not None:
            offloaded(model, directory)
        torch.manual_seed(0)
        model.resize_token_embeddings(TOKENS + 8, mean_resizing=False)
        Training(model, adamw(model.parameters()), of_tokens).run(plain_step, 3)
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    support.assert_equal_bits(run(tmp_path), run(None))


def test_a_trainer(tmp_path: Path) -> None:
    def run(directory: Path | None) -> dict[str, Tensor]:
        model = llama()
        if directory is not None:
            offloaded(model, directory)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            max_steps=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch",
            dataloader_pin_memory=False,
        )
        rows = [{"input_ids": row, "labels": row} for n in range(8) for row in tokens_of(n)]
        transformers.Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]
        if directory is not None:
            assert away(model)
            assert ssdtrain.parameter_stats(model).read_bytes > 0
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    support.assert_equal_bits(run(tmp_path), run(None))


def test_all_large_weights_of_these_models_may_leave(tmp_path: Path) -> None:
    for build in (llama, gpt2, t5):
        model = offloaded(build(), tmp_path)
        expected = sum(param.nbytes for param in unique(model).values())
        assert ssdtrain.parameter_stats(model).total_bytes == expected
