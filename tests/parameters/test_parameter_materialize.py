"""Models built on the meta device get the first values of the plain construction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
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
    # Conv1D draws its weight in its constructor, and the blocks draw some weights again.
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=128, n_embd=HIDDEN, n_layer=2, n_head=4, **no_tokens()
    ),
    "bert": lambda: transformers.BertConfig(is_decoder=True, **COMMON),
    "t5": lambda: transformers.T5Config(
        d_kv=32, d_ff=2 * HIDDEN, num_layers=2, num_heads=4, **TWO_SIDED
    ),
    "llama, tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **COMMON),
    # The weights of the experts belong to a module without reset_parameters().
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **CACHED),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=TOKENS, hidden_size=HIDDEN, n_layer=2, n_head=4, **no_tokens()
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=TOKENS, hidden_size=HIDDEN, num_hidden_layers=2, **no_tokens()
    ),
    # Draws random numbers of the default dtype; two of its layers share their attention.
    "zamba2": lambda: transformers.Zamba2Config(
        n_mamba_heads=8,
        mamba_headdim=32,
        mamba_d_state=16,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        **{**COMMON, "num_hidden_layers": 3},
    ),
}
CALLED = ("gpt2", "bert", "t5", "llama, tied", "mixtral")
Build = Callable[[], Any]


def no_tokens() -> dict[str, int]:
    return {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def built(name: str, **options: Any) -> Any:
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return kind.from_config(CONFIGS[name](), **options)


def on_meta(build: Build) -> Any:
    with torch.device("meta"):
        return build()


def materialized(model: nn.Module, directory: Path, bound_bytes: int, **options: Any) -> Tensor:
    """Offload a model on the meta device, and return the state of the random numbers after it."""
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


def prove(build: Build, directory: Path, init_fn: Any = None) -> tuple[Any, Any]:
    """Compare a model that was built on the meta device with the plain one; return both.

    ``init_fn`` is a function of the model and a module.
    """
    expected, random_state = plain(build)
    model = on_meta(build)
    options = {"init_fn": None if init_fn is None else partial(init_fn, model)}
    found = materialized(model, directory, quarter(expected), **options)
    assert torch.equal(found, random_state)
    assert ties(model) == ties(expected)
    assert list(model.state_dict()) == list(expected.state_dict())
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))
    return model, expected


# Models of Transformers


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the most bytes of weights in memory before each module lets others leave."""
    found: list[int] = []
    begin = Weights.begin

    def noting(self: Weights) -> None:
        found.append(self.stats().peak_resident_bytes)
        begin(self)

    monkeypatch.setattr(Weights, "begin", noting)
    return found


@pytest.mark.parametrize("name", CALLED)
def test_a_model_of_transformers(name: str, peaks: list[int], tmp_path: Path) -> None:
    build = partial(built, name)
    expected, _ = plain(build)
    bound = quarter(expected)
    model = on_meta(build)
    materialized(model, tmp_path, bound)
    # The weights of a new module are above the bound until others have left for them.
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
    prove(partial(built, name), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "zamba2"])
