"""Models that were built without bytes, whose weights have the bits of the plain construction."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from ssdtrain import ConfigError, NoSpaceError
from ssdtrain.parameters.weights import Weights
from weights_away import away, largest_bytes, numbered, quarter, unique

TOKENS = 160
HIDDEN = 128
COMMON: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CACHED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
TWO_SIDED: dict[str, Any] = {
    "vocab_size": TOKENS,
    "d_model": HIDDEN,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    # Its Conv1D draws in its constructor, and its blocks draw weights of theirs anew.
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=128, n_embd=HIDDEN, n_layer=2, n_head=4, **no_tokens()
    ),
    "bert": lambda: transformers.BertConfig(is_decoder=True, **COMMON),
    "t5": lambda: transformers.T5Config(
        d_kv=32, d_ff=2 * HIDDEN, num_layers=2, num_heads=4, **TWO_SIDED
    ),
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama, tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **COMMON),
    "llama, yarn": lambda: transformers.LlamaConfig(
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}, **COMMON
    ),
    "qwen2": lambda: transformers.Qwen2Config(**CACHED),
    # Its experts' weights are parameters of a module that has no method for their first values.
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **CACHED),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=TOKENS, hidden_size=HIDDEN, n_layer=2, n_head=4, **no_tokens()
    ),
    "opt": lambda: transformers.OPTConfig(ffn_dim=256, word_embed_proj_dim=HIDDEN, **COMMON),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=TOKENS, hidden_size=HIDDEN, num_hidden_layers=2, **no_tokens()
    ),
}
QUICK = ("gpt2", "bert", "t5", "llama, tied", "mixtral")
Build = Callable[[], Any]


def no_tokens() -> dict[str, int]:
    return {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def built(name: str, **options: Any) -> Any:
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return kind.from_config(CONFIGS[name](), **options)


def on_meta(build: Build) -> Any:
    with torch.device("meta"):
        return build()


def born(model: nn.Module, directory: Path, bound_bytes: int, **options: Any) -> Tensor:
    """Give a model its weights, and return what random numbers come next."""
    torch.manual_seed(0)
    ssdtrain.offload_parameters(model, directory, max_resident_bytes=bound_bytes, **options)
    return torch.get_rng_state()


def plain(build: Build) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return build(), torch.get_rng_state()


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: one.detach().clone() for name, one in named}


def ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())


def prove_born(build: Build, directory: Path) -> tuple[Any, Any]:
    """Compare a model that was built without bytes with the plain one; return both."""
    expected, random_state = plain(build)
    model = on_meta(build)
    assert torch.equal(born(model, directory, quarter(expected)), random_state)
    assert ties(model) == ties(expected)
    assert list(model.state_dict()) == list(expected.state_dict())
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))
    return model, expected


# Models of Transformers


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the most bytes of weights between any two modules of a birth."""
    found: list[int] = []
    begin = Weights.begin

    def noting(self: Weights) -> None:
        found.append(self.stats().peak_resident_bytes)
        begin(self)

    monkeypatch.setattr(Weights, "begin", noting)
    return found


@pytest.mark.parametrize("name", support.shared_out(CONFIGS, quick=QUICK))
def test_a_model_of_transformers(name: str, peaks: list[int], tmp_path: Path) -> None:
    build = partial(built, name)
    expected, _ = plain(build)
    bound = quarter(expected)
    model = on_meta(build)
    born(model, tmp_path, bound)
    # What is born is above the bound until others have left for it.
    assert max(peaks) <= bound + largest_bytes(expected) < total_bytes(expected)
    stats = ssdtrain.parameter_stats(model)
    assert stats.peak_resident_bytes <= bound
    assert stats.on_disk_bytes >= total_bytes(expected) - bound
    assert away(model)
    tokens = numbered(1, 2, 12).mul(50).long().abs() % TOKENS
    losses = []
    for one in (model, expected):
        torch.manual_seed(1)
        losses.append(one(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
    assert ssdtrain.parameter_stats(model).peak_resident_bytes <= bound
    assert torch.equal(*losses)
    support.assert_equal_bits(gradients(model), gradients(expected))


def total_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in unique(model).values())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_has_the_bits_of_the_plain_construction(name: str, tmp_path: Path) -> None:
    prove_born(partial(built, name), tmp_path)


@pytest.mark.parametrize("name", support.shared_out(CONFIGS, quick=["gpt2"]))
def test_it_has_them_in_bfloat16(name: str, tmp_path: Path) -> None:
    build = partial(built, name, dtype=torch.bfloat16)
    expected, random_state = plain(build)
    model = on_meta(build)
    bound = largest_bytes(expected)
    assert torch.equal(born(model, tmp_path, bound), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


def around_llama() -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, 200),
        transformers.LlamaModel(transformers.LlamaConfig(**COMMON)),
        nn.Linear(200, HIDDEN),
    )


def test_a_model_of_transformers_in_another(tmp_path: Path) -> None:
    prove_born(around_llama, tmp_path)


def test_what_has_bytes_keeps_them(tmp_path: Path) -> None:
    """Weights that were loaded before are no new ones, nor what is tied to them."""
    build = partial(built, "llama, tied")
    model = on_meta(build)
    held = {
        "model.embed_tokens.weight": torch.full((TOKENS, HIDDEN), 3.0),
        "model.layers.1.mlp.up_proj.weight": torch.full((2 * HIDDEN, HIDDEN), 4.0),
        "model.norm.weight": torch.full((HIDDEN,), 5.0),
    }
    model.load_state_dict({name: one.clone() for name, one in held.items()}, False, assign=True)
    model.tie_weights()
    born(model, tmp_path, quarter(model))
    assert ties(model) == ties(plain(build)[0])
    now = all_tensors(model)
    support.assert_equal_bits({name: now[name] for name in held}, held)
    assert not any(hasattr(param, "_is_hf_initialized") for param in model.parameters())


def test_a_model_that_was_moved_to_meta(tmp_path: Path) -> None:
    build = partial(built, "llama, tied")
    expected, random_state = plain(build)
    model = plain(build)[0].to("meta")
    model.tie_weights()
    assert torch.equal(born(model, tmp_path, quarter(expected)), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


def test_a_birth_that_fails_leaves_the_model_as_it_was(tmp_path: Path, caplog: Any) -> None:
    build = partial(built, "llama, tied")
    expected, random_state = plain(build)
    model = on_meta(build)
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(NoSpaceError) as caught:
        born(model, tmp_path, quarter(expected), max_disk_bytes="300KiB")
    assert "the disk has to hold" in caught.value.__notes__[-1]
    assert "training goes on" not in caplog.text
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param and param.is_meta for name, param in before.items())
    assert all(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(born(model, tmp_path, quarter(expected)), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


# Models of users


class Tied(nn.Module):
    """A model as nanoGPT is written: ties, then gives all modules first values."""

    def __init__(self, norm: Any = nn.LayerNorm, scaled: bool = False, applied: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.norm = norm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, TOKENS, bias=False)
        self.embedding.weight = self.head.weight
        if applied:
            self.apply(self._init_weights)
        if scaled:
            nn.init.normal_(self.down.weight, std=0.01)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def test_a_model_that_applies_first_values_in_its_constructor(tmp_path: Path) -> None:
    model, _ = prove_born(Tied, tmp_path)
    assert model.embedding.weight is model.head.weight


class Whole(nn.Module):
    """A model without weights of its own that gives first values to those in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, param in self.named_parameters():
            nn.init.normal_(param, std=0.1 if name == "up.weight" else 0.01)


def test_a_model_that_resets_the_modules_in_it(tmp_path: Path) -> None:
    prove_born(Whole, tmp_path)


def test_first_values_that_nobody_applied_are_not(tmp_path: Path, caplog: Any) -> None:
    class Unapplied(Tied):
        pass

    build = partial(Unapplied, applied=False)
    model = on_meta(build)
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        born(model, tmp_path, quarter(model))
    assert "nothing tells that its constructor applied _init_weights" in caplog.text
    assert torch.equal(model.up.weight, plain(build)[0].up.weight)


# What cannot be born


class Scale(nn.Module):
    """A weight that the constructor fills, and no method does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Masked(nn.Linear):
    """A buffer that the method for first values forgets."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.register_buffer("mask", torch.ones(HIDDEN, dtype=kind), persistent=False)


class Noted(nn.Linear):
    """A tensor that torch does not know of."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.angles = torch.arange(HIDDEN)


class Extended(transformers.LlamaForCausalLM):
    """A weight of which the model's own initialization knows nothing."""

    def __init__(self) -> None:
        super().__init__(transformers.LlamaConfig(**COMMON))
        self.temperature = nn.Parameter(torch.tensor(2.0))


def adapted() -> nn.Module:
    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    return peft.get_peft_model(built("llama"), options)


UNBORN: dict[str, tuple[Build, str]] = {
    "without a method": (lambda: nn.Sequential(Scale(9), nn.Linear(200, 200)), "weight of .* 0 "),
    "not in _init_weights": (partial(Tied, Scale), "norm.weight has no bytes, .*_init_weights"),
    "a buffer": (lambda: nn.Sequential(Masked(torch.float32)), "0.mask has no bytes"),
    "a buffer of integers": (partial(Masked, torch.int64), "mask has no bytes"),
    "a buffer of truths": (partial(Masked, torch.bool), "mask has no bytes"),
    "a lone tensor": (lambda: nn.Sequential(Noted()), r"angles of the module 0 \(Noted\)"),
    "more in the constructor": (partial(Tied, scaled=True), "down.weight was changed by"),
    "of Transformers": (Extended, "temperature has no bytes"),
    "adapters": (adapted, "q_proj.lora_A.default.weight was changed by a constructor"),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", UNBORN)
def test_what_cannot_be_born_is_refused(name: str, tmp_path: Path) -> None:
    build, message = UNBORN[name]
    model = on_meta(build)
    with pytest.raises(ConfigError, match=message):
        born(model, tmp_path, 1 << 20)
    assert all(one.is_meta for one in [*model.parameters(), *model.buffers()])
    assert len(unique(model)) > 0, "the bound has to be of use"


class Drawing(nn.Module):
    """Draws in its constructor what nobody can draw again: how wide it is it does not say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, HIDDEN))
        nn.init.normal_(self.weight)


class WithDrawing(transformers.LlamaForCausalLM):
    def __init__(self) -> None:
        super().__init__(transformers.LlamaConfig(**COMMON))
        self.drawing = Drawing(200)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Drawing):
            nn.init.zeros_(module.weight)


def test_a_constructor_that_draws_is_told_of(tmp_path: Path, caplog: Any) -> None:
    model = on_meta(WithDrawing)
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        born(model, tmp_path, quarter(model))
    assert "Drawing draws its weights in its constructor" in caplog.text
    assert not model.drawing.weight.any()


def test_an_optimizer_that_was_made_before_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.known_to_itself = optimizer  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="an optimizer \\(AdamW\\) has parameters of this model"):
        ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes="300KiB")
    assert all(param.is_meta for param in model.parameters())
    del optimizer
    ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes="300KiB")
    optimizer = torch.optim.AdamW(model.parameters())
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