def test_it_has_them_in_bfloat16(name: str, tmp_path: Path) -> None:
    build = partial(built, name, dtype=torch.bfloat16)
    expected, random_state = plain(build)
    model = on_meta(build)
    bound = largest_bytes(expected)
    assert torch.equal(materialized(model, tmp_path, bound), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


def around_llama() -> nn.Module:
    return nn.Sequential(
        nn.Linear(HIDDEN, 200),
        transformers.LlamaModel(transformers.LlamaConfig(**COMMON)),
        nn.Linear(200, HIDDEN),
    )


def test_a_model_of_transformers_in_another(tmp_path: Path) -> None:
    prove(around_llama, tmp_path)


def test_loaded_weights_keep_their_values(tmp_path: Path) -> None:
    """Weights that were loaded before keep their values, and so do weights tied to them."""
    build = partial(built, "llama, tied")
    model = on_meta(build)
    held = {
        "model.embed_tokens.weight": torch.full((TOKENS, HIDDEN), 3.0),
        "model.layers.1.mlp.up_proj.weight": torch.full((2 * HIDDEN, HIDDEN), 4.0),
        "model.norm.weight": torch.full((HIDDEN,), 5.0),
    }
    model.load_state_dict({name: one.clone() for name, one in held.items()}, False, assign=True)
    model.tie_weights()
    materialized(model, tmp_path, quarter(model))
    assert ties(model) == ties(plain(build)[0])
    now = all_tensors(model)
    support.assert_equal_bits({name: now[name] for name in held}, held)
    assert not any(hasattr(param, "_is_hf_initialized") for param in model.parameters())


def test_a_model_that_was_moved_to_meta(tmp_path: Path) -> None:
    build = partial(built, "llama, tied")
    expected, random_state = plain(build)
    model = plain(build)[0].to("meta")
    model.tie_weights()
    assert torch.equal(materialized(model, tmp_path, quarter(expected)), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


def test_a_failure_leaves_the_model_on_the_meta_device(tmp_path: Path, caplog: Any) -> None:
    build = partial(built, "llama, tied")
    expected, random_state = plain(build)
    model = on_meta(build)
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(NoSpaceError) as caught:
        materialized(model, tmp_path, quarter(expected), max_disk_bytes="300KiB")
    assert "; offload_parameters needs " in str(caught.value)
    assert "training goes on" not in caplog.text
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param and param.is_meta for name, param in before.items())
    assert all(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(materialized(model, tmp_path, quarter(expected)), random_state)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


def test_a_model_of_accelerate(tmp_path: Path) -> None:
    """`init_empty_weights` lets the constructor initialize on the meta device, without effect."""
    build = partial(built, "llama, tied")
    expected, random_state = plain(build)
    with accelerate.init_empty_weights(include_buffers=True):
        model = build()
    assert torch.equal(materialized(model, tmp_path, quarter(expected)), random_state)
    assert ties(model) == ties(expected)
    support.assert_equal_bits(all_tensors(model), all_tensors(expected))


# Models of users


class Tied(nn.Module):
    """A model as nanoGPT is written: shares a weight, then gives all modules first values."""

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
            self.scale()

    def scale(self) -> None:
        for name, param in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(param, std=0.01)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            # As minGPT writes it; torch does not count such a change.
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def first_values(model: Tied, module: nn.Module) -> None:
    model._init_weights(module)
    if module is model:
        model.scale()


def test_a_model_that_applies_first_values_in_its_constructor(tmp_path: Path) -> None:
    model, _ = prove(Tied, tmp_path, Tied._init_weights)
    assert model.embedding.weight is model.head.weight


def test_an_init_fn_that_does_all_that_the_constructor_does(tmp_path: Path) -> None:
    prove(partial(Tied, scaled=True), tmp_path, first_values)


def test_an_init_fn_gives_values_to_tensors_that_no_reset_knows(tmp_path: Path) -> None:
    def init_fn(_: Any, module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.ones_(module.weight)
        if isinstance(module, Masked):
            module.mask.fill_(1)
        if isinstance(module, Noted):
            module.angles = torch.arange(HIDDEN)

    def build() -> nn.Module:
        return nn.Sequential(
            *(Masked(kind) for kind in (torch.float32, torch.int64, torch.bool)),
            *(Scale(HIDDEN), Noted()),
        )

    model, expected = prove(build, tmp_path, init_fn)
    assert torch.equal(model[-1].angles, expected[-1].angles)


def test_an_init_fn_for_a_model_with_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has its values: call model\.apply\(init_fn\)"):
        ssdtrain.offload_parameters(Tied(), tmp_path, init_fn=nn.Module.requires_grad_)


def test_attributes_of_parameters_stay(tmp_path: Path) -> None:
    """S4 and Mamba mark parameters that weight decay must pass over."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
        model[1].bias._no_weight_decay = True  # type: ignore[attr-defined]
        model[2].weight._no_weight_decay = True  # type: ignore[attr-defined]
    materialized(model, tmp_path, quarter(model))
    marked = [name for name, one in model.named_parameters() if hasattr(one, "_no_weight_decay")]
    assert marked == ["1.bias", "2.weight"]


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
    prove(Whole, tmp_path)


def test_a_reset_of_all_modules_leaves_loaded_weights(tmp_path: Path) -> None:
    model = on_meta(Whole)
    loaded = torch.full((2 * HIDDEN, HIDDEN), 3.0)
    model.load_state_dict({"up.weight": loaded, "up.bias": loaded[:, 0]}, False, assign=True)
    with pytest.raises(ConfigError, match=r"down\.weight was changed by a constructor"):
        materialized(model, tmp_path, quarter(model))
    materialized(model, tmp_path, quarter(model), init_fn=lambda module: None)
    assert torch.equal(model.up.weight, loaded)


# Models that are refused


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


class Drawing(nn.Module):
    """A weight that the constructor draws, and no method does."""

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


class Copied(nn.Module):
    """Begins with two equal layers, as `nn.TransformerEncoder` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(200, 200)
        self.second = copy.deepcopy(self.first)


def adapted() -> nn.Module:
    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    return peft.get_peft_model(built("llama, tied"), options)


REFUSED: dict[str, tuple[Build, str]] = {
    "without a method": (lambda: nn.Sequential(Scale(9), nn.Linear(200, 200)), "for 0.weight: "),
    "shared": (partial(Tied, applied=False), "head.weight is also embedding.weight, .* init_fn"),
    "a buffer": (lambda: nn.Sequential(Masked(torch.float32)), "for 0.mask: .* init_fn"),
    "a buffer of integers": (partial(Masked, torch.int64), "for mask: "),
    "a lone tensor": (lambda: nn.Sequential(Noted()), "for 0.angles: "),
    "of Transformers": (Extended, "for temperature: "),
    "drawn in a constructor": (WithDrawing, "drawing.weight was changed by a constructor"),
    "copied in a constructor": (Copied, "second.weight is a copy of another tensor .* init_fn"),
    "adapters": (adapted, "q_proj.lora_A.default.weight was changed by .* add adapters after"),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_its_first_values_is_refused(name: str, tmp_path: Path) -> None:
    build, message = REFUSED[name]
    model = on_meta(build)
    with pytest.raises(ConfigError, match=message):
        materialized(model, tmp_path, 1 << 20)
    assert all(one.is_meta for one in [*model.parameters(), *model.buffers()])
    assert len(unique(model)) > 0, "the bound has to be of use"


def test_a_value_that_the_init_fn_forgets_is_named(tmp_path: Path) -> None:
    model = on_meta(partial(Tied, Scale))
    with pytest.raises(ConfigError, match=r"for norm\.weight: "):
        materialized(model, tmp_path, 1 << 20, init_fn=model._init_weights)
    assert all(one.is_meta for one in model.parameters())


def test_an_optimizer_that_was_made_before_raises(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    early = torch.optim.AdamW(model.parameters())
    ssdtrain.offload_parameters(model, tmp_path, max_resident_bytes="300KiB")
    for use in (early.zero_grad, early.step):
        with pytest.raises(ConfigError, match="make the optimizer after that call"):
            use()
    optimizer = torch.optim.AdamW(model.parameters())
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
